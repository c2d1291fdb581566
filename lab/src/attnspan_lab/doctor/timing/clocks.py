"""Watched clocks. The difference of two readings is a timed region, with its lines and its samples."""

from __future__ import annotations

import itertools
import resource
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from attnspan_lab.doctor.patched import patched
from attnspan_lab.doctor.places import is_users

_FRAMES = 8  # Frames of the stack that a reading remembers.
_TIMEIT = "<timeit-src>"  # File name of the code that timeit generates.
_SECONDS = {"perf_counter": 1.0, "time": 1.0, "monotonic": 1.0, "process_time": 1.0, "thread_time": 1.0}
#: Clocks of the module `time`, each with its seconds per unit.
CLOCKS = _SECONDS | {f"{name}_ns": 1e-9 for name in _SECONDS}


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class Spot(NamedTuple):
    """A frame of the stack, where it stood when a clock was read."""

    frame: int
    code: CodeType
    line: int
    at: int


@dataclass
class Mark:
    """One reading of a clock.

    Args:
        serial: Number of the reading.
        clock: Name of the clock.
        value: Seconds of this clock before the bookkeeping. A region ends here.
        wall: Seconds of `time.perf_counter` before the bookkeeping.
        stack: The user's frames, the innermost first.
        pending: Whether a result in these frames was not ready.
        shapes: Shapes of the arrays in the innermost frame. Samples of other shapes are other calls.
        faults: Page faults of the process so far.
        value_after: Seconds of this clock after the bookkeeping. A region begins here.
        wall_after: Seconds of `time.perf_counter` after the bookkeeping.
    """

    serial: int
    clock: str
    value: float
    wall: float
    stack: tuple[Spot, ...]
    pending: bool
    shapes: Shapes = ()
    faults: int = 0
    value_after: float = 0.0
    wall_after: float = 0.0


class _Elapsed:
    """Subtraction of two readings, which defines a timed region."""

    mark: Mark
    watch: Watch

    def __sub__(self, other: Any) -> Any:
        plain = super().__sub__(other)  # type: ignore[misc]
        if not isinstance(other, _Elapsed):
            return plain
        seconds = self.watch.add(Sample(other.mark, self.mark))
        return seconds if isinstance(self, float) else round(seconds * 1e9)


class _Float(_Elapsed, float):
    pass


class _Int(_Elapsed, int):
    pass


class Sample(NamedTuple):
    """One run of timed code: the readings before and after it."""

    start: Mark
    stop: Mark

    @property
    def seconds(self) -> float:
        """The time by the clock that the user reads."""
        return self.stop.value - self.start.value_after

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end in seconds of `time.perf_counter`."""
        return self.start.wall_after, self.stop.wall

    @property
    def faults(self) -> int:
        """Page faults of the run."""
        return self.stop.faults - self.start.faults


#: The samples of one timed region.
Region = list[Sample]
Key = tuple[tuple[CodeType, int], ...]
Variables = list[tuple[dict[str, Any], dict[str, Any]]]


@dataclass
class Watch:
    """Everything that was seen while a script ran.

    Attributes:
        regions: Timed regions, by the places of their two readings.
        frames: Local and global variables of the user's frames at the last reading at each place, the
            innermost frame first.
        compilations: Begin and end of each compilation, in seconds of `time.perf_counter`.
        listening: Modules that report compilations, each with a function that removes the listener.
        sources: Code that timeit generated, by its code object.
        is_busy: Whether a reading is being recorded. The user's own arrays may read a clock meanwhile.
        closed: Whether the script has ended. Its clocks then read as usual.
    """

    regions: dict[tuple[Key, Key, Shapes], Region] = field(default_factory=dict)
    frames: dict[tuple[Key, Shapes], Variables] = field(default_factory=dict)
    compilations: list[tuple[float, float]] = field(default_factory=list)
    sources: dict[CodeType, str] = field(default_factory=dict)
    listening: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    closed: bool = False
    is_busy: bool = False
    _serials: Iterator[int] = field(default_factory=itertools.count)
    _seen: set[tuple[int, int]] = field(default_factory=set)

    def reading(self, name: str, real: Callable[[], Any], frame: FrameType, value: Any, wall: float) -> Any:
        """Record a reading of the user's code, with the clock's value and the wall time before."""
        faults = page_faults()
        self.listen()
        stack, variables = [], []
        for one in itertools.islice(_users_frames(frame), _FRAMES):
            stack.append(Spot(id(one), one.f_code, one.f_lineno, one.f_lasti))
            variables.append((_variables(one), one.f_globals))
        shapes = _shapes(variables)
        self.frames[key_of(tuple(stack)), shapes] = variables
        pending = _is_pending(variables)
        kind, unit = (_Int if isinstance(value, int) else _Float), CLOCKS[name]
        found, serial = kind(value), next(self._serials)
        found.mark = Mark(serial, name, value * unit, wall, tuple(stack), pending, shapes, faults)
        found.watch = self
        found.mark.wall_after = _wall()
        found.mark.value_after = real() * unit
        return found

    def add(self, sample: Sample) -> float:
        """Add a sample to the region between its two readings, and return its seconds."""
        start, stop = sample
        pair = start.serial, stop.serial
        if pair not in self._seen and start.serial < stop.serial:
            self._seen.add(pair)
            key = (key_of(start.stack), key_of(stop.stack), stop.shapes)
            self.regions.setdefault(key, []).append(sample)
        return sample.seconds

    def variables(self, mark: Mark) -> Variables:
        """Return the local and global variables of the frames of a reading, the innermost first."""
        return self.frames[key_of(mark.stack), mark.shapes]

    def listen(self) -> None:
        """Record when JAX and torch trace or compile, as soon as the script has imported them."""
        heard = {name for name, _ in self.listening}
        for name, listen in _LISTENERS.items():
            if name not in heard and name in sys.modules:
                self.listening.append((name, listen(self.compilations)))

    def close(self) -> None:
        """Remove all listeners."""
        self.closed = True
        for _, remove in self.listening:
            remove()


_wall = time.perf_counter


def _listen_to_jax(spans: list[tuple[float, float]]) -> Callable[[], None]:
    from jax import monitoring

    def told(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            now = _wall()
            spans.append((now - duration_secs, now))

    monitoring.register_event_duration_secs_listener(told)
    return lambda: monitoring.unregister_event_duration_listener(told)


def _listen_to_torch(spans: list[tuple[float, float]]) -> Callable[[], None]:
    from torch._dynamo.callback import callback_handler

    begun: list[float] = []

    def begins(_: Any) -> None:
        begun.append(_wall())

    def ends(_: Any) -> None:
        if begun:
            spans.append((begun.pop(), _wall()))

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)

    def remove() -> None:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)

    return remove


_LISTENERS = {"jax.monitoring": _listen_to_jax, "torch._dynamo.callback": _listen_to_torch}


def page_faults() -> int:
    """Count the pages of memory that this process touched for the first time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def key_of(stack: tuple[Spot, ...]) -> Key:
    """Return the places of a stack without its frames."""
    return tuple((x.code, x.at) for x in stack)


@cache
def _is_own(file: str) -> bool:
    """Whether a file belongs to the user's benchmark: neither a library nor generated, except by timeit."""
    return file == _TIMEIT or (is_users(file) and "site-packages" not in file)


def _users_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _variables(frame: FrameType) -> dict[str, Any]:
    """Copy the local variables of a frame. In timeit's code, the iterator of calls becomes a range."""
    found, caller = dict(frame.f_locals), frame.f_back
    if frame.f_code.co_filename == _TIMEIT and caller is not None and "number" in caller.f_locals:
        found["_it"] = range(caller.f_locals["number"])
    return found


def _shapes(variables: Variables) -> Shapes:
    """List the shapes of the arrays among the variables of the innermost frame."""
    own = variables[0][0].items() if variables else ()
    arrays = [
        (name, x) for name, x in own if hasattr(x, "dtype") and isinstance(getattr(x, "shape", 0), tuple)
    ]
    return tuple((name, tuple(map(int, x.shape))) for name, x in arrays)


def _is_pending(variables: Variables) -> bool:
    """Whether a device still computes one of the results in the two innermost frames."""
    values = [x for own, _ in variables[:2] for x in own.values()]
    every = [x for value in values for x in (value if isinstance(value, list | tuple) else (value,))]
    arrays = [x for x in every if hasattr(x, "is_ready") and not isinstance(x, type)]
    # A deleted array, such as a donated one, has no state.
    if any(not x.is_deleted() and not x.is_ready() for x in arrays):
        return True
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized() and not torch.cuda.current_stream().query())


@contextmanager
def watched() -> Iterator[Watch]:
    """Replace the clocks of `time` and `timeit` for the user's code, and record compilations."""
    watch, init, default = Watch(), timeit.Timer.__init__, timeit.default_timer
    fakes = {name: _watched_clock(watch, name, getattr(time, name)) for name in CLOCKS}
    # Functions that took the clock as a default when they were defined.
    takers: list[Any] = [init, timeit.timeit, timeit.repeat]
    if (module := sys.modules.get("torch.utils.benchmark")) is not None:
        takers.append(module.Timer.__init__)

    def remember(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        watch.sources[self.inner.__code__] = self.src

    with ExitStack() as stack:
        stack.callback(watch.close)
        stack.enter_context(patched(time, **fakes))
        stack.enter_context(patched(timeit, default_timer=fakes["perf_counter"]))
        stack.enter_context(patched(timeit.Timer, __init__=remember))
        for taker in takers:
            defaults = tuple(fakes["perf_counter"] if x is default else x for x in taker.__defaults__)
            stack.enter_context(patched(taker, __defaults__=defaults))
        yield watch


def _watched_clock(watch: Watch, name: str, real: Callable[[], Any]) -> Callable[[], Any]:
    def clock() -> Any:
        value, wall, frame = real(), _wall(), sys._getframe(1)
        if watch.closed or watch.is_busy or not _is_own(frame.f_code.co_filename):
            return value
        watch.is_busy = True
        try:
            return watch.reading(name, real, frame, value, wall)
        finally:
            watch.is_busy = False

    return clock


def overlap(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    """Return the seconds of an interval that lie in one or more of some spans.

    Example:
        >>> overlap([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)], 1.0, 6.0)
        3.0
    """
    total, last = 0.0, begin
    for low, high in sorted(spans):
        low, high = max(low, last), min(high, end)
        if high > low:
            total, last = total + high - low, high
    return total
