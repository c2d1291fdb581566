"""Charts of single calls: bars of ratios, the roofline, curves over the length, peak memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from attnspan_lab.bench.cells import OURS, Ceilings, Cell, Run, verdicts
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.standings import View, reached
from attnspan_lab.console import bytes_text, percent, rate_text, seconds_text, times_text
from attnspan_lab.report.charts import (
    Chart,
    Palette,
    Section,
    axis,
    bars,
    facets,
    hovered,
    line_at,
    names_axis,
    plain,
    ratio_text,
    trace,
)

__all__ = ["memory_section", "ratio_section", "roofline_section", "scaling_sections"]

_BAR, _GAP = 17, 0.6  # Height of a bar in pixels, and gap between groups in bars.


def ratio_section(results: Results, palette: Palette) -> Section | None:
    """Make bars from 1 on a logarithmic axis, for each family and view. None without comparisons."""
    said, charts = verdicts(results.cells), []
    for view, title, members in facets(results.cells):
        drawn = [(label, cell, run) for label, cell in members for run in cell.peers if run.ratio is not None]
        if not drawn:
            continue
        behind = [f"{n} against {r.peer}" for n, c, r in drawn if said[c.label, r.peer] == "behind"]
        alt = f"{title}, {view.label}: {len(drawn)} ratios of time, peer over {OURS}, " + (
            f"{OURS} is slower in {'; '.join(behind)}." if behind else "none is significantly below 1."
        )
        places, middles = _places([cell for _, cell, _ in drawn])
        height = 64 + round(_BAR * (places[-1] + _GAP))
        data, layout = _ratio_bars(drawn, places, palette)
        labels = list({id(cell): plain(label) for label, cell, _ in drawn}.values())
        layout["yaxis"] |= {"tickvals": middles, "ticktext": labels}
        charts.append(Chart(title, view.label, alt, data, layout, height, view))
    lead = (
        f"A bar to the right of 1 means that the peer takes longer than {OURS}. Whiskers show the interval "
        "of the median ratio, from order statistics. The hover text has its level. Hatched bars are noisy."
    )
    return Section("ratios", f"Time against {OURS}", lead, tuple(charts)) if charts else None


def _places(cells: Sequence[Cell]) -> tuple[list[float], list[float]]:
    """Compute the position of each bar, and the middle of each group for its label."""
    places: list[float] = []
    groups: dict[int, list[float]] = {}
    at = 0.0
    for cell in cells:
        at += 1.0 if id(cell) in groups else 1.0 + _GAP
        places.append(at)
        groups.setdefault(id(cell), []).append(at)
    return places, [(members[0] + members[-1]) / 2 for members in groups.values()]


def _ratio_bars(
    drawn: Sequence[tuple[str, Cell, Run]], places: Sequence[float], palette: Palette
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    ratios = [run.ratio for _, _, run in drawn if run.ratio is not None]
    low, high = min(1.0, *(r.low for r in ratios)) / 1.06, max(1.0, *(r.high for r in ratios)) * 1.04
    high = max(high, low * 1.5)
    ends = [math.log10(low), math.log10(high)]
    data = []
    for peer in dict.fromkeys(run.peer for _, _, run in drawn):
        mine = [(at, cell, run) for at, (_, cell, run) in zip(places, drawn, strict=True) if run.peer == peer]
        data += _peer_bars(peer, mine, palette, high)
    layout = {
        "barmode": "overlay",
        "margin": {"r": 58},
        "xaxis": axis(f"time of peer / time of {OURS}", log=True, range=ends, ticksuffix="x"),
        "yaxis": {"range": [places[-1] + 1, _GAP], "showgrid": False, "zeroline": False},
        "shapes": [line_at(1, color="@ink", width=1.5)],
    }
    return data, layout


def _peer_bars(
    peer: str, members: Sequence[tuple[float, Cell, Run]], palette: Palette, edge: float
) -> list[dict[str, Any]]:
    """Make the bars of one peer, with the ratios in the right margin."""
    found = [(run.ratio, run.noisy) for _, _, run in members if run.ratio is not None]
    common: dict[str, Any] = {"meta": {"peer": peer}, "y": [at for at, _, _ in members]}
    pattern = {"shape": ["/" if noisy else "" for _, noisy in found], "size": 6, "solidity": 0.4}
    drawn = bars(
        [(ratio.low, ratio.median, ratio.high) for ratio, _ in found],
        [_ratio_hover(cell, run) for _, cell, run in members],
        name=plain(peer),
        base=[1.0] * len(members),
        width=0.84,
        marker={"color": palette.color(peer), "pattern": pattern},
        error_x={"thickness": 1.2, "width": 2},
        **common,
    )
    figures = {
        **common,
        "type": "scatter",
        "mode": "text",
        "x": [edge] * len(members),
        "text": [f"{'~' if noisy else ''}{times_text(ratio.median)}" for ratio, noisy in found],
        "textposition": "middle right",
        "cliponaxis": False,
        "textfont": {"size": 11},
        "hoverinfo": "skip",
    }
    return [drawn, figures]


def _ratio_hover(cell: Cell, run: Run) -> str:
    assert run.ratio is not None
    return (
        f"<b>{plain(cell.workload.name)}</b><br>{plain(run.peer)}: {ratio_text(run.ratio)}"
        f"<br>{seconds_text(cell.seconds(run))}, {OURS} {seconds_text(cell.seconds(cell.ours))}"
        f"<br>{plain(cell.workload.sizes)}, {plain(cell.workload.mask)}{', cold caches' if cell.cold else ''}"
        f"<br>{run.ratio.pairs} pairs, {100 * run.ratio.level:.1f} %{', noisy' if run.noisy else ''}"
    )


def roofline_section(results: Results, palette: Palette) -> Section | None:
    """Make the roofline: each call's rate below the machine's ceiling. None without measured ceilings."""
    roof, charts = results.roof, []
    if roof is None:
        return None
    for view in dict.fromkeys(View.of(cell) for cell in results.cells):
        cells = [cell for cell in results.cells if View.of(cell) == view and cell.intensity > 0]
        if not any(run.ran for cell in cells for run in cell.runs):
            continue
        top = reached(cells, roof, view)
        alt = f"Roofline, {view.label}: FLOP/s over FLOP per byte." + (
            f" {OURS} comes nearest to the peak with {percent(top[1])} at {top[0]}." if top else ""
        )
        data = _roof(roof, view.dtype, cells) + _points(cells, palette, roof)
        layout = {
            "xaxis": axis("FLOP per byte", log=True),
            "yaxis": axis("useful FLOP/s", log=True),
        }
        charts.append(Chart("Roofline", view.label, alt, data, layout, 480, view))
    lead = (
        "Useful FLOP/s (visible pairs only) over the FLOP per byte of minimum traffic. The roof was measured "
        f"on this machine: {rate_text(roof.read_bandwidth, 'B/s')} of read bandwidth, and the highest peak "
        "of the element type, which no run exceeds. Open marks are noisy cells. Points above the slope read "
        "data from a cache."
    )
    return Section("roofline", "Roofline", lead, tuple(charts), layout="single") if charts else None


def _roof(roof: Ceilings, dtype: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Draw the slope of the bandwidth up to the peak, then the peak."""
    best = roof.best(dtype)
    if best is None:
        return []
    kind, peak = best
    note = plain(roof.notes.get(kind, ""))
    ridge, found = peak / roof.read_bandwidth, [cell.intensity for cell in cells]
    left, right = min(ridge, *found) / 2, max(ridge, *found) * 2
    return [
        {
            "type": "scatter",
            "mode": "lines+text",
            "x": [left, ridge, right],
            "y": [left * roof.read_bandwidth, peak, peak],
            "text": ["", "", f"{plain(kind)} {rate_text(peak)}"],
            "textposition": "bottom left",
            "textfont": {"size": 11},
            "line": {"color": "@ink", "width": 2},
            "hovertemplate": f"{plain(kind)}: {rate_text(peak)}<br>{note}<extra></extra>",
        }
    ]


def _points(cells: Sequence[Cell], palette: Palette, roof: Ceilings) -> list[dict[str, Any]]:
    def hover(cell: Cell, run: Run) -> str:
        rate = rate_text(cell.flops_per_second(run))
        return (
            f"<b>{plain(cell.workload.name)}</b><br>{plain(run.peer)}: {rate}"
            f"<br>{percent(cell.share(run, roof))} of the peak, "
            f"{percent(cell.bandwidth_share(run, roof))} of the bandwidth"
        )

    traces = []
    for peer in palette.drawn:
        runs = [(cell, run) for cell in cells if (run := cell.run(peer)) is not None and run.ran]
        symbol = palette.symbol(peer)
        marker = {
            "size": 9 if peer == OURS else 7,
            "opacity": 0.95 if peer == OURS else 0.7,
            "symbol": [f"{symbol}-open" if run.noisy else symbol for _, run in runs],
        }
        x, y = [cell.intensity for cell, _ in runs], [cell.flops_per_second(run) for cell, run in runs]
        texts = [hover(*found) for found in runs]
        traces += [trace(palette, peer, texts, mode="markers", x=x, y=y, marker=marker)] if runs else []
    return traces


def scaling_sections(results: Results, palette: Palette) -> tuple[Section, ...]:
    """Make curves of FLOP/s and time per visible pair over the length. Empty if no length varies."""
    roof, series = results.roof, _series(results.cells)
    if not series:
        return ()
    flops, per_pair = [], []
    for (view, title), cells in series.items():
        lengths = [cell.workload.k_len for cell in cells]
        words = f"over {min(lengths):,} to {max(lengths):,} keys, a line for each peer."
        ticks = sorted(set(lengths))
        texts = [f"{tick // 1024}K" if tick % 1024 == 0 else f"{tick}" for tick in ticks]
        x_axis = axis("keys", log=True, tickvals=ticks, ticktext=texts)
        curves = _curves(cells, palette, Cell.flops_per_second, rate_text)
        curves[:0] = [_roof_line(cells, roof)] if roof else []
        layout = {"xaxis": x_axis, "yaxis": axis("FLOP/s", rangemode="tozero")}
        alt = f"{title}, {view.label}: useful FLOP/s {words}"
        flops.append(Chart(title, view.label, alt, curves, layout, 270, view))
        curves = _curves(cells, palette, Cell.seconds_per_pair, seconds_text)
        layout = {"xaxis": x_axis, "yaxis": axis("s per visible pair", log=True)}
        alt = f"{title}, {view.label}: time per visible pair {words}"
        per_pair.append(Chart(title, view.label, alt, curves, layout, 270, view))
    lead = (
        "Useful FLOP/s: only visible pairs count as work. The dashed line is the roof: the measured peak of "
        "the element type, or the limit from the measured bandwidth."
    )
    flat = "A flat line means that cost depends only on visible pairs."
    return (
        Section("speed", "FLOP/s over length", lead, tuple(flops), layout="small"),
        Section("scaling", "Time per visible pair over length", flat, tuple(per_pair), layout="small"),
    )


def _series(cells: Sequence[Cell]) -> dict[tuple[View, str], list[Cell]]:
    """Group cells that differ only in length, by view and title."""
    grouped: dict[tuple[View, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((View.of(cell), _line_title(cell)), []).append(cell)
    return {
        key: sorted(members, key=lambda cell: cell.workload.k_len)
        for key, members in grouped.items()
        if len({cell.workload.k_len for cell in members}) > 1
    }


def _line_title(cell: Cell) -> str:
    """Describe the fixed parameters of a line. The number of heads may depend on the length."""
    work = cell.workload
    dim = f"D {work.head_dim}" if work.head_dim == work.v_dim else f"D {work.head_dim}/{work.v_dim}"
    parts = [work.mask.removesuffix("()"), dim]
    parts += [f"{work.q_heads // work.kv_heads}:1 heads"] if work.q_heads != work.kv_heads else []
    if work.q_len != work.k_len:
        parts.append("1 query" if work.q_len == 1 else f"{work.q_len} queries")
    parts += [f"batch {work.batch}"] if work.batch > 1 else []
    return f"{work.family}: {', '.join(parts)}{', cold' if cell.cold else ''}"


def _roof_line(cells: Sequence[Cell], roof: Ceilings) -> dict[str, Any]:
    rates = [roof.attainable(cell.workload.dtype, cell.intensity) for cell in cells]
    hover, x = [f"roof {rate_text(rate)}" for rate in rates], [cell.workload.k_len for cell in cells]
    line = {"color": "@faint", "width": 1, "dash": "dash"}
    return hovered("scatter", hover, mode="lines", x=x, y=rates, line=line)


def _curves(
    cells: Sequence[Cell],
    palette: Palette,
    figure: Callable[[Cell, Run], float | None],
    text: Callable[[float | None], str],
) -> list[dict[str, Any]]:
    traces = []
    for peer in palette.drawn:
        found = [(cell, run) for cell in cells if (run := cell.run(peer)) is not None]
        points = [(c, value) for c, run in found if (value := figure(c, run)) is not None]
        if not points:
            continue
        hover = [f"<b>{plain(c.workload.name)}</b><br>{plain(peer)}: {text(value)}" for c, value in points]
        x, y = [cell.workload.k_len for cell, _ in points], [value for _, value in points]
        line = {"color": palette.color(peer), "width": 2.6 if peer == OURS else 1.4}
        marker = {"size": 7 if peer == OURS else 6}
        traces.append(trace(palette, peer, hover, mode="lines+markers", x=x, y=y, line=line, marker=marker))
    return traces


def memory_section(results: Results, palette: Palette) -> Section | None:
    """Make the chart of each call's peak memory. None if memory was not measured."""
    charts = []
    for view, title, members in facets(results.cells):
        # A logarithmic axis cannot show 0.
        known = [found for found in members if any(run.peak_memory for run in found[1].runs)]
        if not known:
            continue
        data = [found for peer in palette.drawn if (found := _sizes(peer, known, palette))]
        powers = range(10, 45, 5)
        ticks = {"tickvals": [2**n for n in powers], "ticktext": [bytes_text(2.0**n) for n in powers]}
        layout = {
            "xaxis": axis("bytes above the inputs", log=True, **ticks),
            "yaxis": names_axis(
                [label for label, _ in known], range=[len(known) - 0.4, -0.6], zeroline=False
            ),
        }
        alt = f"{title}, {view.label}: peak memory of {len(known)} workloads by peer."
        charts.append(Chart(title, view.label, alt, data, layout, 70 + 24 * len(known), view))
    lead = "Bytes above the inputs at the peak of a call, on a logarithmic axis."
    return Section("memory", "Peak memory", lead, tuple(charts)) if charts else None


def _sizes(peer: str, members: Sequence[tuple[str, Cell]], palette: Palette) -> dict[str, Any] | None:
    points = [
        (row, cell, run.peak_memory)
        for row, (_, cell) in enumerate(members)
        if (run := cell.run(peer)) is not None and run.peak_memory
    ]
    hover = [f"<b>{plain(c.workload.name)}</b><br>{plain(peer)}: {bytes_text(size)}" for _, c, size in points]
    x, y = [size for _, _, size in points], [row for row, _, _ in points]
    marker = {"size": 10, "opacity": 0.9}
    return trace(palette, peer, hover, mode="markers", x=x, y=y, marker=marker) if points else None
