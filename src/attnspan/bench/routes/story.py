"""What a study says in plain words; every number is a property of its data."""

from __future__ import annotations

from collections.abc import Iterator

from attnspan.bench.routes.findings import Route, RouteStudy
from attnspan.bench.table import seconds_text

__all__ = ["tell"]

_KERNEL = ("torch-eager", "torch-compile", "jax-jit", "call-jax")


def tell(study: RouteStudy) -> tuple[str, ...]:
    """The study in sentences: what is true of the routes, and how large each cause of the puzzle is here.

    Args:
        study: What was measured.

    Returns:
        Paragraphs, the summary first; only those for which there are figures.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("r", "report", 1, 5, 5, 512, 512, 128, 128, "float32", "full")
        >>> tell(RouteStudy(work, "forward", 6e8, (Route("torch-eager", "eager", reason="no kernel"),)))
        ('No route ran here: torch-eager: no kernel.',)
    """
    if not study.ran:
        reasons = "; ".join(f"{route.name}: {route.reason}" for route in study.routes)
        return (f"No route ran here: {reasons}.",)
    parts = (
        _same_kernel(study),
        _tracing(study),
        _waiting(study),
        _blocks(study),
        _calling(study),
        _lazy(study),
    )
    return tuple(part for part in parts if part)


def _same_kernel(study: RouteStudy) -> str:
    routes = [route for name in _KERNEL if (route := study.route(name)) is not None]
    if len(routes) < 2:
        return ""
    # Ratios are of neighbouring samples: medians of a whole run would show what the machine did meanwhile.
    ratios = [route.ratio.median if route.ratio else 1.0 for route in routes]
    figures = ", ".join(
        f"{route.name} {seconds_text(route.seconds)} ({ratio:.2f}x)"
        for route, ratio in zip(routes, ratios, strict=True)
    )
    apart = max(ratios) / min(ratios) - 1
    return (
        "The report of 2025 had 2.5 ms from JAX, 2.6 ms by call_jax and 3.0 ms from PyTorch/XLA for "
        f"one kernel. Here one kernel by {len(routes)} routes, warm, many calls waited for once: {figures}. "
        f"Sample by sample the slowest is {apart:.0%} above the fastest."
    )


def _tracing(study: RouteStudy) -> str:
    """Cause 1: the first call is counted."""
    routes = [route for route in study.ran if route.compile_seconds is not None]
    if not routes:
        return ""
    parts = [
        f"{route.name} {seconds_text(route.naive)} instead of {seconds_text(route.seconds)} "
        f"({route.inflation:,.3g}x; trace {seconds_text(route.trace_seconds)}, "
        f"compile {seconds_text(route.compile_seconds)})"
        for route in routes
    ]
    count = len(routes[0].cold)
    start = f"Tracing counted as execution: a loop of {count} calls that counts the first reports"
    return f"{start} {', '.join(parts)}."


def _waiting(study: RouteStudy) -> str:
    """Cause 2: every call is waited for."""
    routes = [route for route in study.ran if route.waiting is not None and route.execute and route.pipelined]
    synchronous = [route.name for route in study.ran if route.waiting is None]
    parts = [
        f"{route.name} {seconds_text(_median(route, waited=True))} a call instead of "
        f"{seconds_text(_median(route, waited=False))} ({(route.waiting or 1) - 1:+.0%})"
        for route in routes
    ]
    text = f"Waiting after every call: {', '.join(parts)}." if parts else ""
    if synchronous:
        text += f" Calls of {', '.join(synchronous)} return with their results: there is nothing to wait for."
    return text.strip()


def _median(route: Route, *, waited: bool) -> float | None:
    timing = route.execute if waited else route.pipelined
    return timing.median if timing else None


def _blocks(study: RouteStudy) -> str:
    """Cause 3: sizes of blocks that do not fit."""
    own = study.route("kernel")
    fixed = [route for route in study.ran if route.name.startswith("kernel-")]
    if own is None or not own.seconds or not fixed:
        return ""
    parts = [
        f"{route.name.removeprefix('kernel-')} takes {seconds_text(route.seconds)} "
        f"({(route.seconds or 0) / own.seconds:.2f}x)"
        for route in fixed
    ]
    return (
        f"Fixed block sizes: the kernel's own choice takes {seconds_text(own.seconds)}, {', '.join(parts)}."
    )


def _calling(study: RouteStudy) -> str:
    """What a call costs whatever it computes: the part that differs between frameworks."""
    routes = [route for name in _KERNEL if (route := study.route(name)) is not None and route.overhead]
    if not routes:
        return ""
    parts = [
        f"{route.name} {seconds_text(route.overhead.median if route.overhead else None)} "
        f"({route.overhead_share or 0:.1%} of a call here)"
        for route in routes
    ]
    return (
        f"What a call costs whatever it computes (at length {study.tiny_length}): {', '.join(parts)}. "
        "It stays as it is while the work grows with the square of the length."
    )


def _lazy(study: RouteStudy) -> str:
    found = list(_lazy_parts(study))
    return " ".join(found)


def _lazy_parts(study: RouteStudy) -> Iterator[str]:
    for route in study.routes:
        if route.name != "torch-xla":
            continue
        if not route.ran:
            yield f"Lazy PyTorch/XLA was not measured: {route.reason}."
        elif route.retrace is not None:
            beside = study.route(route.partner)
            text = (
                "Lazy PyTorch/XLA traces in every call, not in the first alone: "
                f"{seconds_text(route.retrace.median)} of Python each, "
                f"{route.retrace.median / (route.seconds or 1):.0%} of a warm call"
            )
            if route.ratio is not None and beside is not None:
                text += (
                    f"; it takes {seconds_text(route.seconds)}, {route.ratio.median:.2f}x the "
                    f"{seconds_text(beside.seconds)} of JAX beside it in its process, by the same back end"
                )
            yield f"{text}."
