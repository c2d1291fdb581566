"""Headline figures, the standing against each peer, and the table of all cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnspan.tools.bench.results import Cell, Results, Run
from attnspan.tools.bench.standings import Standing, View, peak_share, reached, standings
from attnspan.tools.bench.targets import MEAN_HEAD_DIMS, MEAN_LENGTHS, targets
from attnspan.tools.report._chart import OURS, Section, Table, TableCell
from attnspan.tools.report._numbers import NONE, bytes_text, percent, rate, ratio_text, seconds_text, times

__all__ = ["Card", "Row", "cards", "cell_rows", "cell_table", "standing_section", "target_section"]


@dataclass(frozen=True)
class Card:
    """A headline: what it is, the figure, the small print."""

    name: str
    figure: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A run in the table of all cells, with what it is filtered by."""

    cells: tuple[TableCell, ...]
    family: str
    mode: str
    dtype: str
    peer: str
    state: str
    ours: bool


def cards(results: Results) -> tuple[Card, ...]:
    """One headline per view against the fastest peer of each cell, one for training."""
    heads = [_card(results, standing) for standing in standings(results.cells) if standing.peer is None]
    slowest = min(
        (cell for cell in results.training if cell.ratio is not None),
        key=lambda cell: cell.ratio.median if cell.ratio else 0.0,
        default=None,
    )
    if slowest is not None and slowest.ratio is not None:
        note = f"against {slowest.attention}, the closest"
        heads.append(Card("whole training steps", times(slowest.ratio.median), (note,)))
    return tuple(heads)


def _card(results: Results, standing: Standing) -> Card:
    label, lowest = standing.lowest
    notes = [
        f"{standing.ahead} of {len(standing.ratios)} cells ahead, {standing.behind} behind",
        f"lowest {times(lowest.median)}, {label}",
    ]
    top = reached(results.cells, results.ceilings, standing.view) if results.ceilings else None
    if top is not None:
        doubt = ": it was measured too low" if top[1] > 1 else ""
        notes.append(f"up to {percent(top[1])} of the measured peak{doubt}")
    return Card(standing.view.label, times(standing.geometric_mean), tuple(notes))


def standing_section(results: Results) -> Section | None:
    """Geometric means by view and peer; None where nothing was compared."""
    found = standings(results.cells)
    if not found:
        return None
    rows = tuple(
        (
            TableCell(standing.view.label),
            TableCell(standing.peer or "fastest of each cell"),
            TableCell(times(standing.geometric_mean), standing.geometric_mean),
            TableCell(ratio_text(standing.lowest[1]), standing.lowest[1].median, small=standing.lowest[0]),
            TableCell(f"{len(standing.ratios)}", len(standing.ratios)),
            TableCell(f"{standing.ahead}", standing.ahead),
            TableCell(f"{standing.undecided}", standing.undecided),
            TableCell(f"{standing.behind}", standing.behind),
        )
        for standing in found
    )
    columns = ("view", "peer", "geometric mean", "lowest", "cells", "ahead", "undecided", "behind")
    table = Table(
        f"Time of the peer over {OURS}'s. Ahead, behind: the whole interval of 95 % lies on that side of 1",
        columns,
        rows,
        frozenset({0, 1}),
    )
    return Section("standing", "Standing", f"Above 1, {OURS} is faster.", table=table)


def target_section(results: Results) -> Section | None:
    """The grid in a few figures; None where it was not measured."""
    found = targets(results)
    if not found:
        return None
    dims = sorted({dim for target in found for dim in target.shares})
    rows = tuple(
        (
            TableCell(f"{target.mode}, {target.dtype}, {target.mask}"),
            TableCell(times(target.mean), target.mean),
            TableCell(ratio_text(target.slowest[1]), target.slowest[1].median, small=target.slowest[0]),
            TableCell(f"{target.losses} of {len(target.ratios)}", target.losses),
            *(TableCell(percent(target.share(dim)), target.share(dim)) for dim in dims),
        )
        for target in found
    )
    lengths = f"{min(MEAN_LENGTHS):,} to {max(MEAN_LENGTHS):,}"
    dim_names = " and ".join(f"{dim}" for dim in MEAN_HEAD_DIMS)
    table = Table(
        "Mean and shares are geometric; lowest and slower are over every cell of the grid",
        ("cells", "mean", "lowest", "slower", *(f"of peak, D {dim}" for dim in dims)),
        rows,
        frozenset({0}),
    )
    means = f"the mean is over lengths {lengths} and head dims {dim_names}"
    lead = f"Time of {found[0].peer} over {OURS}'s; {means}."
    return Section("grid", f"The grid against {found[0].peer}", lead, table=table)


@dataclass(frozen=True)
class _Column:
    """A column of the table of all cells: its name and what stands in it."""

    name: str
    figure: Callable[[Cell, Run], float | None]
    text: Callable[[float | None], str]


def _columns(results: Results) -> list[_Column]:
    """Columns of figures that at least one run has."""
    ceilings = results.ceilings
    columns = [
        _Column("time", lambda cell, run: cell.seconds(run), seconds_text),
        _Column("spread", lambda cell, run: timing.spread if (timing := cell.timing(run)) else None, percent),
        _Column("FLOP/s", lambda cell, run: cell.flops_per_second(run), rate),
        _Column("of peak", lambda cell, run: peak_share(cell, run, ceilings) if ceilings else None, percent),
        _Column(
            "of bandwidth",
            lambda cell, run: cell.bandwidth_share(run, ceilings) if ceilings else None,
            percent,
        ),
        _Column("per call", lambda _, run: run.execute.median if run.execute else None, seconds_text),
        _Column("pipelined", lambda _, run: run.pipelined.median if run.pipelined else None, seconds_text),
        _Column("dispatch", lambda _, run: run.dispatch.median if run.dispatch else None, seconds_text),
        _Column("trace", lambda _, run: run.trace_seconds, seconds_text),
        _Column("compile", lambda _, run: run.compile_seconds, seconds_text),
        _Column("peak memory", lambda _, run: run.peak_memory, bytes_text),
        _Column("utilisation", lambda _, run: run.utilisation, percent),
        _Column(
            "energy",
            lambda _, run: run.energy_joules,
            lambda value: NONE if value is None else f"{value:.3g} J",
        ),
        _Column(
            "difference", lambda _, run: run.error, lambda value: NONE if value is None else f"{value:.1e}"
        ),
    ]
    runs = [(cell, run) for cell in results.cells for run in cell.runs]
    return [column for column in columns if any(column.figure(cell, run) is not None for cell, run in runs)]


def cell_table(results: Results) -> tuple[str, ...]:
    """Names of the columns of the table of all cells."""
    return ("workload", "peer", "state", "ratio", *(column.name for column in _columns(results)))


def cell_rows(results: Results) -> tuple[Row, ...]:
    """Every run of every cell, those that could not run among them, with their reasons."""
    columns = _columns(results)
    return tuple(
        _row(cell, run, tuple(_figure(column, cell, run) for column in columns))
        for cell in results.cells
        for run in cell.runs
    )


def _figure(column: _Column, cell: Cell, run: Run) -> TableCell:
    value = column.figure(cell, run)
    return TableCell(column.text(value), value)


def _row(cell: Cell, run: Run, figures: tuple[TableCell, ...]) -> Row:
    work = cell.workload
    view = View.of(cell)
    state = "ran" if run.reason is None else "could not run"
    if run.noisy:
        state = "noisy"
    slower = run.ratio is not None and run.ratio.is_slower
    words = (
        TableCell(work.name, small=f"{view.label}; {work.sizes}; {work.mask}"),
        TableCell(run.peer, small=run.note),
        TableCell(
            run.reason or ("faster than ours" if slower else "ran"), badge="noisy" if run.noisy else ""
        ),
        TableCell(ratio_text(run.ratio), run.ratio.median if run.ratio else None),
    )
    if slower and not run.noisy:
        state = "faster than ours"
    return Row((*words, *figures), work.family, cell.mode, work.dtype, run.peer, state, run.peer == OURS)
