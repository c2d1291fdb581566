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
from attnspan_lab.bench.timing import Budget, MeasurementError, Subject, first_call, interleave, orders


def _measure(world, subjects, threads=1, evict=None, basis="execute", **budget):
    limits = Budget(**({"sample_seconds": 1e-9, "seconds": 1e9} | budget))
    return interleave(subjects, limits, world.meter(threads), evict=evict, basis=basis)


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
    slow = [world.subject(name, [100.0]) for name in "ab"]
    for subjects, wanted, budget in (
        *((subjects, 17, {"rounds": 17}) for subjects in ([steady, steady], [steady, wild], [steady])),
        ([steady, steady], 19, {"rounds": 50, "seconds": 2.0}),  # the trial samples count too
        (slow, 9, {"seconds": 1.0}),
    ):
        assert {len(x.execute.samples) for x in _measure(world, subjects, **budget)} == {wanted}
    with pytest.raises(OptionError, match="rounds: expected 9 or more"):
        Budget(rounds=8)


def test_ratios_are_of_pairs_and_wide_intervals_are_noise():
    world, rng = World(), np.random.default_rng(0)
    ours, theirs = _measure(world, [world.subject("a", [0.1]), world.subject("b", [0.25])])
    assert (theirs.ratio.median, theirs.ratio.pairs, theirs.noisy) == (pytest.approx(2.5), 25, False)
    assert (ours.ratio, ours.execute.median) == (None, pytest.approx(0.1))
    wild = [world.subject(name, np.exp(0.8 * rng.standard_normal(997))) for name in "ab"]
    found = [_measure(world, x)[-1].noisy for x in (wild, wild[:1], [world.subject("a", [1.0])])]
    assert found == [True, True, False]


def test_short_calls_are_repeated_within_a_sample_and_cores_counted():
    world = World()
    subjects = [world.subject("a", [1e-6], cores=2.0), world.subject("b", [1e-6], cores=0.5)]
    ours, theirs = _measure(world, subjects, threads=2, sample_seconds=1e-3)
    assert ours.execute.calls >= 1000
    assert ours.execute.median == pytest.approx(1e-6)
    assert (ours.utilisation, theirs.utilisation) == (pytest.approx(1.0), pytest.approx(0.25))


def test_cold_samples_are_one_call_each_after_emptied_caches(monkeypatch):
    world, turns, seen = World(), [], []

    def evict():
        world.now += 7.0  # is no part of the sample
        turns.append(len(world.calls))

    subjects = [world.subject("a", [0.1]), VirtualDevice(world, work=0.5).subject("d")]
    found = _measure(world, subjects, evict=evict, sample_seconds=10.0, calls=4)
    times = [(x.execute.calls, x.execute.median) for x in found]
    assert times == [(1, pytest.approx(0.1)), (1, pytest.approx(0.5))]
    assert found[1].pipelined is None, "a second call in a row would be warm"
    assert len(turns) == 2 * 25 + 2
    monkeypatch.setattr("attnspan_lab.bench.devices.last_level_bytes", lambda: 1 << 16)
    monkeypatch.setattr(np, "add", lambda x, _one, out: seen.append((x is out, x.nbytes)))
    cache_evictor("cpu")()
    assert seen == [(True, 1 << 17)], "more than the last cache"


@pytest.mark.parametrize(("round_trip", "execute"), [(0.0, 0.004), (0.01, 0.014)])
def test_waiting_for_every_call_is_seen(round_trip, execute):
    world = World()
    (found,) = _measure(world, [VirtualDevice(world, 0.004, round_trip).subject("a")], calls=10)
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
        assert _measure(world, subjects, calls=10, basis=basis)[1].ratio.median == pytest.approx(ratio)


def test_results_of_an_asynchronous_library_are_not_timed_as_the_hosts():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((8, 8))
    with pytest.raises(MeasurementError, match="Time the call on its own device"):
        interleave([Subject("jax", lambda: x @ x, Device())], Budget())
    (found,) = interleave([Subject("jax", lambda: x @ x, JaxDevice("cpu"))], Budget(seconds=0.05))
    assert found.pipelined is not None


def test_a_known_ratio_is_recovered_through_drift():
    rng = np.random.default_rng(0)
    machine = np.exp(0.2 * np.cumsum(rng.standard_normal(60)))
    ours, theirs = (scale * machine * np.exp(0.02 * rng.standard_normal(60)) for scale in (1.0, 1.37))
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
    found = [Interval.of(2.0 * np.exp(rng.exponential(size=count) - math.log(2))) for _ in range(1000)]
    covered = np.mean([each.low <= 2.0 <= each.high for each in found])
    assert covered == pytest.approx(level, abs=0.04), "also for a skewed distribution"


def test_the_quotient_of_two_runs_covers_the_truth():
    rng = np.random.default_rng(2)
    samples = np.exp(0.1 * rng.standard_normal((300, 2, 25))) * [[1.0], [1.5]]
    found = [quotient(Interval.of(old), Interval.of(new)) for old, new in samples]
    assert all(each.p < 0.05 for each in found)
    assert np.mean([each.low <= 1.5 <= each.high for each in found]) >= 0.92


def test_many_cells_without_a_difference_are_not_called_different():
    rng = np.random.default_rng(3)
    tables = np.exp(0.05 * rng.standard_normal((40, 168, 9)))
    false = sum(any(discoveries([sign_test(cell) for cell in table])) for table in tables)
    assert false <= 6, "uncorrected, hardly a table of 168 cells would be free of them"
    assert sign_test([1.0] * 13 + [1.1] * 12) == 1.0, "ties speak for a median of 1"
    assert discoveries([*[sign_test([1.1] * 25)] * 20, *[0.5] * 148])[:20] == [True] * 20
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
