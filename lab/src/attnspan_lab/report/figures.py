"""Charts of single calls: bars of ratios, the roofline, curves over the length, peak memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    hovered,
    line_at,
    names_axis,
    plain,
    ratio_text,
)

__all__ = ["memory_section", "ratio_section", "roofline_section", "scaling_sections"]

_BAR, _GAP = 17, 0.6  # Height of a bar in pixels, and gap between groups in bars.
_MANY = 12  # Families with at least this many cells are split by mask and head dim.

Point = tuple[float, float, str]  # x, y and hover text
Bar = tuple[float, str, Cell, Run]  # place, label, cell and run


def _grouped(cells: Iterable[Cell], title: Callable[[Cell], str]) -> dict[tuple[View, str], list[Cell]]:
    """Group cells by view and title."""
    groups: dict[tuple[View, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((View.of(cell), title(cell)), []).append(cell)
    return groups


def _facets(cells: Iterable[Cell]) -> Iterator[tuple[View, str, list[tuple[str, Cell]]]]:
    """Group cells into charts, with labels: by family, and large families also by mask and head dim."""

    def part(cell: Cell) -> str:
        return f"{cell.workload.family}: {cell.workload.mask.removesuffix('()')}, D {cell.workload.head_dim}"

    for (view, family), members in _grouped(cells, lambda cell: cell.workload.family).items():
        if len(members) <= _MANY:
            yield view, family, [(cell.workload.name, cell) for cell in members]
            continue
        for (_, title), found in _grouped(members, part).items():
            yield view, title, [(cell.workload.sizes, cell) for cell in found]


def _traces(
    cells: Sequence[Cell], palette: Palette, mode: str, point: Callable[[Cell, Run], Point | None]
) -> list[dict[str, Any]]:
    """Make a scatter trace of each peer that has points, with open marks for noisy runs."""
    traces = []
    for peer in palette.drawn:
        runs = [(cell, run) for cell in cells if (run := cell.run(peer)) is not None]
        found = [(cell, run, *at) for cell, run in runs if (at := point(cell, run)) is not None]
        if not found:
            continue
        hover = [f"<b>{plain(c.workload.name)}</b><br>{plain(peer)}: {text}" for c, *_, text in found]
        size, width, color, symbol = 7, 1.4, palette.color(peer), palette.symbol(peer)
        if peer == OURS:
            size, width = 9, 2.6
        symbols = [f"{symbol}-open" if run.noisy else symbol for _, run, *_ in found]
        look: dict[str, Any] = {"mode": mode, "marker": {"color": color, "symbol": symbols, "size": size}}
        look |= {"line": {"color": color, "width": width}, "name": plain(peer), "meta": {"peer": peer}}
        x, y = [x for _, _, x, *_ in found], [y for *_, y, _ in found]
        traces.append(hovered("scatter", hover, x=x, y=y, **look))
    return traces


def ratio_section(results: Results, palette: Palette) -> Section | None:
    """Make bars from 1 on a logarithmic axis, for each family and view. None without comparisons."""
    said, charts = verdicts(results.cells), []
    for view, title, members in _facets(results.cells):
        drawn = _bars(members)
        if not drawn:
            continue
        behind = [f"{n} against {r.peer}" for _, n, c, r in drawn if said[c.label, r.peer] == "behind"]
        alt = f"{title}, {view.label}: {len(drawn)} ratios of time, peer over {OURS}, " + (
            f"{OURS} is slower in {'; '.join(behind)}." if behind else "none is significantly below 1."
        )
        height = 64 + round(_BAR * (drawn[-1][0] + _GAP))
        charts.append(Chart(title, view.label, alt, *_ratio_bars(drawn, palette), height, view))
    lead = (
        f"A bar to the right of 1 means that the peer takes longer than {OURS}. Whiskers show the interval "
        "of the median ratio, from order statistics. The hover text has its level. Hatched bars are noisy."
    )
    return Section("ratios", f"Time against {OURS}", lead, charts) if charts else None


def _bars(members: Sequence[tuple[str, Cell]]) -> list[Bar]:
    """List the bars of a chart with their places. A gap separates the cells."""
    found: list[Bar] = []
    at = 0.0
    for label, cell in members:
        at += _GAP if any(run.ratio for run in cell.peers) else 0
        for run in cell.peers:
            if run.ratio is not None:
                at += 1
                found.append((at, label, cell, run))
    return found


def _ratio_bars(drawn: Sequence[Bar], palette: Palette) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    ratios = [run.ratio for *_, run in drawn if run.ratio is not None]
    low, high = min(1.0, *(r.low for r in ratios)) / 1.06, max(1.0, *(r.high for r in ratios)) * 1.04
    high = max(high, low * 1.5)
    data = []
    for peer in dict.fromkeys(run.peer for *_, run in drawn):
        data += _peer_bars([bar for bar in drawn if bar[3].peer == peer], palette, high)
    places: dict[int, list[float]] = {}
    for at, _, cell, _ in drawn:
        places.setdefault(id(cell), []).append(at)
    labels = {id(cell): plain(label) for _, label, cell, _ in drawn}
    middles = [(found[0] + found[-1]) / 2 for found in places.values()]
    ends = [math.log10(low), math.log10(high)]
    names = {"tickvals": middles, "ticktext": list(labels.values()), "showgrid": False, "zeroline": False}
    layout = {
        "barmode": "overlay",
        "margin": {"r": 58},
        "xaxis": axis(f"time of peer / time of {OURS}", log=True, range=ends, ticksuffix="x"),
        "yaxis": {"range": [drawn[-1][0] + 1, _GAP], **names},
        "shapes": [line_at(1, color="@ink", width=1.5)],
    }
    return data, layout


def _peer_bars(members: Sequence[Bar], palette: Palette, edge: float) -> list[dict[str, Any]]:
    """Make the bars of one peer, with the ratios in the right margin."""
    peer = members[0][3].peer
    found = [(run.ratio, run.noisy) for *_, run in members if run.ratio is not None]
    common: dict[str, Any] = {"meta": {"peer": peer}, "y": [at for at, *_ in members]}
    pattern = {"shape": ["/" if noisy else "" for _, noisy in found], "size": 6, "solidity": 0.4}
    drawn = bars(
        [(ratio.low, ratio.median, ratio.high) for ratio, _ in found],
        [_ratio_hover(cell, run) for *_, cell, run in members],
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

    def point(cell: Cell, run: Run) -> Point | None:
        rate, share = cell.flops_per_second(run), cell.bandwidth_share(run, roof)
        peak = f"{percent(cell.share(run, roof))} of the peak"
        text = f"{rate_text(rate)}<br>{peak}, {percent(share)} of the bandwidth"
        return (cell.intensity, rate, text) if rate and cell.intensity > 0 else None

    for (view, _), cells in _grouped(results.cells, lambda _: "").items():
        data = _traces(cells, palette, "markers", point)
        if not data:
            continue
        top = reached(cells, roof, view)
        alt = f"Roofline, {view.label}: FLOP/s over FLOP per byte." + (
            f" {OURS} comes nearest to the peak with {percent(top[1])} at {top[0]}." if top else ""
        )
        layout = {"xaxis": axis("FLOP per byte", log=True), "yaxis": axis("useful FLOP/s", log=True)}
        data = _roof(roof, view.dtype, [x for trace in data for x in trace["x"]]) + data
        charts.append(Chart("Roofline", view.label, alt, data, layout, 480, view))
    lead = (
        "Useful FLOP/s (visible pairs only) over the FLOP per byte of minimum traffic. The roof was measured "
        f"on this machine: {rate_text(roof.read_bandwidth, 'B/s')} of read bandwidth, and the highest peak "
        "of the element type, which no run exceeds. Open marks are noisy cells. Points above the slope read "
        "data from a cache."
    )
    return Section("roofline", "Roofline", lead, charts, layout="single") if charts else None


def _roof(roof: Ceilings, dtype: str, found: Sequence[float]) -> list[dict[str, Any]]:
    """Draw the slope of the bandwidth up to the peak, then the peak, around the found intensities."""
    best = roof.best(dtype)
    if best is None:
        return []
    kind, peak = best
    name, ridge = f"{plain(kind)} {rate_text(peak)}", peak / roof.read_bandwidth
    left, right = min(ridge, *found) / 2, max(ridge, *found) * 2
    return [
        {
            "type": "scatter",
            "mode": "lines+text",
            "x": [left, ridge, right],
            "y": [left * roof.read_bandwidth, peak, peak],
            "text": ["", "", name],
            "textposition": "bottom left",
            "textfont": {"size": 11},
            "line": {"color": "@ink", "width": 2},
            "hovertemplate": f"{name}<br>{plain(roof.notes.get(kind, ''))}<extra></extra>",
        }
    ]


def scaling_sections(results: Results, palette: Palette) -> tuple[Section, ...]:
    """Make curves of FLOP/s and time per visible pair over the length. Empty if no length varies."""
    roof = results.roof
    series = {
        key: sorted(members, key=lambda cell: cell.workload.k_len)
        for key, members in _grouped(results.cells, _line_title).items()
        if len({cell.workload.k_len for cell in members}) > 1
    }
    if not series:
        return ()

    def charts(what: str, y_axis: dict[str, Any], figure: Any, text: Any, with_roof: bool) -> list[Chart]:
        def point(cell: Cell, run: Run) -> Point | None:
            value = figure(cell, run)
            return None if value is None else (cell.workload.k_len, value, text(value))

        made = []
        for (view, title), cells in series.items():
            ticks = sorted({cell.workload.k_len for cell in cells})
            texts = [f"{tick // 1024}K" if tick % 1024 == 0 else f"{tick}" for tick in ticks]
            layout = {"xaxis": axis("keys", log=True, tickvals=ticks, ticktext=texts), "yaxis": y_axis}
            data = [_roof_line(cells, roof)] if with_roof and roof else []
            data += _traces(cells, palette, "lines+markers", point)
            over = f"over {ticks[0]:,} to {ticks[-1]:,} keys, a line for each peer."
            alt = f"{title}, {view.label}: {what} {over}"
            made.append(Chart(title, view.label, alt, data, layout, 270, view))
        return made

    lead = (
        "Useful FLOP/s: only visible pairs count as work. The dashed line is the roof: the measured peak of "
        "the element type, or the limit from the measured bandwidth."
    )
    flat = "A flat line means that cost depends only on visible pairs."
    rates, times = axis("FLOP/s", rangemode="tozero"), axis("s per visible pair", log=True)
    speed = charts("useful FLOP/s", rates, Cell.flops_per_second, rate_text, True)
    scaling = charts("time per visible pair", times, Cell.seconds_per_pair, seconds_text, False)
    return (
        Section("speed", "FLOP/s over length", lead, speed, layout="small"),
        Section("scaling", "Time per visible pair over length", flat, scaling, layout="small"),
    )


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


def memory_section(results: Results, palette: Palette) -> Section | None:
    """Make the chart of each call's peak memory. None if memory was not measured."""
    powers = range(10, 45, 5)
    ticks = {"tickvals": [2**n for n in powers], "ticktext": [bytes_text(2.0**n) for n in powers]}
    charts = []
    for view, title, members in _facets(results.cells):
        # A logarithmic axis cannot show 0.
        known = [found for found in members if any(run.peak_memory for run in found[1].runs)]
        rows = {id(cell): row for row, (_, cell) in enumerate(known)}

        def point(cell: Cell, run: Run, rows: dict[int, int] = rows) -> Point | None:
            size = run.peak_memory
            return (size, rows[id(cell)], bytes_text(size)) if size else None

        if known:
            names = names_axis([x for x, _ in known], range=[len(known) - 0.4, -0.6], zeroline=False)
            layout = {"xaxis": axis("bytes above the inputs", log=True, **ticks), "yaxis": names}
            alt = f"{title}, {view.label}: peak memory of {len(known)} workloads by peer."
            data = _traces([cell for _, cell in known], palette, "markers", point)
            charts.append(Chart(title, view.label, alt, data, layout, 70 + 24 * len(known), view))
    lead = "Bytes above the inputs at the peak of a call, on a logarithmic axis."
    return Section("memory", "Peak memory", lead, charts) if charts else None
