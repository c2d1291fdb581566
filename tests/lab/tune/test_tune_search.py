"""The search finds what is faster, on a simulated machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from attnspan_lab.bench.timing import Meter
from attnspan_lab.tune.search import Found, search


class Machine:
    """Calls that take as long as they are told to, times a little noise. A configuration is a block size."""

    def __init__(self, costs: Mapping[int, float], noise: float = 0.02, drift: float = 0.0) -> None:
        self.costs, self.noise, self.drift = costs, noise, drift
        self.now, self.random = 0.0, random.Random(1)
        self.calls: list[int] = []

    def make_call(self, block: int) -> Callable[[], int]:
        if block < 0:
            raise ValueError(f"block {block} is negative")

        def call() -> int:
            self.calls.append(block)
            slower = 1 + self.drift * self.now
            self.now += self.costs[block] * slower * (1 + self.noise * self.random.random())
            return block

        return call

    def search(self, blocks: list[int], seconds: float = 10.0, **options: Any) -> Found[int]:
        def clock() -> float:
            return self.now

        meter = Meter(clock=clock, cpu_clock=clock)
        return search(self.make_call, blocks, 0, seconds=seconds, meter=meter, **options)


def test_the_fastest_of_many_wins_with_its_samples() -> None:
    costs = {block: 0.01 + abs(block - 37) * 2e-4 for block in range(60)}
    found = Machine(costs).search(list(range(60)))
    assert abs(found.config - 37) <= 1, "the next best differs by as much as the noise"
    assert (found.contender, found.reason, found.tried, found.failures) == (found.config, "faster", 59, ())
    assert found.ratio is not None
    assert found.ratio.median == pytest.approx(costs[0] / costs[found.config], rel=0.03)
    assert len(found.default_seconds) == len(found.contender_seconds) == found.ratio.pairs >= 5
    assert min(found.default_seconds) > max(found.contender_seconds)


@pytest.mark.parametrize("drift", [-0.05, 0.3])
def test_a_drifting_machine_changes_no_verdict(drift: float) -> None:
    costs = {0: 0.01, 1: 0.0101, 2: 0.0099, 3: 0.012}
    assert Machine(costs, drift=drift).search([1, 2, 3]).config == 0
    costs[2] = 0.008
    assert Machine(costs, drift=drift).search([1, 2, 3]).config == 2


@pytest.mark.parametrize(
    ("cost", "noise", "seconds"),
    [(0.0099, 0.001, 1.0), (0.0103, 0.001, 1.0), (0.0094, 3.0, 1.0)],
)
def test_the_default_stays_without_a_certain_gain(cost: float, noise: float, seconds: float) -> None:
    found = Machine({0: 0.01, 1: cost}, noise=noise).search([1], seconds)
    assert (found.config, found.contender) == (0, 1)
    assert found.reason.startswith("no significant gain of 3% in "), found.reason


def test_without_candidates_the_default_stays() -> None:
    assert Machine({0: 0.01}).search([0]) == Found(0, "no candidate works", 0, ())
    failure = (-1, "ValueError: block -1 is negative")
    assert Machine({0: 0.01}).search([-1]) == Found(0, "no candidate works", 1, (failure,))


def test_failures_are_kept_and_the_rest_goes_on() -> None:
    class Fragile(Machine):
        def make_call(self, block: int) -> Callable[[], int]:
            call = super().make_call(block)
            if block == 2:
                return lambda: 1 // 0
            if block == 3:
                return lambda: call() if self.calls.count(3) < 5 else [][0]
            return call

    found = Fragile({0: 0.01, 1: 0.008, 3: 0.006}).search([-5, 1, 2, 3])
    assert (found.config, found.tried) == (1, 4)
    assert dict(found.failures) == {
        -5: "ValueError: block -5 is negative",
        2: "ZeroDivisionError: integer division or modulo by zero",
        3: "IndexError: list index out of range",
    }


def test_a_wrong_result_is_a_failure_however_fast() -> None:
    def check(result: int) -> None:
        assert result % 2 == 0, "it is odd"

    found = Machine({0: 0.01, 1: 0.001, 2: 0.008}).search([1, 2], check=check)
    assert found.config == 2
    assert dict(found.failures)[1].startswith("AssertionError: it is odd")


def test_what_the_default_raises_is_raised() -> None:
    def refuse(_: int) -> None:
        raise ValueError("wrong")

    with pytest.raises(KeyError):
        Machine({1: 0.01}).search([1])
    with pytest.raises(ValueError, match="wrong"):
        Machine({0: 0.01}).search([], check=refuse)


def test_an_interrupt_is_no_failure() -> None:
    def make_call(block: int) -> Callable[[], None]:
        def call() -> None:
            if block:
                raise KeyboardInterrupt

        return call

    with pytest.raises(KeyboardInterrupt):
        search(make_call, [1], 0, seconds=1.0)


@pytest.mark.parametrize("seconds", [0.01, 0.3, 3.0])
def test_the_time_is_kept(seconds: float) -> None:
    machine = Machine(dict.fromkeys(range(200), 0.01))
    found = machine.search(list(range(200)), seconds)
    few_calls = 16 * 0.0102
    assert machine.now < seconds + few_calls
    if seconds < 1:
        assert found.tried < 199
    else:
        assert machine.now > 0.3 * seconds


def test_short_calls_are_repeated_within_a_sample() -> None:
    machine = Machine({0: 1e-6, 1: 0.8e-6}, noise=0.3)
    found = machine.search([1], seconds=0.5)
    assert found.config == 1
    assert len(machine.calls) > 1000 * len(found.default_seconds)
    assert sorted(found.default_seconds)[len(found.default_seconds) // 2] == pytest.approx(1.15e-6, rel=0.02)


class Queue:
    """A device that returns at once and works later, on the time of a machine."""

    name, is_asynchronous, is_ordered = "queue", True, True

    def __init__(self, machine: Machine) -> None:
        self.machine, self.busy_until = machine, 0.0

    def make_call(self, block: int) -> Callable[[], None]:
        def call() -> None:
            self.machine.now += 1e-4
            self.busy_until = max(self.busy_until, self.machine.now) + self.machine.costs[block]

        return call

    def synchronize(self, _result: Any) -> None:
        self.machine.now = max(self.machine.now, self.busy_until)

    def is_idle(self, _result: Any) -> bool:
        return self.machine.now >= self.busy_until

    def timer(self) -> None:
        return None


@pytest.mark.parametrize("fast", [1, 2, 3])
def test_an_asynchronous_device_is_waited_for(fast: int) -> None:
    machine = Machine({0: 0.01, 1: 0.012, 2: 0.012, 3: 0.012} | {fast: 0.007})
    queue = Queue(machine)
    meter = Meter(clock=lambda: machine.now, cpu_clock=lambda: machine.now)
    found = search(queue.make_call, [1, 2, 3], 0, seconds=5.0, device=queue, meter=meter)
    assert found.config == fast
    assert found.default_seconds[0] == pytest.approx(0.01, rel=0.03)
