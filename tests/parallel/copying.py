"""A task whose loss can reach 0 if, and only if, every token sees its own segment: copying inside of it.

A segment repeats a motif of random tokens. From its second repetition on, each token is the one that came a
motif's length before. A token that sees another segment, or lacks its own, can but guess.

Shapes: B batch rows, S tokens of a row, E width, H heads, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from attnspan import Mask, causal, segments
from attnspan.parallel import Layout
from attnspan.torch import attention

VOCABULARY, MOTIF, SEQ_LEN, BATCH = 16, 6, 120, 2
WIDTH, HEADS, HEAD_DIM, LAYERS = 64, 2, 32, 2
#: Misplaced ids fall apart into many runs; with the default of one the mask itself would refuse them.
RUNS = 8

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    """One training run.

    Args:
        strategy: How ranks share attention; None for one process without context parallelism.
        steps: Training steps.
        misplaced: Order the ids of the mask by another layout than all else: shapes fit, rows do not.
        lr: Learning rate, after 20 steps of warm-up.
    """

    strategy: str | None = None
    steps: int = 160
    misplaced: bool = False
    lr: float = 1e-2


@dataclass(frozen=True)
class Batch:
    """Tokens, ids, positions inside of their segments, and the tokens to come, each (B, S)."""

    tokens: Tensor
    ids: Tensor
    positions: Tensor
    targets: Tensor


def make_batch(step: int) -> Batch:
    """The batch of a step, the same in every process; targets that nobody can know are -100."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = []
    for _ in range(BATCH):
        parts, at, count = [], 0, 0
        while at < SEQ_LEN:
            length = min(int(torch.randint(2 * MOTIF, 6 * MOTIF, (), generator=generator)), SEQ_LEN - at)
            motif = torch.randint(0, VOCABULARY, (MOTIF,), generator=generator)
            positions = torch.arange(length)
            known = (positions >= MOTIF - 1) & (positions < length - 1)
            targets = motif[(positions + 1) % MOTIF].masked_fill(~known, -100)
            parts.append(
                torch.stack([motif[positions % MOTIF], torch.full((length,), count), positions, targets])
            )
            at, count = at + length, count + 1
        rows.append(torch.cat(parts, 1))
    tokens, ids, positions, targets = torch.stack(rows, 1)
    return Batch(tokens, ids.to(torch.int32), positions, targets)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Block(nn.Module):
    """One pre-norm layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, HEAD_DIM)
        q, k, v = qkv.unbind(2)
        mixed = attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + self.out(mixed.reshape(batch, length, -1))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Decoder(nn.Module):
    """Two layers with rotary positions that restart in each segment; attention is handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        frequency = 100.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("angles", torch.arange(SEQ_LEN)[:, None] * frequency)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        angles = self.angles[positions][:, :, None]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), attend)
        return self.head(self.norm(x))


def misplace(ids: Tensor, ranks: int) -> Tensor:
    """Ids in the order of another layout, two mirrored chunks a rank, where rows lie as they are."""
    chunk = SEQ_LEN // (2 * ranks)
    other = Layout.of(causal(), q_len=SEQ_LEN, ranks=ranks, method="zigzag", rows_per_chunk=chunk)
    order = torch.tensor(other.rows.reshape(-1)).long()
    assert torch.equal(order.sort().values, torch.arange(SEQ_LEN)), "no padding in between"
    return ids[:, order]


def train(run: Run) -> list[float]:
    """Train and return the loss of each step, that of all ranks together."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    losses = []
    for step in range(run.steps):
        batch = make_batch(step)
        ids = misplace(batch.ids, max(dist.get_world_size(), 2)) if run.misplaced else batch.ids
        losses.append(_step(model, batch, causal() & segments(ids, max_runs=RUNS), run))
        optimizer.step()
        schedule.step()
    return losses


def _shared(run: Run, batch: Batch, mask: Mask) -> tuple[Any, dict[str, Tensor]]:
    """The mask of this rank's rows, and the rows."""
    rows = {"tokens": batch.tokens, "positions": batch.positions, "targets": batch.targets}
    if run.strategy is None:
        return mask.prepare(SEQ_LEN, SEQ_LEN, batch=BATCH), rows
    from worlds import mesh

    # With misplaced ids rows lie as they are, so that only the ids are out of place.
    method: Any = "contiguous" if run.misplaced else "balanced"
    layout = Layout.of(mask, q_len=SEQ_LEN, ranks=dist.get_world_size(), batch=BATCH, method=method)
    mine = layout.shard(rows, dist.get_rank())
    plan = layout.plan(heads=(HEADS, HEADS), strategy=run.strategy)
    return plan.on(mesh(dist.get_world_size())["cp"], rows=mine), mine


def _step(model: Decoder, batch: Batch, mask: Mask, run: Run) -> float:
    """Forward and backward; the loss is the sum over ranks, each divided by the tokens of all of them."""
    seen, rows = _shared(run, batch, mask)
    attend: Attend = lambda q, k, v: attention(q, k, v, mask=seen, layout="bshd")  # noqa: E731
    logits = model(rows["tokens"], rows["positions"], attend)
    total = functional.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten(), reduction="sum")
    loss = total / (batch.targets >= 0).sum()
    model.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if run.strategy is not None:
        flat = torch.cat([shown.view(1), *(p.grad.flatten() for p in model.parameters())])
        dist.all_reduce(flat)
        shown, *grads = flat.split([1, *(p.numel() for p in model.parameters())])
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad.copy_(grad.view_as(parameter))
    return float(shown)
