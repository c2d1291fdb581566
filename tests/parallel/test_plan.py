"""The plans of all ranks, run together: keys arrive where the masks of the stages expect them."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from programs import run_program
from simulated import NOTHING, any_plan, arrivals, lists, rows_of

import attnspan
from attnspan import Spans, causal, full, segments
from attnspan.errors import DtypeError, OptionError, ShapeError
from attnspan.parallel import Layout, Plan, Strategy
from attnspan.torch import attention

NAMES = ("exchange", "ring", "ulysses", "hybrid(2, 2)", "hybrid(2, 2, ring)")


def check(plan: Plan, q_index: np.ndarray | None = None) -> None:
    """All that the engine takes for granted: each visible pair meets once, and nothing else does."""
    dense = np.asarray(plan.mask.lowered.dense())
    dense = np.broadcast_to(dense, (plan.planes, *dense.shape[1:]))
    every = [plan.tables(rank) for rank in range(plan.layout.ranks)]
    shift = plan.k_len - plan.layout.q_len
    index = shift + np.arange(plan.layout.q_len)[None] if q_index is None else q_index
    for tables, stages in zip(every, arrivals(plan, every), strict=True):
        rows = rows_of(plan.layout, tables.numbers.group, plan.strategy.members)
        placed = np.broadcast_to(tables.q_index, (plan.planes, rows.shape[1]))
        for plane in range(plan.planes):
            own = rows[plane % len(rows)]
            wanted = np.where((own >= 0)[:, None], dense[plane][:, own], False)
            total = np.zeros(wanted.shape, int)
            for stage, flat in zip(tables.stages, stages, strict=True):
                _check_stage(plan, stage, flat)
                keys = np.broadcast_to(stage.keys, flat.shape)[plane]
                bounds = np.broadcast_to(stage.bounds, (plan.planes, *stage.bounds.shape[1:]))[plane][None]
                sees = np.asarray(Spans(bounds, flat.shape[1]).validate().dense())[0]
                assert stage.visible or not sees.any(), "what is skipped is seen by nobody"
                known = int((flat[plane] != NOTHING).sum())
                assert not sees[..., known:].any(), "nobody sees padding"
                total[..., keys[:known]] += sees[..., :known]
            assert (total == wanted).all()
            expected = np.where(own < 0, 0, index[plane % len(index)][own])
            assert (placed[plane] == expected).all(), "biases go by global indices; those of padding are 0"


def _check_stage(plan: Plan, stage: Any, flat: np.ndarray) -> None:
    """Each key is the one that the stage says; keys ascend, and stand before all padding, which is 0."""
    planes, there = np.nonzero(flat != NOTHING)
    keys = np.broadcast_to(stage.keys, flat.shape)
    assert (flat[planes, there] == planes * plan.k_len + keys[planes, there]).all()
    assert (keys[flat == NOTHING] == 0).all()
    for row in flat:
        known = row[row != NOTHING]
        assert (row[: len(known)] == known).all()
        assert (np.diff(known) > 0).all()


@given(any_plan())
def test_each_visible_pair_meets_once(plan: Plan) -> None:
    check(plan)


def test_what_nobody_needs_does_not_travel() -> None:
    layout = Layout.contiguous(32, ranks=4)
    for mask in (Spans(np.zeros((1, 1, 32, 2, 2), np.int32), 32), causal() & segments(np.arange(32) // 8)):
        plan = layout.plan(mask, heads=(4, 2), strategy="exchange")
        check(plan)
        assert all(lists(plan.tables(rank)).send.size == 0 for rank in range(4))
    # Rank 0 of a ring sees none of the keys that come last.
    ids = np.repeat([0, 1], [7, 13])
    plan = Layout.contiguous(20, 2).plan(causal() & segments(ids), heads=(4, 2), strategy="ring")
    assert [[x.visible for x in plan.tables(r).stages] for r in (0, 1)] == [[True, False], [True, True]]


FACTS = """
import sys
import numpy as np
import attnspan.parallel
from attnspan import causal, segments
from attnspan.parallel import Layout
mask = causal() & segments(np.repeat([3, 5, 4], [9, 2, 21]))
plan = Layout.of(mask, q_len=32, ranks=4).plan(heads=(8, 2))
print(plan.strategy, sorted(plan.facts.items()), plan.local(3).numbers.tolist())
assert not {"torch", "jax"} & set(sys.modules), "a data loader needs no framework"
assert "MeshPlan" in attnspan.parallel.__all__
"""
TORCH = "from attnspan.parallel import MeshPlan\nassert 'torch' in sys.modules\n"
JAX = """
sys.modules["torch"] = None
import jax
import attnspan.jax
layout = Layout.of(causal(), q_len=5, ranks=1)
mesh = jax.make_mesh((1,), ("context",))
rows = layout.on(mesh, sequence="context").shard({"q": jax.numpy.ones((1, 2, 5, 4))}, axis=2)
placed, q = layout.plan(heads=(2, 1)).on(mesh, sequence="context", rows=rows), rows["q"]
assert attnspan.jax.attention(q, q[:, :1], q[:, :1], mask=placed).shape == (1, 2, 5, 4)
"""


@pytest.mark.slow
def test_plans_are_the_same_in_every_process_and_need_one_framework_at_most() -> None:
    found = [
        run_program("-c", FACTS + more, PYTHONHASHSEED=seed) for more, seed in ((TORCH, "1"), (JAX, "2"))
    ]
    assert found[0] == found[1] != ""


def test_a_plan_without_its_mesh_is_no_mask() -> None:
    plan = Layout.of(causal(), q_len=8, ranks=2).plan(causal(), heads=(2, 2))
    x = torch.ones(1, 2, 8, 4)
    for mask in (plan, plan.local(0)):
        with pytest.raises(DtypeError, match=r"Pass plan\.on\(mesh, rows=rows\)"):
            attention(x, x, x, mask=mask)


def test_plans_are_pickled() -> None:
    mask = causal() & segments(np.repeat([3, 5, 4], [9, 2, 21]))
    plan = Layout.of(mask, q_len=32, ranks=4).plan(heads=(8, 2))
    again = pickle.loads(pickle.dumps(plan))
    assert (again.facts, str(again.choice)) == (plan.facts, str(plan.choice))
    for rank in range(4):
        local, other = plan.local(rank), pickle.loads(pickle.dumps(again.local(rank)))
        assert (local.rank, local.layout, local.facts) == (other.rank, other.layout, other.facts)
        for name in ("data", "numbers", "rows"):
            assert (getattr(local, name) == getattr(other, name)).all()
        assert len(pickle.dumps(local)) < 10_000


def test_a_mask_in_any_form_is_planned_alike() -> None:
    ids = np.repeat([[0, 1, 2], [3, 4, 5]], [9, 4, 19], axis=1)
    layout, facts = Layout.contiguous(32, ranks=2), set()
    for convert in (np.asarray, torch.from_numpy):
        mask = causal() & segments(convert(ids))
        for form in (mask, mask.prepare(32, 32, batch=2), mask.spans(32, 32, batch=2)):
            plan = layout.plan(form, heads=(4, 2), strategy="ring", batch=2)
            assert type(plan.bounds) is np.ndarray
            facts.add(tuple(plan.facts.values()))
    assert len(facts) == 1


def planned(mask: Any = None, **given: Any) -> Plan:
    ranks = given.pop("ranks", 4)
    mask = causal() if mask is None else mask
    return Layout.contiguous(32, ranks).plan(mask, **{"heads": (4, 2), "batch": 2, **given})


PER_HEAD = attnspan.spans(np.zeros((1, 8, 32, 1, 2), np.int32))
THREE = Layout.of(segments(np.arange(96).reshape(3, 32) // 8), q_len=32, ranks=4, batch=3)
FOUR, ROWS = segments(np.zeros((4, 32), int)), np.arange(32)
CROSS = Layout.of(full(), q_len=8, k_len=5, ranks=2)
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: planned(torch.ones(32, 32, dtype=torch.bool)), DtypeError, "Tensor of bool.*Wrap booleans"),
    (lambda: planned(causal), DtypeError, "the function causal. Call it"),
    (lambda: planned(causal().prepare(31, 32)), ShapeError, "32 rows and 32 keys, the whole problem"),
    (lambda: planned(segments(np.zeros((2, 16), int))), ShapeError, "expected arrays that describe 32 keys"),
    (
        lambda: planned(FOUR.prepare(32, 32, batch=4)),
        ShapeError,
        r"2 batch elements, or 1 .*, got Spans\(B=4",
    ),
    (lambda: planned(PER_HEAD.prepare(32, 32, heads=8)), ShapeError, "expected 4 heads, or 1 that all share"),
    (
        lambda: planned(causal().prepare(32, 32, k_index=ROWS)),
        OptionError,
        "Pass a mask of the whole problem",
    ),
    (lambda: planned(Spans(np.full((1, 1, 32, 1, 2), 40), 32)), OptionError, "ascending, disjoint"),
    (
        lambda: planned(segments(np.tile([0, 1], 16))),
        OptionError,
        "Pass ids in the order of the tokens, or raise max_runs",
    ),
    (lambda: planned(strategy="zigzag"), OptionError, r"u \* r = 4 ranks, got 'zigzag'"),
    (lambda: planned(strategy=Strategy("ring", 1, 2)), OptionError, "one for 4 ranks, got ring for 2"),
    (lambda: planned(heads=(4, 3)), OptionError, r"the second a divisor of the first, got \(4, 3\)"),
    (lambda: planned(heads=(True, True)), OptionError, "heads: expected"),
    (lambda: planned(keys=Layout.contiguous(32, 2)), OptionError, "keys: .* layout of 4 ranks, got 2"),
    (lambda: planned(keys=Layout.contiguous(9, 4), k_len=8), ShapeError, "keys: expected 8 rows"),
    (lambda: planned(keys=THREE), ShapeError, "expected 1 or 3, got 1|expected 1 or 2, got 3"),
    (lambda: planned(batch=0), OptionError, "batch: expected 1 to"),
    (lambda: planned(head_dim=2.5), DtypeError, "head_dim: expected an int, got float"),
    (lambda: planned(node_size=0), OptionError, "node_size: expected 1 to"),
    (lambda: planned(memory="1GB"), DtypeError, "memory: expected a number of bytes, got '1GB'"),
    (lambda: planned(keys=5), DtypeError, "keys: expected a Layout, got 5"),
    (lambda: planned(machine="rates.json"), DtypeError, "machine: expected measured rates, got 'rates.json'"),
    (lambda: planned().local(-1), OptionError, "rank: expected 0 to 3, got -1"),
    (lambda: planned().cost().received("fwd"), OptionError, "direction: expected 'forward', 'backward' or"),
    (lambda: CROSS.plan(heads=(4, 2)), ShapeError, "For cross attention pass k_len="),
    (lambda: planned(memory=10), OptionError, r"memory: expected at least \d+ bytes.*got 10"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2][:30] for row in REFUSED])
def test_what_is_no_plan(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
