"""The search finds what is faster, on a simulated machine."""

from __future__ import annotations

import random

import pytest
from fake_devices import VirtualDevice, World

from attnspan_lab.tune.search import Found, search


class Machine(World):
    """Calls that take as long as they are told to, times a little noise. A configuration is a block size."""

    def __init__(self, costs, noise=0.02, drift=0.0):
        super().__init__()
        self.costs, self.noise, self.drift, self.random = costs, noise, drift, random.Random(1)

    def make_call(self, block):
        if block < 0:
            raise ValueError(f"block {block} is negative")

        def call():
            self.calls.append(block)
            slower = 1 + self.drift * self.now
            self.now += self.costs[block] * slower * (1 + self.noise * self.random.random())
            return block

        return call

    def search(self, blocks, seconds=10.0, make_call=None, **options):
        return search(make_call or self.make_call, blocks, 0, seconds=seconds, meter=self.meter(), **options)


def test_the_fastest_of_many_wins_with_its_samples():
    costs = {block: 0.01 + abs(block - 37) * 2e-4 for block in range(60)}
    found = Machine(costs).search(list(range(60)))
    assert abs(found.config - 37) <= 1, "the next best differs by as much as the noise"
    assert (found.contender, found.reason, found.tried, found.failures) == (found.config, "faster", 59, ())
    assert found.ratio.median == pytest.approx(costs[0] / costs[found.config], rel=0.03)
    assert len(found.default_seconds) == len(found.contender_seconds) == found.ratio.pairs >= 5
    assert min(found.default_seconds) > max(found.contender_seconds)


@pytest.mark.parametrize("drift", [-0.05, 0.3])
def test_a_drifting_machine_changes_no_verdict(drift):
    for fastest, wanted in ((0.0099, 0), (0.008, 2)):
        costs = {0: 0.01, 1: 0.0101, 2: fastest, 3: 0.012}
        assert Machine(costs, drift=drift).search([1, 2, 3]).config == wanted


@pytest.mark.parametrize(
    ("cost", "noise", "seconds"), [(0.0099, 0.001, 1.0), (0.0103, 0.001, 1.0), (0.0094, 3.0, 1.0)]
)
def test_the_default_stays_without_a_certain_gain(cost, noise, seconds):
    found = Machine({0: 0.01, 1: cost}, noise=noise).search([1], seconds)
    assert (found.config, found.contender) == (0, 1)
    assert found.reason.startswith("no significant gain of 3% in "), found.reason


def test_failures_and_wrong_results_are_kept_and_the_rest_goes_on():
    class Fragile(Machine):
        def make_call(self, block):
            call = super().make_call(block)
            if block == 2:
                return lambda: 1 // 0
            if block == 3:
                return lambda: call() if self.calls.count(3) < 5 else [][0]
            return call

    def check(result):
        assert result != 4, "it is wrong"

    found = Fragile({0: 0.01, 1: 0.008, 3: 0.006, 4: 0.001}).search([-5, 1, 2, 3, 4], check=check)
    assert (found.config, found.tried) == (1, 5)
    failures = dict(found.failures)
    assert failures.pop(4).startswith("AssertionError: it is wrong"), "however fast"
    assert failures == {
        -5: "ValueError: block -5 is negative",
        2: "ZeroDivisionError: integer division or modulo by zero",
        3: "IndexError: list index out of range",
    }
    assert Machine({0: 0.01}).search([0]) == Found(0, "no candidate works", 0, ())
    failed = Machine({0: 0.01}).search([-1])
    assert (failed.reason, failed.tried, len(failed.failures)) == ("no candidate works", 1, 1)


def test_what_the_default_raises_and_an_interrupt_are_raised():
    def refuse(result):
        raise ValueError("wrong")

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyError):
        Machine({1: 0.01}).search([1])
    with pytest.raises(ValueError, match="wrong"):
        Machine({0: 0.01}).search([], check=refuse)
    machine = Machine({0: 0.01})
    with pytest.raises(KeyboardInterrupt):
        machine.search([1], make_call=lambda block: interrupted if block else machine.make_call(0))


@pytest.mark.parametrize("seconds", [0.01, 0.3, 3.0])
def test_the_time_is_kept(seconds):
    machine = Machine(dict.fromkeys(range(200), 0.01))
    found = machine.search(list(range(200)), seconds)
    few_calls = 16 * 0.0102
    assert machine.now < seconds + few_calls
    assert found.tried < 199 if seconds < 1 else machine.now > 0.3 * seconds


def test_short_calls_are_repeated_within_a_sample():
    machine = Machine({0: 1e-6, 1: 0.8e-6}, noise=0.3)
    found = machine.search([1], seconds=0.5)
    assert found.config == 1
    assert len(machine.calls) > 1000 * len(found.default_seconds)
    assert sorted(found.default_seconds)[len(found.default_seconds) // 2] == pytest.approx(1.15e-6, rel=0.02)


@pytest.mark.parametrize("fast", [1, 2, 3])
def test_an_asynchronous_device_is_waited_for(fast):
    machine = Machine({0: 0.01, 1: 0.012, 2: 0.012, 3: 0.012} | {fast: 0.007})
    queue = VirtualDevice(machine)
    calls = {block: lambda cost=cost: queue.submit(cost) for block, cost in machine.costs.items()}
    found = machine.search([1, 2, 3], 5.0, calls.get, device=queue)
    assert found.config == fast
    assert found.default_seconds[0] == pytest.approx(0.01, rel=0.03)
