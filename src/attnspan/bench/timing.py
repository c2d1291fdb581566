"""Times taken in turn, A B A B, until the noise leaves little open or the budget is spent.

A sample is the time per call over a few calls in a row. Where calls return early there are two samples of
each: every call waited for (`execute`), and all of them waited for once (`pipelined`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from attnspan.bench.devices import Device
from attnspan.bench.samples import Ratio, Timing
from attnspan.bench.statistics import bootstrap_medians
from attnspan.errors import OptionError

__all__ = ["Budget", "Measured", "MeasurementError", "Meter", "Subject", "first_call", "interleave"]

# A look at the interval at every new pair would stop at the luckiest moment; each look waits for this many
# times the pairs of the last one.
_LOOK_GROWTH = 1.4


class MeasurementError(OptionError):
    """A time that would not mean what it says."""


@dataclass(frozen=True)
class Subject:
    """A call that can be timed.

    Args:
        name: For people.
        call: Does the work once and returns its result.
        device: Where it runs.
        around: Makes a context that every sample is taken in, outside of the timed region.

    Example:
        >>> from attnspan.bench.devices import HostDevice
        >>> Subject("sum", lambda: sum(range(10)), HostDevice()).call()
        45
    """

    name: str
    call: Callable[[], Any]
    device: Device
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Budget:
    """When a comparison may stop.

    Args:
        seconds: To spend on each pair of subjects, at most.
        width: Target width of the ratio's interval, as a fraction of the ratio.
        least: Pairs at least; three are enough where one pair takes longer than the whole budget.
        most: Pairs at most.
        sample_seconds: Length of a sample at least; short calls are repeated within one.
        calls: Calls of a sample at least; a row of one call cannot show what pipelining gains.

    Raises:
        OptionError: A limit is not positive, or ``most`` is below ``least``.

    Example:
        >>> Budget(seconds=0)
        Traceback (most recent call last):
        attnspan.errors.OptionError: budget: expected positive limits with least <= most, got \
Budget(seconds=0, width=0.04, least=5, most=200, sample_seconds=0.005, calls=1). Pass larger ones.
    """

    seconds: float = 2.0
    width: float = 0.04
    least: int = 5
    most: int = 200
    sample_seconds: float = 0.005
    calls: int = 1

    def __post_init__(self) -> None:
        if (
            min(self.seconds, self.width, self.least, self.sample_seconds, self.calls) <= 0
            or self.most < self.least
        ):
            raise OptionError(
                "budget",
                expected="positive limits with least <= most",
                got=repr(self),
                remedy="Pass larger ones",
            )


@dataclass(frozen=True)
class Meter:
    """The clocks; tests give their own.

    Args:
        clock: Wall time, s.
        cpu_clock: Processor time of all threads of this process, s.
        joules: Energy used so far, or None.
        threads: Threads that a call may use.

    Example:
        >>> Meter().threads
        1
    """

    clock: Callable[[], float] = time.perf_counter
    cpu_clock: Callable[[], float] = time.process_time
    joules: Callable[[], float | None] = lambda: None
    threads: int = 1


@dataclass(frozen=True)
class Measured:
    """The times of one subject.

    Args:
        name: Of the subject.
        execute: Every call waited for.
        pipelined: Many calls waited for once; None where calls are synchronous.
        dispatch: Until calls return; None where they are synchronous.
        utilisation: Processor time over wall time and threads. Threads that spin while they wait are busy.
        energy_joules: Per call, or None.
        ratio: Against the first subject; None for that one.
        noisy: The interval is wider than the budget asked for.

    Example:
        >>> Measured("sum", Timing((0.1,))).noisy
        False
    """

    name: str
    execute: Timing
    pipelined: Timing | None = None
    dispatch: Timing | None = None
    utilisation: float | None = None
    energy_joules: float | None = None
    ratio: Ratio | None = None
    noisy: bool = False


def first_call(subject: Subject, meter: Meter) -> tuple[Any, float]:
    """Make the first call, which compiles, packs and allocates.

    Args:
        subject: Not called before.
        meter: The clocks.

    Returns:
        The result and the seconds until it was there.

    Example:
        >>> from attnspan.bench.devices import HostDevice
        >>> first_call(Subject("sum", lambda: sum(range(10)), HostDevice()), Meter())[0]
        45
    """
    with subject.around():
        start = meter.clock()
        result = subject.call()
        subject.device.synchronize(result)
        stop = meter.clock()
    _require_idle(subject, result)
    return result, stop - start


def interleave(
    subjects: Sequence[Subject], budget: Budget, meter: Meter | None = None, *, basis: str = "execute"
) -> tuple[Measured, ...]:
    """Time the first subject in turn with each other one: A B A C A B A C.

    Every pair is sampled until the bootstrap interval of its ratio is as narrow as the budget asks, or the
    budget is spent; pairs that are done drop out. A subject alone is sampled until the interval of its median
    is narrow.

    Args:
        subjects: One or more, warm (see `first_call`).
        budget: When to stop.
        meter: The clocks.
        basis: Which times the ratios are of: "execute" or "pipelined"; the latter falls to "execute" for
            synchronous subjects, which have no other.

    Returns:
        The times, in the order of the subjects.

    Raises:
        MeasurementError: A timed region ended before its work was done.

    Example:
        >>> from attnspan.bench.devices import HostDevice
        >>> calls = [Subject(str(n), lambda n=n: sum(range(n)), HostDevice()) for n in (1000, 4000)]
        >>> short, long = interleave(calls, Budget(seconds=0.2, width=0.5))
        >>> long.ratio.median > 1
        True
    """
    meter = Meter() if meter is None else meter
    tracks = [_Track(subject, meter, basis, _calibrate(subject, budget, meter)) for subject in subjects]
    first, others = tracks[0], tracks[1:]
    pairs = [_Pair(first, other, budget) for other in others] or [_Pair(first, None, budget)]
    while active := [pair for pair in pairs if not pair.done]:
        for pair in active:
            pair.sample()
    done = {id(pair.other): pair for pair in pairs}
    alone = pairs[0].noisy if not others else False
    return (first.measured(None, alone), *(t.measured(done[id(t)].ratio, done[id(t)].noisy) for t in others))


def _calibrate(subject: Subject, budget: Budget, meter: Meter) -> int:
    """Calls of one sample: enough to fill the least length of a sample."""
    calls, track = budget.calls, _Track(subject, meter, "execute", budget.calls)
    while True:
        track.calls = calls
        seconds = track.sample() * calls
        if seconds >= budget.sample_seconds or calls >= 1 << 20:
            return calls
        # The clock may read zero; the growth is bounded because the first calls are slow.
        wanted = budget.sample_seconds / max(seconds / calls, 1e-9)
        calls = max(calls + 1, min(int(wanted * 1.1) + 1, calls * 16))


@dataclass
class _Track:
    """The samples of one subject so far."""

    subject: Subject
    meter: Meter
    basis: str
    calls: int
    execute: list[float] = field(default_factory=list)
    pipelined: list[float] = field(default_factory=list)
    dispatch: list[float] = field(default_factory=list)
    wall: float = 0.0
    busy: float = 0.0
    joules: float | None = 0.0

    def sample(self) -> float:
        """Take one sample of each kind; returns the one that ratios are of."""
        meter, begin_joules = self.meter, self.meter.joules()
        with self.subject.around():
            begin, begin_cpu = meter.clock(), meter.cpu_clock()
            self._execute()
            if self.subject.device.is_asynchronous:
                self._pipeline()
            self.busy += meter.cpu_clock() - begin_cpu
            self.wall += meter.clock() - begin
        end_joules = meter.joules()
        if self.joules is not None and begin_joules is not None and end_joules is not None:
            self.joules += end_joules - begin_joules
        else:
            self.joules = None
        use_pipelined = self.basis == "pipelined" and self.pipelined
        return self.pipelined[-1] if use_pipelined else self.execute[-1]

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
            # Results of an ordered device may go at once: their memory is used again, as in a model.
            kept = [result] if device.is_ordered else [*kept, result]
        if timer:
            timer.stop()
        device.synchronize(kept)
        stop = clock()
        _require_idle(self.subject, kept)
        self.pipelined.append((timer.seconds() if timer else stop - start) / self.calls)

    def measured(self, ratio: Ratio | None, noisy: bool) -> Measured:
        timed = 2 if self.pipelined else 1
        calls = self.calls * len(self.execute) * timed
        return Measured(
            self.subject.name,
            Timing(tuple(self.execute), self.calls),
            Timing(tuple(self.pipelined), self.calls) if self.pipelined else None,
            Timing(tuple(self.dispatch), self.calls) if self.dispatch else None,
            # The processor's use says nothing of another device.
            self.busy / self.wall / self.meter.threads
            if self.wall and self.subject.device.name == "cpu"
            else None,
            self.joules / calls if self.joules is not None else None,
            ratio,
            noisy,
        )


@dataclass
class _Pair:
    """The first subject and another one, sampled in turn; or the first alone."""

    first: _Track
    other: _Track | None
    budget: Budget
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    spent: float = 0.0
    next_look: int = 0
    width: float = float("inf")

    def sample(self) -> None:
        clock = self.first.meter.clock
        start = clock()
        self.ours.append(self.first.sample())
        if self.other is not None:
            self.theirs.append(self.other.sample())
        self.spent += clock() - start
        count = len(self.ours)
        if count >= max(self.next_look, self._least) or self._is_spent:
            self.width = self._measure_width()
            self.next_look = int(count * _LOOK_GROWTH) + 1

    @property
    def _least(self) -> int:
        slow = self.ours and self.spent / len(self.ours) > self.budget.seconds
        return min(3, self.budget.least) if slow else self.budget.least

    @property
    def _is_spent(self) -> bool:
        count = len(self.ours)
        return count >= self._least and (self.spent >= self.budget.seconds or count >= self.budget.most)

    @property
    def done(self) -> bool:
        return self._is_spent or self.width <= self.budget.width

    @property
    def noisy(self) -> bool:
        return self.width > self.budget.width

    @property
    def ratio(self) -> Ratio:
        return Ratio.of(self.ours, self.theirs)

    def _measure_width(self) -> float:
        if self.other is not None:
            return self.ratio.width
        # Two independent resamples of the same samples: wider than one median's interval, never narrower.
        ratio, low, high = bootstrap_medians(self.ours, self.ours)
        return (high - low) / ratio


def _require_idle(subject: Subject, result: Any) -> None:
    if not subject.device.is_idle(result):
        raise MeasurementError(
            f"time of {subject.name}",
            expected="its work to be done when the clock stops",
            got="work that goes on",
            remedy="Time it on its own device, and wait for the result inside the timed region",
        )
