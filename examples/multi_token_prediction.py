"""Multi-token prediction over ranks: one head predicts the next token, a second head the token after it.

    torchrun --nproc-per-node 2 examples/multi_token_prediction.py

Each rank has a part of packed documents. The second head reads the embedding of the next token, and both
heads need labels of later tokens. These tokens may be on another rank, and `roll` brings them. The program
prints the losses of both heads, and how far losses and gradients are from one rank's. On GPUs, write "cuda"
in place of "cpu", and "nccl" in place of "gloo".
"""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from attnspan import causal, segments
from attnspan.parallel import Layout, roll
from attnspan.parallel.torch.loss import global_token_count, sum_gradients, sum_over, token_mean
from attnspan.torch import attention

VOCABULARY, WIDTH, HEADS, BATCH, LENGTH = 32, 64, 4, 2, 301  # No number of ranks divides the length.
AHEAD = (-1, -2)  # the tokens that the heads predict


class Block(nn.Module):
    """Attention between two projections. Norms, positions and the MLP are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: object) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).chunk(3, 2)
        return x + self.out(attention(q, k, v, mask=mask, layout="bshd").flatten(2))


class Model(nn.Module):
    """A trunk with two heads. The second head is a block of its own, as in DeepSeek-V3."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.join = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.trunk, self.second = Block(), Block()
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)

    def forward(self, tokens: Tensor, mask: object, next_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = self.embed(tokens)
        first = self.trunk(x, mask)
        second = self.second(self.join(torch.cat([first, next_of(x)], -1)), mask)
        return [functional.linear(hidden, self.embed.weight) for hidden in (first, second)]


def losses_of(logits: list[Tensor], targets: tuple[Tensor, ...], mesh: object) -> list[Tensor]:
    """This rank's part of the mean loss of each head."""
    totals = [
        functional.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum")
        for x, y in zip(logits, targets, strict=True)
    ]
    counts = [global_token_count(y, mesh) for y in targets]
    return [token_mean(total, count) for total, count in zip(totals, counts, strict=True)]


def on_one_rank(model: nn.Module, tokens: Tensor, ids: Tensor, mask: object) -> list[Tensor]:
    """The losses of the whole batch, with shifts written out."""

    def shifted(x: Tensor, fill: int, by: int) -> Tensor:
        found = torch.full_like(x, fill)
        found[:, :by] = x[:, -by:]
        same = ids[:, -by:] == ids[:, :by]
        found[:, :by][~same] = fill
        return found

    logits = model(tokens, mask, lambda x: shifted(x, 0, AHEAD[0]))
    return losses_of(logits, tuple(shifted(tokens, -100, by) for by in AHEAD), None)


def main() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    ranks, rank = mesh.size(), mesh.get_local_rank()
    torch.manual_seed(0)
    model = Model()  # the same weights on every rank
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(x.parameters(), lr=1e-2) for x in (model, alone)]
    apart = 0.0
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        lengths = torch.randint(20, 80, (BATCH, LENGTH), generator=generator)  # more than fit
        ids = torch.stack([torch.repeat_interleave(torch.arange(LENGTH), row)[:LENGTH] for row in lengths])
        mask = causal() & segments(ids)

        # A data loader can make these: they are picklable, and need no process group.
        layout = Layout.of(mask, q_len=LENGTH, ranks=ranks, batch=BATCH)
        rows = layout.shard({"tokens": tokens}, rank)
        plan = layout.plan(mask, heads=(HEADS, HEADS))
        next_token, targets = (layout.plan_roll(by, within=ids) for by in (AHEAD[0], AHEAD))

        plan, next_token, targets = (x.on(mesh, rows=rows) for x in (plan, next_token, targets))
        labels = roll(rows["tokens"], AHEAD, targets, fill=-100)
        logits = model(rows["tokens"], plan, lambda x, by=next_token: roll(x, AHEAD[0], by))
        parts = losses_of(logits, labels, mesh)
        sum(parts).backward()
        sum_gradients(model.parameters(), mesh)

        wanted = on_one_rank(alone, tokens, ids, mask)
        sum(wanted).backward()
        losses, one = ([float(sum_over(x, y)) for x in z] for z, y in ((parts, mesh), (wanted, None)))
        pairs = [(x.grad, y.grad) for x, y in zip(model.parameters(), alone.parameters(), strict=True)]
        apart = max(apart, *(abs(x - y) / y for x, y in zip(losses, one, strict=True)))
        apart = max(apart, *(float((x - y).norm() / y.norm()) for x, y in pairs))
        if rank == 0:
            print(f"step {step + 1}: next token {losses[0]:.4f}, second token {losses[1]:.4f}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"losses and gradients differ from one rank by {apart:.1e}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
