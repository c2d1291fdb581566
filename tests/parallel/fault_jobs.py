"""Ranks that disagree, die, or are handed what does not fit: each job returns the error that it met."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parity_jobs import Placed, attend, local_inputs, place
from samples.parallel import Case, segment_ids
from worlds import mesh

import attnspan
from attnspan.parallel import Layout, ShardedCache
from attnspan.parallel.torch.comm import Ranks, counted_bytes
from attnspan.parallel.torch.loss import sum_gradients
from attnspan.torch import attention

CASE = Case(length=37)


def _met(action: Callable[[], Any]) -> tuple[str, str, int]:
    """Type and text of the error of an action, and the bytes that were exchanged before it."""
    with counted_bytes() as counts:
        try:
            action()
        except Exception as error:
            return type(error).__name__, str(error), sum(counts.sent.values())
        return "", "no error", sum(counts.sent.values())


def _is_odd() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def disagree(what: str) -> tuple[str, str, int]:
    """The last rank is given another problem than the others."""
    ids = segment_ids(CASE, CASE.batch)
    changes: dict[str, dict[str, Any]] = {
        "ids": {"mask": attnspan.causal() & attnspan.segments(ids.roll(1, -1), max_runs=2)},
        "mask": {"mask": attnspan.causal()},
        "strategy": {"strategy": "ring"},
        "layout": {"method": "zigzag", "rows_per_chunk": 3},
    }
    common = {"mask": attnspan.causal() & attnspan.segments(ids, max_runs=2), "rows_per_chunk": 3}
    given = {**common, **(changes[what] if _is_odd() else {})}
    return _met(lambda: attend(place(CASE, **given), CASE))


def disagree_later() -> tuple[str, str, int]:
    """The first step agrees, the mask of the second does not."""
    attend(place(CASE), CASE)
    length = 5 + dist.get_rank()
    return _met(lambda: attend(place(CASE, mask=attnspan.causal() & attnspan.window(length)), CASE))


def disagree_unchecked() -> str:
    """Another scale on one rank: without a comparison it is found nowhere."""
    for check in (False, False, True):
        placed = place(CASE, mask=attnspan.causal(), check=check)
        rows = [torch.randn(2, heads, placed.mask.frame.rows_per_rank, 16) for heads in (4, 2, 2)]
        attention(*rows, mask=placed.mask, scale=0.5 if _is_odd() and not check else 0.25)
    return "no error"


def call_otherwise(what: str, strategy: str, early: bool = True) -> tuple[str, str, int]:
    """Plans agree, but the last rank calls, or differentiates, in another way.

    Args:
        what: In which.
        strategy: Of the plan.
        early: Ask before each exchange, as with gloo; else a later step's plan tells.
    """
    odd, case = _is_odd(), Case(length=37, strategy=strategy, heads=(4, 2))
    agreement = Ranks.of(mesh(dist.get_world_size())["cp"], case.members).agreement

    def step(odd: bool) -> None:
        placed = place(case, mask=attnspan.causal())
        rows, dtype = (
            placed.mask.frame.rows_per_rank,
            torch.bfloat16 if odd and what == "dtype" else torch.float32,
        )
        batch, dim = 2 + (odd and what == "batch rows"), 16 + 8 * (odd and what == "head dims")
        q, k, v = (torch.randn(batch, heads, rows, dim).to(dtype).requires_grad_() for heads in (4, 2, 2))
        options: dict[str, Any] = {}
        if what in ("scale", "softcap"):
            options[what] = 0.5 if odd else 0.25
        if what == "backend":
            options["backend"] = "math" if odd else "cpu"
        if what == "sinks" and not odd:
            options["sinks"] = torch.zeros(4)
        if what == "dropout_p":
            options.update(dropout_p=0.5 if odd else 0.25, dropout_seed=torch.tensor(1))
        if what == "gradients_of_lse" and strategy == "exchange":
            out, lse = attention(q, k, v, mask=placed.mask, return_lse=True)
            (out.sum() + lse.nan_to_num(neginf=0.0).sum() if odd else out.sum()).backward()
        else:
            attention(q, k, v, mask=placed.mask, **options)

    if early:
        return _met(lambda: step(odd))
    agreement.early = False
    try:
        step(odd)
        return _met(lambda: [step(False) for _ in range(2)])
    finally:
        agreement.early = True


def gather_otherwise(what: str) -> tuple[str, str, int]:
    """The last rank's rows, or its part of a cache's step, have other sizes."""
    line, wide = mesh(dist.get_world_size())["cp"], 3 + _is_odd()
    if what == "gather":
        layout = Layout.contiguous(12, dist.get_world_size())
        return _met(lambda: layout.gather(torch.zeros(2, 12 // dist.get_world_size(), wide), line))
    if what == "sum_gradients":
        weight = torch.zeros(wide, requires_grad=True)
        return _met(lambda: sum_gradients([weight], line))
    cache = ShardedCache(line, batch=1, kv_heads=1, max_len=9, head_dim=8)
    return _met(lambda: cache.attend(*(torch.zeros(1, 1, wide, 8) for _ in range(3))))


def agree() -> tuple[str, str, int]:
    return _met(lambda: [attend(place(CASE), CASE) for _ in range(2)])


def die_in_mid_step(strategy: str, phase: str) -> tuple[str, str, int]:
    """Rank 1 is killed while the others are in forward or backward."""
    case = Case(length=101, strategy=strategy, heads=(4, 4))
    placed = place(case)
    leaves, (dout, _) = local_inputs(placed, case)
    attend(placed, case)
    if phase == "forward" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def step() -> None:
        out = attention(*leaves, mask=placed.mask)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.autograd.grad(out, leaves, dout)
        # Small sends may have left before the other end died; the next step must notice.
        torch.autograd.grad(attention(*leaves, mask=placed.mask), leaves, dout)

    return _met(step)


def hang_in_mid_step() -> tuple[str, str, int]:
    """Rank 1 stops without dying: nothing but the timeout of the group can tell."""
    case = Case(length=101, heads=(4, 4))
    placed = place(case)
    leaves, _ = local_inputs(placed, case)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return _met(lambda: attention(*leaves, mask=placed.mask))


def misfit(what: str) -> tuple[str, str, int]:
    """Every rank hands over the same misfit."""
    placed = place(CASE)
    attend(placed, CASE)  # what was compared does not count
    rows, rank = placed.mask.frame.rows_per_rank, dist.get_rank()
    q, k, v = (torch.randn(2, heads, rows, 16) for heads in (4, 2, 2))
    line = mesh(dist.get_world_size())["cp"]
    actions: dict[str, Callable[[], Any]] = {
        "shard": lambda: placed.shard(torch.zeros(2, 36)),
        "gather": lambda: placed.gather(torch.zeros(2, 36)),
        "another rank's plan": lambda: placed.plan.local((rank + 1) % 3).on(line, rows="unchecked"),
        "another mesh": lambda: (
            Layout.contiguous(37, 2).plan(attnspan.causal(), heads=(4, 2)).local(0).on(line, rows="unchecked")
        ),
        "second derivative": lambda: _second_derivative(placed, q, k, v),
    }
    return _met(actions[what])


def _second_derivative(placed: Placed, *inputs: torch.Tensor) -> None:
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attention(q, k, v, mask=placed.mask)
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    first.square().sum().backward()
