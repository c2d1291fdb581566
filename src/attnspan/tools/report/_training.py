"""Whole training steps: the table of attentions, and the steps of a watched run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnspan.tools.bench.results import MonitorRecord, Results, TrainingCell
from attnspan.tools.report._chart import OURS, Chart, Section, Table, TableCell, decades_axis, whiskers
from attnspan.tools.report._numbers import NONE, bytes_text, percent, plain, rate, ratio_text, seconds_text

__all__ = ["monitor_section", "training_section"]

_HEIGHT = 300
_BARS = 40
_PHASES = {
    "forward": "@ours",
    "backward": "@peer1",
    "optimizer": "@peer2",
    "communication": "@peer3",
    "data": "@peer5",
    "host": "@peer7",
}


def training_section(results: Results) -> Section | None:
    """The reference job with each attention; None where it was not run."""
    if not results.training:
        return None
    rows = tuple(_training_row(cell) for cell in results.training)
    table = Table(
        "The same training steps with each attention; ratio: its step time over attnspan's",
        (
            "attention",
            "state",
            "tokens/s",
            "step",
            "ratio",
            "peak memory",
            "note",
        ),
        rows,
        frozenset({0, 1, 6}),
    )
    ran = [cell for cell in results.training if cell.tokens_per_second is not None]
    charts = (_tokens_chart(ran),) if ran else ()
    lead = "Whole steps of the reference job, data and optimizer included, taken in turn."
    return Section("training", "Training steps", lead, charts, table, wide=True)


def _training_row(cell: TrainingCell) -> tuple[TableCell, ...]:
    speed = cell.tokens_per_second.median if cell.tokens_per_second else None
    seconds = cell.seconds.median if cell.seconds else None
    return (
        TableCell(cell.attention),
        TableCell(cell.reason or "ran", badge="noisy" if cell.noisy else ""),
        TableCell(NONE if speed is None else f"{speed:,.0f}", speed),
        TableCell(seconds_text(seconds), seconds),
        TableCell(ratio_text(cell.ratio), cell.ratio.median if cell.ratio else None),
        TableCell(bytes_text(cell.peak_memory), cell.peak_memory),
        TableCell(cell.note),
    )


def _tokens_chart(cells: Sequence[TrainingCell]) -> Chart:
    rates = [cell.tokens_per_second for cell in cells if cell.tokens_per_second is not None]
    middle = [samples.median for samples in rates]
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(cells))),
        "x": middle,
        "width": 0.6,
        "marker": {"color": ["@ours" if cell.attention == OURS else "@peer7" for cell in cells]},
        "error_x": whiskers(
            middle, [samples.quartiles[0] for samples in rates], [samples.quartiles[2] for samples in rates]
        ),
        "customdata": [
            f"<b>{plain(cell.attention)}</b><br>{value:,.0f} tokens/s"
            for cell, value in zip(cells, middle, strict=True)
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
    layout = {
        "xaxis": {"title": {"text": "tokens per second"}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": list(range(len(cells))),
            "ticktext": [plain(cell.attention) for cell in cells],
            "range": [len(cells) - 0.5, -0.5],
            "showgrid": False,
        },
    }
    words = "; ".join(f"{cell.attention} {value:,.0f}" for cell, value in zip(cells, middle, strict=True))
    return Chart(
        "Tokens per second",
        "median, whiskers at the quartiles",
        f"Tokens per second: {words}.",
        {"data": [trace], "layout": layout},
        70 + 42 * len(cells),
    )


def monitor_section(results: Results) -> Section | None:
    """Phase shares and curves over the steps of a watched training; None where none was watched."""
    records = results.monitor
    if not records:
        return None
    curves = (
        _steps_chart(records, "Time of a step", "seconds", lambda r: r.seconds, seconds_text, compiled=True),
        _steps_chart(
            records, "Tokens per second", "tokens/s", lambda r: r.tokens_per_second, "{:,.0f} tokens/s".format
        ),
        _steps_chart(
            records,
            "Attention speed",
            "FLOP/s over visible pairs",
            lambda r: r.attention_flops_per_second,
            rate,
        ),
        _steps_chart(records, "Attention, share of the ceiling", "share", lambda r: r.ceiling_share, percent),
        _steps_chart(records, "Attention, share of the step", "share", lambda r: r.attention_share, percent),
        _steps_chart(records, "Resident memory", "bytes", lambda r: r.memory, bytes_text),
        _steps_chart(records, "Device memory", "bytes", lambda r: r.device_memory, bytes_text),
        _steps_chart(records, "Utilisation", "busy share", lambda r: r.utilisation, percent),
    )
    widest = max(record.steps for record in records)
    thinned = f" A point is the mean of up to {widest:,} steps." if widest > 1 else ""
    return Section(
        "monitor",
        "Steps of a training",
        f"Steps {records[0].step:,} to {records[-1].step:,} of a watched training: where each step's "
        f"time went, and what it reached. A triangle marks a step in which something was compiled.{thinned}",
        (_phases_chart(records), *(chart for chart in curves if chart is not None)),
    )


def _phases_chart(records: Sequence[MonitorRecord]) -> Chart:
    steps = [record.step for record in records]
    as_bars = len(records) <= _BARS
    data: list[dict[str, Any]] = []
    for phase, color in _PHASES.items():
        shares = [getattr(record.phases, phase) for record in records]
        if not any(shares):
            continue
        trace: dict[str, Any] = {
            "name": phase,
            "x": steps,
            "y": shares,
            "hovertemplate": f"{phase} %{{y:.1%}}<extra></extra>",
        }
        if as_bars:
            trace |= {"type": "bar", "marker": {"color": color}}
        else:
            trace |= {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "one",
                "fillcolor": color,
                "line": {"width": 0.5, "color": "@paper"},
            }
        data.append(trace)
    layout = {
        "barmode": "stack",
        "bargap": 0.08,
        "hovermode": "x unified",
        "showlegend": True,
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": "share of the step"}, "tickformat": ".0%", "range": [0, 1]},
    }
    names = ", ".join(trace["name"] for trace in data)
    return Chart(
        "Phases of a step",
        "phases that took no time are left out",
        f"Share of each step's time by phase ({names}) over {len(records)} steps.",
        {"data": data, "layout": layout},
        _HEIGHT,
    )


def _steps_chart(
    records: Sequence[MonitorRecord],
    title: str,
    unit: str,
    figure: Callable[[MonitorRecord], float | None],
    text: Callable[[float], str],
    *,
    compiled: bool = False,
) -> Chart | None:
    points = [(record, value) for record in records if (value := figure(record)) is not None]
    if not points:
        return None
    data = [_step_line(points, text)]
    if compiled and any(record.compile_seconds for record, _ in points):
        data.append(_compile_marks([point for point in points if point[0].compile_seconds]))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero", "exponentformat": "SI"},
    }
    if len(data) > 1:
        # Compilation takes as long as many steps: a linear axis would show nothing else.
        values = [value for _, value in points]
        layout["yaxis"] = decades_axis(min(values), max(values), unit, text)
    if text is percent:
        layout["yaxis"] |= {"tickformat": ".0%"}
    if text is bytes_text:
        layout["yaxis"] |= _bytes_axis(max(value for _, value in points))
    alt = f"{title} over {len(points)} steps: {text(points[0][1])} at first, {text(points[-1][1])} at last."
    return Chart(title, "", alt, {"data": data, "layout": layout}, _HEIGHT)


def _bytes_axis(top: float) -> dict[str, Any]:
    """Ticks at round binary sizes."""
    step = 1.0
    while top / step > 5:
        step *= 2
    ticks = [step * index for index in range(6) if step * index <= top * 1.2]
    return {"tickvals": ticks, "ticktext": ["0", *(bytes_text(tick) for tick in ticks[1:])]}


def _step_line(points: Sequence[tuple[MonitorRecord, float]], text: Callable[[float], str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(points) <= _BARS else "lines",
        "x": [record.step for record, _ in points],
        "y": [value for _, value in points],
        "line": {"color": "@ours", "width": 2},
        "customdata": [f"step {record.step}: {text(value)}" for record, value in points],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _compile_marks(points: Sequence[tuple[MonitorRecord, float]]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [record.step for record, _ in points],
        "y": [value for _, value in points],
        "marker": {"color": "@peer4", "symbol": "triangle-up", "size": 11},
        "customdata": [
            f"step {record.step}: {seconds_text(record.compile_seconds)} of compilation"
            for record, _ in points
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }
