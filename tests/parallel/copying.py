"""Train the copying task of examples/failures on one rank and on several, also with misplaced ids."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from attnspan import Mask, causal, segments
from attnspan.parallel import Layout
from attnspan.torch import attention
from failures.task import BATCH, HEADS, SEQ_LEN, Attend, Batch, Decoder, make_batch

#: Misplaced ids fall apart into many runs; with the default of one the mask itself would refuse them.
RUNS = 8


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
