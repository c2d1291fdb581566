"""From a mask and ranks to a plan: what is refused, and that equal questions have equal answers."""

from typing import Any

import numpy as np
import pytest
import torch
from attnspan.parallel.choose import Call
from attnspan.parallel.planning import Request, cost, lower, make_plan

import attnspan
from attnspan import Prepared, Spans, causal, full, segments
from attnspan.errors import DtypeError, OptionError, ShapeError
from attnspan.parallel.machine import Machine
from attnspan.parallel.strategy import Strategy

CALL = Call(4, 2)
IDS = np.repeat([[0, 1, 2], [3, 4, 5]], [9, 4, 19], axis=1)


def plain(mask: Any, **changes: Any) -> Prepared:
    return lower(mask, **{"q_len": 32, "k_len": 32, "batch": 2, "heads": 4, **changes})


@pytest.mark.parametrize(
    "make",
    [
        lambda mask: mask,
        lambda mask: mask.prepare(32, 32, batch=2),
        lambda mask: mask.spans(32, 32, batch=2),
        lambda mask: mask.spans(32, 32, batch=2).lowered,
    ],
    ids=["expression", "prepared", "lowered", "spans"],
)
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_a_mask_in_any_form_is_lowered_to_numpy(make: Any, convert: Any) -> None:
    found = plain(make(causal() & segments(convert(IDS))))
    assert type(found.lowered.bounds) is np.ndarray
    wanted = (causal() & segments(IDS)).prepare(32, 32, batch=2)
    assert (found.lowered.dense() == wanted.lowered.dense()).all()


def test_the_indices_that_a_mask_was_prepared_with_stay() -> None:
    index = torch.arange(32)[None] * 2 % 32
    found = plain(causal().prepare(32, 32, q_index=index))
    assert type(found.q_index) is np.ndarray
    assert (np.broadcast_to(found.q_index, (1, 32)) == index.numpy()).all()


PER_HEAD = attnspan.spans(np.zeros((1, 8, 32, 1, 2), np.int32))
REFUSED = {
    "a tensor": (lambda: torch.ones(32, 32, dtype=torch.bool), DtypeError, "Tensor of bool.*Wrap booleans"),
    "nothing": (lambda: None, DtypeError, "got NoneType"),
    "other rows": (lambda: causal().prepare(31, 32), ShapeError, "expected 32 rows and 32 keys"),
    "other keys": (lambda: full().spans(32, 31), ShapeError, "expected 32 rows and 32 keys"),
    "ids of a shard": (lambda: segments(IDS[:, :16]), ShapeError, "expected arrays that describe 32 keys"),
    "other batch": (
        lambda: segments(np.repeat(IDS, 2, 0)).prepare(32, 32, batch=4),
        ShapeError,
        "expected 2 batch rows, or 1 that all share, got Spans\\(B=4",
    ),
    "other heads": (
        lambda: PER_HEAD.prepare(32, 32, heads=8),
        ShapeError,
        "expected 4 heads, or 1 that all share, got Spans\\(B=1, H=8",
    ),
    "keys of its own": (
        lambda: causal().prepare(32, 32, k_index=np.arange(32)),
        OptionError,
        "prepared for keys of its own. Describe the whole problem",
    ),
    "illegal bounds": (lambda: Spans(np.full((1, 1, 32, 1, 2), 40), 32), OptionError, "ascending, disjoint"),
    "illegal data": (lambda: segments(np.tile([0, 1], 16)), OptionError, "Raise max_runs or mend the data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mask_of_the_whole_problem(name: str) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        plain(make())


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses", "auto"])
def test_rows_that_break_a_promise_are_named_even_in_a_mask_that_was_not_checked(strategy: str) -> None:
    unchecked = segments(np.tile([0, 1], 16)).spans(32, 32)
    with pytest.raises(OptionError, match="batch 0, head 0, row 0"):
        make_plan(lower(unchecked, 32, 32, 1, 4), Request(4, CALL, strategy))


@pytest.mark.parametrize("strategy", [None, 3, "zigzag", "hybrid(3, 2)"])
def test_no_strategy(strategy: Any) -> None:
    with pytest.raises(OptionError, match="u \\* r = 4 ranks"):
        make_plan(causal().prepare(32, 32), Request(4, CALL, strategy))


def test_a_strategy_for_other_ranks() -> None:
    with pytest.raises(OptionError, match="expected one for 4 ranks, got ring for 2"):
        make_plan(causal().prepare(32, 32), Request(4, CALL, Strategy("ring", 1, 2)))


@pytest.mark.parametrize("strategy", ["exchange", "auto"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"method": "zag"}, "got 'zag'"), ({"rows_per_chunk": 0}, "expected at least 1 row, got 0")],
    ids=["method", "rows_per_chunk"],
)
def test_no_partition(strategy: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_plan(causal().prepare(32, 32), Request(4, CALL, strategy, **changes))


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses", "hybrid(2, 2)", "auto"])
def test_keys_of_their_own_are_dealt_in_order_to_the_strategys_groups(strategy: str) -> None:
    plan, _ = make_plan(full().prepare(32, 13), Request(4, CALL, strategy, self_attention=False))
    members, groups = plan.strategy.members, plan.strategy.groups
    assert plan.keys.rows.shape == (4, plan.keys.rows_per_rank)
    flat = plan.keys.rows.reshape(-1)
    assert flat[flat >= 0].tolist() == list(range(13))
    assert (plan.keys.groups, plan.keys.members) == (groups, members)
    each = -(-13 // groups)
    for group in range(groups):
        rows = plan.keys.group_rows(group)
        assert rows[rows >= 0].tolist() == list(range(group * each, min(13, (group + 1) * each)))


def test_keys_of_self_attention_lie_like_the_rows() -> None:
    plan, _ = make_plan(causal().prepare(32, 32), Request(4, CALL, "exchange"))
    assert plan.keys is plan.rows


def test_auto_says_what_it_chose_and_a_given_strategy_was_not_chosen() -> None:
    mask = causal().prepare(32, 32)
    plan, choice = make_plan(mask, Request(4, CALL))
    assert choice is not None
    assert plan.strategy == choice.best.strategy
    assert plan.rows is choice.best.partition
    assert make_plan(mask, Request(4, CALL, plan.strategy))[1] is None


def test_on_two_levels_auto_lets_only_the_ranks_of_a_node_share_out_heads() -> None:
    _, choice = make_plan(causal().prepare(64, 64), Request(8, CALL, node_size=4))
    assert choice is not None
    assert {found.strategy.name for found in choice.considered} == {"hybrid(4, 2)", "hybrid(4, 2, ring)"}
    assert choice.machine.node_size == 4


def test_the_cost_is_that_of_the_plan() -> None:
    request = Request(4, CALL, machine=Machine())
    plan, choice = make_plan((causal() & segments(IDS[0])).prepare(32, 32), request)
    assert choice is not None
    found = cost(plan, request)
    assert found.pairs.tolist() == choice.best.pairs.tolist()
    assert found.received == choice.best.received
    assert found.prediction.seconds == choice.best.prediction.seconds


@pytest.mark.parametrize("strategy", ["exchange", "hybrid(2, 2)", "auto"])
def test_the_same_question_has_the_same_answer(strategy: str) -> None:
    request = Request(4, CALL, strategy)
    mask = (causal() & segments(IDS[0])).prepare(32, 32)
    first, second = (make_plan(mask, request)[0] for _ in range(2))
    assert first.digest == second.digest
    assert first.rows.rows.tolist() == second.rows.rows.tolist()
