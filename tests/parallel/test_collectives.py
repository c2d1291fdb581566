"""The bytes that cross the network are those of the plan, and for an exchange no more than anybody needs."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from covering import everything, few
from placed import local_inputs, place
from samples.parallel import MASKS, OPTIONS, Case
from test_parity import WORLDS
from worlds import world

from attnspan.parallel.strategy import split_heads
from attnspan.parallel.torch.comm import counted_bytes
from attnspan.torch import attention

#: An exchange may bring so much more than the rows that somebody may see.
OVERHEAD = 1.05


def _cases(ranks: int, strategy: str) -> list[Case]:
    heads = ((4, 2), (4, 4), (5, 5), (6, 3), (7, 1), (2, 1))
    self_attention = [
        Case(mask=mask, length=101, heads=heads[i % len(heads)], strategy=strategy, return_lse=False)
        for i, mask in enumerate(MASKS)
    ]
    if not everything():
        self_attention = self_attention[ranks % 4 :: 4]
    cross = [
        Case(mask="window", length=37, k_len=101, strategy=strategy, return_lse=False),
        Case(mask="spans", length=101, k_len=37, strategy=strategy, return_lse=False, dtype="bfloat16"),
    ]
    low = Case(length=101, strategy=strategy, dtype="float16", return_lse=False, batch=3)
    return [*self_attention, *cross, low]


def count(case: Case) -> dict[str, Any]:
    """Bytes of this rank by direction, way and phase, which are those that the plan foretells; its keys."""
    placed = place(case)
    leaves, (dout, _) = local_inputs(placed, case)
    with counted_bytes() as forward:
        out = attention(*leaves, mask=placed.mask, **OPTIONS[case.option](case))
    with counted_bytes() as backward:
        torch.autograd.grad(out, leaves, dout)
    plan, cost, found = placed.plan, placed.plan.cost(), dict[str, Any]()
    for direction, counts in (("forward", forward), ("backward", backward)):
        phases = getattr(cost, direction)
        for way in ("received", "sent"):
            counted = _moved(getattr(counts, way))
            foretold = {phase: int(getattr(x, way)[placed.rank]) for phase, x in phases.items()}
            assert counted == _moved(foretold), f"{direction} {way}: {case}"
            found[direction, way] = counted
    group, member = divmod(placed.rank, plan.strategy.members)
    return {
        **found,
        "rows": plan._rows(plan.layout, group),
        "keys": plan._rows(plan.keys, group),
        "kv_heads": len(split_heads(*case.heads, plan.strategy.members)[member].kv),
    }


def _moved(phases: dict[str, int]) -> dict[str, int]:
    """A phase in which nothing moves may be counted or left out."""
    return {phase: n for phase, n in phases.items() if n}


@functools.cache
def _counts(ranks: int, strategy: str) -> list[tuple[Case, Sequence[dict[str, Any]]]]:
    """Cases, with what each rank has counted."""
    cases = _cases(ranks, strategy)
    counts = world(ranks).run(lambda: [count(case) for case in cases])
    return list(zip(cases, zip(*counts, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), few(WORLDS, 3))
def test_counted_bytes_are_those_of_the_plan(ranks: int, strategy: str) -> None:
    for case, parts in _counts(ranks, strategy):
        for direction in ("forward", "backward"):
            sums = [sum(sum(part[direction, way].values()) for part in parts) for way in ("sent", "received")]
            assert sums[0] == sums[1], f"{direction} of {case}"


def needed(case: Case, part: dict[str, Any]) -> int:
    """Bytes of the keys and values that a rank's group may see and does not hold, by the dense mask."""
    mask = MASKS[case.mask](case)
    dense = np.asarray(mask.spans(case.length, case.keys, batch=case.batch, heads=case.heads[0]).dense())
    planes = max(len(dense), len(part["rows"]), len(part["keys"]))
    dense = np.broadcast_to(dense, (planes, *dense.shape[1:]))
    seen = np.zeros((planes, case.keys), bool)
    for plane in range(planes):
        rows, keys = (part[name][plane % len(part[name])] for name in ("rows", "keys"))
        seen[plane] = dense[plane][:, rows[rows >= 0]].any((0, 1))
        seen[plane, keys[keys >= 0]] = False
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[case.dtype]
    return int(seen.sum()) * (case.batch // len(seen)) * part["kv_heads"] * sum(case.dims) * size


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "exchange"), (4, "hybrid(2, 2)")])
def test_an_exchange_brings_what_is_needed_and_little_else(ranks: int, strategy: str) -> None:
    counts = _counts(ranks, strategy)
    assert any(needed(case, parts[0]) for case, parts in counts)
    for case, parts in counts:
        for part in parts:
            least = needed(case, part)
            for direction in ("forward", "backward"):
                brought = part[direction, "received"].get("exchange", 0)
                assert least <= brought <= OVERHEAD * least, f"{direction}: {brought} of {least} in {case}"
