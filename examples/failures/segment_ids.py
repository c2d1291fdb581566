"""Failure 4: sequence-sharded attention whose segment ids are sharded by another rule than the tokens.

    python examples/failures/segment_ids.py

Two ranks train a small decoder to copy within packed segments. The loss reaches 0 only if every token sees
its own segment. Tokens are sharded in the zigzag order that balances a causal mask. You see three runs:

1. Every rank passes the ids of the whole sequence: the shapes differ, and attention raises an error.
2. The obvious repair, `ids.chunk(2)[rank]`: the shapes fit, but the rows differ. The loss stalls.
3. attnspan: one `Layout` shards tokens and mask. The loss goes to 0.
"""

import os
import socket
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import first_line, show
from task import BATCH, HEADS, SEQ_LEN, Attend, Decoder, make_batch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather

from attnspan import causal, segments
from attnspan.parallel import Layout
from attnspan.torch import attention

RANKS, STEPS = 2, 160
Rows = dict[str, Tensor]  # each (B, S): tokens, ids, positions, targets


def by_hand(batch: Rows, rank: int, *, shapes_only: bool) -> tuple[Rows, Attend]:
    """Zigzag rows, keys gathered from all ranks, and a mask of ids that are sharded elsewhere."""
    chunks = torch.arange(SEQ_LEN).chunk(2 * RANKS)
    order = torch.stack([torch.cat([chunks[r], chunks[2 * RANKS - 1 - r]]) for r in range(RANKS)])
    rows = {name: x[:, order[rank]] for name, x in batch.items()}
    ids = batch["ids"].chunk(RANKS, 1)[rank] if shapes_only else batch["ids"]
    causal_pairs = order[rank][:, None] >= order.flatten()
    mask = (causal_pairs & (ids[:, :, None] == batch["ids"][:, None])).unsqueeze(1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat(all_gather(x.contiguous()), 1) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    return rows, attend


def by_layout(batch: Rows, rank: int) -> tuple[Rows, Attend]:
    layout = Layout.of(causal() & segments(batch["ids"]), q_len=SEQ_LEN, ranks=RANKS, batch=BATCH)
    rows = layout.shard(batch, rank)
    mask = layout.plan(heads=(HEADS, HEADS)).on(init_device_mesh("cpu", (RANKS,)), rows=rows)
    return rows, lambda q, k, v: attention(q, k, v, mask=mask, layout="bshd")


def train(share: Callable[[Rows, int], tuple[Rows, Attend]], rank: int, steps: int) -> list[float] | str:
    """The loss of each step over all ranks, or the error that the first step raised."""
    torch.manual_seed(0)
    model, losses = Decoder(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    for step in range(steps):
        batch = vars(make_batch(step))
        try:
            rows, attend = share(batch, rank)
        except RuntimeError as error:
            return first_line(error)
        logits = model(rows["tokens"], rows["positions"], attend)
        total = F.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten(), reduction="sum")
        loss = total / (batch["targets"] >= 0).sum()  # by the targets of all ranks
        optimizer.zero_grad()
        loss.backward()
        for x in (loss.detach(), *(p.grad for p in model.parameters())):
            dist.all_reduce(x)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())  # detach() shares its memory, so this is the sum over all ranks
    return losses


WAYS = {
    "ids of the whole sequence": lambda batch, rank: by_hand(batch, rank, shapes_only=False),
    "ids.chunk(2)[rank]": lambda batch, rank: by_hand(batch, rank, shapes_only=True),
    "attnspan: one Layout": by_layout,
}


def run_rank(rank: int, port: int, steps: int, results: dict[str, list[float] | str]) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed.nn", category=FutureWarning)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for name, share in WAYS.items():
        found = train(share, rank, steps)
        if rank == 0:
            results[name] = found
    dist.destroy_process_group()


def main(steps: int = STEPS) -> dict[str, list[float] | str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        torch.multiprocessing.spawn(run_rank, (port, steps, results := manager.dict()), nprocs=RANKS)
        found = dict(results)
    shown = [step for step in (1, 40, 80, 120, STEPS) if step <= steps]
    notes = [f"{name}: {error}" for name, error in found.items() if isinstance(error, str)]
    rows = []
    for name, losses in found.items():
        rows.append((name, *("error" if isinstance(losses, str) else f"{losses[i - 1]:.4f}" for i in shown)))
    show("Loss of two ranks", ("segment ids", *(f"step {step}" for step in shown)), rows, notes)
    return found


if __name__ == "__main__":
    main()
