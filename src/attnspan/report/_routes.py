"""One kernel by many routes: what each benchmark would report, phase by phase, and the story in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnspan.bench.results import Ceilings, Results, Route, RouteStudy
from attnspan.bench.routes.story import tell
from attnspan.report._chart import Chart, Section, Table, TableCell, decades_axis
from attnspan.report._numbers import NONE, percent, plain, rate, ratio_text, seconds_text, times

__all__ = ["route_sections"]

# What a reader of each benchmark would be told: name, colour, symbol, figure.
_TOLD: tuple[tuple[str, str, str, Callable[[Route], float | None]], ...] = (
    ("in a row, waited for once", "@ours", "circle", lambda route: route.seconds),
    (
        "each call waited for",
        "@peer2",
        "diamond",
        lambda route: route.execute.median if route.execute else None,
    ),
    ("a loop from cold, its first call counted", "@peer4", "triangle-up", lambda route: route.naive),
)


def route_sections(results: Results) -> tuple[Section, ...]:
    """A section for each study."""
    return tuple(_section(study, results.ceilings, index) for index, study in enumerate(results.routes))


def _section(study: RouteStudy, ceilings: Ceilings | None, index: int) -> Section:
    work = study.workload
    charts = (_told_chart(study),) if study.ran else ()
    table = Table(
        "Every route, warm and from cold; those that could not run say why",
        (
            *("route", "state", "in a row", "each waited", "rate", "share of peak", "ratio"),
            *(
                "tiny call",
                "first call",
                "trace",
                "compile",
                "loop reports",
                "too much",
                "trace/compile/execute",
            ),
        ),
        tuple(_row(study, route, ceilings) for route in study.routes),
        frozenset({0, 1}),
    )
    title = f"Routes: {work.name}, {work.sizes} {work.dtype}, {study.mode}"
    lead, *points = tell(study)
    return Section(f"routes-{index}", title, lead, charts, table, wide=True, points=tuple(points))


def _row(study: RouteStudy, route: Route, ceilings: Ceilings | None) -> tuple[TableCell, ...]:
    def seconds(value: float | None) -> TableCell:
        return TableCell(seconds_text(value), value)

    speed, share = study.flops_per_second(route), study.share(route, ceilings)
    against = f"against {route.partner}" if route.partner else ""
    shares = "/".join(f"{part * 100:.0f}" for part in route.shares.values())
    return (
        TableCell(route.name, small=route.what),
        TableCell(route.reason or "ran", small=route.note, badge="noisy" if route.noisy else ""),
        seconds(route.seconds),
        seconds(route.execute.median if route.execute else None),
        TableCell(rate(speed), speed),
        TableCell(percent(share), share),
        TableCell(ratio_text(route.ratio), route.ratio.median if route.ratio else None, small=against),
        seconds(route.overhead.median if route.overhead else None),
        seconds(route.first),
        seconds(route.trace_seconds),
        seconds(route.compile_seconds),
        seconds(route.naive),
        TableCell(times(route.inflation), route.inflation),
        TableCell(f"{shares} %" if shares else NONE),
    )


def _told_chart(study: RouteStudy) -> Chart:
    routes = study.ran
    data = [
        _markers(routes, name, color, symbol, [figure(route) for route in routes])
        for name, color, symbol, figure in _TOLD
    ]
    shown = [value for trace in data for value in trace["x"]]
    layout = {
        "showlegend": True,
        "xaxis": decades_axis(min(shown), max(shown), "time of a call", seconds_text),
        "yaxis": {
            "tickvals": list(range(len(routes))),
            "ticktext": [plain(route.name) for route in routes],
            "range": [len(routes) - 0.5, -0.5],
        },
    }
    words = "; ".join(
        f"{route.name} {seconds_text(route.seconds)}, naively {seconds_text(route.naive)}" for route in routes
    )
    return Chart(
        "What a benchmark would report",
        "the same calls, timed in three ways",
        f"Time of a call by route: {words}.",
        {"data": data, "layout": layout},
        110 + 34 * len(routes),
    )


def _markers(
    routes: Sequence[Route], name: str, color: str, symbol: str, values: Sequence[float | None]
) -> dict[str, Any]:
    points = [(index, value) for index, value in enumerate(values) if value]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [value for _, value in points],
        "y": [index for index, _ in points],
        "marker": {"color": color, "symbol": symbol, "size": 11},
        "customdata": [
            f"<b>{plain(routes[index].name)}</b><br>{name}: {seconds_text(value)}" for index, value in points
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
