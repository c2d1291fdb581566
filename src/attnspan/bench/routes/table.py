"""A study of routes in a terminal: warm calls, cold loops, what is absent and why, and the story in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from attnspan.bench.cells import Ceilings
from attnspan.bench.routes.findings import Route, RouteStudy
from attnspan.bench.routes.story import tell
from attnspan.bench.samples import Ratio
from attnspan.bench.table import seconds_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["show_routes"]


def show_routes(studies: Iterable[RouteStudy], ceilings: Ceilings | None, console: Console) -> None:
    """Print studies.

    Args:
        studies: What was measured.
        ceilings: Of the machine, or None.
        console: Where to.

    Example:
        >>> from rich.console import Console
        >>> show_routes((), None, Console(width=100))
    """
    for study in studies:
        work = study.workload
        size = f"{work.sizes} {work.dtype}, {study.mode}, {study.flops / 1e9:,.3g} GFLOP"
        title = f"{work.name} {size} ({work.note})"
        console.print()
        console.print(title, style="bold", highlight=False)
        if study.ran:
            console.print(_warm(study, ceilings))
            console.print(_cold(study))
        for route in study.routes:
            if route.reason is not None:
                console.print(f"  not {route.name}: {route.reason}", style="dim", highlight=False)
        console.print()
        for part in tell(study):
            console.print(f"- {part}", highlight=False)


def _table(title: str, headings: Iterable[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    return table


def _warm(study: RouteStudy, ceilings: Ceilings | None) -> Table:
    headings = ("route", "each waited", "in a row", "spread", "GFLOP/s", "peak", "time", "95 %", "tiny call")
    table = _table("warm calls; time: over the first route's, or that of the route named beside it", headings)
    for route in study.ran:
        rate, share = study.flops_per_second(route), study.share(route, ceilings)
        table.add_row(
            route.name,
            seconds_text(route.execute.median if route.execute else None),
            seconds_text(route.pipelined.median if route.pipelined else None),
            f"{route.timing.spread:.0%}" if route.timing else "-",
            "-" if rate is None else f"{rate / 1e9:,.1f}",
            "-" if share is None else f"{share:.0%}",
            *_ratio(route, route.ratio),
            seconds_text(route.overhead.median if route.overhead else None),
        )
    return table


def _ratio(route: Route, ratio: Ratio | None) -> tuple[str, str]:
    if ratio is None:
        return ("", "")
    partner = f" {route.partner}" if route.partner else ""
    mark = " ~" if route.noisy else ""
    return (f"{ratio.median:.2f}{partner}", f"{ratio.low:.2f}-{ratio.high:.2f}{mark}")


def _cold(study: RouteStudy) -> Table:
    count = len(study.ran[0].cold)
    headings = (
        "route",
        "first call",
        "trace",
        "compile",
        "loop reports",
        "too much",
        "trace/compile/execute",
    )
    table = _table(
        f"a hasty benchmark: {count} calls from cold, each waited for, the first one counted", headings
    )
    for route in study.ran:
        shares = "/".join(f"{share * 100:.0f}" for share in route.shares.values())
        table.add_row(
            route.name,
            seconds_text(route.first),
            seconds_text(route.trace_seconds),
            seconds_text(route.compile_seconds),
            seconds_text(route.naive),
            "-" if route.inflation is None else f"{route.inflation:,.3g}x",
            f"{shares} %",
        )
    return table
