"""The zoo as a page: totals, charts, and the table of all cells with its filters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnspan_lab.bench.cells import OURS
from attnspan_lab.console import NONE, bytes_text, percent, seconds_text, times_text
from attnspan_lab.report.charts import (
    Chart,
    Entry,
    Section,
    Table,
    axis,
    bars,
    hovered,
    line_at,
    names_axis,
    plain,
)
from attnspan_lab.report.page import write_sections
from attnspan_lab.zoo.results import Cell, Row, Speed, ZooResults
from attnspan_lab.zoo.table import COLUMNS, SPEED_COLUMNS, line_of, speed_line, total_lines
from attnspan_lab.zoo.verdicts import (
    FACTOR,
    FLOOR,
    JUDGED,
    Summary,
    complaints,
    is_exact,
    is_own,
    rounding_ratio,
    summary_of,
)

__all__ = ["write_page"]

_LEAD = (
    "Small models with random weights run with several attentions, with and without torch.compile, on plain, "
    "packed and padded batches. If a model also fails when the identity replaces attention, the failure is "
    "the model's own and does not count."
)
_COLORS = {"attnspan": "@ours", "sdpa": "@peer1", "flex": "@peer2"}


def write_page(results: ZooResults, path: Path) -> None:
    """Write one self-contained HTML file with all results.

    Raises:
        ModuleNotFoundError: jinja2 or plotly is not installed (the extra ``bench``).

    Example:
        >>> import tempfile
        >>> page = Path(tempfile.mkdtemp()) / "zoo.html"
        >>> write_page(ZooResults(rows=(Row("llama", "transformers", "decoder"),)), page)
        >>> "llama" in page.read_text(encoding="utf-8")
        True
    """
    summary, rows = summary_of(results.rows), results.rows
    write_sections(
        path,
        title="attnspan in other projects' models",
        lead=_LEAD,
        sections=(
            _totals(summary),
            _wrong(rows),
            _errors(rows),
            _speed(results.speed),
            _architectures(rows),
            _cells(rows),
        ),
        environment=results.environment | {f"zoo {k}": v for k, v in results.settings.items()},
        glance="attnspan in these models.",
        cards=_cards(summary) if rows else (),
        complete=results.complete,
    )


def _cards(summary: Summary) -> list[tuple[str, str, list[str]]]:
    def card(name: str, shares: dict[str, Any]) -> tuple[str, str, list[str]]:
        others = [f"{x} {shares[x]}" for x in JUDGED if x != OURS and shares[x].total]
        return name, str(shares[OURS]), others

    name, share, others = card("architectures that compile to one graph", summary.compiles)
    return [
        ("architectures without a problem", str(summary.spotless), []),
        (name, percent(summary.compiles[OURS].share), [f"{OURS} {share}", *others]),
        ("no more graphs than SDPA", str(summary.graphs), ["over three lengths"]),
        card("cells within the rounding error of eager", summary.exact),
        card("architectures that leak between documents", summary.leaking),
        card("architectures with a (tokens, tokens) tensor", summary.all_pairs),
    ]


def _totals(summary: Summary) -> Section | None:
    caption = "Only models that run when the identity replaces attention count"
    table = Table(caption, ("total", *JUDGED), total_lines(summary))
    lead = "Each attention over all architectures."
    return Section("totals", "Totals", lead, table=table) if summary.architectures else None


def _wrong(rows: Sequence[Row]) -> Section | None:
    """Make the section on problems with attnspan. None without problems."""
    lines = [(row.name, what) for row in rows for what in complaints(row)]
    table = Table("One row per problem", ("architecture", "finding"), lines)
    lead = "Failures that are not the model's own."
    return Section("wrong", f"Problems with {OURS}", lead, table=table) if lines else None


def _errors(rows: Sequence[Row]) -> Section | None:
    """Make the chart of errors against float64, by architecture and attention."""
    names = [name for name in JUDGED if name != "eager"]
    found = [row for row in rows if any(_worst(row, name) is not None for name in names)]
    if not found:
        return None
    data = [_points(found, name) for name in names]
    lead = (
        "The larger error of results and gradients, over the float32 error of the eager implementation. "
        "The reference of both errors is the eager implementation in float64. "
        f"Errors up to {FACTOR:.0f} times eager's error plus {FLOOR:.1e} count as rounding."
    )
    most = max(x for trace in data for x in trace["x"])
    ends = [math.log10(0.2), math.log10(max(10.0, 1.5 * most))]
    layout = {
        "xaxis": axis("error over the eager implementation's", log=True, range=ends, dtick="D2"),
        "yaxis": names_axis([row.name for row in found]),
        "shapes": [line_at(FACTOR, color="@peer4")],
        "showlegend": True,
    }
    alt = f"Errors of {', '.join(names)} in {len(found)} architectures, up to {most:.3g} times eager's."
    chart = Chart("Error in float32", "the worst layout of each", alt, data, layout, 110 + 17 * len(found))
    return Section("errors", "Exactness", lead, (chart,), layout="single")


def _worst(row: Row, name: str) -> float | None:
    cells = [x for x in row.cells if x.implementation == name]
    ratios = [x for cell in cells if (x := rounding_ratio(row, cell)) is not None and 0 < x < math.inf]
    return max(ratios, default=None)


def _points(rows: Sequence[Row], name: str) -> dict[str, Any]:
    points = [(value, i, row) for i, row in enumerate(rows) if (value := _worst(row, name)) is not None]
    symbols = {"attnspan": "circle", "sdpa": "square-open", "flex": "x"}
    return hovered(
        "scatter",
        [f"{plain(row.name)}, {name}: {times_text(x)}" for x, _, row in points],
        mode="markers",
        name=name,
        x=[x for x, *_ in points],
        y=[i for _, i, _ in points],
        marker={"color": _COLORS[name], "symbol": symbols[name], "size": 8},
    )


def _speed(speeds: Sequence[Speed]) -> Section | None:
    """Make the section on ratios of time and memory by model. None if nothing was timed."""
    if not speeds:
        return None
    lead = (
        "Compiled training steps (forward and backward) of larger models, with attnspan and with SDPA on the "
        "same batch. Times alternate. Memory is the peak above the weights, in separate processes. "
        "Above 1, attnspan is better."
    )
    times = [(x.name, x.ratio.median, x.ratio.low, x.ratio.high) for x in speeds if x.ratio]
    sizes = [(x.name, r, r, r) for x in speeds if (r := x.memory_ratio) is not None]
    charts = [
        _ratios(title, found)
        for title, found in (("SDPA's time over attnspan's", times), ("SDPA's memory over attnspan's", sizes))
        if found
    ]
    rows: list[tuple[Entry | str, ...]] = []
    for x in speeds:
        name, batch, *texts, missing = speed_line(x)
        rows.append((name, batch, *map(Entry, texts, _figures(x)), missing))
    table = Table("Medians. ~ marks ratios with a wide interval", [x.name for x in SPEED_COLUMNS], rows)
    return Section("speed", "Training steps", lead, charts, table)


def _figures(x: Speed) -> tuple[float | None, ...]:
    seconds = [x.seconds[name].median if name in x.seconds else None for name in ("sdpa", OURS)]
    peaks = [x.peaks.get(name) for name in ("sdpa", OURS)]
    return (*seconds, x.ratio.median if x.ratio else None, *peaks, x.memory_ratio)


def _ratios(title: str, found: Sequence[tuple[str, float, float, float]]) -> Chart:
    found = sorted(found, key=lambda x: -x[1])
    words = [f"{name} {times_text(x)}" for name, x, *_ in found]
    look: dict[str, Any] = {"y": list(range(len(found))), "width": 0.65, "marker": {"color": "@ours"}}
    drawn = bars([(low, x, high) for _, x, low, high in found], list(map(plain, words)), **look)
    layout = {
        "xaxis": axis("times", rangemode="tozero"),
        "yaxis": names_axis([name for name, *_ in found], showgrid=False),
        "shapes": [line_at(1.0, color="@peer4")],
    }
    note, alt = "above 1, attnspan is better", f"{title}: {'; '.join(words)}."
    return Chart(title, note, alt, [drawn], layout, 90 + 24 * len(found))


def _architectures(rows: Sequence[Row]) -> Section | None:
    table = Table("One row per architecture", [x.name for x in COLUMNS], list(map(line_of, rows)))
    lead = "own: the model also fails with the identity. error: attnspan's largest error over eager's error."
    return Section("architectures", "Architectures", lead, table=table) if rows else None


def _cells(rows: Sequence[Row]) -> Section | None:
    """Make the table of every cell of every architecture."""
    found = [(row, cell) for row in rows for cell in row.cells]
    columns = (
        *("architecture", "attention", "state", "mode", "layout", "error", "gradients", "over eager"),
        *("graphs", "compilation", "step", "memory", "largest tensor", "all pairs"),
    )
    caption = (
        "error: difference from float64. over eager: the larger error over eager's error. memory: peak of "
        "torch's allocator"
    )
    lines, filters = [_cell(*x) for x in found], [_filters(*x) for x in found]
    table = Table(caption, columns, lines, filters, "name, reason, layout")
    lead = "Every architecture with every attention that ran. Times and memory are measured with tiny models."
    return Section("cells", "All cells", lead, table=table) if found else None


def _filters(row: Row, cell: Cell) -> dict[str, str]:
    about = {"library": row.library, "kind": row.kind, "attention": cell.implementation}
    return about | {"mode": cell.mode, "layout": cell.layout, "state": _state(row, cell)}


def _cell(row: Row, cell: Cell) -> tuple[Entry | str, ...]:
    state = _state(row, cell)
    ratio, seconds = rounding_ratio(row, cell), cell.seconds.median if cell.seconds else None
    flagged = state not in ("ran", "own")
    # The identity is not meant to be exact.
    compared = cell.implementation != "identity"
    errors = (cell.output_error, cell.gradient_error) if compared else (None, None)
    return (
        Entry(row.name, small=row.kind),
        cell.implementation,
        Entry(cell.reason or cell.leaks or ("" if flagged else state), badge=state if flagged else ""),
        cell.mode,
        cell.layout,
        *(Entry(NONE if x is None else f"{x:.1e}", _finite(x)) for x in errors),
        Entry(times_text(ratio), _finite(ratio)),
        Entry(NONE if cell.graphs is None else f"{cell.graphs}", cell.graphs),
        Entry(seconds_text(cell.compile_seconds), cell.compile_seconds),
        Entry(seconds_text(seconds), seconds),
        Entry(bytes_text(cell.peak), cell.peak),
        _shape(cell.largest),
        _shape(cell.pairs[0]) if cell.pairs else NONE,
    )


def _state(row: Row, cell: Cell) -> str:
    if cell.failed:
        return "own" if is_own(row, cell) else cell.failed
    if not cell.backward:
        return "no backward"
    if cell.implementation == "identity":
        return "ran"
    return "leaks" if cell.leaks else "inexact" if is_exact(row, cell) is False else "ran"


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or NONE
