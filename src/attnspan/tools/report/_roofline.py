"""The roofline: what each call reached, under what the machine can do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attnspan.tools.bench.results import Ceilings, Cell, Results
from attnspan.tools.bench.standings import View, peak_share, reached
from attnspan.tools.report._chart import OURS, Chart, Palette, Section, decades_axis
from attnspan.tools.report._numbers import bandwidth, percent, plain, rate

__all__ = ["roofline_section"]

_HEIGHT = 480


def roofline_section(results: Results, palette: Palette) -> Section | None:
    """One chart per view; None where no ceiling was measured or nothing ran."""
    ceilings = results.ceilings
    if ceilings is None:
        return None
    charts = []
    for view in dict.fromkeys(View.of(cell) for cell in results.cells):
        cells = [cell for cell in results.cells if View.of(cell) == view and cell.intensity > 0]
        if not any(run.ran for cell in cells for run in cell.runs):
            continue
        top = reached(cells, ceilings, view)
        alt = f"Roofline, {view.label}: FLOP/s over FLOP per byte." + (
            f" {OURS} comes nearest to the peak with {percent(top[1])} at {top[0]}." if top else ""
        )
        figure = {
            "data": _roof(ceilings, view.dtype, cells) + _points(cells, palette, ceilings),
            "layout": _layout(ceilings, cells),
        }
        charts.append(Chart("Roofline", view.label, alt, figure, _HEIGHT, view))
    if not charts:
        return None
    return Section(
        "roofline",
        "Roofline",
        "Useful FLOP/s (visible pairs only) over the least traffic a call must have. The roof is measured on "
        f"this machine: reading {bandwidth(ceilings.read_bandwidth)}, and the peaks by kind of "
        "instruction. Open marks are of noisy cells. Data that stay in a cache may stand above the slope.",
        tuple(charts),
        wide=True,
    )


def _layout(ceilings: Ceilings, cells: Sequence[Cell]) -> dict[str, Any]:
    left, right = _span(ceilings, cells)
    rates = [cell.flops_per_second(run) or 0.0 for cell in cells for run in cell.runs if run.ran]
    peaks = [ceilings.flops[kind] for kind in ceilings.kinds(cells[0].workload.dtype)]
    return {
        "xaxis": decades_axis(left, right, "FLOP per byte", "{:,g}".format),
        "yaxis": decades_axis(min(rates), max(rates + peaks), "useful FLOP/s", rate),
    }


def _span(ceilings: Ceilings, cells: Sequence[Cell]) -> tuple[float, float]:
    """Ends of the axis of intensities: what was measured, and the corners of the roof."""
    corners = [
        ceilings.flops[kind] / ceilings.read_bandwidth for kind in ceilings.kinds(cells[0].workload.dtype)
    ]
    found = [*corners, *(cell.intensity for cell in cells)]
    return min(found) / 2, max(found) * 2


def _roof(ceilings: Ceilings, dtype: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The slope of the bandwidth up to each peak, then the peak; the highest peak is drawn strong."""
    kinds = ceilings.kinds(dtype)
    ridges = [ceilings.flops[kind] / ceilings.read_bandwidth for kind in kinds]
    left, right = _span(ceilings, cells)
    traces = []
    for kind, ridge in zip(kinds, ridges, strict=True):
        peak = ceilings.flops[kind]
        best = kind == kinds[-1]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+text",
                "x": [left, ridge, math.sqrt(ridge * right), right] if best else [ridge, right],
                "y": [left * ceilings.read_bandwidth, peak, peak, peak] if best else [peak, peak],
                "text": ["", "", "", f"{plain(kind)} {rate(peak)}"]
                if best
                else ["", f"{plain(kind)} {rate(peak)}"],
                "textposition": "top left",
                "textfont": {"size": 11},
                "line": {
                    "color": "@ink" if best else "@faint",
                    "width": 2 if best else 1,
                    "dash": "solid" if best else "dash",
                },
                "hovertemplate": f"{plain(kind)}: {rate(peak)}"
                f"<br>{plain(ceilings.notes.get(kind, ''))}<extra></extra>",
            }
        )
    return traces


def _points(cells: Sequence[Cell], palette: Palette, ceilings: Ceilings) -> list[dict[str, Any]]:
    """Ours last, on top of the others."""
    traces = []
    for peer in (*palette.peers, OURS):
        runs = [(cell, run) for cell in cells if (run := cell.run(peer)) is not None and run.ran]
        if not runs:
            continue
        symbol = palette.symbol(peer)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plain(peer),
                "meta": {"peer": peer},
                "x": [cell.intensity for cell, _ in runs],
                "y": [cell.flops_per_second(run) for cell, run in runs],
                "marker": {
                    "color": palette.color(peer),
                    "size": 9 if peer == OURS else 7,
                    "opacity": 0.95 if peer == OURS else 0.7,
                    "symbol": [f"{symbol}-open" if run.noisy else symbol for _, run in runs],
                },
                "customdata": [
                    f"<b>{plain(cell.workload.name)}</b><br>{plain(peer)}: {rate(cell.flops_per_second(run))}"
                    f"<br>{percent(peak_share(cell, run, ceilings))} of the peak, "
                    f"{percent(cell.bandwidth_share(run, ceilings))} of the bandwidth"
                    for cell, run in runs
                ],
                "hovertemplate": "%{customdata}<extra></extra>",
            }
        )
    return traces
