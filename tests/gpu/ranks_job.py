"""torchrun --nproc-per-node=N ranks_job.py STRATEGY: attention over ranks against that of one."""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attnspan import causal, segments, window
from attnspan.parallel import Layout
from attnspan.torch import attention

B, S, HEADS, KV_HEADS, D = 2, 2048, 8, 8, 64


def main(strategy: str) -> None:
    """Every rank checks its own rows of the output and of the gradient of q."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    ids = (torch.arange(S) // 300).repeat(B, 1)
    mask = causal() & (window(700) if strategy == "ring" else segments(ids))
    q, k, v = (torch.randn(B, S, h, D).to(torch.bfloat16) for h in (HEADS, KV_HEADS, KV_HEADS))
    whole = [x.cuda().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    on_gpu = causal() & (window(700) if strategy == "ring" else segments(ids.cuda()))
    wanted = attention(*whole, mask=on_gpu)
    wanted.float().square().mean().backward()

    layout = Layout.of(mask, q_len=S, ranks=mesh.size(), batch=B)
    rows = layout.shard({"q": q, "k": k, "v": v, "at": torch.arange(S).repeat(B, 1)}, rank)
    mine = [torch.as_tensor(rows[name]).cuda().transpose(1, 2).requires_grad_() for name in "qkv"]
    plan = layout.plan(mask, heads=(HEADS, KV_HEADS), strategy=strategy, batch=B)
    out = attention(*mine, mask=plan.on(mesh, rows=rows))
    (out.float().square().sum() / wanted.numel()).backward()
    at = torch.as_tensor(rows["at"]).cuda()
    for found, full in ((out, wanted), (mine[0].grad, whole[0].grad)):
        _compare(found, full, at)
    dist.barrier()
    if rank == 0:
        print("equal to one rank")
    dist.destroy_process_group()


def _compare(found: Tensor | None, full: Tensor | None, at: Tensor) -> None:
    assert found is not None
    assert full is not None
    rows = torch.stack([x[:, i] for x, i in zip(full, at, strict=True)]).float()
    difference = (found.float() - rows).norm() / rows.norm()
    assert difference < 2e-2, float(difference)


if __name__ == "__main__":
    main(sys.argv[1])
