"""Cards, summaries against each peer, and the table of all cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnspan_lab.bench.cells import OURS, Cell, Run, verdicts
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.standings import MEAN_LENGTHS, Standing, View, reached, standings, targets
from attnspan_lab.bench.table import figures
from attnspan_lab.console import percent, times_text
from attnspan_lab.report.charts import Entry, Section, Table, ratio_text

__all__ = ["Filtered", "Row", "cards", "cell_table", "standing_section", "target_section"]


def cards(results: Results) -> list[tuple[str, str, list[str]]]:
    """Make cards of name, value and notes: one per view against the fastest peers, and one for training."""
    found = []
    for standing in standings(results.cells):
        if standing.peer is not None:
            continue
        label, lowest = standing.lowest
        ahead, behind, total = standing.count("ahead"), standing.count("behind"), len(standing.ratios)
        notes = [
            f"{ahead} of {total} cells ahead, {behind} behind",
            f"lowest {times_text(lowest.median)}, {label}",
        ]
        top = reached(results.cells, results.roof, standing.view)
        notes += [f"up to {percent(top[1])} of the measured peak"] if top else []
        found.append((standing.view.label, times_text(standing.mean), notes))
    ratios = [(cell.ratio, cell.attention) for cell in results.training if cell.ratio is not None]
    if ratios:
        ratio, peer = min(ratios, key=lambda entry: entry[0].median)
        notes = [f"against {peer}, the fastest peer", ratio_text(ratio)]
        found.append(("whole training steps", times_text(ratio.median), notes))
    return found


def standing_section(results: Results) -> Section | None:
    """Make the section of geometric means by view and peer. None without comparisons."""
    found = standings(results.cells)
    caption = (
        f"Time of the peer over {OURS}'s time. Ahead, behind: the sign test is significant, corrected for "
        "the number of ratios (Benjamini-Hochberg, 5 % false discoveries)"
    )
    lead = f"Above 1, {OURS} is faster."
    return Section("standing", "Standing", lead, table=_table(caption, found)) if found else None


def target_section(results: Results) -> Section | None:
    """Make the section that summarizes the grid. None if the grid was not measured."""
    found = targets(results)
    caption = "Mean and shares are geometric means. Lowest and behind count every cell of the grid"
    lengths = f"lengths {min(MEAN_LENGTHS):,} to {max(MEAN_LENGTHS):,}"
    title = f"The grid against {found[0].peer}" if found else ""
    lead = f"Time of the peer over {OURS}'s time. The mean is over {lengths}."
    return Section("grid", title, lead, table=_table(caption, found)) if found else None


def _table(caption: str, found: Sequence[Standing]) -> Table:
    dims = sorted({dim for standing in found for dim in standing.shares})
    rows = tuple(
        (
            Entry(", ".join(filter(None, (standing.view.label, standing.mask)))),
            Entry(standing.peer or "fastest of each cell"),
            Entry(times_text(standing.mean), standing.mean),
            Entry(ratio_text(standing.lowest[1]), standing.lowest[1].median, small=standing.lowest[0]),
            Entry(f"{len(standing.ratios)}", len(standing.ratios)),
            *(Entry(f"{standing.count(x)}", standing.count(x)) for x in ("ahead", "open", "behind")),
            *(Entry(percent(standing.shares.get(dim)), standing.shares.get(dim)) for dim in dims),
        )
        for standing in found
    )
    columns = ("view", "peer", "geometric mean", "lowest", "cells", "ahead", "open", "behind")
    peaks = tuple(f"of peak, D {dim}" for dim in dims)
    return Table(caption, columns + peaks, rows, frozenset({"view", "peer"}))


@dataclass(frozen=True)
class Row:
    """A row of the table of all cells.

    Args:
        entries: Cells of the row.
        data: Values for the filters, by name.
        marked: Whether the row is highlighted.
    """

    entries: tuple[Entry, ...]
    data: dict[str, str]
    marked: bool = False


@dataclass(frozen=True)
class Filtered:
    """A long table with a filter for each name in its rows' data.

    Args:
        title, lead, caption: Texts above the table.
        columns: Names of the columns.
        rows: All rows.
        words: Number of leading columns that hold text.
        hint: Placeholder of the search field.
    """

    title: str
    lead: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    words: int
    hint: str

    @property
    def filters(self) -> dict[str, list[str]]:
        """Values of each filter, in the order of the rows."""
        return {x: list(dict.fromkeys(row.data[x] for row in self.rows)) for x in self.rows[0].data}


def cell_table(results: Results) -> Filtered | None:
    """Make the table of all runs, including runs that failed with their reasons. None without cells."""
    roof, said = results.roof, verdicts(results.cells)
    shown = figures(results.cells, roof)

    def row(cell: Cell, run: Run) -> Row:
        values = [(figure.value(cell, run, roof), figure.text) for figure in shown]
        entries = [Entry(text(value), value) for value, text in values]
        return _row(cell, run, entries, said.get((cell.label, run.peer)) == "behind")

    rows = tuple(row(cell, run) for cell in results.cells for run in cell.runs)
    if not rows:
        return None
    return Filtered(
        "All cells",
        "Every workload with every peer, or the reason why a peer could not run. Click on a heading to sort.",
        "Times, ratios against attnspan (above 1, attnspan is faster), rates, memory",
        ("workload", "peer", "state", "ratio", *(figure.name for figure in shown)),
        rows,
        words=3,
        hint="name, mask, reason",
    )


def _row(cell: Cell, run: Run, figures: Sequence[Entry], slower: bool) -> Row:
    work, view = cell.workload, View.of(cell)
    state = "ran" if run.reason is None else "could not run"
    state = "noisy" if run.noisy else f"faster than {OURS}" if slower else state
    cold = ", cold caches" if cell.cold else ""
    entries = (
        Entry(work.name, small=f"{view.label}{cold}; {work.sizes}; {work.mask}"),
        Entry(run.peer, small=run.note),
        Entry(run.reason or (f"faster than {OURS}" if slower else "ran"), badge="noisy" if run.noisy else ""),
        Entry(ratio_text(run.ratio), run.ratio.median if run.ratio else None),
        *figures,
    )
    data = {"family": work.family, "mode": cell.mode, "dtype": work.dtype, "peer": run.peer, "state": state}
    return Row(entries, data, marked=run.peer == OURS)
