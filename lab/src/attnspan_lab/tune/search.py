"""Search of configurations by successive halving, then a comparison of the best one with the default.

The search knows no kernel: it gets callables and configurations. The samples that chose the best candidate
are biased in its favour, so the comparison takes new samples. (Jamieson and Talwalkar 2016, arXiv:1502.07943)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, TypeVar

from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.bench.timing import Budget, Meter, Subject, first_call, interleave

__all__ = ["MIN_GAIN", "Found", "search"]

#: A candidate replaces the default if the 95 % interval of its gain lies above this value.
MIN_GAIN = 0.03

_HALVING_SHARE = 0.6  # share of the time; the rest is for the comparison
_SAMPLE_SECONDS = 2e-3  # Shorter calls are repeated to fill a sample.
_REUSES = 8  # candidates that share one sample of the default
_MAX_PAIRS = 50  # of the comparison

C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True)
class Found(Generic[C]):
    """The result of a search."""

    config: C  # to use: the contender if it was accepted, else the default
    reason: str
    tried: int  # candidates that were called
    failures: tuple[tuple[C, str], ...]
    contender: C | None = None  # the best candidate
    ratio: Interval | None = None  # time of the default over time of the contender
    default_seconds: tuple[float, ...] = ()  # raw samples, each paired with one of the contender
    contender_seconds: tuple[float, ...] = ()


def search(
    make_call: Callable[[C], Callable[[], Any]],
    configs: Sequence[C],
    default: C,
    *,
    seconds: float,
    check: Callable[[Any], object] = lambda _: None,
    device: Device | None = None,
    meter: Meter | None = None,
) -> Found[C]:
    """Find the fastest configuration. The default wins unless another one is clearly faster.

    Args:
        make_call: Maps a configuration to a call. Errors of the default's call are passed on.
        configs: Candidates, in any order.
        default: The default configuration.
        seconds: Time for the whole search. If it is short, some candidates are not tried.
        check: Called with the result of each first call, the default's first. It raises for a wrong result.
        device: Device of the calls. Default: the CPU.
        meter: The clocks.

    Example:
        >>> import time
        >>> found = search(lambda ms: lambda: time.sleep(ms / 1e3), [1, 5], 10, seconds=0.5)
        >>> found.config, found.reason
        (1, 'faster')
    """
    meter = meter or Meter()
    end = meter.clock() + seconds
    race = _Race(make_call, default, check, device or Device(), meter)
    candidates = [config for config in configs if config != default]
    random.Random(0).shuffle(candidates)
    for candidate in race.halve(candidates, end - (1 - _HALVING_SHARE) * seconds):
        found = race.compare(candidate, end)
        if found is not None:
            return found
    return Found(default, "no candidate works", race.tried, tuple(race.failures.items()))


@dataclass
class _Candidate(Generic[C]):
    config: C
    subject: Subject
    speeds: list[float]  # the default's time over this candidate's time

    @property
    def rank(self) -> tuple[int, float]:
        return -len(self.speeds), -median(self.speeds)


@dataclass
class _Race(Generic[C]):
    make_call: Callable[[C], Callable[[], Any]]
    default: C
    check: Callable[[Any], object]
    device: Device
    meter: Meter

    def __post_init__(self) -> None:
        self.failures: dict[C, str] = {}
        self.tried = self.samples = 0
        self.base = self._subject(self.default)
        self.calls = 1
        self.calls = max(1, round(_SAMPLE_SECONDS / self._seconds(self.base)))

    def halve(self, configs: Sequence[C], end: float) -> list[_Candidate[C]]:
        """Return the working candidates. The candidates that stayed longest come first."""
        racing = entered = self._enter(configs, end)
        passes = 1
        while len(racing) > 1 and self.meter.clock() < end:
            for _ in range(passes):
                for candidate in racing:
                    candidate.speeds.append(self._speed(candidate.config, candidate.subject))
            racing = sorted(racing, key=lambda x: x.rank)[: (len(racing) + 1) // 2]
            passes *= 2
        return sorted((x for x in entered if x.config not in self.failures), key=lambda x: x.rank)

    def compare(self, candidate: _Candidate[C], end: float) -> Found[C] | None:
        """Compare a candidate with the default. Return None if it fails."""
        left = max(end - self.meter.clock(), 1e-3)
        budget = Budget(left / 2, _MAX_PAIRS, sample_seconds=_SAMPLE_SECONDS)
        sides = (candidate.subject, self.base)
        times = self._attempt(candidate.config, interleave, sides, budget, self.meter, basis="pipelined")
        if times is None or times[1].ratio is None:
            return None
        ratio, samples = times[1].ratio, [(x.pipelined or x.execute).samples for x in reversed(times)]
        found, failures = candidate.config, tuple(self.failures.items())
        if ratio.low >= 1 + MIN_GAIN:
            return Found(found, "faster", self.tried, failures, found, ratio, *samples)
        reason = f"no significant gain of {MIN_GAIN:.0%} in {ratio.pairs} pairs"
        return Found(self.default, reason, self.tried, failures, found, ratio, *samples)

    def _enter(self, configs: Sequence[C], end: float) -> list[_Candidate[C]]:
        entered = []
        for config in configs:
            if self.meter.clock() > end:
                break
            self.tried += 1
            subject = self._attempt(config, self._subject, config)
            if subject is not None:
                entered.append(_Candidate(config, subject, [self._speed(config, subject)]))
        return entered

    def _subject(self, config: C) -> Subject:
        """Make and check the first call. It packs, compiles and allocates, so it is not timed."""
        subject = Subject(str(config), self.make_call(config), self.device)
        self.check(first_call(subject, self.meter)[0])
        return subject

    def _speed(self, config: C, subject: Subject) -> float:
        """Measure the default's time over the candidate's, in turn because machines drift. 0 if it fails."""
        if self.samples % _REUSES == 0:
            self.base_seconds = self._seconds(self.base)
        self.samples += 1
        seconds = self._attempt(config, self._seconds, subject)
        return 0.0 if seconds is None else self.base_seconds / seconds

    def _seconds(self, subject: Subject) -> float:
        """Measure the seconds per call. The result is never 0, even with a coarse clock."""
        start = self.meter.clock()
        for _ in range(self.calls):
            self.device.synchronize(subject.call())
        return max(self.meter.clock() - start, 1e-9) / self.calls

    def _attempt(self, config: C, act: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a call and return its result, or record the failure and return None."""
        try:
            return act(*args, **options)
        except Exception as error:
            self.failures[config] = f"{type(error).__name__}: {error}"
            return None
