"""Times are taken in turn, until the noise is small or the budget spent, and mean what they say."""

import numpy as np
import pytest
from fake_devices import SleepingDevice, VirtualDevice, World

from attnspan.errors import OptionError
from attnspan.tools.bench.devices import HostDevice, JaxDevice
from attnspan.tools.bench.timing import Budget, MeasurementError, Meter, Subject, first_call, interleave


def _measure(world, subjects, **budget):
    return interleave(subjects, Budget(**({"sample_seconds": 1e-9} | budget)), world.meter())


def test_samples_are_taken_in_turn_with_every_peer():
    world = World()
    subjects = [world.subject(name, [0.1]) for name in "abc"]
    _measure(world, subjects, least=4)
    turns = "".join(world.calls)[3:]  # The first call of each finds how many fill a sample.
    assert turns == "abac" * 4


def test_a_steady_ratio_is_found_and_ends_at_once():
    world = World()
    ours, theirs = _measure(world, [world.subject("a", [0.1]), world.subject("b", [0.25])], seconds=100)
    assert theirs.ratio.median == pytest.approx(2.5)
    assert theirs.ratio.pairs == 5
    assert not theirs.noisy
    assert ours.ratio is None
    assert ours.execute.median == pytest.approx(0.1)


def test_noise_is_sampled_until_the_interval_is_narrow():
    world, rng = World(), np.random.default_rng(0)
    subjects = [world.subject(name, np.exp(0.05 * rng.standard_normal(997))) for name in "ab"]
    _, theirs = _measure(world, subjects, seconds=1000, width=0.06, most=400)
    assert 5 < theirs.ratio.pairs < 400
    assert theirs.ratio.width <= 0.06
    assert not theirs.noisy


def test_a_machine_that_stays_noisy_is_called_so():
    world, rng = World(), np.random.default_rng(0)
    subjects = [world.subject(name, np.exp(0.8 * rng.standard_normal(997))) for name in "ab"]
    _, theirs = _measure(world, subjects, seconds=20)
    assert theirs.noisy
    assert theirs.ratio.width > 0.04
    assert world.now < 40, "the budget ends it"


def test_a_noisy_subject_alone_is_called_so_and_a_steady_one_is_not():
    world, rng = World(), np.random.default_rng(0)
    (noisy,) = _measure(world, [world.subject("a", np.exp(rng.standard_normal(997)))], seconds=20)
    (steady,) = _measure(world, [world.subject("a", [0.1])], seconds=20)
    assert (noisy.noisy, steady.noisy) == (True, False)


def test_short_calls_are_repeated_within_a_sample():
    world = World()
    (found,) = _measure(world, [world.subject("a", [1e-6])], sample_seconds=1e-3)
    assert found.execute.calls >= 1000
    assert found.execute.median == pytest.approx(1e-6)


def test_three_samples_do_for_calls_longer_than_the_budget():
    world = World()
    _, theirs = _measure(world, [world.subject("a", [1.0]), world.subject("b", [9.0])], seconds=2)
    assert theirs.ratio.pairs == 3


def test_a_pair_that_is_done_drops_out():
    world, rng = World(), np.random.default_rng(0)
    names = [world.subject("a", [0.01]), world.subject("steady", [0.01])]
    subjects = [*names, world.subject("wild", 0.01 * np.exp(rng.standard_normal(997)))]
    _, steady, wild = _measure(world, subjects, seconds=2)
    assert steady.ratio.pairs == 5 < wild.ratio.pairs


def test_cores_in_use_and_energy_are_of_the_subjects_own_samples():
    world = World()
    subjects = [world.subject("a", [0.1], cores=2.0), world.subject("b", [0.1], cores=0.5)]
    meter = world.meter(joules=lambda: world.busy * 10, threads=2)
    ours, theirs = interleave(subjects, Budget(sample_seconds=1e-9), meter)
    assert (ours.utilisation, theirs.utilisation) == (pytest.approx(1.0), pytest.approx(0.25))
    assert (ours.energy_joules, theirs.energy_joules) == (pytest.approx(2.0), pytest.approx(0.5))


def test_a_machine_without_a_counter_shows_no_energy():
    world = World()
    (found,) = _measure(world, [world.subject("a", [0.1])])
    assert found.energy_joules is None


def test_waiting_for_every_call_is_seen():
    device = SleepingDevice(work=0.001, round_trip=0.02)
    subject = Subject("a", device.submit, device)
    (found,) = interleave([subject], Budget(seconds=0.5, sample_seconds=0.1), basis="pipelined")
    assert found.pipelined is not None
    assert found.dispatch is not None
    assert found.execute.median > 2.5 * found.pipelined.median
    assert found.dispatch.median < 0.5 * found.pipelined.median


def test_where_waiting_is_free_both_ways_of_timing_agree():
    world = World()
    (found,) = _measure(world, [VirtualDevice(world, work=0.004).subject("a")], sample_seconds=0.02)
    assert found.pipelined is not None
    assert found.execute.median == pytest.approx(found.pipelined.median) == pytest.approx(0.004)
    assert found.utilisation is None, "the processor's use says nothing of another device"


def test_never_waiting_is_refused():
    device = SleepingDevice(work=0.05, waits=False)
    with pytest.raises(MeasurementError, match="expected its work to be done when the clock stops"):
        interleave([Subject("a", device.submit, device)], Budget())
    with pytest.raises(MeasurementError, match="got work that goes on"):
        first_call(Subject("a", device.submit, device), Meter())


def test_the_ratio_of_asynchronous_sides_is_of_pipelined_times_where_asked():
    world = World()
    subjects = [VirtualDevice(world, work, round_trip=0.01).subject(str(work)) for work in (0.001, 0.004)]
    budget = Budget(sample_seconds=0.1)
    _, pipelined = interleave(subjects, budget, world.meter(), basis="pipelined")
    _, execute = interleave(subjects, budget, world.meter(), basis="execute")
    assert pipelined.ratio.median > 2.2
    assert execute.ratio.median == pytest.approx(14 / 11)


def test_results_of_an_asynchronous_library_are_not_timed_as_the_hosts():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((8, 8))
    with pytest.raises(MeasurementError, match="Time it on its own device"):
        interleave([Subject("jax", lambda: x @ x, HostDevice())], Budget())
    (found,) = interleave([Subject("jax", lambda: x @ x, JaxDevice("cpu"))], Budget(seconds=0.05))
    assert found.pipelined is not None


def test_a_budget_that_cannot_be_kept_is_refused():
    with pytest.raises(OptionError, match="expected positive limits with least <= most"):
        Budget(least=10, most=5)
