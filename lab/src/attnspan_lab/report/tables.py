"""Cards, summaries against each peer, and the table of all cells."""

from __future__ import annotations

from collections.abc import Sequence

from attnspan_lab.bench.cells import OURS, Cell, Run, verdicts
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.standings import MEAN_LENGTHS, Standing, View, reached, standings, targets
from attnspan_lab.bench.table import figures
from attnspan_lab.console import percent, times_text
from attnspan_lab.report.charts import Entry, Section, Table, ratio_text

__all__ = ["cards", "cell_section", "standing_section", "target_section"]


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
    rows: list[tuple[Entry | str, ...]] = []
    for standing in found:
        label, lowest = standing.lowest
        counts = [len(standing.ratios), *map(standing.count, ("ahead", "open", "behind"))]
        shares = [standing.shares.get(dim) for dim in dims]
        rows.append(
            (
                ", ".join(filter(None, (standing.view.label, standing.mask))),
                standing.peer or "fastest of each cell",
                Entry(times_text(standing.mean), standing.mean),
                Entry(ratio_text(lowest), lowest.median, small=label),
                *(Entry(f"{count}", count) for count in counts),
                *(Entry(percent(share), share) for share in shares),
            )
        )
    columns = ("view", "peer", "geometric mean", "lowest", "cells", "ahead", "open", "behind")
    return Table(caption, (*columns, *(f"of peak, D {dim}" for dim in dims)), rows)


def cell_section(results: Results) -> Section | None:
    """Make the table of all runs, including runs that failed with their reasons. None without cells."""
    if not results.cells:
        return None
    roof, said = results.roof, verdicts(results.cells)
    shown = figures(results.cells, roof)
    rows, filters = [], []
    for cell, run in ((x, run) for x in results.cells for run in x.runs):
        slower = said.get((cell.label, run.peer)) == "behind"
        values = [(figure.value(cell, run, roof), figure.text) for figure in shown]
        rows.append((*_named(cell, run, slower), *(Entry(text(value), value) for value, text in values)))
        work, state = cell.workload, "ran" if run.reason is None else "could not run"
        state = "noisy" if run.noisy else f"faster than {OURS}" if slower else state
        about = {"family": work.family, "mode": cell.mode, "dtype": work.dtype}
        filters.append(about | {"peer": run.peer, "state": state})
    lead = (
        "Every workload with every peer, or the reason why a peer could not run. Click on a heading to sort."
    )
    caption = "Times, ratios against attnspan (above 1, attnspan is faster), rates, memory"
    columns = ("workload", "peer", "state", "ratio", *(figure.name for figure in shown))
    table = Table(caption, columns, rows, filters, "name, mask, reason")
    return Section("cells", "All cells", lead, table=table)


def _named(cell: Cell, run: Run, slower: bool) -> tuple[Entry, ...]:
    """Make the first columns of a run's row: workload, peer, state and ratio."""
    work, cold = cell.workload, ", cold caches" if cell.cold else ""
    return (
        Entry(work.name, small=f"{View.of(cell).label}{cold}; {work.sizes}; {work.mask}"),
        Entry(run.peer, small=run.note),
        Entry(run.reason or (f"faster than {OURS}" if slower else "ran"), badge="noisy" if run.noisy else ""),
        Entry(ratio_text(run.ratio), run.ratio.median if run.ratio else None),
    )
