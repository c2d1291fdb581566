"""Ranks that disagree, die, or are handed what does not fit: each job returns the error that it met."""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attnspan.parallel._collectives import counted_bytes
from parity_cases import Case, segment_ids
from parity_jobs import attend, local_inputs, make
from worlds import mesh

import attnspan
from attnspan.parallel import ContextParallel

CASE = Case(length=37)


def _met(action: Callable[[], Any]) -> tuple[str, str, int]:
    """Type and text of the error of an action, and the bytes that were exchanged before it."""
    with counted_bytes() as counts:
        try:
            action()
        except Exception as error:
            return type(error).__name__, str(error), counts.total_sent
    return "", "no error", counts.total_sent


def disagree(what: str) -> tuple[str, str, int]:
    """The last rank is given another problem than the others."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    ids = segment_ids(CASE, CASE.batch)
    changes: dict[str, dict[str, Any]] = {
        "ids": {"mask": attnspan.causal() & attnspan.segments(ids.roll(1, -1), max_runs=2)},
        "mask": {"mask": attnspan.causal()},
        "strategy": {"strategy": "ring"},
        "partition": {"method": "zigzag", "rows_per_chunk": 3},
        "heads": {"heads": (8, 2)},
        "q_len": {"q_len": 36, "mask": attnspan.causal()},
    }
    common = {"mask": attnspan.causal() & attnspan.segments(ids, max_runs=2), "rows_per_chunk": 3}
    return _met(lambda: attend(make(CASE, **{**common, **(changes[what] if odd else {})}), CASE))


def disagree_later() -> tuple[str, str, int]:
    """The first step agrees, the mask of the second does not."""
    cp = make(CASE)
    attend(cp, CASE)
    length = 5 + dist.get_rank()
    return _met(lambda: cp.with_mask(attnspan.causal() & attnspan.window(length)))


def call_otherwise(what: str, strategy: str, batch: int = 2) -> tuple[str, str, int]:
    """Plans agree, but the last rank calls, or differentiates, in another way than the others."""
    odd = dist.get_rank() == dist.get_world_size() - 1
    case = Case(length=37, strategy=strategy, heads=(4, 2))
    cp = make(case, mask=attnspan.causal())
    q, k, v = (torch.randn(batch, heads, cp.rows_per_rank, 16, requires_grad=True) for heads in (4, 2, 2))
    options: dict[str, Any] = {}
    if odd and what == "dtype":
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    if odd and what == "batch":
        q, k, v = (x[:1] for x in (q, k, v))
    if odd and what == "head_dim":
        q, k = q[..., :8], k[..., :8]
    if odd and what == "v_dim":
        v = v[..., :8]
    if what in ("scale", "softcap"):
        options[what] = 0.5 if odd else 0.25
    if what == "sinks" and not odd:
        options["sinks"] = torch.zeros(4)
    if what == "dropout_p":
        options.update(dropout_p=0.5 if odd else 0.25, dropout_seed=torch.tensor(1))
    if what == "gradients_of_lse":
        out, lse = cp.attention(q, k, v, return_lse=True)
        loss = out.sum() + lse.nan_to_num(neginf=0.0).sum() if odd else out.sum()
        return _met(loss.backward)
    return _met(lambda: cp.attention(q, k, v, **options))


def agree() -> tuple[str, str, int]:
    return _met(lambda: attend(make(CASE), CASE))


def die_in_mid_step(strategy: str, phase: str) -> tuple[str, str, int]:
    """Rank 1 is killed while the others are in forward or backward."""
    case = Case(length=101, strategy=strategy, heads=(4, 4))
    cp = make(case)
    leaves, (dout, _) = local_inputs(cp, case)
    attend(cp, case)
    if phase == "forward" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def step() -> None:
        out = cp.attention(*leaves)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.autograd.grad(out, leaves, dout)
        # Small sends may have left before the other end died; the next step must notice.
        torch.autograd.grad(cp.attention(*leaves), leaves, dout)

    return _met(step)


def hang_in_mid_step() -> tuple[str, str, int]:
    """Rank 1 stops without dying: nothing but the timeout of the group can tell."""
    case = Case(length=101, heads=(4, 4))
    cp = make(case)
    leaves, _ = local_inputs(cp, case)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return _met(lambda: cp.attention(*leaves))


def _local(cp: ContextParallel, **sizes: int) -> list[torch.Tensor]:
    size = {
        "batch": 2,
        "q_heads": 4,
        "kv_heads": 2,
        "rows": cp.rows_per_rank,
        "keys": cp.rows_per_rank,
        **sizes,
    }
    return [
        torch.randn(size["batch"], size["q_heads"], size["rows"], 16),
        *(torch.randn(size["batch"], size["kv_heads"], size["keys"], 16) for _ in range(2)),
    ]


def misfit(what: str) -> tuple[str, str, int]:
    """Every rank hands over the same misfit."""
    cp = make(CASE)
    q, k, v = _local(cp)
    n = cp.rows_per_rank
    line = mesh(dist.get_world_size())["cp"]
    actions: dict[str, Callable[[], Any]] = {
        "whole rows": lambda: cp.attention(*_local(cp, rows=37, keys=37)),
        "whole keys": lambda: cp.attention(*_local(cp, keys=37)),
        "q heads": lambda: cp.attention(*_local(cp, q_heads=8)),
        "kv heads": lambda: cp.attention(*_local(cp, kv_heads=1)),
        "batch": lambda: cp.attention(*_local(cp, batch=3)),
        "dtypes": lambda: cp.attention(q, k.double(), v),
        "integers": lambda: cp.attention(q.long(), k.long(), v.long()),
        "no tensor": lambda: cp.attention(q.numpy(), k, v),
        "layout": lambda: cp.attention(q, k, v, layout="sbhd"),
        "scale": lambda: cp.attention(q, k, v, scale=float("nan")),
        "sinks": lambda: cp.attention(q, k, v, sinks=torch.zeros(2)),
        "slopes": lambda: cp.attention(q, k, v, bias=attnspan.alibi(torch.ones(2))),
        "dense bias": lambda: cp.attention(q, k, v, bias=torch.zeros(n, n)),
        "seed": lambda: cp.attention(q, k, v, dropout_p=0.5),
        "q_index": lambda: cp.attention(q, k, v, q_index=torch.arange(n)),
        "backend": lambda: cp.attention(q, k, v, backend="cpu"),
        "shard": lambda: cp.shard(torch.zeros(2, 36)),
        "unshard": lambda: cp.unshard(torch.zeros(2, 36)),
        "strategy": lambda: make(CASE, strategy="hybrid(3, 5)"),
        "kind of strategy": lambda: make(CASE, strategy="spiral"),
        "method": lambda: make(CASE, method="fair"),
        "heads": lambda: make(CASE, heads=(4, 3)),
        "no mask": lambda: make(CASE, mask=torch.ones(37, 37)),
        "mask of other length": lambda: make(CASE, mask=attnspan.causal().spans(5, 5)),
        "ids of other length": lambda: make(CASE, mask=attnspan.segments(torch.zeros(36, dtype=torch.int32))),
        "no mesh": lambda: ContextParallel(line.get_group(), q_len=37, heads=(4, 2)),  # type: ignore[arg-type]
        "second derivative": lambda: _second_derivative(cp, q, k, v),
    }
    return _met(actions[what])


def _second_derivative(cp: ContextParallel, *inputs: torch.Tensor) -> None:
    q, k, v = (x.requires_grad_() for x in inputs)
    (first,) = torch.autograd.grad(cp.attention(q, k, v).square().sum(), q, create_graph=True)
    first.square().sum().backward()
