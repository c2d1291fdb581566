"""The plans of all ranks, run together: keys arrive where the masks of the stages expect them."""

import subprocess
import sys

import numpy as np
import pytest
from attnspan.parallel.choose import Call
from attnspan.parallel.planning import Request, lower, make_plan
from hypothesis import given
from hypothesis import strategies as st
from mask_samples import BATCH, IDS, KEYS, SAMPLES, Sample
from simulated import (
    HEADS,
    NOTHING,
    STRATEGIES,
    any_plan,
    arrivals,
    held,
    lists,
    peer_of,
    returned,
    sent,
    visible,
)

from attnspan import Prepared, Spans, causal, full, segments
from attnspan.errors import ShapeError
from attnspan.parallel.needs import Needs
from attnspan.parallel.plan import Kept, Plan, expand
from attnspan.parallel.strategy import Strategy


def check(plan: Plan) -> None:
    """Everything that the engine takes for granted."""
    found, dense = arrivals(plan), np.asarray(plan.mask.lowered.dense())
    rows_seen = np.zeros(plan.rows.q_len, int)
    for rank, stages in enumerate(found):
        rows = plan.rows.group_rows(rank // plan.strategy.members)
        real = rows >= 0
        rows_seen[rows[real]] += 1
        wanted = np.where(real[:, None], dense[:, :, rows], False)
        total = np.zeros(wanted.shape, int)
        for arrival in stages:
            stage = arrival.local.stages[arrival.stage]
            assert stage.visible or not visible(arrival).any(), "what is skipped is seen by nobody"
            planes, there = np.nonzero(arrival.flat != NOTHING)
            keys = np.broadcast_to(arrival.keys, arrival.flat.shape)
            # Each key is the one that the stage says, and what no key stands behind is 0.
            assert (arrival.flat[planes, there] == planes * plan.k_len + keys[planes, there]).all()
            assert (keys[arrival.flat == NOTHING] == 0).all()
            for plane in range(plan.planes):
                known = np.flatnonzero(arrival.flat[plane] != NOTHING)
                assert known.tolist() == list(range(len(known))), "padding only behind the last key"
                assert (np.diff(keys[plane, known]) > 0).all(), "keys ascend"
                sees = visible(arrival)[plane]
                assert not sees[..., len(known) :].any(), "nobody sees padding"
                total[plane][..., keys[plane, known]] += sees[..., : len(known)]
        # Each visible pair once, nothing else, and nothing for padding rows.
        assert (total == wanted).all()
    assert (rows_seen == plan.strategy.members).all(), "each row is with one group"


@given(any_plan())
def test_each_visible_pair_meets_once(plan: Plan) -> None:
    check(plan)


@given(any_plan())
def test_an_exchange_moves_what_somebody_sees_and_brings_its_gradients_home(plan: Plan) -> None:
    found = arrivals(plan)
    for rank, (arrival, *_) in enumerate(found):
        local = arrival.local
        if local.transfer is None:
            return
        transfer = lists(local)
        assert transfer.send_counts[local.group] == 0, "nothing is sent to oneself"
        assert transfer.receive_counts[local.group] == 0
        used = visible(arrival).any(axis=(1, 2))
        assert (used == (arrival.flat != NOTHING)).all(), "what arrives is seen by some row"
        for group, back in enumerate(returned(plan, local, found)):
            there = sent(plan, local)[group]
            assert (back == there).all(), "gradients come back in the order in which keys left"
            assert len(set(there.tolist())) == len(there), "a key travels once to each group"
        assert all(
            lists(found[peer_of(local, group)][0].local).send_counts[local.group]
            == transfer.receive_counts[group]
            for group in range(plan.strategy.groups)
        )
        own = held(plan, local.group)
        assert (own[transfer.own] != NOTHING).all()
        assert (own[transfer.send] != NOTHING).all()
        assert found[rank][0].flat.shape == local.stages[0].keys.shape


@given(any_plan())
def test_members_of_a_group_have_one_plan(plan: Plan) -> None:
    members = plan.strategy.members
    for rank in range(plan.strategy.ranks):
        mine, first = plan.local(rank), plan.local(rank // members * members)
        assert (mine.rank, mine.group, mine.member) == (rank, rank // members, rank % members)
        arrays = [
            (x.q_index, *(part for stage in x.stages for part in (stage.keys, stage.bounds)))
            for x in (mine, first)
        ]
        assert all((a == b).all() for a, b in zip(*arrays, strict=True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
@pytest.mark.parametrize("name", ["exchange", "ring", "ulysses", "hybrid(2, 2)", "hybrid(2, 2, ring)"])
def test_every_kind_of_mask(sample: Sample, name: str) -> None:
    mask = lower(sample.mask(), KEYS, KEYS, BATCH, HEADS[0])
    for method in ("balanced", "greedy", "contiguous", "zigzag"):
        request = Request(4, Call(*HEADS, batch=BATCH), name, method=method, rows_per_chunk=3)  # type: ignore[arg-type]
        plan, _ = make_plan(mask, request)
        check(plan)
        for rank in range(4):
            local, rows = plan.local(rank), plan.rows.group_rows(rank // plan.strategy.members)
            index = sample.default_q_index(KEYS)
            real = rows >= 0
            placed = np.broadcast_to(local.q_index, (BATCH, len(rows)))
            assert (placed[:, real] == index[:, rows[real]]).all(), "biases go by global indices"
            assert (placed[:, ~real] == 0).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda x: f"{x.kind}-{x.members}x{x.groups}")
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (2, 2), (3, 7), (7, 3), (13, 13), (4, 1), (5, 0)])
def test_more_groups_than_chunks_and_hardly_any_rows(strategy: Strategy, q_len: int, k_len: int) -> None:
    request = Request(strategy.ranks, Call(*HEADS), strategy, self_attention=q_len == k_len)
    plan, _ = make_plan(lower(causal(), q_len, k_len, 1, HEADS[0]), request)
    check(plan)


def test_rows_that_see_nothing_need_nothing() -> None:
    mask = Prepared(Spans(np.zeros((1, 1, 8, 2, 2), np.int32), 8))
    plan, _ = make_plan(mask, Request(4, Call(*HEADS), "exchange"))
    check(plan)
    for rank in range(4):
        local = plan.local(rank)
        assert local.stages[0].keys.shape == (1, 0)
        assert lists(local).send.size == 0


def test_a_document_on_one_rank_stays_there() -> None:
    ids = np.repeat([0, 1, 2, 3], 8)
    request = Request(4, Call(*HEADS), "exchange", method="contiguous", rows_per_chunk=8)
    plan, _ = make_plan((causal() & segments(ids)).prepare(32, 32), request)
    assert all(lists(plan.local(rank)).send.size == 0 for rank in range(4))


def test_the_indices_of_cross_attention_align_at_the_end() -> None:
    plan, _ = make_plan(full().prepare(4, 9), Request(3, Call(*HEADS), "ring", self_attention=False))
    found = np.concatenate([plan.local(rank).q_index[0] for rank in range(3)])
    assert sorted(found.tolist()) == [0, 0, 5, 6, 7, 8], "and those of padding are 0"


INGREDIENTS = {
    "mask": [
        ((causal() & segments(np.repeat([0, 1], [7, 9]))).prepare(16, 16), {}),
        (causal().prepare(16, 16, q_index=np.arange(16) + 1), {}),
    ],
    "partition": [(None, {"method": "contiguous"}), (None, {"rows_per_chunk": 4})],
    "strategy": [(None, {"strategy": "ring"})],
    "heads": [(None, {"call": Call(8, 2)}), (None, {"call": Call(4, 4)})],
}


@pytest.mark.parametrize("name", INGREDIENTS)
def test_the_digest_tells_which_ingredient_is_another(name: str) -> None:
    mask = causal().prepare(16, 16)
    options = {"ranks": 4, "call": Call(*HEADS), "strategy": "exchange", "rows_per_chunk": 2}
    first = make_plan(mask, Request(**options))[0].digest  # type: ignore[arg-type]
    assert first == make_plan(causal().prepare(16, 16), Request(**options))[0].digest  # type: ignore[arg-type]
    for other, changes in INGREDIENTS[name]:
        changed = make_plan(mask if other is None else other, Request(**{**options, **changes}))[0].digest
        assert changed[name] != first[name]
        if name != "mask":  # another mask may be dealt out in another way
            assert [part for part in first if first[part] != changed[part]] == [name]


def test_the_digest_knows_the_indices_of_rows_that_see_alike() -> None:
    request = Request(2, Call(*HEADS), "ring")
    shifted = full().prepare(6, 6, q_index=np.arange(6) + 1)
    plans = [make_plan(mask, request)[0] for mask in (full().prepare(6, 6), shifted)]
    assert (plans[0].bounds == plans[1].bounds).all()
    assert plans[0].digest["mask"] != plans[1].digest["mask"]


def test_the_digest_knows_how_many_keys_there_are() -> None:
    bounds = full().prepare(6, 4).lowered.bounds
    found = set()
    for k_len in (4, 5):
        request = Request(2, Call(*HEADS), "ring", self_attention=False)
        found.add(make_plan(Prepared(Spans(bounds, k_len)), request)[0].digest["mask"])
    assert len(found) == 2


DIGEST = """
import numpy as np
from attnspan import causal, segments
from attnspan.parallel.choose import Call
from attnspan.parallel.planning import Request, make_plan
mask = (causal() & segments(np.repeat([3, 5, 4], [9, 2, 21]))).prepare(32, 32)
print(sorted(make_plan(mask, Request(4, Call(8, 2), "hybrid(2, 2)"))[0].digest.items()))
"""


def test_the_digest_is_the_same_in_every_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=9))
def test_ranges_are_written_out(ranges: list[tuple[int, int]]) -> None:
    lo = np.array([a for a, _ in ranges], np.int64)
    hi = np.array([a + n for a, n in ranges], np.int64)
    assert expand(lo, hi).tolist() == [x for a, n in ranges for x in range(a, a + n)]


@given(st.sets(st.integers(0, 59)), st.sampled_from([(1, 60), (2, 30), (3, 20), (4, 15)]))
def test_kept_keys_are_counted_and_placed(keys: set[int], shape: tuple[int, int]) -> None:
    planes, k_len = shape
    edges = [x for x in sorted(keys) if x - 1 not in keys], [x + 1 for x in sorted(keys) if x + 1 not in keys]
    lo, hi = (np.array(x, np.int64) for x in edges)
    kept = Kept.of(Needs(np.array([0, len(lo)]), lo, hi), 0, planes, k_len)
    every = np.arange(60)
    assert kept.count(np.arange(61)).tolist() == [sum(y < x for y in keys) for x in range(61)]
    assert kept.has(every).tolist() == [x in keys for x in range(60)]
    inside = np.array(sorted(keys), np.int64)
    placed = kept.place(inside)
    assert len(set(placed.tolist())) == len(keys)
    assert (kept.keys.reshape(-1)[placed] == inside % k_len).all()
    assert (placed // max(1, kept.keys.shape[1]) == inside // k_len).all()


def test_places_that_int32_cannot_number_are_refused() -> None:
    k_len = 2**30
    everything = Needs(np.array([0, 1]), np.array([0]), np.array([3 * k_len]))
    with pytest.raises(ShapeError) as caught:
        Kept.of(everything, 0, planes=3, k_len=k_len)
    message = str(caught.value)
    assert "below 2,147,483,648" in message
    assert f"{3 * k_len:,}" in message
    assert "batch rows" in message
