"""The plans of all ranks, run together: keys arrive where the masks of the stages expect them."""

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from samples.masks import BATCH, IDS, KEYS, SAMPLES, Sample
from simulated import NOTHING, STRATEGIES, any_plan, anyhow, arrivals, lists, rows_of

import attnspan
from attnspan import Spans, causal, full, segments
from attnspan.errors import DtypeError, OptionError, ShapeError
from attnspan.parallel import Layout, Plan, Strategy
from attnspan.parallel.lowered import lower
from attnspan.parallel.needs import Needs
from attnspan.parallel.places import Kept
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_mask(sample: Sample, name: str) -> None:
    for method in ("balanced", "contiguous", "zigzag"):
        given: dict[str, Any] = {"batch": BATCH, "method": method, "rows_per_chunk": 3}
        layout = Layout.of(sample.mask(), q_len=KEYS, ranks=4, **given)
        check(layout.plan(heads=(4, 2), strategy=name, batch=BATCH), sample.default_q_index(KEYS))


@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda x: f"{x.kind}-{x.members}x{x.groups}")
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (2, 2), (3, 7), (7, 3), (13, 13), (4, 1), (5, 0)])
def test_hardly_any_rows_or_keys(strategy: Strategy, q_len: int, k_len: int) -> None:
    layout = Layout.of(causal(), q_len=q_len, k_len=k_len, ranks=strategy.ranks, rows_per_chunk=2)
    check(layout.plan(heads=(4, 2), strategy=strategy, k_len=None if q_len == k_len else k_len))


def test_the_chunks_of_a_layout_serve_plans_of_other_members_and_planes() -> None:
    mask = causal() & segments(np.repeat([0, 1, 2], [10, 3, 11]))
    two = Layout.of(mask, q_len=24, ranks=4, members=2)
    plan = two.plan(heads=(4, 2), strategy="hybrid(2, 2)")
    for name in NAMES:
        strategy = Strategy.parse(name, 4)
        found, expected = plan.cost(strategy), two.plan(mask, heads=(4, 2), strategy=strategy).cost()
        assert found.fetched.tolist() == expected.fetched.tolist()
        assert found.received().tolist() == expected.received().tolist()
    # Keys of the second batch row lie otherwise, its queries see alike.
    keys = anyhow(24, 4, planes=2, seed=0)
    check(Layout.of(mask, q_len=24, ranks=4).plan(heads=(4, 2), strategy="exchange", batch=2, keys=keys))


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


def test_facts_tell_plans_apart() -> None:
    """test_faults.py has ranks whose plans differ in each part."""

    def facts(**options: Any) -> dict[str, int]:
        layout = Layout.of(causal(), q_len=16, ranks=4, rows_per_chunk=options.pop("rows_per_chunk", 2))
        return layout.plan(**{"heads": (4, 2), "strategy": "exchange", **options}).facts

    assert facts() == facts()
    for part, options in (
        ("mask", {"mask": causal().prepare(16, 16, q_index=np.arange(16) + 1)}),
        ("layout of the keys", {"keys": Layout.contiguous(16, ranks=4)}),
        ("strategy and heads", {"heads": (8, 2)}),
        ("strategy and heads", {"heads": (4, 4)}),
    ):
        assert {name for name, x in facts().items() if x != facts(**options)[name]} == {part}
    # Bounds do not show how many keys there are.
    bounds, layout = full().prepare(6, 4).lowered.bounds, Layout.contiguous(6, ranks=2)
    plans = [layout.plan(Spans(bounds, k), k_len=k, heads=(4, 2), strategy="ring") for k in (4, 5)]
    assert plans[0].facts["mask"] != plans[1].facts["mask"]


FACTS = """
import numpy as np
from attnspan import causal, segments
from attnspan.parallel import Layout
mask = causal() & segments(np.repeat([3, 5, 4], [9, 2, 21]))
plan = Layout.of(mask, q_len=32, ranks=4).plan(heads=(8, 2))
print(plan.strategy, sorted(plan.facts.items()), plan.local(3).numbers.tolist())
"""


def test_plans_are_the_same_in_every_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", FACTS],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


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
    index = torch.arange(32)[None] * 2 % 32
    found = lower(causal().prepare(32, 32, q_index=index), 32, 32, 1, 4)
    assert type(found.q_index) is np.ndarray
    assert (np.broadcast_to(found.q_index, (1, 32)) == index.numpy()).all()


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
    (lambda: planned(full().spans(32, 31)), ShapeError, "expected 32 rows and 32 keys"),
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
    (lambda: planned(segments(np.tile([0, 1], 16)).spans(32, 32)), OptionError, "batch 0, head 0, query 0"),
    (lambda: planned(strategy="zigzag"), OptionError, r"u \* r = 4 ranks, got 'zigzag'"),
    (lambda: planned(strategy="hybrid(3, 2)"), OptionError, r"u \* r = 4 ranks"),
    (lambda: planned(strategy=Strategy("ring", 1, 2)), OptionError, "one for 4 ranks, got ring for 2"),
    (lambda: planned(strategy=None), OptionError, r"u \* r = 4 ranks"),
    (lambda: planned(heads=(4, 3)), OptionError, r"the second a divisor of the first, got \(4, 3\)"),
    (lambda: planned(heads=4), OptionError, "heads: expected"),
    (lambda: planned(heads=(True, True)), OptionError, "heads: expected"),
    (lambda: planned(keys=Layout.contiguous(32, 2)), OptionError, "keys: .* layout of 4 ranks, got 2"),
    (lambda: planned(keys=Layout.contiguous(9, 4), k_len=8), ShapeError, "keys: expected 8 rows"),
    (lambda: planned(keys=THREE), ShapeError, "expected 1 or 3, got 1|expected 1 or 2, got 3"),
    (lambda: THREE.plan(causal(), heads=(4, 2), batch=2), ShapeError, "batch"),
    (lambda: planned(strategy=["ring"]), OptionError, r"u \* r = 4 ranks, got \['ring'\]"),
    (lambda: Layout.of(causal(), q_len=8, ranks=2).plan(heads=([4], 2)), OptionError, "heads: expected"),
    (lambda: planned(batch=0), OptionError, "batch: expected 1 to"),
    (lambda: planned(head_dim=2.5), DtypeError, "head_dim: expected an int, got float"),
    (lambda: planned(v_dim=-1), OptionError, "v_dim: expected 1 to"),
    (lambda: planned(itemsize="bf16"), DtypeError, "itemsize: expected an int, got str"),
    (lambda: planned(node_size=0), OptionError, "node_size: expected 1 to"),
    (lambda: planned(memory="1GB"), DtypeError, "memory: expected a number of bytes, got '1GB'"),
    (lambda: planned(keys=5), DtypeError, "keys: expected a Layout, got 5"),
    (lambda: planned(machine="rates.json"), DtypeError, "machine: expected measured rates, got 'rates.json'"),
    (lambda: planned().local(-1), OptionError, "rank: expected 0 to 3, got -1"),
    (lambda: planned().tables(4), OptionError, "rank: expected 0 to 3, got 4"),
    (lambda: planned().cost("zigzag"), OptionError, r"u \* r = 4 ranks, got 'zigzag'"),
    (lambda: planned().cost(Strategy("ring", 1, 2)), OptionError, "one for 4 ranks, got ring for 2"),
    (lambda: planned().cost(node_size=0), OptionError, "node_size: expected 1 to"),
    (lambda: planned().cost().received("fwd"), OptionError, "direction: expected 'forward', 'backward' or"),
    (lambda: CROSS.plan(heads=(4, 2)), ShapeError, "For cross attention pass k_len="),
    (lambda: planned(memory=10), OptionError, r"memory: expected at least \d+ bytes.*got 10"),
    (lambda: Kept.of(_everything(), 0, planes=3, k_len=2**30), ShapeError, "below 2,147,483,648, got 3 x"),
]


def _everything() -> Needs:
    """Keys that int32 could not number."""
    return Needs(np.array([0, 1]), np.array([0]), np.array([3 * 2**30]))


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2][:30] for row in REFUSED])
def test_what_is_no_plan(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
