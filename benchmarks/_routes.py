"""Routes to a kernel, and their measurement. Only the routes import frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attnspan_lab.bench.cells import Run, Timing
from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.bench.timing import (
    Budget,
    MeasurementError,
    Meter,
    Subject,
    first_call,
    interleave,
)

HEADS, DIM, TINY, COLD = 5, 128, 16, 10
# Limits of the difference from the first route, in the norm.
BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class Problem:
    """Dense attention over (1, HEADS, length, DIM)."""

    length: int = 512
    dtype: str = "float32"
    backward: bool = False
    device: str = "cpu"

    def arrays(self) -> list[np.ndarray]:
        """Draw q, k and v, and for gradients the output's gradient, in float32."""
        draw = np.random.default_rng(0)
        shape = (1, HEADS, self.length, DIM)
        return [draw.standard_normal(shape, np.float32) for _ in range(3 + self.backward)]

    def __str__(self) -> str:
        kind = "forward and backward" if self.backward else "forward"
        return f"(1, {HEADS}, {self.length}, {DIM}) {self.dtype}, {kind}, on {self.device}"


class AbsentError(Exception):
    """Reason why a route cannot run here."""


@dataclass(frozen=True)
class Opened:
    """A route to one problem, not yet traced or compiled.

    ``compiler`` returns this process's seconds of compilation. It is None for a route without a compiler.
    ``retraces`` contains the seconds to build the graph in each call, if each call builds one.
    """

    call: Callable[[], Any]
    device: Device = field(default_factory=Device)
    arrays: Callable[[Any], Sequence[np.ndarray]] = lambda found: [
        x.detach().float().cpu().numpy() for x in found
    ]
    compiler: Callable[[], float] | None = None
    retraces: Sequence[float] | None = None


Open = Callable[[Problem], Opened]


@dataclass
class Route:
    """Measurements of a route in seconds, or the reason why there are none.

    ``overhead`` is the time of a tiny problem. ``cold`` has the first calls, including compilation.
    ``compile`` is the compiler's part of them. ``retrace`` is the Python time of warm calls that build a
    graph each time. ``ratio`` is relative to ``partner``.
    """

    name: str
    reason: str | None = None
    overhead: Timing | None = None
    cold: tuple[float, ...] = ()
    compile: float | None = None
    error: float | None = None
    execute: Timing | None = None
    pipelined: Timing | None = None
    retrace: Timing | None = None
    ratio: Interval | None = None
    partner: str = ""

    @property
    def seconds(self) -> float:
        """Median time of warm calls, pipelined if the device is asynchronous."""
        timing = self.pipelined or self.execute
        return timing.median if timing else float("nan")

    @property
    def trace(self) -> float | None:
        """Time to trace: the first call minus compilation and a warm call."""
        if self.compile is None or self.execute is None:
            return None
        return max(0.0, self.cold[0] - self.compile - self.execute.median)

    @property
    def hasty(self) -> float:
        """Mean time of a loop that includes its first call and waits after each call."""
        return sum(self.cold) / len(self.cold)


def take(
    routes: Mapping[str, Open], problem: Any, tiny: Any, bound: float, budget: Budget, meter: Meter
) -> list[Route]:
    """Measure every route. Ratios are relative to the first route that runs."""
    found = {name: Route(name) for name in routes}
    opened: dict[str, Opened] = {}

    def attempt(step: Callable[[Route], None]) -> None:
        for route in found.values():
            try:
                if route.reason is None:
                    step(route)
            except MeasurementError:
                raise
            except AbsentError as error:
                route.reason = str(error)
            except Exception as error:  # A failure becomes the route's reason, and the others continue.
                route.reason = (
                    f"it failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
                )

    def warm(route: Route) -> None:
        opened[route.name] = routes[route.name](tiny)
        first_call(_subject(route.name, opened), meter)

    expected: list[np.ndarray] = []

    def start(route: Route) -> None:
        own = opened[route.name] = routes[route.name](problem)
        before, calls = own.compiler() if own.compiler else 0.0, []
        for _ in range(COLD):
            result, seconds = first_call(_subject(route.name, opened), meter)
            calls.append(seconds)
        route.cold, route.compile = tuple(calls), own.compiler() - before if own.compiler else None
        arrays = own.arrays(result)
        expected.extend(arrays if not expected else ())
        off = [
            float(np.linalg.norm(b - a) / np.linalg.norm(a)) for a, b in zip(expected, arrays, strict=True)
        ]
        route.error = max(off)
        if not max(off) <= bound:  # Written so that NaN exceeds every bound.
            raise AbsentError(
                f"its result differs from the first route's result by {route.error:.2g} of the norm"
            )

    attempt(warm)
    short = replace(
        budget, seconds=budget.seconds / 4, calls=1, sample_seconds=min(budget.sample_seconds, 0.005)
    )
    for name, measured in _in_turn(found, opened, short, meter).items():
        found[name].overhead = measured.execute
    opened.clear()
    attempt(start)
    for name, measured in _in_turn(found, opened, budget, meter).items():
        route, retraces = found[name], opened[name].retraces
        route.execute, route.pipelined, route.ratio = measured.execute, measured.pipelined, measured.ratio
        route.retrace = None if retraces is None else Timing(tuple(retraces[COLD:][-100:]))
    return list(found.values())


def _subject(name: str, opened: Mapping[str, Opened]) -> Subject:
    return Subject(name, opened[name].call, opened[name].device)


def _in_turn(
    found: Mapping[str, Route], opened: Mapping[str, Opened], budget: Budget, meter: Meter
) -> dict[str, Run]:
    subjects = [_subject(name, opened) for name in opened if found[name].reason is None]
    # For asynchronous calls, the pipelined time is the kernel's. Other calls have only one time.
    return {x.peer: x for x in interleave(subjects, budget, meter, basis="pipelined")} if subjects else {}
