"""The search finds what is faster, on a machine whose time is made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from attnspan.bench.timing import Meter
from attnspan.errors import OptionError
from attnspan.tune.search import Search, search

Config = Mapping[str, int]
DEFAULT = {"block": 0}


class Machine:
    """Calls that take as long as they are told to, times a little noise."""

    def __init__(self, costs: Mapping[int, float], noise: float = 0.02, drift: float = 0.0) -> None:
        self.costs, self.noise, self.drift = costs, noise, drift
        self.now, self.random = 0.0, random.Random(1)
        self.calls: list[int] = []

    def make_call(self, config: Config) -> Callable[[], int]:
        block = config["block"]
        if block < 0:
            raise ValueError(f"block {block} is negative")

        def call() -> int:
            self.calls.append(block)
            slower = 1 + self.drift * self.now
            self.now += self.costs[block] * slower * (1 + self.noise * self.random.random())
            return block

        return call

    def search(self, space: list[int], seconds: float = 10.0, **options: Any) -> Search:
        def clock() -> float:
            return self.now

        configs = [{"block": block} for block in space]
        meter = Meter(clock=clock, cpu_clock=clock)
        return search(self.make_call, configs, DEFAULT, seconds=seconds, meter=meter, **options)


def test_the_fastest_wins_among_many() -> None:
    costs = {block: 0.01 + abs(block - 37) * 2e-4 for block in range(60)}
    found = Machine(costs).search(list(range(60)))
    assert found.accepted
    assert abs(found.best["block"] - 37) <= 1, "the next best differs by as much as the noise"
    assert found.best == found.contender
    assert found.ratio is not None
    assert found.ratio.median == pytest.approx(costs[0] / costs[found.best["block"]], rel=0.03)
    assert found.tried == 59
    assert found.failures == ()
    assert found.default_times is not None
    assert found.contender_times is not None
    assert len(found.default_times.samples) == len(found.contender_times.samples) == found.ratio.pairs >= 5


@pytest.mark.parametrize("drift", [-0.05, 0.3])
def test_a_machine_that_changes_its_speed_changes_no_verdict(drift: float) -> None:
    costs = {0: 0.01, 1: 0.0101, 2: 0.0099, 3: 0.012}
    assert not Machine(costs, drift=drift).search([1, 2, 3]).accepted
    costs[2] = 0.008
    assert dict(Machine(costs, drift=drift).search([1, 2, 3]).best) == {"block": 2}


@pytest.mark.parametrize(
    ("cost", "noise", "reason"),
    [
        (0.0099, 0.001, "gains less than 3%: 1.01"),
        (0.0103, 0.001, "not faster beyond doubt: 0.97"),
        (0.0094, 3.0, "not faster beyond doubt"),
        (0.0015, 3.0, "too noisy"),
        (0.03, 0.001, "every candidate failed or was much slower"),
    ],
)
def test_the_default_stays_without_a_clear_gain(cost: float, noise: float, reason: str) -> None:
    found = Machine({0: 0.01, 1: cost}, noise=noise).search([1], seconds=1.0)
    assert not found.accepted
    assert found.best == DEFAULT
    assert found.reason.startswith(reason), found.reason


def test_a_much_slower_candidate_is_dropped_at_once() -> None:
    machine = Machine({0: 0.01, 1: 0.009, 2: 0.1, 3: 0.2})
    assert dict(machine.search([1, 2, 3]).best) == {"block": 1}
    assert machine.calls.count(2) == machine.calls.count(3) == 2, "the first call, and one sample"


def test_what_fails_is_kept_and_the_rest_goes_on() -> None:
    class Fragile(Machine):
        def make_call(self, config: Config) -> Callable[[], int]:
            call = super().make_call(config)
            if config["block"] == 2:
                return lambda: 1 // 0
            if config["block"] == 3:
                return lambda: call() if self.calls.count(3) < 5 else [][0]
            return call

    machine = Fragile({0: 0.01, 1: 0.008, 3: 0.006})
    found = machine.search([-5, 1, 2, 3])
    assert dict(found.best) == {"block": 1}
    assert found.tried == 4
    assert {config["block"]: error for config, error in found.failures} == {
        -5: "ValueError: block -5 is negative",
        2: "ZeroDivisionError: integer division or modulo by zero",
        3: "IndexError: list index out of range",
    }


def test_a_wrong_result_is_a_failure_however_fast() -> None:
    def check(result: int) -> str | None:
        return "it is odd" if result % 2 else None

    found = Machine({0: 0.01, 1: 0.001, 2: 0.008}).search([1, 2], check=check)
    assert dict(found.best) == {"block": 2}
    assert found.failures == (({"block": 1}, "it is odd"),)
    with pytest.raises(OptionError, match="check: expected to pass the default's result, got it is 0"):
        Machine({0: 0.01}).search([], check="it is {}".format)


def test_what_the_default_raises_is_raised() -> None:
    with pytest.raises(KeyError):
        Machine({1: 0.01}).search([1])


def test_an_interrupt_is_no_failure() -> None:
    def make_call(config: Config) -> Callable[[], None]:
        def call() -> None:
            if config["block"]:
                raise KeyboardInterrupt

        return call

    with pytest.raises(KeyboardInterrupt):
        search(make_call, [{"block": 1}], DEFAULT, seconds=1.0)


@pytest.mark.parametrize("seconds", [0.01, 0.3, 3.0])
def test_the_time_is_kept(seconds: float) -> None:
    machine = Machine(dict.fromkeys(range(200), 0.01))
    found = machine.search(list(range(200)), seconds=seconds)
    few_calls = 16 * 0.0102
    assert machine.now < seconds + few_calls
    if seconds < 1:
        assert found.tried < 199
    else:
        assert machine.now > 0.3 * seconds


def test_short_calls_are_repeated_within_a_sample() -> None:
    machine = Machine({0: 1e-6, 1: 0.8e-6}, noise=0.3)
    found = machine.search([1], seconds=0.5)
    assert found.accepted
    assert found.default_times is not None
    assert found.default_times.calls > 1000
    assert found.default_times.median == pytest.approx(1.15e-6, rel=0.02)


def test_the_same_seed_takes_the_same_way() -> None:
    costs = {block: 0.01 + (block * 7 % 11) * 1e-4 for block in range(30)}

    def way(seed: int) -> list[int]:
        machine = Machine(costs)
        machine.search(list(range(30)), seconds=2.0, seed=seed)
        return machine.calls

    assert way(3) == way(3)
    assert way(3) != way(4)


def test_with_little_time_each_seed_takes_other_candidates() -> None:
    def tried(seed: int) -> set[int]:
        machine = Machine(dict.fromkeys(range(200), 0.01))
        machine.search(list(range(200)), seconds=0.5, seed=seed)
        return set(machine.calls)

    assert tried(3) == tried(3)
    assert len(tried(3) & tried(4)) < len(tried(3)) / 2


class Queue:
    """A device that returns at once and works later, on the time of a machine."""

    name, is_asynchronous, is_ordered = "queue", True, True

    def __init__(self, machine: Machine) -> None:
        self.machine, self.busy_until = machine, 0.0

    def make_call(self, config: Config) -> Callable[[], None]:
        def call() -> None:
            self.machine.now += 1e-4
            cost = self.machine.costs[config["block"]]
            self.busy_until = max(self.busy_until, self.machine.now) + cost

        return call

    def synchronize(self, _result: Any) -> None:
        self.machine.now = max(self.machine.now, self.busy_until)

    def is_idle(self, _result: Any) -> bool:
        return self.machine.now >= self.busy_until

    def timer(self) -> None:
        return None


def test_an_asynchronous_device_is_waited_for() -> None:
    machine = Machine({0: 0.01, 1: 0.012, 2: 0.007})
    queue = Queue(machine)
    meter = Meter(clock=lambda: machine.now, cpu_clock=lambda: machine.now)
    space = [{"block": block} for block in (1, 2)]
    found = search(queue.make_call, space, DEFAULT, seconds=5.0, device=queue, meter=meter)
    assert dict(found.best) == {"block": 2}
    assert found.default_times is not None
    assert found.default_times.median == pytest.approx(0.01, rel=0.03)
