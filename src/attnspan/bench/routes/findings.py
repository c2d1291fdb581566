"""What the study of routes found: plain data for the JSON file, with every derived figure beside it."""

from __future__ import annotations

from dataclasses import dataclass

from attnspan.bench.cells import Ceilings, Workload
from attnspan.bench.samples import Ratio, Timing

__all__ = ["PHASES", "Route", "RouteStudy"]

#: What a cold loop spends its time on, in order.
PHASES = ("trace", "compile", "execute")


@dataclass(frozen=True)
class Route:
    """One way from Python to a kernel.

    Args:
        name: Of the route, like "jax-jit".
        what: The same in a few words.
        reason: Why it could not run; then it has no figures. None where it ran.
        cold: Seconds of each call of a loop that began with nothing traced nor compiled, each one waited for.
        compile_seconds: What the compiler itself took during the cold loop; None where nothing is compiled.
        execute: Seconds per warm call, each waited for.
        pipelined: Seconds per warm call of many in a row, waited for once; None where calls are synchronous.
        dispatch: Seconds until a warm call returns, without waiting for its result; None where synchronous.
        overhead: Seconds of a warm call on a problem so small that the call is all it costs.
        retrace: Seconds of Python in each warm call that builds the graph anew; None where it is traced once.
        ratio: Its warm time over that of the partner; None for the partner itself.
        noisy: The interval of the ratio did not get narrow within the budget.
        error: Norm of the difference from the first route's result over the norm of that result.
        note: What ran in truth, like a back end's name.
        partner: Name of the route that the ratio is against; empty for the first that ran.

    Example:
        >>> Route("jax-jit", "JAX, jit", cold=(0.5, 0.1, 0.1), compile_seconds=0.25).naive
        0.2333333333333333
    """

    name: str
    what: str
    reason: str | None = None
    cold: tuple[float, ...] = ()
    compile_seconds: float | None = None
    execute: Timing | None = None
    pipelined: Timing | None = None
    dispatch: Timing | None = None
    overhead: Timing | None = None
    retrace: Timing | None = None
    ratio: Ratio | None = None
    noisy: bool = False
    error: float | None = None
    note: str = ""
    partner: str = ""

    @property
    def ran(self) -> bool:
        """Whether there are times."""
        return self.execute is not None

    @property
    def timing(self) -> Timing | None:
        """The times that mean the kernel: pipelined where calls return early, else of each call."""
        return self.pipelined or self.execute

    @property
    def seconds(self) -> float | None:
        """Median of `timing`."""
        return self.timing.median if self.timing else None

    @property
    def first(self) -> float | None:
        """Seconds of the first call ever."""
        return self.cold[0] if self.cold else None

    @property
    def trace_seconds(self) -> float | None:
        """First call less compilation and a warm call: Python becoming a graph; None without a compiler."""
        if self.compile_seconds is None or self.execute is None or not self.cold:
            return None
        return max(0.0, self.cold[0] - self.compile_seconds - self.execute.median)

    @property
    def naive(self) -> float | None:
        """What a loop reports that counts the first call and waits after each: the mean of the cold calls."""
        return sum(self.cold) / len(self.cold) if self.cold else None

    @property
    def inflation(self) -> float | None:
        """The naive figure over the true one."""
        return self.naive / self.seconds if self.naive and self.seconds else None

    @property
    def waiting(self) -> float | None:
        """Per-call time over pipelined time: what waiting after each call adds; None where synchronous."""
        if self.execute is None or self.pipelined is None:
            return None
        return self.execute.median / self.pipelined.median

    @property
    def overhead_share(self) -> float | None:
        """Part of a warm call, waited for, that a call on a tiny problem costs as well, 0..1."""
        if self.overhead is None or self.execute is None:
            return None
        return min(1.0, self.overhead.median / self.execute.median)

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the cold loop's time by phase, of `PHASES`; empty where nothing was timed."""
        if not self.cold:
            return {}
        total = sum(self.cold)
        trace, compiling = self.trace_seconds or 0.0, min(self.compile_seconds or 0.0, total)
        parts = (trace, compiling, max(0.0, total - trace - compiling))
        return dict(zip(PHASES, (part / total for part in parts), strict=True))


@dataclass(frozen=True)
class RouteStudy:
    """Every route to one kernel at one workload.

    Args:
        workload: What was computed.
        mode: "forward" or "forward+backward".
        flops: Floating-point operations of a call, over visible pairs only.
        routes: In the order in which they were taken in turn.
        device: "cpu" or "cuda".
        tiny_length: Queries and keys of the problem of the `Route.overhead`.

    Example:
        >>> work = Workload("two", "report", 1, 5, 5, 512, 512, 128, 128, "float32", "full")
        >>> study = RouteStudy(work, "forward", 6e8, (Route("jax-jit", "JAX", execute=Timing((0.003,))),))
        >>> study.flops_per_second(study.routes[0])
        200000000000.0
    """

    workload: Workload
    mode: str
    flops: float
    routes: tuple[Route, ...]
    device: str = "cpu"
    tiny_length: int = 16

    @property
    def ran(self) -> tuple[Route, ...]:
        """The routes that have times."""
        return tuple(route for route in self.routes if route.ran)

    @property
    def base(self) -> Route | None:
        """The route that ratios are against: the first that ran."""
        return self.ran[0] if self.ran else None

    def route(self, name: str) -> Route | None:
        """The route of that name, if it ran."""
        return next((route for route in self.ran if route.name == name), None)

    def flops_per_second(self, route: Route) -> float | None:
        """Useful FLOP/s of a warm call, pipelined where calls return early."""
        return self.flops / route.seconds if route.seconds else None

    def share(self, route: Route, ceilings: Ceilings | None) -> float | None:
        """Part of the highest measured ceiling of the dtype that a warm call reaches."""
        rate = self.flops_per_second(route)
        best = ceilings.best(self.workload.dtype) if ceilings else None
        return rate / best if rate and best else None
