"""Curves over the length, and the memory of each call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnspan.tools.bench.results import Ceilings, Cell, Results, Run
from attnspan.tools.bench.standings import View
from attnspan.tools.bench.targets import mask_kind
from attnspan.tools.report._chart import (
    OURS,
    Chart,
    Palette,
    Section,
    decades_axis,
    facets,
    lengths_axis,
    log_ticks,
)
from attnspan.tools.report._numbers import bytes_text, plain, rate, rounded, seconds_text

__all__ = ["memory_section", "scaling_sections"]

_HEIGHT = 270

Figure = Callable[[Cell, Run], float | None]


@dataclass(frozen=True)
class _Series:
    """Cells that differ in length alone."""

    view: View
    title: str
    cells: tuple[Cell, ...]

    @property
    def lengths(self) -> list[int]:
        return [cell.workload.k_len for cell in self.cells]

    @property
    def span(self) -> str:
        return f"{min(self.lengths):,} to {max(self.lengths):,} keys"


def scaling_sections(results: Results, palette: Palette) -> tuple[Section, ...]:
    """Time per visible pair and FLOP/s over the length; none where no length varies."""
    series = _series(results.cells)
    if not series:
        return ()
    speed = tuple(_speed_chart(line, palette, results.ceilings) for line in series)
    cost = tuple(_cost_chart(line, palette) for line in series)
    return (
        Section(
            "speed",
            "FLOP/s over length",
            "Useful FLOP/s, over visible pairs only, whatever a peer computes besides. The dashed line is "
            "the roof: the measured peak of the element type, or what the measured bandwidth feeds.",
            speed,
            small=True,
        ),
        Section(
            "scaling",
            "Time per visible pair over length",
            "Flat where cost grows with visible pairs only.",
            cost,
            small=True,
        ),
    )


def _series(cells: Sequence[Cell]) -> list[_Series]:
    """What has a length to vary, in the order of the file."""
    grouped: dict[tuple[View, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((View.of(cell), _title(cell)), []).append(cell)
    return [
        _Series(view, title, tuple(sorted(members, key=lambda cell: cell.workload.k_len)))
        for (view, title), members in grouped.items()
        if len({cell.workload.k_len for cell in members}) > 1
    ]


def _title(cell: Cell) -> str:
    """Everything that a line holds fixed; the number of heads may follow the length."""
    work = cell.workload
    dim = f"D {work.head_dim}" if work.head_dim == work.v_dim else f"D {work.head_dim}/{work.v_dim}"
    parts = [mask_kind(cell), dim]
    if work.q_heads != work.kv_heads:
        parts.append(f"{work.q_heads // work.kv_heads}:1 heads")
    if work.q_len != work.k_len:
        parts.append("1 query" if work.q_len == 1 else f"{work.q_len} queries")
    if work.batch > 1:
        parts.append(f"batch {work.batch}")
    return f"{work.family}: {', '.join(parts)}"


def _speed_chart(series: _Series, palette: Palette, ceilings: Ceilings | None) -> Chart:
    data = _curves(series, palette, Cell.flops_per_second, rate)
    if ceilings is not None:
        data.insert(0, _roof_line(series, ceilings))
    layout = {
        "xaxis": lengths_axis(series.lengths, "keys"),
        "yaxis": {"title": {"text": "FLOP/s"}, "exponentformat": "SI", "rangemode": "tozero"},
    }
    alt = f"{series.title}, {series.view.label}: useful FLOP/s over {series.span}, a line for each peer."
    return Chart(series.title, series.view.label, alt, {"data": data, "layout": layout}, _HEIGHT, series.view)


def _cost_chart(series: _Series, palette: Palette) -> Chart:
    data = _curves(series, palette, Cell.seconds_per_pair, seconds_text)
    values = [value for trace in data for value in trace["y"]]
    layout = {
        "xaxis": lengths_axis(series.lengths, "keys"),
        "yaxis": decades_axis(min(values), max(values), "time per visible pair", seconds_text),
    }
    alt = f"{series.title}, {series.view.label}: time per visible pair over {series.span}, a line per peer."
    return Chart(series.title, series.view.label, alt, {"data": data, "layout": layout}, _HEIGHT, series.view)


def _roof_line(series: _Series, ceilings: Ceilings) -> dict[str, Any]:
    roof = [ceilings.attainable(series.view.dtype, cell.intensity) for cell in series.cells]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": series.lengths,
        "y": roof,
        "line": {"color": "@faint", "width": 1, "dash": "dash"},
        "customdata": [f"roof {rate(value)}" for value in roof],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _curves(
    series: _Series, palette: Palette, figure: Figure, text: Callable[[float | None], str]
) -> list[dict[str, Any]]:
    """Ours last, on top of the others."""
    traces = []
    for peer in (*palette.peers, OURS):
        points = [
            (cell, value)
            for cell in series.cells
            if (run := cell.run(peer)) is not None and (value := figure(cell, run)) is not None
        ]
        if points:
            traces.append(_curve(peer, points, palette, text))
    return traces


def _curve(
    peer: str,
    points: Sequence[tuple[Cell, float]],
    palette: Palette,
    text: Callable[[float | None], str],
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(peer),
        "meta": {"peer": peer},
        "x": [cell.workload.k_len for cell, _ in points],
        "y": [value for _, value in points],
        "line": {"color": palette.color(peer), "width": 2.6 if peer == OURS else 1.4},
        "marker": {
            "color": palette.color(peer),
            "symbol": palette.symbol(peer),
            "size": 7 if peer == OURS else 6,
        },
        "customdata": [
            f"<b>{plain(cell.workload.name)}</b><br>{plain(peer)}: {text(value)}" for cell, value in points
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def memory_section(results: Results, palette: Palette) -> Section | None:
    """Peak memory of each call; None where it was not measured."""
    charts = []
    for facet in facets(results.cells):
        # A logarithmic axis has no place for nothing at all.
        known = [cell for cell in facet.cells if any(run.peak_memory for run in cell.runs)]
        if known:
            figure = _memory_figure(known, [facet.label(cell) for cell in known], palette)
            alt = f"{facet.title}, {facet.view.label}: peak memory of {len(known)} workloads by peer."
            height = 70 + 24 * len(known)
            charts.append(Chart(facet.title, facet.view.label, alt, figure, height, facet.view))
    if not charts:
        return None
    return Section(
        "memory",
        "Peak memory",
        "Bytes above the inputs at the peak of a call, on a logarithmic axis.",
        tuple(charts),
    )


def _memory_figure(cells: Sequence[Cell], labels: Sequence[str], palette: Palette) -> dict[str, Any]:
    sizes = [run.peak_memory for cell in cells for run in cell.runs if run.peak_memory]
    low, high = min(sizes) / 1.5, max(sizes) * 1.5
    ticks = [tick * 2**20 for tick in log_ticks(low / 2**20, high / 2**20)]
    data = []
    for peer in (*palette.peers, OURS):
        points = [
            (row, cell, run.peak_memory)
            for row, cell in enumerate(cells)
            if (run := cell.run(peer)) is not None and run.peak_memory
        ]
        if not points:
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plain(peer),
                "meta": {"peer": peer},
                "x": [size for _, _, size in points],
                "y": [row for row, _, _ in points],
                "marker": {
                    "color": palette.color(peer),
                    "symbol": palette.symbol(peer),
                    "size": 10,
                    "opacity": 0.9,
                },
                "customdata": [
                    f"<b>{plain(cell.workload.name)}</b><br>{plain(peer)}: {bytes_text(size)}"
                    for _, cell, size in points
                ],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    layout = {
        "xaxis": {
            "type": "log",
            "title": {"text": "bytes above the inputs"},
            "range": [math.log10(low), math.log10(high)],
            "tickvals": ticks,
            "ticktext": [rounded(bytes_text(tick)) for tick in ticks],
        },
        "yaxis": {
            "tickvals": list(range(len(cells))),
            "ticktext": [plain(label) for label in labels],
            "range": [len(cells) - 0.4, -0.6],
            "zeroline": False,
        },
    }
    return {"data": data, "layout": layout}
