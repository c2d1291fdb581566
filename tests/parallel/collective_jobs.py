"""What crosses the network, as the engine counts it and as the plan foretells it."""

from typing import Any

import torch
from attnspan.parallel._collectives import counted_bytes
from attnspan.parallel.planning import cost
from parity_cases import OPTIONS, Case
from parity_jobs import local_inputs, make


def count(case: Case) -> dict[str, Any]:
    """Bytes of this rank by direction and phase: {"forward": {"received": {...}, "sent": {...}}, ...}."""
    cp = make(case)
    leaves, (dout, _) = local_inputs(cp, case)
    with counted_bytes() as forward:
        out = cp.attention(*leaves, **OPTIONS[case.option](case))
    with counted_bytes() as backward:
        torch.autograd.grad(out, leaves, dout)
    counted = {
        name: {"received": dict(counts.received), "sent": dict(counts.sent)}
        for name, counts in (("forward", forward), ("backward", backward))
    }
    traffic = cost(cp.plan, cp._request).traffic
    foretold = {
        name: {
            way: {phase: int(getattr(figures, way)[cp.rank]) for phase, figures in phases.items()}
            for way in ("received", "sent")
        }
        for name, phases in (("forward", traffic.forward), ("backward", traffic.backward))
    }
    group = cp.rank // cp.strategy.members
    return {
        "counted": counted,
        "foretold": foretold,
        "rows": cp.partition.group_rows(group),
        "keys": cp.plan.keys.group_rows(group),
        "kv_heads": len(cp.plan.heads[cp.rank % cp.strategy.members].kv),
    }


def count_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [count(case) for case in cases]
