"""Findings on a timed region, from its samples, the compilations within them, and trials."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

from attnspan_lab.bench.statistics import Interval
from attnspan_lab.console import seconds_text, times_text
from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.timing.body import Body
from attnspan_lab.doctor.timing.clocks import Region
from attnspan_lab.doctor.timing.replay import Replay
from attnspan_lab.doctor.timing.unused import unused
from attnspan_lab.doctor.words import counted

_FEW = 9  # With fewer samples, an interval of 95 % has no room for a single slow sample.
_WIDE = 0.1  # Width of an interval over its median.
_LEAST = 0.05  # Smaller effects are no findings.
_MANY_FAULTS = 16  # Fewer page faults occur anywhere.
_MUCH = 3.0  # One sample, which noise may have lengthened, must exceed all repetitions by this factor.
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
#: Statistics that one slow first sample cannot move far.
_ROBUST = {"median", "minimum", "mean without the first", "median without the first"}


@dataclass(frozen=True)
class Timed:
    """A timed region with its trials.

    Args:
        region: Samples.
        compiled: Seconds of compilation in each sample.
        body: Timed statements, or None if they were not found.
        again: Times of the same statements, measured again, or None.
        why_not: Reason why they were not measured again.
        output: The output of the script.
        compiles_again: Share of the trials' time that is compilation.
        coverage: Collects the checks.
        follows_queued: Whether the region before stopped its clock while its work still ran.
    """

    region: Region
    compiled: tuple[float, ...]
    body: Body | None
    again: Replay | None
    why_not: str
    output: str
    compiles_again: float
    coverage: Coverage
    follows_queued: bool

    @cached_property
    def count(self) -> int:
        """Number of calls in a sample."""
        return (self.body.count or 1) if self.body is not None else 1

    @property
    def times(self) -> list[float]:
        """Seconds of each sample."""
        return [x.seconds for x in self.region]

    @property
    def own(self) -> float:
        """Mean seconds of a call in the script's own samples."""
        return fmean(self.times) / self.count

    @property
    def amount(self) -> str:
        """Number of samples, and of calls in each."""
        calls = f" of {self.count} calls" if self.count > 1 else ""
        return f"{counted(len(self.region), 'sample')}{calls}"

    @cached_property
    def printed(self) -> frozenset[str]:
        """Names of the statistics of the samples that the script printed."""
        return printed_statistics(self.output, self.times, self.count)

    @property
    def keeps_first(self) -> bool:
        """Whether a slow first sample moves the result of the script, as far as that can be seen."""
        return len(self.region) < 3 or not (self.printed and self.printed <= _ROBUST)

    @property
    def facts(self) -> dict[str, Any]:
        """The region as plain data."""
        each, in_a_row = (None, None) if self.again is None else (self.again.each, self.again.in_a_row)
        return {
            "place": "" if self.body is None else str(self.body.place),
            "amount": self.amount,
            "own": self.own,
            "samples": self.times,
            "each": None if each is None else interval_text(each),
            "in a row": None if in_a_row is None else interval_text(in_a_row),
            "why not": self.why_not,
        }


def printed_statistics(output: str, samples: list[float], count: int) -> frozenset[str]:
    """Find the statistics of some samples among the numbers of a text, in any unit of time.

    Example:
        >>> sorted(printed_statistics("2.125 ms", [0.001, 0.002125, 0.009], 1))
        ['median']
    """
    rest = samples[1:] or samples
    values = {
        "mean": fmean(samples),
        "sum": math.fsum(samples),
        "median": median(samples),
        "minimum": min(samples),
        "maximum": max(samples),
        "mean without the first": fmean(rest),
        "median without the first": median(rest),
    }
    found = set()
    for text in _NUMBER.findall(output):
        digits, _, exponent = text.lower().partition("e")
        if len(digits.replace(".", "").strip("0")) < 2:
            continue
        half = 0.5000001 * 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
        for name, value in values.items():
            scaled = (value / n * unit for n in {1, count} for unit in (1, 1e3, 1e6, 1e9))
            if any(abs(x - float(text)) <= half for x in scaled):
                found.add(name)
    return frozenset(found)


def judged(timed: Timed) -> Iterator[Finding]:
    """Yield the findings of one region, the most important first."""
    checks = [_compilation, _waiting, _inputs, _unused, _processor_time, _slow_first, _samples]
    if timed.follows_queued:
        checks.remove(_slow_first)  # The first sample waits for the work of the region before.
    own, times = (timed.body.place,) if timed.body is not None else (), tuple(_rightly(timed))
    for check in checks:
        for finding in check(timed):
            yield replace(finding, places=own, evidence=(*finding.evidence, *times))
            times = ()  # Once for each region.


def _rightly(timed: Timed) -> Iterator[str]:
    """Describe the script's time and the times of the trials."""
    yield f"your samples: {seconds_text(timed.own)} for each call, {timed.amount}"
    each, in_a_row = timed.facts["each"], timed.facts["in a row"]
    if each is None:
        yield f"not measured again: {timed.why_not}"
    elif in_a_row is None:
        yield f"measured again, warm: {each}"
    else:
        yield f"measured again, warm: {each} with a wait after each call"
        yield f"measured again, warm: {in_a_row} for calls in a row with one wait"


def interval_text(found: Interval) -> str:
    """Write an interval as text."""
    ends = f"{seconds_text(found.low)} to {seconds_text(found.high)}"
    return f"{seconds_text(found.median)} ({ends}, {found.pairs} samples)"


def _compilation(timed: Timed) -> Iterator[Finding]:
    all_, total = math.fsum(timed.times), math.fsum(timed.compiled)
    if total / max(all_, 1e-12) < _LEAST:
        return
    text = f"Your time of {seconds_text(all_)} contains {seconds_text(total)} of tracing and compilation"
    if timed.compiles_again > _LEAST:
        remedy = (
            "Create the compiled function once, outside of the timed code, "
            "and pass arguments with equal shapes and types"
        )
        yield Finding("compile-counted", f"{text}: each call compiles", remedy=remedy)
    elif timed.keeps_first:
        yield Finding("compile-counted", text, evidence=_printed(timed))


def _printed(timed: Timed) -> tuple[str, ...]:
    if not timed.printed or len(timed.region) < 2:
        return ()
    return (f"the script prints the {' or the '.join(sorted(timed.printed))} of its samples",)


def _waiting(timed: Timed) -> Iterator[Finding]:
    again, count = timed.again, timed.count
    if again is None or again.in_a_row is None or again.in_a_row.low <= 0.0:
        return  # On a busy machine, the difference of two times may be 0 or less.
    pairs = zip(timed.times, timed.compiled, strict=True)
    figure = median(sample - compiled for sample, compiled in pairs) / count
    is_pending = any(x.stop.pending for x in timed.region)
    if (again.returned < 0.7 or is_pending) and figure < (1 - _LEAST) * again.in_a_row.low:
        what = "You stop the clock before the results are computed: the calls are only queued"
        lines = [] if timed.body is None else timed.body.uncalled_waits
        missing = [f"line {x} names a function that waits, and does not call it" for x in lines]
        text = f"the timed code returns after {again.returned:.0%} of the time until its results are ready"
        yield Finding("not-waited", what, evidence=(*missing, text))
    elif figure > again.in_a_row.high and again.in_a_row.high < (1 - _LEAST) * again.each.low:
        ratio = again.each.median / again.in_a_row.median
        what = (
            f"You wait after each call. Calls with one wait at the end take {times_text(1 / ratio)} the time"
        )
        yield Finding("waited-each-call", what)


def _inputs(timed: Timed) -> Iterator[Finding]:
    again = timed.again
    if again is None or again.without_inputs is None or timed.body is None:
        return
    if again.without_inputs.high < (1 - _LEAST) * again.each.low:
        lines = timed.body.once().makers
        saved = seconds_text(again.each.median - again.without_inputs.median)
        makers = f"Line {lines[0]} makes" if len(lines) == 1 else f"Lines {', '.join(map(str, lines))} make"
        what = f"{makers} inputs while the clock runs: {saved} for each call"
        evidence = (f"without making inputs: {interval_text(again.without_inputs)}",)
        yield Finding("inputs-counted", what, evidence=evidence)


def _unused(timed: Timed) -> Iterator[Finding]:
    if timed.body is None or timed.again is None:
        return
    for name, share, is_constant in unused(timed.body.once(), timed.coverage):
        kind = "result-constant" if is_constant else "result-unused"
        what = (
            f"The compiler computes {share:.0%} of the products of {name} once, while it compiles"
            if is_constant
            else f"The compiler deletes {share:.0%} of the products and kernels of {name}, "
            f"because {name} does not return their results"
        )
        yield Finding(kind, what)


def _processor_time(timed: Timed) -> Iterator[Finding]:
    clock = timed.region[-1].stop.clock
    if clock.removesuffix("_ns") not in ("process_time", "thread_time"):
        return
    wall = math.fsum(end - begin for begin, end in (x.span for x in timed.region))
    own = math.fsum(timed.times)
    if abs(own / max(wall, 1e-12) - 1) > _LEAST:
        what = f"time.{clock} counts {seconds_text(own)} of processor time in {seconds_text(wall)}"
        yield Finding("processor-clock", what)


def _slow_first(timed: Timed) -> Iterator[Finding]:
    times, again = timed.times, timed.again
    if math.fsum(timed.compiled) >= _LEAST * math.fsum(times):
        return
    if len(times) > 2:
        first, rest = times[0], times[1:]
        is_slow = first > max(1.5 * median(rest), max(rest)) and fmean(times) > 1.1 * median(rest)
        if timed.keeps_first and is_slow:
            ratio = times_text(first / median(rest))
            what = f"The first of {len(times)} samples takes {ratio} the median time of the others"
            yield Finding("first-call-counted", what, evidence=(*_printed(timed), *_touched(timed)))
    elif again is not None and again.returned > 0.7 and min(times) > _MUCH * again.slowest:
        ratio = times_text(min(times) / again.slowest)
        what = f"Your time is {ratio} the longest time of the same calls when they are warm"
        yield Finding("first-call-counted", what, evidence=_touched(timed))


def _touched(timed: Timed) -> tuple[str, ...]:
    """Count the page faults of the first sample, if repetitions have far fewer."""
    first, again = timed.region[0].faults, 0.0 if timed.again is None else timed.again.faults
    if first < 2 * again + _MANY_FAULTS:
        return ()
    return (f"new memory: {first:,} page faults in the first run, {again:.0f} in a later run",)


def _samples(timed: Timed) -> Iterator[Finding]:
    times = timed.times
    if len(times) < 2:
        what = "There is only one sample, so you do not know how much the time varies"
        yield Finding("few-samples", what)
        return
    found, kind = Interval.of(times), "few-samples" if len(times) < _FEW else "wide-samples"
    if kind == "few-samples" or found.width > _WIDE:
        ends = f"{seconds_text(found.low / timed.count)} and {seconds_text(found.high / timed.count)}"
        what = f"The median of {len(times)} samples lies between {ends}, with {found.level:.0%} confidence"
        yield Finding(kind, what)
