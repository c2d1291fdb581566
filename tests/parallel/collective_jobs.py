"""What crosses the network, as the engine counts it and as the plan foretells it."""

from typing import Any

import torch
from parity_jobs import local_inputs, place
from samples.parallel import OPTIONS, Case

from attnspan.parallel.strategy import split_heads
from attnspan.parallel.torch.comm import counted_bytes
from attnspan.torch import attention


def count(case: Case) -> dict[str, Any]:
    """Bytes of this rank by direction and phase: {"forward": {"received": {...}, "sent": {...}}, ...}."""
    placed = place(case)
    leaves, (dout, _) = local_inputs(placed, case)
    with counted_bytes() as forward:
        out = attention(*leaves, mask=placed.mask, **OPTIONS[case.option](case))
    with counted_bytes() as backward:
        torch.autograd.grad(out, leaves, dout)
    counted = {
        name: {"received": dict(counts.received), "sent": dict(counts.sent)}
        for name, counts in (("forward", forward), ("backward", backward))
    }
    plan, cost = placed.plan, placed.plan.cost()
    foretold = {
        name: {
            way: {phase: int(getattr(figures, way)[placed.rank]) for phase, figures in phases.items()}
            for way in ("received", "sent")
        }
        for name, phases in (("forward", cost.forward), ("backward", cost.backward))
    }
    members = plan.strategy.members
    group, member = divmod(placed.rank, members)
    return {
        "counted": counted,
        "foretold": foretold,
        "rows": plan._rows(plan.layout, group),
        "keys": plan._rows(plan.keys, group),
        "kv_heads": len(split_heads(*case.heads, members)[member].kv),
    }


def count_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [count(case) for case in cases]
