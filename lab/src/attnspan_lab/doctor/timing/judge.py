"""Findings on a timed region, from its samples, the compilations within them, and trials."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
        printed: Names of the statistics of the samples that the script printed.
        compiles_again: Share of the trials' time that is compilation.
        follows_queued: Whether the region before stopped its clock while its work still ran.
        coverage: Collects the checks.
    """

    region: Region
    compiled: tuple[float, ...]
    body: Body | None
    again: Replay | None
    why_not: str
    printed: frozenset[str]
    compiles_again: float = 0.0
    follows_queued: bool = False
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def count(self) -> int:
        """Number of calls in a sample."""
        return (self.body.count or 1) if self.body is not None else 1

    @property
    def own(self) -> float:
        """Mean seconds of a call in the script's own samples."""
        return fmean(self.region.samples) / self.count

    @property
    def keeps_first(self) -> bool:
        """Whether a slow first sample moves the result of the script, as far as that can be seen."""
        return len(self.region.samples) < 3 or not (self.printed and self.printed <= _ROBUST)


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
        for kind, what, evidence, remedy in check(timed):
            yield Finding(kind, what, own, (*evidence, *times), remedy=remedy)
            times = ()  # Once for each region.


def _rightly(timed: Timed) -> Iterator[str]:
    """Describe the script's time and the times of the trials."""
    yield f"your samples: {seconds_text(timed.own)} for each call, {_amount(timed)}"
    if timed.again is None:
        yield f"not measured again: {timed.why_not}"
        return
    yield f"measured again, warm: {interval_text(timed.again.each)}" + (
        " with a wait after each call" if timed.again.in_a_row is not None else ""
    )
    if timed.again.in_a_row is not None:
        yield f"measured again, warm: {interval_text(timed.again.in_a_row)} for calls in a row with one wait"


def _amount(timed: Timed) -> str:
    samples = len(timed.region.samples)
    calls = f" of {timed.count} calls" if timed.count > 1 else ""
    return f"{samples} sample{'s' * (samples > 1)}{calls}"


def interval_text(found: Interval) -> str:
    """Write an interval as text."""
    ends = f"{seconds_text(found.low)} to {seconds_text(found.high)}"
    return f"{seconds_text(found.median)} ({ends}, {found.pairs} samples)"


_Said = Iterator[tuple[str, str, tuple[str, ...], str]]


def _compilation(timed: Timed) -> _Said:
    samples, compiled = timed.region.samples, timed.compiled
    total, share = math.fsum(compiled), math.fsum(compiled) / max(math.fsum(samples), 1e-12)
    if share < _LEAST:
        return
    all_ = seconds_text(math.fsum(samples))
    text = f"Your time of {all_} contains {seconds_text(total)} of tracing and compilation"
    if timed.compiles_again > _LEAST:
        remedy = (
            "Create the compiled function once, outside of the timed code, "
            "and pass arguments with equal shapes and types"
        )
        yield "compile-counted", f"{text}: each call compiles", (), remedy
    elif timed.keeps_first:
        yield "compile-counted", text, _printed(timed), ""


def _printed(timed: Timed) -> tuple[str, ...]:
    if not timed.printed or len(timed.region.samples) < 2:
        return ()
    return (f"the script prints the {' or the '.join(sorted(timed.printed))} of its samples",)


def _waiting(timed: Timed) -> _Said:
    again, count = timed.again, timed.count
    if again is None or again.in_a_row is None:
        return
    pairs = zip(timed.region.samples, timed.compiled, strict=True)
    figure = median(sample - compiled for sample, compiled in pairs) / count
    if (again.returned < 0.7 or timed.region.pending) and figure < (1 - _LEAST) * again.in_a_row.low:
        what = "You stop the clock before the results are computed: the calls are only queued"
        lines = [] if timed.body is None else timed.body.uncalled_waits
        missing = [f"line {x} names a function that waits, and does not call it" for x in lines]
        text = f"the timed code returns after {again.returned:.0%} of the time until its results are ready"
        yield "not-waited", what, (*missing, text), ""
    elif figure > again.in_a_row.high and again.in_a_row.high < (1 - _LEAST) * again.each.low:
        ratio = again.each.median / again.in_a_row.median
        what = (
            f"You wait after each call. Calls with one wait at the end take {times_text(1 / ratio)} the time"
        )
        yield "waited-each-call", what, (), ""


def _inputs(timed: Timed) -> _Said:
    again = timed.again
    if again is None or again.without_inputs is None or timed.body is None:
        return
    if again.without_inputs.high < (1 - _LEAST) * again.each.low:
        lines = sorted({x.line for x in timed.body.once().makers})
        saved = seconds_text(again.each.median - again.without_inputs.median)
        makers = f"Line {lines[0]} makes" if len(lines) == 1 else f"Lines {', '.join(map(str, lines))} make"
        what = f"{makers} inputs while the clock runs: {saved} for each call"
        yield "inputs-counted", what, (f"without making inputs: {interval_text(again.without_inputs)}",), ""


def _unused(timed: Timed) -> _Said:
    if timed.body is None or timed.again is None:
        return
    for name, share, is_constant in unused(timed.body.once(), timed.coverage):
        if is_constant:
            what = f"The compiler computes {share:.0%} of the products of {name} once, while it compiles"
            yield "result-constant", what, (), ""
            continue
        what = (
            f"The compiler deletes {share:.0%} of the products and kernels of {name}, "
            f"because {name} does not return their results"
        )
        yield "result-unused", what, (), ""


def _processor_time(timed: Timed) -> _Said:
    clock = timed.region.stop.clock
    if clock.removesuffix("_ns") not in ("process_time", "thread_time"):
        return
    wall = math.fsum(stop - start for start, stop in timed.region.spans)
    counted = math.fsum(timed.region.samples)
    if abs(counted / max(wall, 1e-12) - 1) > _LEAST:
        what = f"time.{clock} counts {seconds_text(counted)} of processor time in {seconds_text(wall)}"
        yield "processor-clock", what, (), ""


def _slow_first(timed: Timed) -> _Said:
    samples, again = timed.region.samples, timed.again
    if math.fsum(timed.compiled) >= _LEAST * math.fsum(samples):
        return
    if len(samples) > 2:
        rest = samples[1:]
        if (
            timed.keeps_first
            and samples[0] > max(1.5 * median(rest), max(rest))
            and fmean(samples) > 1.1 * median(rest)
        ):
            ratio = times_text(samples[0] / median(rest))
            what = f"The first of {len(samples)} samples takes {ratio} the median time of the others"
            yield "first-call-counted", what, (*_printed(timed), *_touched(timed)), ""
    elif again is not None and again.returned > 0.7 and min(samples) > _MUCH * again.slowest:
        ratio = times_text(min(samples) / again.slowest)
        what = f"Your time is {ratio} the longest time of the same calls when they are warm"
        yield "first-call-counted", what, _touched(timed), ""


def _touched(timed: Timed) -> tuple[str, ...]:
    """Count the page faults of the first sample, if repetitions have far fewer."""
    first, again = timed.region.faults[0], 0.0 if timed.again is None else timed.again.faults
    if first < 2 * again + _MANY_FAULTS:
        return ()
    return (f"new memory: {first:,} page faults in the first run, {again:.0f} in a later run",)


def _samples(timed: Timed) -> _Said:
    samples = timed.region.samples
    if len(samples) < 2:
        yield "few-samples", "There is only one sample, so you do not know how much the time varies", (), ""
        return
    found = Interval.of(samples)
    if len(samples) >= _FEW and found.width > _WIDE:
        ends = f"{seconds_text(found.low / timed.count)} and {seconds_text(found.high / timed.count)}"
        what = f"The median of {len(samples)} samples lies between {ends}, with {found.level:.0%} confidence"
        yield "wide-samples", what, (), ""
    elif len(samples) < _FEW:
        ends = f"{seconds_text(found.low / timed.count)} and {seconds_text(found.high / timed.count)}"
        what = f"The median of {len(samples)} samples lies between {ends}, with {found.level:.0%} confidence"
        yield "few-samples", what, (), ""


def facts_of_timing(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """Describe each region in plain data."""
    found = []
    for one in timed:
        again = one.again
        place = one.body.place if one.body is not None else None
        found.append(
            {
                "place": "" if place is None else str(place),
                "amount": _amount(one),
                "own": one.own,
                "samples": list(one.region.samples),
                "each": None if again is None else interval_text(again.each),
                "in a row": None
                if again is None or again.in_a_row is None
                else interval_text(again.in_a_row),
                "why not": one.why_not,
            }
        )
    return found
