"""Measured rates of a machine: predictions by hand, files, and what ranks measure."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from attnspan import causal, segments
from attnspan.errors import OptionError
from attnspan.parallel import Layout, Strategy
from attnspan.parallel.auto import candidates
from attnspan.parallel.cost import Cost, Phase, Sizes
from attnspan_lab.machine import Machine, flops_of

# The worlds of processes that tests over several ranks share.
sys.path.append(str(Path(__file__).parents[1] / "parallel"))
from worlds import world


def plan_of(mask, **given):
    return Layout.of(mask, q_len=256, ranks=4).plan(heads=(8, 4), head_dim=16, **given)


PLAIN = Machine("plain", "bfloat16", 1e12, 5e11, 1e9, 1e8, 1e-6, 2)


@pytest.mark.slow
def test_with_rates_the_shortest_time_is_taken_and_of_equals_the_fewest_bytes():
    mask = causal() & segments(np.repeat(np.arange(4), [80, 70, 60, 46]))
    fast = replace(PLAIN, bandwidth_within=1e15, bandwidth_across=1e15, latency=1e-15)
    slow = replace(PLAIN, forward_flops=1e18, backward_flops=1e18, bandwidth_across=1e3)
    busy = replace(PLAIN, forward_flops=1.5e10, backward_flops=1.284e10, latency=3.92e-6)
    busy = replace(busy, bandwidth_within=1.24e10, bandwidth_across=1.277e10)
    sizes = sorted(int(plan_of(mask).cost(x).memory.max()) for x in candidates(4, 8))
    for machine, memory in product((PLAIN, fast, slow, busy), (None, *sizes)):
        plan = plan_of(mask, machine=machine, memory=memory)
        costs = [plan.cost(x, machine.node_size) for x in candidates(4, 8)]
        costs = [x for x in costs if memory is None or x.memory.max() <= memory]
        seconds = [machine.predict(x, plan.sizes).seconds for x in costs]
        alike = [x for x, time in zip(costs, seconds, strict=True) if time <= 1.05 * min(seconds)]
        bytes_of = {x.strategy: x.received().max() for x in alike}
        assert plan.strategy in bytes_of
        assert bytes_of[plan.strategy] == min(bytes_of.values())
        if machine is fast and memory is None:
            assert len(alike) > 1, "the rule had something to decide"


def test_the_machine_of_the_environment_is_found(tmp_path, monkeypatch):
    assert "No rates were measured" in str(plan_of(causal()).choice)
    path = tmp_path / "machine.json"
    PLAIN.save(path)
    monkeypatch.setenv("ATTNSPAN_MACHINE", str(path))
    assert Machine.default() == Machine.load(path) == PLAIN
    said = str(plan_of(causal(), machine=Machine.default()).choice)
    assert "Rates: plain (bfloat16, 1 and 0.5 TFLOP/s; 1 and 0.1 GB/s in nodes of 2" in said
    assert [each.name for each in tmp_path.iterdir()] == ["machine.json"], "no draft is left"


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "not JSON", None),
        *({"more": 1}, {"node_size": "8"}, {"node_size": 2.5}, {"name": 3}, {"forward_flops": -1.0}),
        *({"latency": x} for x in (0.0, math.inf, math.nan, "1", None)),
    ],
)
def test_a_file_that_is_no_machine_is_refused(text, tmp_path):
    path = tmp_path / "machine.json"
    PLAIN.save(path)
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"forward_flops": 1000}))
    assert Machine.load(str(path)).forward_flops == 1000.0
    path.write_text(text if isinstance(text, str) else json.dumps(good | (text or {})))
    with pytest.raises(OptionError, match="expected"):
        Machine.load(path if text is not None else tmp_path / "none.json")


def by_hand(forward, kind="exchange", parts=2, pairs=1.0):
    """The cost of one rank with these phases forward: bytes received and sent, also from and to nodes."""
    of = {name: Phase(*(np.array([x]) for x in values)) for name, values in forward.items()}
    zero = np.zeros(1, np.int64)
    return Cost(Strategy(kind, 1, parts), np.array([pairs]), zero, 0, of, {}, zero, parts)


def one_by_one(compute, network, parts, first_is_there):
    """Parts one after the other on a link and on a processor, which works on what has come."""
    arrived = now = 0.0
    for part in range(parts):
        if part or not first_is_there:
            arrived += network / (parts - first_is_there)
        now = max(now, arrived) + compute / parts
    return now


@pytest.mark.parametrize("kind", ["exchange", "ring"])
@pytest.mark.parametrize("parts", [2, 4, 64])
@pytest.mark.parametrize(("compute", "network"), [(8.0, 4.0), (4.0, 8.0), (5.0, 5.0), (3.0, 0.0)])
def test_overlap_is_that_of_parts_one_after_the_other(kind, parts, compute, network):
    machine = replace(PLAIN, forward_flops=1.0, backward_flops=1e30, bandwidth_within=1e3, latency=1e-30)
    pairs = compute / flops_of(np.ones(1), head_dim=1, v_dim=1)[0][0]
    received = {kind: 1000 * network, "scatter": 1000, "gather": 500}
    phases = {name: (size, 0, 0, 0) for name, size in received.items()}
    found = machine.predict(by_hand(phases, kind, parts, pairs), Sizes(1, 1, 1, 1))
    # Scatter and gather, 1.5 s, do not overlap.
    assert found.seconds == pytest.approx(one_by_one(compute, network, parts, kind == "ring") + 1.5)
    assert found.compute_seconds == pytest.approx(compute)
    assert found.network_seconds == pytest.approx(network + 1.5)
    assert compute == network or found.bound == ("compute" if compute > network else "exchange")


@pytest.mark.parametrize(
    ("values", "seconds"),
    [((3000, 9000, 1000, 200), 1e-5), ((3000, 90_000, 1000, 200), 8.98e-5), ((3000, 9000, 1000, 4000), 4e-5)],
)
def test_links_work_at_once_and_each_is_as_slow_as_its_busier_direction(values, seconds):
    """Bytes received and sent, and those of them from and to other nodes, at 1 GB/s and 0.1 GB/s."""
    found = PLAIN.predict(by_hand({"exchange": values}), Sizes(1, 1)).network_seconds
    assert found == pytest.approx(seconds + 2 * 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("node_size", [None, 1])
def test_ranks_measure_the_same_figures(node_size):
    first, second = world(2).run(lambda: Machine.calibrate(node_size=node_size, head_dim=32, seconds=0.1))
    assert first == second
    assert (first.node_size, first.dtype) == (node_size or 2, "float32")
    assert all(words in first.name for words in ("2 ranks", "gloo"))
    assert first.bandwidth_across == first.bandwidth_within, "one of the levels has no links"
    # Loose, but wrong units would miss it: the slowest processor, the fastest memory.
    assert 1e8 < first.forward_flops < 1e13
    assert 1e6 < first.bandwidth_within < 1e12
    assert 1e-7 < first.latency < 1e-1


def test_without_other_ranks_nothing_is_measured():
    with pytest.raises(OptionError, match="expected a process group of two ranks or more, got none"):
        Machine.calibrate()
