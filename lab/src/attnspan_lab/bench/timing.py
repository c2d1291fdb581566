"""The benchmark's timer. Peers take turns in balanced order, for a fixed number of rounds.

A sample is the time per call over a few consecutive calls. Asynchronous calls give two samples: with
synchronization after each call (`execute`), and with one synchronization at the end (`pipelined`).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from attnspan.errors import OptionError, expect
from attnspan_lab.bench.cells import Run, Timing
from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.statistics import Interval, paired

__all__ = [
    "LEAST_ROUNDS",
    "Budget",
    "MeasurementError",
    "Meter",
    "Subject",
    "first_call",
    "host_times",
    "interleave",
    "orders",
]

#: With fewer pairs, an interval does not reach 95 % or spans all samples.
LEAST_ROUNDS = 9


class MeasurementError(OptionError):
    """A time that would be misleading."""


@dataclass(frozen=True)
class Subject:
    """A call that can be timed.

    Args:
        name: Name for tables.
        call: Does the work once and returns its result.
        device: Device of the call.
        around: Makes a context manager around each sample, outside of the timed region.
    """

    name: str
    call: Callable[[], Any]
    device: Device
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Budget:
    """Budget of the sampling. The number of samples does not depend on the measured differences.

    Args:
        seconds: Time for each subject. Slow subjects get fewer rounds, but at least 9.
        rounds: Number of samples of each subject.
        width: A ratio is noisy if its interval is wider than this fraction of the ratio.
        sample_seconds: Minimum length of a sample. Short calls are repeated within a sample.
        calls: Minimum number of calls in a sample. A single call cannot show the gain of pipelining.

    Raises:
        OptionError: A limit is not positive, or there are fewer than 9 rounds.
    """

    seconds: float = 2.0
    rounds: int = 25
    width: float = 0.04
    sample_seconds: float = 0.005
    calls: int = 1

    def __post_init__(self) -> None:
        limits = (self.seconds, self.width, self.sample_seconds, self.calls)
        wanted = "positive finite limits"
        expect(all(0 < x < math.inf for x in limits), "budget", wanted, repr(self), "Pass other ones")
        expect(self.rounds >= LEAST_ROUNDS, "rounds", "{} or more", self.rounds, "Take more", LEAST_ROUNDS)


@dataclass(frozen=True)
class Meter:
    """The clocks. Tests pass their own.

    Args:
        clock: Wall time, in seconds.
        cpu_clock: Processor time of all threads of this process, in seconds.
        threads: Number of threads that a call may use.
    """

    clock: Callable[[], float] = time.perf_counter
    cpu_clock: Callable[[], float] = time.process_time
    threads: int = 1


def first_call(subject: Subject, meter: Meter) -> tuple[Any, float]:
    """Make the first call, which compiles, packs and allocates. Return its result and its seconds."""
    with subject.around():
        start = meter.clock()
        result = subject.call()
        subject.device.synchronize(result)
        stop = meter.clock()
    _require_idle(subject, result)
    return result, stop - start


def orders(count: int, rounds: int, seed: int = 0) -> Iterator[tuple[int, ...]]:
    """Choose the order of the subjects: A B B A for two, a random order and its reverse for more.

    Over two rounds, each subject precedes each other subject once, so drift and after-effects cancel.

    Example:
        >>> list(orders(2, 4))
        [(0, 1), (1, 0), (0, 1), (1, 0)]
    """
    draw, order = random.Random(seed), list(range(count))
    for index in range(rounds):
        if index % 2 == 0 and count > 2:
            draw.shuffle(order)
        yield tuple(order if index % 2 == 0 else reversed(order))


def interleave(
    subjects: Sequence[Subject],
    budget: Budget,
    meter: Meter | None = None,
    *,
    basis: str = "execute",
    evict: Callable[[], object] | None = None,
) -> tuple[Run, ...]:
    """Time subjects in turn. Each round has one sample of every subject.

    Args:
        subjects: One or more warm subjects (see `first_call`). Ratios compare the others with the first.
        budget: Budget of samples.
        meter: The clocks.
        basis: Times for the ratios: "execute", or "pipelined" for subjects with such times.
        evict: Empties the caches before each sample. A sample is then one call.

    Returns:
        The times, in the order of the subjects, with the subject's name as the peer. Samples with the same
        index are pairs.

    Raises:
        MeasurementError: A timed region ended before its work was done.

    Example:
        >>> calls = [Subject(str(n), lambda n=n: sum(range(n)), Device()) for n in (1000, 4000)]
        >>> short, long = interleave(calls, Budget(seconds=0.2))
        >>> long.ratio.median > 1, long.ratio.pairs >= 9
        (True, True)
    """
    meter = meter or Meter()
    tracks = [_Track(subject, meter, evict) for subject in subjects]
    start = meter.clock()
    expected = sum(track.calibrate(budget) for track in tracks)
    left = budget.seconds * len(tracks) - (meter.clock() - start)
    affordable = int(left / expected) if expected else budget.rounds
    for order in orders(len(tracks), max(LEAST_ROUNDS, min(budget.rounds, affordable))):
        for index in order:
            tracks[index].sample()
    first = tracks[0].basis(basis)
    found = [tracks[0].measured(None, Interval.of(first).width > budget.width if len(tracks) == 1 else False)]
    for track in tracks[1:]:
        ratio = paired(first, track.basis(basis))
        found.append(track.measured(ratio, ratio.width > budget.width))
    return tuple(found)


def host_times(calls: Mapping[str, Callable[[], object]], budget: Budget) -> dict[str, tuple[float, ...]]:
    """Time synchronous calls in turn, and return their seconds. Samples with the same index are pairs.

    Example:
        >>> calls = {"short": lambda: sum(range(9)), "long": lambda: sum(range(9999))}
        >>> times = host_times(calls, Budget(0.1))
        >>> min(times["long"]) > min(times["short"])
        True
    """
    for call in calls.values():
        call()
    subjects = [Subject(name, call, Device()) for name, call in calls.items()]
    found = interleave(subjects, budget)
    return {run.peer: run.execute.samples for run in found if run.execute is not None}


@dataclass
class _Track:
    """Collected samples of one subject."""

    subject: Subject
    meter: Meter
    evict: Callable[[], object] | None
    calls: int = 1
    execute: list[float] = field(default_factory=list)
    pipelined: list[float] = field(default_factory=list)
    dispatch: list[float] = field(default_factory=list)
    wall: float = 0.0
    busy: float = 0.0

    def calibrate(self, budget: Budget) -> float:
        """Choose the number of calls per sample, and return the time of a sample, including eviction."""
        self.calls = 1 if self.evict else budget.calls
        while True:
            start = self.meter.clock()
            self.sample()
            took = self.meter.clock() - start
            seconds = self.execute[-1] * self.calls
            if self.evict or seconds >= budget.sample_seconds or self.calls >= 1 << 20:
                break
            # The clock may read zero. The growth is bounded because the first calls are slow.
            wanted = budget.sample_seconds / max(seconds / self.calls, 1e-9)
            self.calls = max(self.calls + 1, min(int(wanted * 1.1) + 1, self.calls * 16))
        self.execute, self.pipelined, self.dispatch, self.wall, self.busy = [], [], [], 0.0, 0.0
        return took

    def sample(self) -> None:
        """Take one sample of each kind."""
        meter = self.meter
        with self.subject.around():
            if self.evict:
                self.evict()
            begin, begin_cpu = meter.clock(), meter.cpu_clock()
            self._execute()
            if self.subject.device.is_asynchronous and not self.evict:
                self._pipeline()
            self.busy += meter.cpu_clock() - begin_cpu
            self.wall += meter.clock() - begin

    def _execute(self) -> None:
        call, device, clock = self.subject.call, self.subject.device, self.meter.clock
        result = None
        if not device.is_asynchronous:
            start = clock()
            for _ in range(self.calls):
                result = call()
            stop = clock()
            self.execute.append((stop - start) / self.calls)
        else:
            total = returned = 0.0
            for _ in range(self.calls):
                start = clock()
                result = call()
                middle = clock()
                device.synchronize(result)
                stop = clock()
                returned += middle - start
                total += stop - start
            self.execute.append(total / self.calls)
            self.dispatch.append(returned / self.calls)
        _require_idle(self.subject, result)

    def _pipeline(self) -> None:
        call, device, clock = self.subject.call, self.subject.device, self.meter.clock
        timer = device.timer()
        kept: list[Any] = []
        start = clock()
        if timer:
            timer.start()
        for _ in range(self.calls):
            result = call()
            # On an ordered device, results may be freed immediately: their memory is reused, as in a model.
            kept = [result] if device.is_ordered else [*kept, result]
        if timer:
            timer.stop()
        device.synchronize(kept)
        stop = clock()
        _require_idle(self.subject, kept)
        self.pipelined.append((timer.seconds() if timer else stop - start) / self.calls)

    def basis(self, name: str) -> list[float]:
        return self.pipelined if name == "pipelined" and self.pipelined else self.execute

    def measured(self, ratio: Interval | None, noisy: bool) -> Run:
        def timing(samples: list[float]) -> Timing | None:
            return Timing(tuple(samples), self.calls) if samples else None

        # The processor's utilisation tells nothing about another device.
        on_cpu = self.wall and self.subject.device.name == "cpu"
        return Run(
            self.subject.name,
            execute=timing(self.execute),
            pipelined=timing(self.pipelined),
            dispatch=timing(self.dispatch),
            utilisation=self.busy / self.wall / self.meter.threads if on_cpu else None,
            ratio=ratio,
            noisy=noisy,
        )


def _require_idle(subject: Subject, result: Any) -> None:
    if not subject.device.is_idle(result):
        raise MeasurementError(
            f"time of {subject.name}",
            expected="a call whose work is done when the clock stops",
            got="work that continues",
            remedy="Time the call on its own device, and wait for the result inside the timed region",
        )
