"""Predicted times, machines on disk and measured, and what the choice falls on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from attnspan.parallel._engine import parts_of
from attnspan.parallel.choose import (
    ALIKE,
    Call,
    Candidate,
    candidates,
    choose,
    evaluate,
    exchange_parts,
    holders_of,
)
from attnspan.parallel.traffic import Phase, Traffic
from worlds import world

from attnspan import Spans, causal, full, segments
from attnspan.errors import OptionError, ShapeError
from attnspan.parallel.chunks import Chunks
from attnspan.parallel.machine import Machine, Times, flops_of, phase_seconds, predict
from attnspan.parallel.needs import Holders
from attnspan.parallel.partition import partition
from attnspan.parallel.strategy import Strategy, split_heads

PLAIN = Machine(
    name="plain",
    forward_flops=1e12,
    backward_flops=5e11,
    bandwidth_within=1e9,
    bandwidth_across=1e8,
    latency_within=1e-6,
    latency_across=1e-5,
    node_size=2,
    notes=(),
)


def phase(**fields: int) -> Phase:
    zeros = Phase.zeros(1)
    return replace(zeros, **{name: np.array([value]) for name, value in fields.items()})


def simulated_overlap(compute: float, network: float, parts: int, at_hand: bool) -> float:
    """Parts one after the other on a link and on a processor, which works on what has come."""
    arrived = now = 0.0
    travelling = parts - 1 if at_hand else parts
    for part in range(parts):
        if part or not at_hand:
            arrived += network / travelling
        now = max(now, arrived) + compute / parts
    return now


@pytest.mark.parametrize("at_hand", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4, 64])
@pytest.mark.parametrize(("compute", "network"), [(8.0, 4.0), (4.0, 8.0), (5.0, 5.0), (3.0, 0.0)])
def test_overlap_is_that_of_parts_one_after_the_other(
    compute: float, network: float, parts: int, at_hand: bool
) -> None:
    if at_hand and parts == 1:
        network = 0.0  # the only part is there
    times = Times.of(np.array([compute]), np.array([network]), np.zeros(1), parts=parts, at_hand=at_hand)
    assert times.total[0] == pytest.approx(simulated_overlap(compute, network, parts, at_hand))


def test_links_work_side_by_side_and_each_is_as_slow_as_its_busier_direction() -> None:
    some = phase(
        received=3000, sent=9000, received_across=1000, sent_across=200, messages=5, messages_across=2
    )
    latency = 3 * 1e-6 + 2 * 1e-5
    assert phase_seconds(PLAIN, some) == pytest.approx(max(8800 / 1e9, 1000 / 1e8) + latency)
    assert phase_seconds(PLAIN, replace(some, sent_across=np.array([4000]))) == pytest.approx(4e-5 + latency)


def test_a_prediction_exposes_scatter_and_gather_and_hides_the_rest() -> None:
    second = phase(received=10**9)
    traffic = Traffic(
        1,
        2,
        {"scatter": second, "exchange": second, "gather": second},
        {"scatter": second, "ring": second, "gradients": second, "gather": second},
    )
    found = predict(PLAIN, traffic, np.array([4e12]), np.array([4e12]), parts=2)
    assert found.forward.compute.tolist() == [4.0]
    assert found.forward.network.tolist() == [1.0]
    assert found.forward.exposed.tolist() == [2.0]
    assert found.forward.total.tolist() == [6.5]
    assert found.backward.network.tolist() == [2.0]
    assert found.backward.total.tolist() == [11.0]
    assert found.seconds == 17.5
    assert found.bound == "compute"
    assert predict(PLAIN, traffic, np.zeros(1), np.zeros(1)).bound == "scatter and gather"


def test_nodes_of_traffic_and_machine_must_agree() -> None:
    with pytest.raises(ShapeError, match="expected nodes of 2 ranks, as the machine has, got 8"):
        predict(PLAIN, Traffic(1, 8), np.zeros(1), np.zeros(1))


def test_flops_count_two_products_forward_and_five_backward() -> None:
    forward, backward = flops_of(np.array([10.0]), head_dim=3, v_dim=5)
    assert forward.tolist() == [10 * 2 * (3 + 5)]
    assert backward.tolist() == [10 * 2 * (3 + 5 + 5 + 3 + 3)]


def test_pairs_of_a_rank_are_those_of_its_rows_and_heads() -> None:
    ids = np.array([[0] * 12 + [1] * 20, [0] * 25 + [1] * 7])
    spans = (causal() & segments(ids)).spans(32, 32, batch=2)
    part = partition(spans, 6, members=3, rows_per_chunk=4, method="zigzag")
    call = Call(q_heads=4, kv_heads=2, head_dim=8, v_dim=8, batch=2)
    found = evaluate(call, Chunks.of(spans, 4), part, Strategy("exchange", 3, 2), Machine())
    cost = spans.cost().sum((0, 1))
    for rank in range(6):
        rows = part.group_rows(rank // 3)
        assert found.pairs[rank] == cost[rows[rows >= 0]].sum() * [2, 1, 1][rank % 3]
    assert found.pairs.sum() == cost.sum() * 4
    assert found.balance == pytest.approx(found.pairs.max() / found.pairs.mean())


def test_a_mask_shared_by_the_batch_costs_once_for_each_of_its_rows() -> None:
    spans = causal().spans(16, 16)
    part = partition(spans, 2, rows_per_chunk=4, method="zigzag")
    call = Call(q_heads=2, kv_heads=1, batch=3)
    found = evaluate(call, Chunks.of(spans, 4), part, Strategy("exchange", 1, 2), Machine())
    assert found.pairs.sum() == 16 * 17 / 2 * 2 * 3


def test_heads_of_a_mask_that_differ_cost_their_mean() -> None:
    both = np.concatenate([causal().spans(16, 16).bounds, full().spans(16, 16).bounds], 1)
    strategy = Strategy("exchange", 1, 2)
    found = choose(Spans(both, 16), 2, Call(q_heads=2, kv_heads=1), Machine(), strategies=[strategy]).best
    assert found.pairs.sum() == 16 * 17 / 2 + 16 * 16


def test_a_partition_of_other_chunks_is_refused() -> None:
    spans = causal().spans(16, 16)
    chunks, part = Chunks.of(spans, 4), partition(spans, 2, rows_per_chunk=8)
    with pytest.raises(ShapeError, match="expected 16 rows in chunks of 4, 1 members in each of 2 groups"):
        evaluate(Call(2, 1), chunks, part, Strategy("exchange", 1, 2), Machine())
    part = partition(spans, 2, rows_per_chunk=4)
    with pytest.raises(ShapeError, match="got 16, 4, 1, 2"):
        evaluate(Call(2, 1), chunks, part, Strategy("exchange", 2, 1), Machine())


def test_holders_of_a_partition_are_those_of_its_chunks() -> None:
    spans = causal().spans(33, 33)
    part = partition(spans, 3, rows_per_chunk=4)
    mine, theirs = holders_of(part, 2), Holders.of(Chunks.of(spans, 4), part.owner, 3)
    assert mine.hi.max() == 66
    key_owner = np.repeat(mine.group, mine.hi - mine.lo)
    assert (key_owner[:33] == np.repeat(theirs.group, theirs.hi - theirs.lo)).all()
    assert (key_owner[33:] == key_owner[:33]).all()


def names(found: list[Strategy]) -> list[str]:
    return [each.name for each in found]


def test_every_member_of_a_candidate_has_a_query_head() -> None:
    assert names(candidates(6, 2)) == ["exchange", "ring", "hybrid(2, 3)", "hybrid(2, 3, ring)"]
    assert "ulysses" in names(candidates(6, 8))
    assert names(candidates(1, 4)) == ["ulysses"]  # one rank, one group: nothing travels


def chosen(spans: Spans, ranks: int, machine: Machine, heads: int = 32) -> str:
    return choose(spans, ranks, Call(heads, 8), machine).best.strategy.name


def test_documents_that_stay_at_home_are_exchanged() -> None:
    mask = causal() & segments(np.repeat(np.arange(32), 64))
    assert chosen(mask.spans(2048, 2048), 4, Machine()) == "exchange"


def test_a_slow_network_across_nodes_keeps_heads_within_a_node() -> None:
    slow = replace(PLAIN, forward_flops=1e18, backward_flops=1e18, bandwidth_across=1e6)
    assert chosen(full().spans(256, 256), 4, slow) in ("hybrid(2, 2)", "hybrid(2, 2, ring)")


def test_many_heads_on_a_fast_network_are_shared_out() -> None:
    fast = replace(PLAIN, forward_flops=1e18, backward_flops=1e18, node_size=8, latency_within=1e-12)
    assert chosen(full().spans(2048, 2048), 8, fast, heads=64) == "ulysses"


def test_the_choice_says_what_was_considered_and_whose_figures_were_used() -> None:
    choice = choose(causal().spans(64, 64), 4, Call(4, 2), PLAIN)
    text = str(choice)
    for each in candidates(4, 4):
        assert f"\n{each.name} " in text
    seconds = [each.prediction.seconds for each in choice.considered]
    assert seconds == sorted(seconds)
    assert choice.best is choice.considered[0]
    assert "predicted with plain (bfloat16: 1 TFLOP/s forward" in text
    assert choice.reason.startswith(f"{choice.best.strategy.name}: ")
    alone = choose(causal().spans(64, 64), 4, Call(4, 2), PLAIN, strategies=[Strategy("ring", 1, 4)])
    assert "nothing else was possible" in alone.reason
    with pytest.raises(OptionError, match="expected at least one, got none"):
        choose(causal().spans(64, 64), 4, Call(4, 2), PLAIN, strategies=[])


def test_keys_of_their_own_are_held_by_whom_the_caller_says() -> None:
    spans = full().spans(8, 32)

    def held(strategy: Strategy) -> Candidate:
        keys = partition(full(), 4, q_len=32, members=strategy.members, rows_per_chunk=8, method="contiguous")
        found = choose(spans, 4, Call(4, 2, 8, 8), PLAIN, strategies=[strategy], keys=lambda _: keys)
        return found.best

    # Each group sees all 32 keys and holds 8 of them: 24 rows of two heads of 16 elements of 2 bytes.
    assert held(Strategy("exchange", 1, 4)).traffic.received("forward").tolist() == [24 * 2 * 16 * 2] * 4


def test_an_exchange_has_as_many_parts_as_the_engine_makes() -> None:
    for q_heads, kv_heads, members in [(8, 8, 1), (8, 2, 1), (12, 3, 2), (32, 8, 4), (2, 1, 2), (3, 3, 2)]:
        heads = split_heads(q_heads, kv_heads, members)
        assert exchange_parts(heads) == parts_of(SimpleNamespace(heads=heads))


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_figures_are_positive_and_finite(value: float) -> None:
    with pytest.raises(OptionError, match="latency_within: expected a positive, finite figure"):
        Machine(latency_within=value)


def test_a_machine_comes_back_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    PLAIN.save(path)
    assert Machine.load(path) == PLAIN
    monkeypatch.setenv("ATTNSPAN_MACHINE", str(path))
    assert Machine.default() == PLAIN
    monkeypatch.delenv("ATTNSPAN_MACHINE")
    assert Machine.default() == Machine()
    assert [each.name for each in tmp_path.iterdir()] == ["machine.json"], "no draft is left"


def test_a_file_that_is_no_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    PLAIN.save(path)
    good = json.loads(path.read_text())
    bad = [
        "[]",
        "not JSON",
        json.dumps(good | {"schema": 2}),
        json.dumps(good | {"more": 1}),
        json.dumps(good | {"node_size": "8"}),
        json.dumps(good | {"name": 3}),
        json.dumps(good | {"notes": 3}),
        json.dumps(good | {"forward_flops": -1.0}),
    ]
    for text in bad:
        path.write_text(text)
        with pytest.raises(OptionError, match="expected"):
            Machine.load(path)
    path.write_text(json.dumps(good | {"forward_flops": 1000}))
    assert Machine.load(path).forward_flops == 1000.0
    with pytest.raises(OptionError, match="expected a place that can be written"):
        PLAIN.save(tmp_path / "missing" / "machine.json")


def test_ranks_measure_the_same_figures() -> None:
    found = world(2).run("machine_jobs:measure", None)
    assert found[0] == found[1]
    assert found[0].node_size == 2
    assert "2 ranks" in found[0].name
    assert "gloo" in found[0].name
    assert found[0].dtype == "float32"
    assert found[0].notes == ("across nodes as within: the group lies in one node",)
    assert found[0].bandwidth_across == found[0].bandwidth_within
    # Loose, but wrong units would miss it: the slowest processor, the fastest memory.
    assert 1e8 < found[0].forward_flops < 1e13
    assert 1e6 < found[0].bandwidth_within < 1e12
    assert 1e-7 < found[0].latency_within < 1e-1


def test_nodes_of_one_rank_have_links_across_only() -> None:
    found = world(2).run("machine_jobs:measure", 1)[0]
    assert found.node_size == 1
    assert found.notes == ("within a node as across: nodes have one rank",)


def test_without_other_ranks_nothing_is_measured() -> None:
    with pytest.raises(OptionError, match="expected a process group of two ranks or more, got none"):
        Machine.calibrate()


def test_of_strategies_as_fast_as_each_other_the_one_of_fewest_bytes_is_chosen() -> None:
    # Bound by compute: a ring, whose first keys are at hand, is predicted a little faster than an exchange.
    fast = {
        "bandwidth_within": 1e12,
        "bandwidth_across": 1e12,
        "latency_within": 1e-12,
        "latency_across": 1e-12,
    }
    machine = replace(PLAIN, **fast)
    spans = (causal() & segments(np.repeat(np.arange(4), [80, 70, 60, 46]))).spans(256, 256)
    both = [Strategy("ring", 1, 4), Strategy("exchange", 1, 4)]
    choice = choose(spans, 4, Call(4, 2), machine, strategies=both)
    ring, exchange = (next(x for x in choice.considered if x.strategy == each) for each in both)
    assert ring.prediction.seconds < exchange.prediction.seconds < ALIKE * ring.prediction.seconds
    assert choice.best is exchange is choice.considered[0]
    assert "as fast as ring" in choice.reason
    assert "with fewer bytes" in choice.reason
    slow = replace(PLAIN, bandwidth_within=1e3, bandwidth_across=1e3)
    assert choose(spans, 4, Call(4, 2), slow, strategies=both).reason.startswith("exchange: ")
