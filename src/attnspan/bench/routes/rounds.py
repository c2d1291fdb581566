"""Routes opened cold, compared, and timed in turn with the first; knows no framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from attnspan.bench.routes.findings import Route
from attnspan.bench.routes.way import Opened, Way, cold_loop
from attnspan.bench.samples import Timing
from attnspan.bench.timing import Budget, Measured, MeasurementError, Meter, Subject, first_call, interleave

__all__ = ["COLD_CALLS", "TINY_LENGTH", "Compare", "Settings", "one_line", "take_routes"]

#: Calls of the loop that a hasty benchmark would be.
COLD_CALLS = 10
#: So few queries and keys that a call costs what calling costs.
TINY_LENGTH = 16
# As many of the last calls' samples are kept.
_RETRACES = 100

#: Takes a result's arrays: the error against the first result's, and the bound it must keep.
Compare = Callable[[Sequence[Any]], tuple[float, float]]


def _silent(step: str) -> None:
    del step


@dataclass(frozen=True)
class Settings:
    """How routes are taken.

    Args:
        budget: When a comparison may stop.
        meter: The clocks.
        cold_calls: Calls of the cold loop.
        tell: Told of each step that begins.

    Example:
        >>> Settings().cold_calls
        10
    """

    budget: Budget = field(default_factory=Budget)
    meter: Meter = field(default_factory=Meter)
    cold_calls: int = COLD_CALLS
    tell: Callable[[str], None] = _silent


@dataclass
class _Entry:
    """A route on its way to its figures."""

    way: Way
    reason: str | None = None
    opened: Opened | None = None
    overhead: Timing | None = None
    cold: tuple[float, ...] = ()
    compile_seconds: float | None = None
    error: float | None = None


def take_routes(
    ways: Sequence[Way], tiny: Any, job: Any, compare: Compare, settings: Settings
) -> tuple[Route, ...]:
    """Take every route to a job.

    A tiny job comes first: it loads what each route loads once, and shows what a call costs. Then each route
    begins cold, its result is compared, and the warm calls are timed in turn.

    Args:
        ways: The first one that runs is what ratios are against.
        tiny: The job in small.
        job: The job.
        compare: Judges a result.
        settings: How.

    Returns:
        A route for each way, in their order.

    Raises:
        MeasurementError: A timed region ended before its work was done.

    Example:
        >>> take_routes([], None, None, lambda found: (0.0, 1.0), Settings())
        ()
    """
    entries = [_Entry(way) for way in ways]
    settings.tell("the cost of a call")
    _measure_overheads(entries, tiny, settings)
    for entry in entries:
        if entry.reason is None:
            settings.tell(f"{entry.way.name}, cold")
            _attempt(entry, _start, job, compare, settings)
    settings.tell("warm calls in turn")
    # Where calls return early the pipelined time is the kernel's; the others have no other.
    measured = _interleaved(
        {e.way.name: e.opened for e in entries if e.opened is not None}, settings.budget, settings.meter
    )
    return tuple(_route(entry, measured.get(entry.way.name)) for entry in entries)


def one_line(error: Exception) -> str:
    """Kind and first line of an error, for a reason.

    Args:
        error: Any.

    Example:
        >>> one_line(ValueError("too large\\nby far"))
        'ValueError: too large'
    """
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _attempt(entry: _Entry, step: Callable[..., None], *args: Any) -> None:
    """Whatever goes wrong with a route is its reason; the others go on."""
    try:
        step(entry, *args)
    except MeasurementError:
        raise
    except Exception as error:
        entry.reason = f"it failed: {one_line(error)}"


def _measure_overheads(entries: Sequence[_Entry], tiny: Any, settings: Settings) -> None:
    """Ask each route whether it can, and time it on the tiny job."""
    opened: dict[str, Opened] = {}

    def warm(entry: _Entry) -> None:
        entry.reason = entry.way.refuses(tiny)
        if entry.reason is None:
            found = entry.way.open(tiny)
            first_call(Subject(entry.way.name, found.call, found.device), settings.meter)
            opened[entry.way.name] = found

    for entry in entries:
        _attempt(entry, warm)
    budget = settings.budget
    short = replace(
        budget, seconds=budget.seconds / 4, calls=1, sample_seconds=min(budget.sample_seconds, 0.005)
    )
    measured = _interleaved(opened, short, settings.meter)
    for entry in entries:
        if entry.way.name in measured:
            entry.overhead = measured[entry.way.name].execute


def _start(entry: _Entry, job: Any, compare: Compare, settings: Settings) -> None:
    """Run the cold loop and compare what it computes."""
    # What fits at the tiny size may not fit here.
    entry.reason = entry.way.refuses(job)
    if entry.reason is not None:
        return
    opened = entry.way.open(job)
    result, entry.cold, entry.compile_seconds = cold_loop(
        opened, settings.meter, settings.cold_calls, entry.way.name
    )
    entry.error, bound = compare(opened.arrays(result))
    # A NaN is beyond every bound.
    if not entry.error <= bound:
        entry.reason = (
            f"its result differs from the first route's by {entry.error:.2g} of the norm, over {bound:.2g}"
        )
        return
    entry.opened = opened


def _interleaved(opened: dict[str, Opened], budget: Budget, meter: Meter) -> dict[str, Measured]:
    subjects = [Subject(name, each.call, each.device) for name, each in opened.items()]
    if not subjects:
        return {}
    return {each.name: each for each in interleave(subjects, budget, meter, basis="pipelined")}


def _route(entry: _Entry, measured: Measured | None) -> Route:
    way = entry.way
    if measured is None or entry.opened is None:
        return Route(way.name, way.what, reason=entry.reason, error=entry.error)
    return Route(
        way.name,
        way.what,
        cold=entry.cold,
        compile_seconds=entry.compile_seconds,
        execute=measured.execute,
        pipelined=measured.pipelined,
        dispatch=measured.dispatch,
        overhead=entry.overhead,
        retrace=_retrace(entry.opened, len(entry.cold)),
        ratio=measured.ratio,
        noisy=measured.noisy,
        error=entry.error,
        note=entry.opened.note,
    )


def _retrace(opened: Opened, cold: int) -> Timing | None:
    """What tracing took in the warm calls."""
    return None if opened.retraces is None else Timing(tuple(opened.retraces[cold:][-_RETRACES:]))
