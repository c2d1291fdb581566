"""Bars from 1.0 on a logarithmic axis: how much longer each peer takes, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnspan.tools.bench.results import Cell, Ratio, Results
from attnspan.tools.report._chart import (
    OURS,
    Chart,
    Palette,
    Section,
    facets,
    log_ticks,
    whiskers,
)
from attnspan.tools.report._numbers import TIMES, plain, ratio_text, seconds_text, times

__all__ = ["ratio_section"]

_BAR = 17
_GAP = 0.6


@dataclass(frozen=True)
class _Bar:
    """One bar: the group it stands in and how that is called on the axis, what it compares, its colour."""

    group: str
    label: str
    peer: str
    ratio: Ratio
    noisy: bool
    color: str
    hover: str


def ratio_section(results: Results, palette: Palette) -> Section | None:
    """A chart of bars for each family of each view; None where nothing was compared."""
    charts = []
    for facet in facets(results.cells):
        bars = [bar for cell in facet.cells for bar in _bars(cell, facet.label(cell), palette)]
        if not bars:
            continue
        behind = [f"{bar.label} against {bar.peer}" for bar in bars if bar.ratio.is_slower]
        alt = f"{facet.title}, {facet.view.label}: {len(bars)} ratios of time, peer over {OURS}, " + (
            f"{OURS} is slower in {'; '.join(behind)}." if behind else "none of them below 1 beyond doubt."
        )
        figure = _figure(bars, f"time of peer / time of {OURS}")
        charts.append(Chart(facet.title, facet.view.label, alt, figure, _height(bars), facet.view))
    if not charts:
        return None
    return Section(
        "ratios",
        f"Time against {OURS}",
        f"A bar to the right of 1 is a peer that takes longer than {OURS}. Whiskers are the bootstrap "
        "interval of 95 % of the paired ratio; hatched bars are of cells that the machine was too noisy for.",
        tuple(charts),
    )


def _bars(cell: Cell, label: str, palette: Palette) -> list[_Bar]:
    ours = seconds_text(cell.seconds(cell.ours))
    return [
        _Bar(
            group=cell.workload.name,
            label=label,
            peer=run.peer,
            ratio=run.ratio,
            noisy=run.noisy,
            color=palette.color(run.peer),
            hover=f"<b>{plain(cell.workload.name)}</b><br>{plain(run.peer)}: {ratio_text(run.ratio)}"
            f"<br>{seconds_text(cell.seconds(run))}, {OURS} {ours}"
            f"<br>{plain(cell.workload.sizes)}, {plain(cell.workload.mask)}"
            f"<br>{run.ratio.pairs} pairs{', noisy' if run.noisy else ''}",
        )
        for run in cell.peers
        if run.ratio is not None
    ]


def _positions(bars: Sequence[_Bar]) -> tuple[list[float], list[float]]:
    """A place for each bar, and one for the label of each group: in its middle."""
    places: list[float] = []
    groups: dict[str, list[float]] = {}
    at = 0.0
    for index, bar in enumerate(bars):
        starts = not index or bars[index - 1].group != bar.group
        at += 1.0 + (_GAP if starts else 0.0)
        places.append(at)
        groups.setdefault(bar.group, []).append(at)
    return places, [(members[0] + members[-1]) / 2 for members in groups.values()]


def _height(bars: Sequence[_Bar]) -> int:
    places, _ = _positions(bars)
    return 64 + round(_BAR * (places[-1] + _GAP))


def _figure(bars: Sequence[_Bar], title: str) -> dict[str, Any]:
    places, middles = _positions(bars)
    labels = [plain(label) for label in {bar.group: bar.label for bar in bars}.values()]
    low, high = min(1.0, *(bar.ratio.low for bar in bars)), max(1.0, *(bar.ratio.high for bar in bars))
    low, high = low / 1.06, max(high * 1.04, low * 1.5)
    data = []
    for peer in dict.fromkeys(bar.peer for bar in bars):
        mine = [(place, bar) for place, bar in zip(places, bars, strict=True) if bar.peer == peer]
        data += _traces(peer, mine, high)
    y_axis = {"range": [places[-1] + 1, _GAP], "showgrid": False, "zeroline": False}
    y_axis |= {"tickvals": middles, "ticktext": labels}
    line = {"type": "line", "x0": 1, "x1": 1, "y0": 0, "y1": 1, "yref": "paper"}
    layout = {
        "barmode": "overlay",
        "margin": {"r": 58},
        "xaxis": _ratio_axis(low, high, title),
        "yaxis": y_axis,
        "shapes": [{**line, "line": {"color": "@ink", "width": 1.5}}],
    }
    return {"data": data, "layout": layout}


def _ratio_axis(low: float, high: float, title: str) -> dict[str, Any]:
    ticks = log_ticks(low, high)
    return {
        "type": "log",
        "title": {"text": title},
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}{TIMES}" for tick in ticks],
    }


def _traces(peer: str, bars: Sequence[tuple[float, _Bar]], edge: float) -> list[dict[str, Any]]:
    """The bars of one peer, and their figures in the right margin."""
    ratios = [bar.ratio for _, bar in bars]
    places = [place for place, _ in bars]
    middle = [ratio.median for ratio in ratios]
    meta = {"peer": peer}  # what a switch of the page hides
    drawn = {
        "type": "bar",
        "orientation": "h",
        "name": plain(peer),
        "meta": meta,
        "y": places,
        "base": [1.0] * len(bars),
        "x": [value - 1 for value in middle],
        "width": 0.84,
        "marker": {
            "color": [bar.color for _, bar in bars],
            "pattern": {"shape": ["/" if bar.noisy else "" for _, bar in bars], "size": 6, "solidity": 0.4},
        },
        "error_x": whiskers(middle, [ratio.low for ratio in ratios], [ratio.high for ratio in ratios]),
        "customdata": [bar.hover for _, bar in bars],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    figures = {
        "type": "scatter",
        "mode": "text",
        "meta": meta,
        "x": [edge] * len(bars),
        "y": places,
        "text": [("~" if bar.noisy else "") + times(bar.ratio.median) for _, bar in bars],
        "textposition": "middle right",
        "cliponaxis": False,
        "textfont": {"size": 11},
        "hoverinfo": "skip",
    }
    return [drawn, figures]
