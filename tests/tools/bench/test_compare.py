"""Regressions are found, noise and slow machines are not mistaken for them."""

from dataclasses import replace

import numpy as np
import pytest
from attnspan.tools.bench.samples import Ratio, Timing

from attnspan.tools.bench.cells import Cell, Run, Workload
from attnspan.tools.bench.compare import compare
from attnspan.tools.bench.results import Results

WORK = Workload("w", "own", 1, 1, 1, 8, 8, 8, 8, "float32", "causal")


def _samples(scale, noise=0.01, seed=0, count=40):
    return tuple(scale * np.exp(noise * np.random.default_rng(seed).standard_normal(count)))


def _results(ours, peer=None, noise=0.01, seed=0, name="w", environment=None):
    mine = _samples(ours, noise, seed)
    runs = [Run("attnspan", execute=Timing(mine))]
    if peer is not None:
        theirs = _samples(peer, noise, seed + 100)
        runs.append(Run("sdpa-flash", execute=Timing(theirs), ratio=Ratio.of(mine, theirs)))
    cell = Cell(replace(WORK, name=name), "forward", 36, 1.0, 1.0, tuple(runs))
    return Results(environment=environment or {"cpu": "c"}, cells=(cell,))


def _verdict(old, new):
    (change,) = compare(old, new).changes
    return change.verdict


def test_slower_is_a_regression_and_faster_is_none():
    assert _verdict(_results(1.0), _results(1.1, seed=1)) == "slower"
    assert compare(_results(1.0), _results(1.1, seed=1)).has_regressed
    assert _verdict(_results(1.0), _results(0.9, seed=1)) == "faster"
    assert not compare(_results(1.0), _results(0.9, seed=1)).has_regressed


def test_noise_is_no_regression():
    for seed in range(1, 6):
        assert _verdict(_results(1.0, noise=0.1), _results(1.02, noise=0.1, seed=seed)) == "same"


def test_a_change_within_the_tolerance_is_none():
    assert _verdict(_results(1.0, noise=1e-4), _results(1.01, noise=1e-4, seed=1)) == "same"


def test_a_slower_machine_is_not_blamed_on_us():
    assert _verdict(_results(1.0, 2.0), _results(1.3, 2.6, seed=1)) == "slower, as the peer: the machine"
    assert not compare(_results(1.0, 2.0), _results(1.3, 2.6, seed=1)).has_regressed


def test_a_slower_kernel_is_found_beside_a_steady_peer():
    assert _verdict(_results(1.0, 2.0), _results(1.3, 2.0, seed=1)) == "slower"


def test_a_faster_machine_does_not_hide_a_slower_kernel():
    assert _verdict(_results(1.0, 2.0), _results(1.0, 1.5, seed=1)) == "slower"
    assert _verdict(_results(1.0, 2.0), _results(0.9, 1.0, seed=1)) == "slower"


def test_a_faster_machine_is_not_our_merit():
    assert _verdict(_results(1.0, 2.0), _results(0.8, 1.6, seed=1)) == "faster, as the peer: the machine"


def test_a_workload_that_no_longer_runs_is_a_regression():
    new = _results(1.0)
    refused = Run("attnspan", reason="no back end")
    new = replace(new, cells=(replace(new.cells[0], runs=(refused,)),))
    (change,) = compare(_results(1.0), new).changes
    assert change.verdict == "gone"
    assert change.note == "it ran; now: no back end"
    assert compare(_results(1.0), new).has_regressed
    assert not compare(new, _results(1.0)).has_regressed


def test_cells_that_came_and_went_are_named():
    comparison = compare(_results(1.0, name="a"), _results(1.0, name="b"))
    assert comparison.appeared == ("b float32 forward",)
    assert comparison.disappeared == ("a float32 forward",)
    assert comparison.changes == ()


def test_one_name_with_other_sizes_is_another_cell():
    old, new = _results(1.0), _results(5.0)
    grown = replace(new.cells[0], workload=replace(WORK, k_len=16))
    comparison = compare(old, replace(new, cells=(grown,)))
    assert not comparison.changes
    assert len(comparison.appeared) == len(comparison.disappeared) == 1


def test_another_machine_is_noted():
    new = _results(1.0, environment={"cpu": "d"})
    assert compare(_results(1.0), new).machine == ("cpu: c, then d",)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_the_interval_holds_the_true_change(scale):
    (change,) = compare(_results(1.0, noise=0.05), _results(scale, noise=0.05, seed=1)).changes
    assert change.time.low < scale < change.time.high
