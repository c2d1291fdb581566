"""Pairs, bytes and memory against a count rank by rank; predictions, machines, and what "auto" takes."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import any_plan, rows_of

from attnspan import causal, segments, window
from attnspan.parallel import Layout, Plan
from attnspan.parallel.auto import Prediction, candidates
from attnspan.parallel.cost import Cost, Sizes


def keys_between(plan: Plan) -> np.ndarray:
    """How many flat keys each group (axis 0) needs of those that each group (axis 1) holds."""
    u, groups = plan.strategy.members, plan.strategy.groups
    dense = np.asarray(plan.mask.lowered.dense()).any(1)
    found = np.zeros((groups, groups), int)
    for b, c, plane in product(range(groups), range(groups), range(plan.planes)):
        rows, keys = (rows_of(x, g, u)[plane % x.planes] for x, g in ((plan.layout, b), (plan.keys, c)))
        sees = dense[plane % len(dense)][rows[rows >= 0]].any(0)
        found[b, c] += sees[keys[keys >= 0]].sum()
    return found


@given(any_plan(), st.integers(1, 4))
def test_bytes_between_nodes_are_those_of_pairs_of_ranks(plan: Plan, times: int) -> None:
    """test_collectives.py counts what each rank sends and receives in all."""
    strategy, groups = plan.strategy, np.arange(plan.strategy.groups)
    members = strategy.members
    node_size = times * members if times < 4 else 1
    node = np.arange(strategy.ranks) // node_size
    cost, apart, between = plan.cost(node_size=node_size), plan.cost(node_size=1), keys_between(plan)
    for phases, alone in ((cost.forward, apart.forward), (cost.backward, apart.backward)):
        for name, phase in phases.items():
            assert alone[name].received_across.tolist() == phase.received.tolist(), name
            if name in ("scatter", "gather") and node_size % members == 0:
                assert not phase.received_across.any(), "groups are within nodes"
            if name not in ("exchange", "ring"):
                continue
            for rank in range(strategy.ranks):
                group, member = divmod(rank, members)
                away = node[groups * members + member] != node[rank]
                one_before = groups == (group - 1) % strategy.groups
                sent = between[group] * (groups != group) if name == "exchange" else one_before
                across = phase.received[rank] * sent[away].sum()
                assert phase.received_across[rank] * sent.sum() == across, name


def plan_of(mask: Any = None, q_len: int = 256, ranks: int = 4, **given: Any) -> Plan:
    mask = causal() if mask is None else mask
    return Layout.of(mask, q_len=q_len, ranks=ranks).plan(**{"heads": (8, 4), "head_dim": 16, **given})


@pytest.mark.parametrize("name", ["exchange", "ring", "ulysses", "hybrid(2, 2)", "hybrid(2, 2, ring)"])
def test_memory_grows_with_every_size(name: str) -> None:
    plan = plan_of(strategy=name, batch=2)
    first = plan.cost().memory
    assert (first > 0).all()
    for larger in ({"kv_heads": 8}, {"head_dim": 32}, {"v_dim": 256}, {"itemsize": 4}, {"batch": 4}):
        assert (replace(plan, sizes=plan.sizes._replace(**larger)).cost().memory > first).all(), larger
    assert (plan_of(strategy=name, batch=2, q_len=512).cost().memory > first).all()
    # Gradients of the group's keys with q, k, v, out, lse of its rows; two blocks with gradients, dq twice.
    exact = {"ulysses": 65_536 + 2 * (32_768 + 16_384) + 8192, "ring": 2 * 16_384 * (2 + 4) + 32_768 * 4}
    if name in exact:
        assert set(first.tolist()) == {exact[name]}
    # What nobody fetches needs no room: buffers of an exchange follow the mask.
    narrow = plan_of(causal() & window(4), strategy=name, batch=2).cost().memory
    assert (narrow < first).all() == (name in ("exchange", "hybrid(2, 2)"))


@given(any_plan(), st.floats(0, 1))
def test_auto_receives_the_fewest_bytes_of_what_fits(plan: Plan, share: float) -> None:
    strategies = candidates(plan.layout.ranks, plan.sizes.q_heads)
    costs = [plan.cost(x) for x in strategies]
    sizes = sorted(int(x.memory.max()) for x in costs)
    memory = sizes[round(share * (len(sizes) - 1))]
    given: dict[str, Any] = {"heads": plan.sizes.heads, "batch": plan.sizes.batch, "keys": plan.keys}
    best = plan.layout.plan(plan.mask, **given, memory=memory)
    fitting = [x for x in costs if x.memory.max() <= memory]
    assert best.cost().received().max() == min(x.received().max() for x in fitting)
    assert best.cost().memory.max() <= memory
    assert best.choice is not None
    assert best.choice.best.strategy == best.strategy
    assert {x.strategy for x in best.choice.considered} == set(strategies)


@pytest.mark.parametrize(
    ("ranks", "node_size", "heads", "members"),
    [(8, 4, (8, 4), 4), (8, 4, (2, 1), 2), (12, 8, (8, 4), 4), (8, 3, (8, 4), 1), (12, 6, (4, 4), 3)],
)
def test_in_nodes_only_their_ranks_share_heads(
    ranks: int, node_size: int, heads: tuple[int, int], members: int
) -> None:
    choice = plan_of(ranks=ranks, node_size=node_size, heads=heads).choice
    assert choice is not None
    assert {x.strategy.members for x in choice.considered} == {members}
    assert {x.strategy.kind for x in choice.considered} == {"exchange", "ring"}
    assert f"Only ranks of a node share heads: {members}." in str(choice)
    for cost in choice.considered:
        scatter = cost.forward.get("scatter")
        assert scatter is None or not scatter.received_across.any(), "heads do not leave a node"


class Slow:
    """Rates of a machine, as "auto" needs them."""

    node_size = 4

    def predict(self, cost: Cost, sizes: Sizes) -> Prediction:
        del sizes
        return Prediction(float(cost.received().max()), 0.0, 0.0, "exchange")

    def __str__(self) -> str:
        return "a slow machine"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["chosen by auto", "ulysses", "hybrid(2, 2)", "No rates were measured"]),
        (
            {"machine": Slow()},
            ["Shortest predicted time. Of times within 5 %", "Rates: a slow machine", "bound by"],
        ),
        ({"memory": 10**9}, ["Buffers may take 1000 MB"]),
        ({"strategy": "ring"}, ["ring on 4 ranks: 100 rows, 100 keys, 8/4 heads", "the strategy was given"]),
        ({"strategy": "exchange"}, ["% of a ring's 75", "no layout needs fewer than"]),
        ({"ranks": 20, "strategy": "ring"}, ["  ..."]),
    ],
)
def test_a_plan_explains_itself(options: dict[str, Any], words: list[str]) -> None:
    plan = plan_of(causal() & segments(np.arange(100) // 30), q_len=100, **options)
    text = plan.explain()
    assert all(word in text for word in words), text
    cost = plan.cost()
    lines = text.splitlines()[3:7]
    for rank, line in enumerate(lines):
        cells = line.split()
        assert cells[0] == str(rank)
        assert cells[1] == f"{cost.pairs[rank]:,.0f}"
        assert cells[3] == f"{cost.fetched[rank]:,}"
        assert cells[4] == f"{cost.received('forward')[rank] / 1e6:,.3f}"
    assert all(len(line) <= 120 for line in text.splitlines())
