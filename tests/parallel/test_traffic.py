"""Bytes per rank against a count that walks over rows, heads and ranks one by one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attnspan.parallel.traffic import Payload, Phase, Traffic, rows_between, traffic_of
from hypothesis import given, settings
from hypothesis import strategies as st

from attnspan import Spans, causal, segments, window
from attnspan.errors import OptionError, ShapeError
from attnspan.parallel.chunks import Chunks
from attnspan.parallel.needs import Holders, needs_of

Events = dict[str, list[tuple[int, int, int]]]  # phase: (receiver, sender, bytes)

WIDE = {2: 4, 4: 4, 8: 8}  # lse and sums of gradients: float32, but float64 for float64
FIELDS = ("received", "sent", "received_across", "sent_across")


def strategy(kind: str, members: int, groups: int) -> Any:
    return SimpleNamespace(kind=kind, members=members, groups=groups)


def random_spans(rng: np.random.Generator, planes: int, rows: int) -> Spans:
    """Two spans per row anywhere, empty ones among them."""
    ends = np.sort(rng.integers(0, rows + 1, (planes, 1, rows, 4)), -1)
    return Spans(ends.reshape(planes, 1, rows, 2, 2).astype(np.int32), rows)


class Walk:
    """The events of a call, one element of an array at a time where heads or rows differ."""

    def __init__(self, spans: Spans, owner: np.ndarray, size: int, members: int, payload: Payload) -> None:
        self.members, self.payload = members, payload
        self.groups = int(owner.max()) + 1
        self.row_owner = np.repeat(owner, size)[: spans.q_len]
        dense = spans.dense()[:, 0]
        planes = len(dense)
        # seen[plane][group]: the keys that some row of the group may see.
        self.seen = [
            [set(np.flatnonzero(dense[p][self.row_owner == b].any(0))) for b in range(self.groups)]
            for p in range(planes)
        ]

    def forward(self, kind: str) -> Events:
        events: Events = defaultdict(list)
        pay, u = self.payload, self.members
        e = pay.itemsize
        for b, a, other in product(range(self.groups), range(u), range(u)):
            if a == other:
                continue
            me, them = b * u + a, b * u + other
            for _ in range(pay.batch * pay.rows):
                events["scatter"].append((me, them, pay.q_heads[a] * pay.head_dim * e))
                events["gather"].append((me, them, pay.q_heads[other] * (pay.v_dim * e + WIDE[e])))
            for _ in range(pay.batch * pay.kv_rows):
                events["scatter"].append((me, them, pay.kv_heads[a] * (pay.head_dim + pay.v_dim) * e))
        if self.groups > 1:
            events[kind] += self.keys(kind, e)
        return events

    def backward(self, kind: str) -> Events:
        events: Events = defaultdict(list)
        pay, u = self.payload, self.members
        e = pay.itemsize
        for b, a, other in product(range(self.groups), range(u), range(u)):
            if a == other:
                continue
            me, them = b * u + a, b * u + other
            for _ in range(pay.batch * pay.rows):
                row = pay.v_dim * e + (WIDE[e] if pay.dlse else 0)
                events["scatter"].append((me, them, pay.q_heads[a] * row))
                events["gather"].append((me, them, pay.q_heads[other] * pay.head_dim * e))
            for _ in range(pay.batch * pay.kv_rows):
                events["gather"].append(
                    (me, them, pay.kv_heads[other] * (pay.head_dim + pay.v_dim) * WIDE[e])
                )
        if self.groups > 1:
            events[kind] += self.keys(kind, e)
            if kind == "exchange":
                events["gradients"] += [(them, me, n) for me, them, n in self.keys(kind, WIDE[e])]
            else:
                for block in range(self.groups):  # its gradients visit all, and come home
                    events["gradients"] += self.hops(block, self.groups, WIDE[e])
        return events

    def keys(self, kind: str, e: int) -> list[tuple[int, int, int]]:
        pay, u = self.payload, self.members
        if kind == "ring":
            return [hop for block in range(self.groups) for hop in self.hops(block, self.groups - 1, e)]
        return [
            (b * u + a, int(self.row_owner[key]) * u + a, pay.kv_heads[a] * (pay.head_dim + pay.v_dim) * e)
            for plane, b, a in product(range(pay.batch), range(self.groups), range(u))
            for key in self.seen[plane % len(self.seen)][b]
            if self.row_owner[key] != b
        ]

    def hops(self, block: int, count: int, e: int) -> list[tuple[int, int, int]]:
        pay, u = self.payload, self.members
        width = pay.head_dim + pay.v_dim
        return [
            (((block + hop + 1) % self.groups) * u + a, ((block + hop) % self.groups) * u + a, size)
            for hop, a in product(range(count), range(u))
            for size in [u * pay.batch * pay.kv_rows * pay.kv_heads[a] * width * e]
        ]


def summed(events: list[tuple[int, int, int]], ranks: int, node_size: int) -> dict[str, list[int]]:
    sums = {name: [0] * ranks for name in FIELDS}
    for receiver, sender, size in events:
        away = receiver // node_size != sender // node_size
        sums["received"][receiver] += size
        sums["sent"][sender] += size
        sums["received_across"][receiver] += size * away
        sums["sent_across"][sender] += size * away
    return sums


def assert_same(phases: Any, events: Events, ranks: int, node_size: int) -> None:
    assert set(phases) == set(events)
    for name, phase in phases.items():
        expected = summed(events[name], ranks, node_size)
        assert {field: getattr(phase, field).tolist() for field in FIELDS} == expected, name


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(["exchange", "ring"]),
    members=st.integers(1, 3),
    groups=st.integers(1, 4),
    node_size=st.integers(1, 7),
    planes=st.sampled_from([1, 2]),
    dlse=st.booleans(),
    itemsize=st.sampled_from([2, 4, 8]),
)
def test_bytes_equal_a_walk_over_rows(
    seed: int, kind: str, members: int, groups: int, node_size: int, planes: int, dlse: bool, itemsize: int
) -> None:
    rng = np.random.default_rng(seed)
    size, chunks = 2, groups * 2
    spans = random_spans(rng, planes, size * chunks - 1)
    owner = rng.permutation(np.arange(chunks) % groups)
    payload = Payload(
        rows=-(-size * 2 // members),
        q_heads=tuple(int(n) for n in rng.integers(1, 4, members)),
        kv_heads=tuple(int(n) for n in rng.integers(1, 3, members)),
        head_dim=8,
        v_dim=4,
        itemsize=itemsize,
        batch=2,
        planes=planes,
        dlse=dlse,
    )
    cut = Chunks.of(spans, size)
    rows = rows_between(needs_of(cut, owner, groups), Holders.of(cut, owner, groups))
    chosen = strategy(kind, members, groups)
    traffic = traffic_of(chosen, payload, rows, node_size=node_size)
    walk = Walk(spans, owner, size, members, payload)
    ranks = members * groups
    assert_same(traffic.forward, walk.forward(kind), ranks, node_size)
    assert_same(traffic.backward, walk.backward(kind), ranks, node_size)


def test_keys_of_cross_attention_have_a_length_of_their_own() -> None:
    payload = Payload(rows=4, q_heads=(1, 1), kv_heads=(1, 1), head_dim=8, v_dim=8, itemsize=2, key_rows=10)
    traffic = traffic_of(strategy("exchange", 2, 1), payload)
    assert traffic.forward["scatter"].received.tolist() == [4 * 8 * 2 + 10 * 16 * 2] * 2
    assert traffic.backward["gather"].received.tolist() == [4 * 8 * 2 + 10 * 16 * 4] * 2


def test_what_all_send_is_what_all_receive() -> None:
    spans = (causal() & segments(np.repeat(np.arange(8), [3, 9, 1, 20, 5, 7, 11, 8]))).spans(64, 64)
    cut, owner = Chunks.of(spans, 4), np.arange(16) % 4
    rows = rows_between(needs_of(cut, owner, 4), Holders.of(cut, owner, 4))
    payload = Payload(rows=16, q_heads=(2, 1), kv_heads=(1, 1), head_dim=8, v_dim=8, itemsize=4)
    for kind in ("exchange", "ring"):
        total = traffic_of(strategy(kind, 2, 4), payload, rows, node_size=3).total()
        assert total.received.sum() == total.sent.sum() > 0
        assert total.received_across.sum() == total.sent_across.sum() > 0
        assert (total.received_within + total.received_across == total.received).all()
        assert (total.sent_within + total.sent_across == total.sent).all()


def test_messages_are_the_ranks_that_something_comes_from() -> None:
    spans = window(4).spans(32, 32)  # each group of eight rows needs keys of the one before
    cut, owner = Chunks.of(spans, 8), np.arange(4)
    rows = rows_between(needs_of(cut, owner, 4), Holders.of(cut, owner, 4))
    payload = Payload(rows=4, q_heads=(1, 1), kv_heads=(1, 1), head_dim=8, v_dim=8, itemsize=4)
    spans_causal = (window(4) & causal()).spans(32, 32)
    cut = Chunks.of(spans_causal, 8)
    rows = rows_between(needs_of(cut, owner, 4), Holders.of(cut, owner, 4))
    exchange = traffic_of(strategy("exchange", 2, 4), payload, rows, node_size=4)
    assert exchange.forward["exchange"].messages.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert exchange.forward["exchange"].messages_across.tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert exchange.backward["gradients"].messages.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    ring = traffic_of(strategy("ring", 2, 4), payload, node_size=4)
    assert ring.forward["ring"].messages.tolist() == [3] * 8
    assert ring.forward["ring"].messages_across.tolist() == [3, 3, 0, 0, 3, 3, 0, 0]
    assert ring.backward["gradients"].messages.tolist() == [4] * 8
    assert ring.forward["scatter"].messages.tolist() == [1] * 8


def test_a_single_rank_moves_nothing() -> None:
    payload = Payload(rows=4, q_heads=(2,), kv_heads=(1,), head_dim=8, v_dim=8, itemsize=2)
    for kind in ("exchange", "ring"):
        traffic = traffic_of(strategy(kind, 1, 1), payload)
        assert not traffic.forward
        assert not traffic.backward
        assert traffic.received().tolist() == [0]


def test_directions() -> None:
    phase = replace(Phase.zeros(2), received=np.array([1, 2]))
    traffic = Traffic(2, 2, {"scatter": phase, "gather": phase}, {"ring": phase})
    assert traffic.received("forward").tolist() == [2, 4]
    assert traffic.received("backward").tolist() == [1, 2]
    assert traffic.received().tolist() == [3, 6]
    with pytest.raises(OptionError, match=r'expected "forward", "backward" or "both", got \'up\''):
        traffic.total("up")


def test_errors_name_what_was_expected() -> None:
    payload = Payload(rows=4, q_heads=(2,), kv_heads=(1,), head_dim=8, v_dim=8, itemsize=2)
    with pytest.raises(ShapeError, match=r"expected \(2, 2\) rows between groups, got None"):
        traffic_of(strategy("exchange", 1, 2), payload)
    with pytest.raises(ShapeError, match="expected heads of 2 members"):
        traffic_of(strategy("exchange", 2, 2), payload, np.zeros((2, 2), np.int64))
    with pytest.raises(ShapeError, match="expected planes to be 1 or the batch, 3, got 2"):
        replace(payload, batch=3, planes=2)
    with pytest.raises(ShapeError, match="as many members, at least one, got 1 and 2"):
        replace(payload, kv_heads=(1, 1))
    with pytest.raises(ShapeError, match="at least one"):
        replace(payload, kv_heads=(), q_heads=())
