"""Times are taken in balanced order, over rounds fixed before; intervals hold what they promise."""

import math
from itertools import combinations

import numpy as np
import pytest
from fake_devices import VirtualDevice, World

from attnspan.errors import OptionError
from attnspan_lab.bench.cells import Timing
from attnspan_lab.bench.devices import Device, JaxDevice, cache_evictor
from attnspan_lab.bench.statistics import Interval, discoveries, order_level, paired, quotient, sign_test
from attnspan_lab.bench.timing import (
    Budget,
    MeasurementError,
    Subject,
    first_call,
    interleave,
    orders,
)


def _measure(world, subjects, evict=None, **budget):
    limits = Budget(**({"sample_seconds": 1e-9, "seconds": 1e9} | budget))
    return interleave(subjects, limits, world.meter(), evict=evict)


def test_two_take_turns_a_b_b_a_and_several_in_random_balanced_order():
    world = World()
    _measure(world, [world.subject(name, [0.1]) for name in "ab"], rounds=12)
    assert "".join(world.calls)[2:] == "abba" * 6  # The first call of each finds how many fill a sample.
    found = list(orders(4, 20))
    assert len(set(found)) > 8, "the order varies"
    for a, b in combinations(range(4), 2):
        assert sum(order.index(a) < order.index(b) for order in found) == 10, "no one comes first more often"


def test_the_number_of_rounds_is_fixed_before_and_never_below_nine():
    world, rng = World(), np.random.default_rng(0)
    steady, wild = world.subject("a", [0.1]), world.subject("b", 0.1 * np.exp(rng.standard_normal(997)))
    for subjects in ([steady, steady], [steady, wild], [steady]):
        assert {len(x.execute.samples) for x in _measure(world, subjects, rounds=17)} == {17}
    lowered = _measure(world, [steady, steady], rounds=50, seconds=2.0)
    assert {len(x.execute.samples) for x in lowered} == {19}, "the trial samples count too"
    slow = [world.subject(name, [100.0]) for name in "ab"]
    assert {len(x.execute.samples) for x in _measure(world, slow, seconds=1.0)} == {9}
    for limits in (
        *({"rounds": 8}, {"seconds": 0}, {"width": -1}),
        *({"seconds": math.inf}, {"width": math.nan}, {"sample_seconds": math.nan}),
    ):
        with pytest.raises(
            OptionError, match=r"rounds: expected 9 or more|budget: expected positive finite limits"
        ):
            Budget(**limits)


def test_ratios_are_of_pairs_and_wide_intervals_are_noise():
    world, rng = World(), np.random.default_rng(0)
    ours, theirs = _measure(world, [world.subject("a", [0.1]), world.subject("b", [0.25])])
    assert (theirs.ratio.median, theirs.ratio.pairs, theirs.noisy) == (pytest.approx(2.5), 25, False)
    assert (ours.ratio, ours.execute.median) == (None, pytest.approx(0.1))
    wild = [world.subject(name, np.exp(0.8 * rng.standard_normal(997))) for name in "ab"]
    assert _measure(world, wild)[1].noisy
    assert [x.noisy for x in (*_measure(world, wild[:1]), *_measure(world, [world.subject("a", [1.0])]))] == [
        True,
        False,
    ]


def test_short_calls_are_repeated_within_a_sample_and_cores_counted():
    world = World()
    subjects = [world.subject("a", [1e-6], cores=2.0), world.subject("b", [1e-6], cores=0.5)]
    meter, budget = world.meter(threads=2), Budget(seconds=1e9, sample_seconds=1e-3)
    ours, theirs = interleave(subjects, budget, meter)
    assert ours.execute.calls >= 1000
    assert ours.execute.median == pytest.approx(1e-6)
    assert (ours.utilisation, theirs.utilisation) == (pytest.approx(1.0), pytest.approx(0.25))


def test_cold_samples_are_one_call_each_after_emptied_caches():
    world, turns = World(), []

    def evict():
        world.now += 7.0  # is no part of the sample
        turns.append(len(world.calls))

    device = VirtualDevice(world, work=0.5)
    found = _measure(
        world, [world.subject("a", [0.1]), device.subject("d")], evict, sample_seconds=10.0, calls=4
    )
    assert [x.execute.calls for x in found] == [1, 1]
    assert [x.execute.median for x in found] == [pytest.approx(0.1), pytest.approx(0.5)]
    assert found[1].pipelined is None, "a second call in a row would be warm"
    assert len(turns) == 2 * 25 + 2


def test_evicting_walks_more_than_the_last_cache(monkeypatch):
    seen = []
    monkeypatch.setattr("attnspan_lab.bench.devices.last_level_bytes", lambda: 1 << 16)
    monkeypatch.setattr(np, "add", lambda x, _one, out: seen.append((x is out, x.nbytes)))
    cache_evictor("cpu")()
    assert seen == [(True, 1 << 17)]


@pytest.mark.parametrize(("round_trip", "execute"), [(0.0, 0.004), (0.01, 0.014)])
def test_waiting_for_every_call_is_seen(round_trip, execute):
    world = World()
    subject = VirtualDevice(world, 0.004, round_trip).subject("a")
    (found,) = _measure(world, [subject], calls=10)
    assert found.execute.median == pytest.approx(execute)
    assert found.pipelined.median == pytest.approx(0.004 + round_trip / 10)
    assert found.dispatch.median == 0.0
    assert found.utilisation is None, "the processor's use says nothing of another device"


def test_never_waiting_is_refused():
    world = World()
    subject = VirtualDevice(world, 0.05, waits=False).subject("a")
    with pytest.raises(MeasurementError, match="expected a call whose work is done when the clock stops"):
        _measure(world, [subject])
    with pytest.raises(MeasurementError, match="got work that continues"):
        first_call(subject, world.meter())


def test_the_ratio_of_asynchronous_sides_is_of_pipelined_times_where_asked():
    world = World()
    subjects = [VirtualDevice(world, work, round_trip=0.01).subject(str(work)) for work in (0.001, 0.004)]
    for basis, ratio in (("pipelined", 5 / 2), ("execute", 14 / 11)):
        found = interleave(subjects, Budget(1e9, sample_seconds=1e-9, calls=10), world.meter(), basis=basis)
        assert found[1].ratio.median == pytest.approx(ratio)


def test_results_of_an_asynchronous_library_are_not_timed_as_the_hosts():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((8, 8))
    with pytest.raises(MeasurementError, match="Time the call on its own device"):
        interleave([Subject("jax", lambda: x @ x, Device())], Budget())
    (found,) = interleave([Subject("jax", lambda: x @ x, JaxDevice("cpu"))], Budget(seconds=0.05))
    assert found.pipelined is not None


def _pairs(rng, count, ratio, noise, drift=0.0):
    """Both sides share a drift of the machine; each has noise of its own."""
    machine = np.exp(drift * np.cumsum(rng.standard_normal(count)))
    ours = machine * np.exp(noise * rng.standard_normal(count))
    return ours, ratio * machine * np.exp(noise * rng.standard_normal(count))


def test_a_known_ratio_is_recovered_through_drift():
    ours, theirs = _pairs(np.random.default_rng(0), 60, ratio=1.37, noise=0.02, drift=0.2)
    assert max(ours) / min(ours) > 2, "the machine must drift far more than the interval is wide"
    found = paired(ours, theirs)
    assert found.low < 1.37 < found.high
    assert found.width < 0.05


@pytest.mark.parametrize("count", [3, 5, 9, 10, 25, 40])
def test_an_interval_has_the_level_that_it_states(count):
    rank, level = order_level(count)
    # The level by enumeration: the median lies outside if fewer than rank + 1 samples are on one side.
    outside = sum(math.comb(count, below) for below in range(rank + 1)) / 2**count
    assert level == pytest.approx(1 - 2 * outside)
    assert (level >= 0.95) == (count >= 6)
    assert rank == 0 or level >= 0.95
    rng = np.random.default_rng(count)
    found = [Interval.of(2.0 * np.exp(rng.exponential(size=count) - math.log(2))) for _ in range(2000)]
    covered = np.mean([each.low <= 2.0 <= each.high for each in found])
    assert covered == pytest.approx(level, abs=0.02), "also for a skewed distribution"


def test_the_quotient_of_two_runs_covers_the_truth():
    rng = np.random.default_rng(2)
    covered = 0
    for _ in range(300):
        old, new = (Interval.of(np.exp(0.1 * rng.standard_normal(25)) * scale) for scale in (1.0, 1.5))
        found = quotient(old, new)
        covered += found.low <= 1.5 <= found.high
        assert found.p < 0.05
    assert covered / 300 >= 0.92


def test_many_cells_without_a_difference_are_not_called_different():
    rng = np.random.default_rng(3)
    false = 0
    for _ in range(40):
        nothing = [sign_test(np.exp(0.05 * rng.standard_normal(9))) for _ in range(168)]
        false += any(discoveries(nothing))
    assert false <= 6, "uncorrected, hardly a table of 168 cells would be free of them"
    assert sign_test([1.0] * 13 + [1.1] * 12) == 1.0, "ties speak for a median of 1"
    real = [sign_test([1.1] * 25)] * 20
    assert discoveries([*real, *[0.5] * 148])[:20] == [True] * 20
    assert discoveries([]) == []


def test_figures_of_no_samples_and_of_unequal_sides_are_refused():
    with pytest.raises(OptionError, match="expected as many of theirs as of ours, 2, got 1"):
        paired([1.0, 2.0], [1.0])
    for empty in (lambda: Timing(()).median, lambda: Interval.of([])):
        with pytest.raises(OptionError, match="expected one or more, got none"):
            empty()
    calm, struck = Timing((1.0, 1.1, 0.9, 1.0, 1.05)), Timing((1.0, 1.1, 0.9, 1.0, 50.0))
    assert struck.median == calm.median
    assert struck.spread < 0.2
