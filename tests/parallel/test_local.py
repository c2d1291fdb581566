"""A rank's plan as two flat arrays: everything comes back, in NumPy and in torch, and nothing is copied."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attnspan.parallel.choose import Call
from attnspan.parallel.planning import Request, make_plan
from hypothesis import given
from simulated import any_plan

from attnspan import causal, segments
from attnspan.parallel.local import LocalPlan, decode, encode
from attnspan.parallel.plan import Plan

NUMBERS = ("strategy", "rank", "planes", "key_slots", "group", "member", "fingerprint")
COUNTS = ("send_counts", "receive_counts")
LISTS = ("send", "place", "own", "own_place")


def arrays(local: LocalPlan) -> dict[str, Any]:
    """All arrays of a plan by name."""
    found = {"q_index": local.q_index}
    for i, stage in enumerate(local.stages):
        found |= {f"keys {i}": stage.keys, f"bounds {i}": stage.bounds}
    if local.transfer is not None:
        found |= {name: getattr(local.transfer, name) for name in LISTS}
    return found


def assert_same(got: LocalPlan, expected: LocalPlan) -> None:
    for name in NUMBERS:
        assert getattr(got, name) == getattr(expected, name), name
    assert (got.transfer is None) == (expected.transfer is None)
    assert [stage.visible for stage in got.stages] == [stage.visible for stage in expected.stages]
    if expected.transfer is not None:
        for name in COUNTS:
            assert list(getattr(got.transfer, name)) == list(getattr(expected.transfer, name)), name
    mine, theirs = arrays(got), arrays(expected)
    assert list(mine) == list(theirs)
    for name, x in mine.items():
        assert tuple(x.shape) == theirs[name].shape, name
        np.testing.assert_array_equal(np.asarray(x), theirs[name], err_msg=name)


@given(any_plan())
def test_what_is_encoded_is_decoded(plan: Plan) -> None:
    for rank in range(plan.strategy.ranks):
        local = replace(plan.local(rank), fingerprint=plan.fingerprint)
        data, meta = encode(local)
        assert data.dtype == np.int32
        assert meta.dtype == np.int64
        assert data.ndim == meta.ndim == 1
        assert_same(decode(data, meta.tolist()), local)
        assert_same(decode(torch.from_numpy(data), meta.tolist()), local)
        assert len(data) == sum(x.size for x in arrays(local).values()), "nothing else is in the data"


def locals_of(strategy: str, ranks: int = 2) -> list[LocalPlan]:
    mask = (causal() & segments(np.repeat([0, 1], [7, 13]))).prepare(20, 20)
    plan, _ = make_plan(mask, Request(ranks, Call(4, 2), strategy, method="contiguous"))
    return [plan.local(rank) for rank in range(ranks)]


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_arrays_are_views_of_the_data(strategy: str, convert: Any) -> None:
    for local in locals_of(strategy):
        flat, meta = encode(local)
        data = convert(flat)
        for name, x in arrays(decode(data, meta.tolist())).items():
            assert type(x) is type(data)
            assert x.dtype == data.dtype, name
            assert np.shares_memory(np.asarray(x), flat) or 0 in x.shape, name


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_members_and_ranks_tell_their_plans_apart(strategy: str) -> None:
    encoded = [encode(local) for local in locals_of(strategy)]
    assert not np.array_equal(encoded[0][1], encoded[1][1]), "the rank is among the numbers"


def test_the_host_knows_what_to_ask_of_collectives() -> None:
    data, meta = encode(locals_of("exchange")[0])
    transfer = decode(torch.from_numpy(data), meta.tolist()).transfer
    assert transfer is not None
    for counts in (transfer.send_counts, transfer.receive_counts):
        assert all(type(count) is int for count in counts), "no tensor, which a device would have to give"


def test_a_ring_skips_what_nobody_sees() -> None:
    # Rank 0 has the first document and a part of the second; it sees none of the keys that come last.
    first, last = locals_of("ring")
    assert [stage.visible for stage in first.stages] == [True, False]
    assert [stage.visible for stage in last.stages] == [True, True]
