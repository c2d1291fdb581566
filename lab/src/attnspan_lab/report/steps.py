"""Sections on training steps: a table of attentions, and loss and speed of a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from attnspan_lab.bench.cells import OURS
from attnspan_lab.bench.results import MonitorRecord, Results, TrainingCell
from attnspan_lab.console import NONE, bytes_text, percent, rate_text, seconds_text
from attnspan_lab.report.charts import (
    Chart,
    Entry,
    Section,
    Table,
    axis,
    bars,
    hovered,
    names_axis,
    plain,
    ratio_text,
)

__all__ = ["monitor_section", "training_section"]

_BARS = 40  # With more steps, charts show medians instead of a bar or mark for each step.
_PHASES = {
    "forward": "@ours",
    "backward": "@peer1",
    "optimizer": "@peer2",
    "communication": "@peer3",
    "data": "@peer5",
    "host": "@peer7",
}


def training_section(results: Results) -> Section | None:
    """Make the section on the reference job with each attention. None if it was not run."""
    if not results.training:
        return None
    columns = ("attention", "state", "tokens/s", "step", "ratio", "peak memory", "note")
    caption = "The same training steps with each attention. Ratio: step time over attnspan's step time"
    table = Table(caption, columns, list(map(_training_row, results.training)))
    ran = [cell for cell in results.training if cell.tokens_per_second is not None]
    lead = "Whole steps of the reference job, including data and optimizer, in turn."
    charts = (_tokens_chart(ran),) if ran else ()
    return Section("training", "Training steps", lead, charts, table, layout="single")


def _training_row(cell: TrainingCell) -> tuple[Entry | str, ...]:
    speed = cell.tokens_per_second.median if cell.tokens_per_second else None
    seconds = cell.seconds.median if cell.seconds else None
    return (
        cell.attention,
        Entry(cell.reason or "ran", badge="noisy" if cell.noisy else ""),
        Entry(NONE if speed is None else f"{speed:,.0f}", speed),
        Entry(seconds_text(seconds), seconds),
        Entry(ratio_text(cell.ratio), cell.ratio.median if cell.ratio else None),
        Entry(bytes_text(cell.peak_memory), cell.peak_memory),
        cell.note,
    )


def _tokens_chart(cells: Sequence[TrainingCell]) -> Chart:
    found = [(cell.attention, cell.tokens_per_second.quartiles) for cell in cells if cell.tokens_per_second]
    words = [f"{name} {middle:,.0f}" for name, (_, middle, _) in found]
    colors = ["@ours" if name == OURS else "@peer7" for name, *_ in found]
    look: dict[str, Any] = {"y": list(range(len(found))), "width": 0.6, "marker": {"color": colors}}
    drawn = bars([quartiles for _, quartiles in found], [f"{plain(x)} tokens/s" for x in words], **look)
    y_axis = names_axis([name for name, *_ in found], showgrid=False)
    layout = {"xaxis": axis("tokens per second", rangemode="tozero"), "yaxis": y_axis}
    alt = f"Tokens per second: {'; '.join(words)}."
    note = "median, whiskers at the quartiles"
    return Chart("Tokens per second", note, alt, [drawn], layout, 70 + 42 * len(found))


def monitor_section(results: Results) -> Section | None:
    """Make the section on loss, speed and phases of a training. None without records."""
    records = results.monitor
    if not records:
        return None
    curves: tuple[tuple[str, str, Callable[[MonitorRecord], float | None], Callable[[float], str]], ...] = (
        ("Tokens per second", "tokens/s", lambda r: r.tokens_per_second, "{:,.0f} tokens/s".format),
        ("Time of a step", "seconds", lambda r: r.seconds, seconds_text),
        ("Attention speed", "FLOP/s over visible pairs", lambda r: r.attention_flops_per_second, rate_text),
        ("Attention, share of the ceiling", "share", lambda r: r.ceiling_share, percent),
        ("Attention, share of the step", "share", lambda r: r.attention_share, percent),
        ("Resident memory", "GiB", lambda r: r.memory, bytes_text),
        ("Device memory", "GiB", lambda r: r.device_memory, bytes_text),
        ("Utilisation", "busy share", lambda r: r.utilisation, percent),
    )
    speed, time, *others = [chart for curve in curves if (chart := _steps_chart(records, *curve)) is not None]
    widest = max(record.steps for record in records)
    lead = f"Steps {records[0].step:,} to {records[-1].step:,}."
    lead += f" Each point is the mean of up to {widest:,} steps." if widest > 1 else ""
    if len(records) > _BARS:
        window = _window(records)
        lead += f" Faint lines show single points, strong lines the running median of {window} points."
    if any(record.compile_seconds for record in records):
        lead += " A triangle marks a step with a compilation."
    charts = (*_loss_charts(results), speed, time, _phases_chart(records), *others)
    return Section("monitor", "Training", lead, charts)


def _loss_charts(results: Results) -> list[Chart]:
    losses = [(record.step, record.loss) for record in results.monitor if record.loss is not None]
    held_out = [(evaluation.step, evaluation.held_out) for evaluation in results.evaluations]
    data, words = [], []
    if losses:
        data += _lines(losses, "{:.3f}".format, name="training")
        words.append(_ends("training", losses))
    if held_out:
        x, y = [step for step, _ in held_out], [loss for _, loss in held_out]
        hover = [f"after step {step}: {loss:.3f} held out" for step, loss in held_out]
        marker = {"color": "@peer1", "symbol": "diamond", "size": 10}
        data.append(hovered("scatter", hover, x=x, y=y, mode="markers", marker=marker, name="held out"))
        words.append(_ends("held out", held_out))
    layout = {"xaxis": axis("step"), "yaxis": axis("loss"), "showlegend": True}
    return [Chart("Loss", "", f"Loss: {'; '.join(words)}.", data, layout, 330)] if data else []


def _ends(name: str, points: Sequence[tuple[int, float]]) -> str:
    return f"{name} {points[0][1]:.3f} at first, {points[-1][1]:.3f} at last"


def _window(points: Sequence[object]) -> int:
    """Compute the points of a running median."""
    return 2 * (len(points) // 20) + 1


def _lines(
    points: Sequence[tuple[int, float]], text: Callable[[float], str], scale: float = 1.0, **look: Any
) -> list[dict[str, Any]]:
    """Draw a line with marks. For many points, draw a running median over a faint line."""
    x, y = [step for step, _ in points], [value / scale for _, value in points]
    hover = [f"step {step}: {text(value)}" for step, value in points]
    look["line"] = {"color": "@ours", "width": 2}
    if len(x) <= _BARS:
        return [hovered("scatter", hover, x=x, y=y, mode="lines+markers", **look)]
    half = _window(x) // 2
    smooth = [median(y[max(0, i - half) : i + half + 1]) for i in range(len(y))]
    faint = {"line": {"color": "@ours", "width": 1}, "opacity": 0.45, "showlegend": False}
    strong = {"type": "scatter", "x": x, "y": smooth, "mode": "lines", "hoverinfo": "skip", **look}
    return [hovered("scatter", hover, x=x, y=y, mode="lines", **faint), strong]


def _phases_chart(records: Sequence[MonitorRecord]) -> Chart:
    steps, data = [record.step for record in records], []
    for phase, color in _PHASES.items():
        shares = [getattr(record.phases, phase) for record in records]
        look: dict[str, Any] = {"type": "bar", "marker": {"color": color}}
        if len(records) > _BARS:
            line = {"width": 0.5, "color": "@paper"}
            look = {"type": "scatter", "mode": "lines", "stackgroup": "one", "fillcolor": color, "line": line}
        hover = f"{phase} %{{y:.1%}}<extra></extra>"
        data += (
            [{"name": phase, "x": steps, "y": shares, "hovertemplate": hover, **look}] if any(shares) else []
        )
    layout = {
        "barmode": "stack",
        "bargap": 0.08,
        "hovermode": "x unified",
        "showlegend": True,
        "xaxis": axis("step"),
        "yaxis": axis("share of the step", tickformat=".0%", range=[0, 1]),
    }
    names = ", ".join(str(found["name"]) for found in data)
    alt = f"Share of each step's time by phase ({names}) over {len(records)} steps."
    return Chart("Phases of a step", "phases that took no time are left out", alt, data, layout, 330)


def _steps_chart(
    records: Sequence[MonitorRecord],
    title: str,
    unit: str,
    figure: Callable[[MonitorRecord], float | None],
    text: Callable[[float], str],
) -> Chart | None:
    points = [(record, value) for record in records if (value := figure(record)) is not None]
    if not points:
        return None
    compiled = [point for point in points if point[0].compile_seconds] if unit == "seconds" else []
    scale = 2.0**30 if unit == "GiB" else 1.0
    data = _lines([(record.step, value) for record, value in points], text, scale)
    if compiled:
        hover = [f"step {r.step}: {seconds_text(r.compile_seconds)} of compilation" for r, _ in compiled]
        marker = {"color": "@peer4", "symbol": "triangle-up", "size": 11}
        x, y = [record.step for record, _ in compiled], [seconds for _, seconds in compiled]
        data.append(hovered("scatter", hover, x=x, y=y, mode="markers", marker=marker))
    # A compilation takes as long as many steps, so a linear axis would hide the other steps.
    y_axis = axis(unit, log=True) if compiled else axis(unit, rangemode="tozero")
    y_axis |= {"tickformat": ".0%"} if text is percent else {}
    alt = f"{title} over {len(points)} steps: {text(points[0][1])} at first, {text(points[-1][1])} at last."
    return Chart(title, "", alt, data, {"xaxis": axis("step"), "yaxis": y_axis})
