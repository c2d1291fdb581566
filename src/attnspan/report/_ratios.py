"""Bars from 1.0 on a logarithmic axis: how much longer each peer takes, with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnspan.bench.results import Cell, Ratio, Results
from attnspan.report._chart import (
    OURS,
    Chart,
    Palette,
    Section,
    Table,
    TableCell,
    facets,
    log_ticks,
    whiskers,
)
from attnspan.report._numbers import TIMES, plain, ratio_text, seconds_text, times

__all__ = ["ratio_section", "tuning_section"]

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


def tuning_section(results: Results) -> Section | None:
    """What tuning gained; None where nothing was tuned."""
    if not results.tuning:
        return None
    bars = [
        _Bar(
            group=f"{index}",
            label=", ".join(gain.key.values()),
            peer="",
            ratio=gain.ratio,
            noisy=False,
            color="@ours" if gain.accepted else "@peer7",
            hover=f"<b>{plain(_key(gain.key))}</b><br>{ratio_text(gain.ratio)}<br>{plain(_key(gain.config))}",
        )
        for index, gain in enumerate(results.tuning)
    ]
    rows = tuple(
        (
            TableCell(_key(gain.key)),
            TableCell(_key(gain.config) if gain.accepted else "default"),
            TableCell(seconds_text(gain.default.median), gain.default.median),
            TableCell(seconds_text(gain.tuned.median), gain.tuned.median),
            TableCell(ratio_text(gain.ratio), gain.ratio.median),
            TableCell(f"{gain.failures}", gain.failures),
        )
        for gain in results.tuning
    )
    accepted = sum(gain.accepted for gain in results.tuning)
    chart = Chart(
        "Gain of tuning",
        "grey: the default stays",
        f"Ratio of the default's time to the tuned time for {len(bars)} keys; tuning won in {accepted}.",
        _figure(bars, "time of the default / time tuned", labels_above=True),
        _height(bars, labels_above=True),
    )
    table = Table(
        "Configurations by key; gain: time of the default over time tuned; failed: what did not run",
        ("key", "configuration", "default", "tuned", "gain", "failed"),
        rows,
        frozenset({0, 1}),
    )
    lead = (
        f"Keys that tuning searched: {len(bars)}. A configuration other than the default won in {accepted}."
    )
    return Section("tuning", "Tuning", lead, (chart,), table, wide=True)


def _key(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _positions(bars: Sequence[_Bar], labels_above: bool) -> tuple[list[float], dict[str, float]]:
    """A place for each bar, and one for the label of each group: in its middle, or on a line above it."""
    places: list[float] = []
    groups: dict[str, list[float]] = {}
    at = 0.0
    for index, bar in enumerate(bars):
        starts = not index or bars[index - 1].group != bar.group
        at += 1.0 + (_GAP + labels_above if starts else 0.0)
        places.append(at)
        groups.setdefault(bar.group, []).append(at)
    middle = {group: (members[0] + members[-1]) / 2 for group, members in groups.items()}
    above = {group: members[0] - 1 for group, members in groups.items()}
    return places, above if labels_above else middle


def _height(bars: Sequence[_Bar], labels_above: bool = False) -> int:
    places, _ = _positions(bars, labels_above)
    return 64 + round(_BAR * (places[-1] + _GAP))


def _figure(bars: Sequence[_Bar], title: str, labels_above: bool = False) -> dict[str, Any]:
    places, groups = _positions(bars, labels_above)
    labels = [plain(label) for label in {bar.group: bar.label for bar in bars}.values()]
    low, high = min(1.0, *(bar.ratio.low for bar in bars)), max(1.0, *(bar.ratio.high for bar in bars))
    low, high = low / 1.06, max(high * 1.04, low * 1.5)
    data = []
    for peer in dict.fromkeys(bar.peer for bar in bars):
        mine = [(place, bar) for place, bar in zip(places, bars, strict=True) if bar.peer == peer]
        data += _traces(peer, mine, high)
    y_axis = {"range": [places[-1] + 1, _GAP], "showgrid": False, "zeroline": False}
    if labels_above:
        data.append(_labels(labels, list(groups.values())))
        y_axis["showticklabels"] = False
    else:
        y_axis |= {"tickvals": list(groups.values()), "ticktext": labels}
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


def _labels(labels: Sequence[str], places: Sequence[float]) -> dict[str, Any]:
    """Long names, each on a line of its own beside the line at 1."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": [1.0] * len(labels),
        "y": list(places),
        "text": list(labels),
        "textposition": "middle right",
        "hoverinfo": "skip",
    }


def _traces(peer: str, bars: Sequence[tuple[float, _Bar]], edge: float) -> list[dict[str, Any]]:
    """The bars of one peer, and their figures in the right margin."""
    ratios = [bar.ratio for _, bar in bars]
    places = [place for place, _ in bars]
    middle = [ratio.median for ratio in ratios]
    # What a switch of the page hides; there is none for tuning.
    meta = {"peer": peer} if peer else {}
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
