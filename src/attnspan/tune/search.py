"""The search itself: any callable, any list of configurations, one default that must be beaten beyond doubt.

It knows no kernel. Candidates are timed beside the default, pass by pass; after each round the slower half is
dropped (successive halving: Jamieson and Talwalkar, AISTATS 2016, arXiv:1502.07943). The last one is then
compared with the default on fresh samples, because those that chose it are biased in its favour.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from attnspan.bench.devices import Device, HostDevice
from attnspan.bench.samples import Ratio, Timing
from attnspan.bench.timing import Budget, Measured, Meter, Subject, first_call, interleave
from attnspan.errors import OptionError

__all__ = ["MAX_WIDTH", "MIN_GAIN", "Search", "search"]

Config = Mapping[str, int]
Call = Callable[[], Any]

#: A contender that gains less than this share does not take the default's place.
MIN_GAIN = 0.03

#: Nor does one whose gain is known less precisely than this, as a share of it: the machine is too noisy.
MAX_WIDTH = 0.25

_HOPELESS = 2.0  # A candidate this many times slower than the default at its first sample is dropped at once.
_HALVING_SHARE = 0.6  # Of the time; the rest is the final's.
_SAMPLE_SECONDS = 2e-3  # Shorter calls are repeated to fill a sample.
_PASS = 8  # Candidates that are held against the same sample of the default: the machine drifts.
_FINAL_WIDTH = 0.01  # A final whose interval is this narrow stops early.


@dataclass(frozen=True)
class Search:
    """What a search found.

    Args:
        best: The configuration to use: the contender if it was accepted, else the default.
        contender: The candidate that came out best, or the default where none was left.
        default_times: Of the final, in turn with ``contender_times``; None without a final.
        contender_times: Of the final.
        ratio: Default over contender.
        accepted: Whether the contender takes the default's place.
        reason: Why it does or does not, for people.
        tried: Candidates that were timed or failed; fewer than there are where time was short.
        failures: Each candidate that failed, and "Type: text" of what it raised.

    Example:
        >>> Search({"block": 0}, {"block": 0}).accepted
        False
    """

    best: Config
    contender: Config
    default_times: Timing | None = None
    contender_times: Timing | None = None
    ratio: Ratio | None = None
    accepted: bool = False
    reason: str = ""
    tried: int = 0
    failures: tuple[tuple[Config, str], ...] = ()


def search(
    make_call: Callable[[Config], Call],
    space: Sequence[Config],
    default: Config,
    *,
    seconds: float,
    check: Callable[[Any], str | None] | None = None,
    device: Device | None = None,
    seed: int = 0,
    meter: Meter | None = None,
) -> Search:
    """Find the fastest configuration, if any is faster than the default.

    Args:
        make_call: Gives the call of a configuration. What it or the call raises makes that candidate a
            failure; of the default, it is raised.
        space: Candidates, in any order; the default among them is skipped.
        default: What is used if no candidate is faster.
        seconds: Time for the whole search, s. It is kept to within a few calls.
        check: Given the result of the first call of the default, then of each candidate: None, or what is
            wrong with it, which makes the candidate a failure.
        device: Where the calls run, and how to wait for them; the host's processor by default.
        seed: Of the order of the candidates; a search with little time takes the first ones.
        meter: The clocks.

    Returns:
        The best configuration, and all that led to it.

    Raises:
        OptionError: The default does not pass ``check``, or work goes on when a call was waited for.

    Example:
        >>> now = [0.0]  # a made-up clock; without one it is the machine's
        >>> def make_call(config):
        ...     if config["block"] == 7:
        ...         raise ValueError("7 is odd")
        ...     return lambda: now.append(now.pop() + 0.01 / config["block"])
        >>> meter = Meter(clock=lambda: now[0], cpu_clock=lambda: now[0])
        >>> found = search(make_call, [{"block": 7}, {"block": 2}], {"block": 1}, seconds=1.0, meter=meter)
        >>> dict(found.best), found.failures
        ({'block': 2}, (({'block': 7}, 'ValueError: 7 is odd'),))
    """
    run = _Run(make_call, default, check, device or HostDevice(), meter or Meter(), seconds)
    return run.search(space, random.Random(seed))


class _CandidateFailed(Exception):
    """A candidate raised; what it raised is recorded."""


@dataclass
class _Side:
    """One configuration under way."""

    config: Config
    subject: Subject
    ratios: list[float] = field(default_factory=list)  # of the default's samples to this one's

    @property
    def rank(self) -> float:
        return -median(self.ratios)


class _Run:
    def __init__(
        self,
        make_call: Callable[[Config], Call],
        default: Config,
        check: Callable[[Any], str | None] | None,
        device: Device,
        meter: Meter,
        seconds: float,
    ) -> None:
        self.make_call, self.default, self.check = make_call, default, check
        self.device, self.meter = device, meter
        self.end = meter.clock() + seconds
        self.halving_end = self.end - (1 - _HALVING_SHARE) * seconds
        self.failures: list[tuple[Config, str]] = []
        self.tried = 0
        self.base = Subject("default", make_call(default), device)
        wrong = self._first(self.base)
        if wrong is not None:
            remedy = "Mend the check, or the default"
            raise OptionError("check", expected="to pass the default's result", got=wrong, remedy=remedy)
        self.calls = 1
        self.calls = max(1, round(_SAMPLE_SECONDS / self._sample(self.base)))

    def search(self, space: Sequence[Config], order: random.Random) -> Search:
        candidates = [config for config in space if dict(config) != dict(self.default)]
        order.shuffle(candidates)
        sides, passes = self._enter(candidates), 1
        beaten: list[_Side] = []  # They are asked again if the last one fails in the final.
        while len(sides) > 1 and self.meter.clock() < self.halving_end:
            for _ in range(passes):
                order.shuffle(sides)
                sides = self._pass(sides)
            sides.sort(key=lambda side: side.rank)
            half = (len(sides) + 1) // 2
            sides, beaten = sides[:half], sides[half:] + beaten
            passes *= 2
        for side in [*sorted(sides, key=lambda side: side.rank), *beaten]:
            try:
                return self._final(side)
            except _CandidateFailed:
                continue
        reason = "every candidate failed or was much slower" if self.tried else "no candidate"
        return self._found(self.default, reason)

    def _enter(self, candidates: Sequence[Config]) -> list[_Side]:
        """The candidates that work and are not hopeless, as far as time allows."""
        entered: list[_Side] = []
        sides: list[_Side] = []
        for config in candidates:
            if self.meter.clock() > self.halving_end:
                break
            self.tried += 1
            try:
                side = _Side(config, Subject(str(dict(config)), self._guarded(config), self.device))
                wrong = self._first(side.subject)
            except _CandidateFailed:
                continue
            if wrong is not None:
                self.failures.append((config, wrong))
                continue
            sides.append(side)
            if len(sides) == _PASS:
                entered, sides = [*entered, *self._hopeful(sides)], []
        return [*entered, *self._hopeful(sides)]

    def _hopeful(self, sides: list[_Side]) -> list[_Side]:
        return [side for side in self._pass(sides) if side.ratios[-1] * _HOPELESS > 1]

    def _guarded(self, config: Config) -> Call:
        """The candidate's call, with what it raises told apart from what the default or a clock raises."""

        def attempt(act: Callable[[], Any]) -> Any:
            try:
                return act()
            except Exception as error:
                self.failures.append((config, f"{type(error).__name__}: {error}"))
                raise _CandidateFailed from None

        call = attempt(lambda: self.make_call(config))
        return lambda: attempt(call)

    def _first(self, subject: Subject) -> str | None:
        """The first call packs, compiles and allocates, and is not timed."""
        result, _ = first_call(subject, self.meter)
        return None if self.check is None else self.check(result)

    def _pass(self, sides: list[_Side]) -> list[_Side]:
        """One sample of each side beside one of the default; those that still run."""
        running = []
        for index, side in enumerate(sides):
            if index % _PASS == 0:
                base = self._sample(self.base)
            try:
                side.ratios.append(base / self._sample(side.subject))
            except _CandidateFailed:
                continue
            running.append(side)
        return running

    def _sample(self, subject: Subject) -> float:
        """Seconds per call; never 0, which a coarse clock may say."""
        start = self.meter.clock()
        for _ in range(self.calls):
            self.device.synchronize(subject.call())
        return max(self.meter.clock() - start, 1e-9) / self.calls

    def _final(self, side: _Side) -> Search:
        left = max(self.end - self.meter.clock(), 1e-3)
        budget = Budget(left, width=_FINAL_WIDTH, sample_seconds=_SAMPLE_SECONDS)
        ours, theirs = interleave([side.subject, self.base], budget, self.meter, basis="pipelined")
        assert theirs.ratio is not None
        return self._found(side.config, _verdict(theirs.ratio), _times(theirs), _times(ours), theirs.ratio)

    def _found(
        self,
        contender: Config,
        verdict: str,
        default_times: Timing | None = None,
        contender_times: Timing | None = None,
        ratio: Ratio | None = None,
    ) -> Search:
        accepted = verdict == _FASTER
        best, failures = contender if accepted else self.default, tuple(self.failures)
        times = (default_times, contender_times, ratio)
        return Search(best, contender, *times, accepted, verdict, self.tried, failures)


_FASTER = "faster"


def _verdict(ratio: Ratio) -> str:
    if not ratio.is_faster:
        return f"not faster beyond doubt: {ratio.median:.3f} in [{ratio.low:.3f}, {ratio.high:.3f}]"
    if ratio.width > MAX_WIDTH:
        return f"too noisy: {ratio.median:.3f} in [{ratio.low:.3f}, {ratio.high:.3f}]"
    if ratio.median < 1 + MIN_GAIN:
        return f"gains less than {MIN_GAIN:.0%}: {ratio.median:.3f}"
    return _FASTER


def _times(measured: Measured) -> Timing:
    return measured.pipelined or measured.execute
