"""Tables of a results file as Markdown, for pages that cite it. An incomplete or unclean file is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnspan.errors import expect
from attnspan_lab.bench.cells import Cell, verdicts
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.timing import LEAST_ROUNDS
from attnspan_lab.console import ratio_digits

__all__ = ["cite", "reasons_not_to_cite"]


def reasons_not_to_cite(results: Results) -> list[str]:
    """Reasons why a page must not cite the file. Empty for a complete run of committed code.

    Example:
        >>> reasons_not_to_cite(Results(environment={"revision": "abc with changes"}, complete=False))
        ['the run stopped before its last cell', 'the code had uncommitted changes (abc with changes)']
    """
    reasons = [] if results.complete else ["the run stopped before its last cell"]
    revision = results.environment.get("revision")
    if revision is None or "changes" in revision:
        reasons.append(f"the code had uncommitted changes ({revision})")
    ratios = [run.ratio for cell in results.cells for run in cell.peers if run.ratio]
    few = sum(ratio.pairs < LEAST_ROUNDS for ratio in ratios)
    if few:
        reasons.append(f"{few} of {len(ratios)} ratios have fewer than {LEAST_ROUNDS} pairs of samples")
    return reasons


def cite(results: Results) -> str:
    """Speedups over each peer, as Markdown tables.

    A cell is the median of paired ratios, time of the peer over time of attnspan. "~" marks an interval that
    is wider than the run's ``--width``. "?" marks a ratio that may be 1.

    Args:
        results: A complete run of committed code.

    Returns:
        One table for each peer on the grid, and one table for all named workloads.

    Raises:
        OptionError: The file must not be cited.
    """
    reasons, remedy = (
        reasons_not_to_cite(results),
        "Commit your changes, and measure again with more --seconds",
    )
    expect(not reasons, "results to cite", "a complete run of committed code", ", ".join(reasons), remedy)
    said = verdicts(results.cells)
    on_grid = [cell for cell in results.cells if cell.workload.family == "grid"]
    named = [cell for cell in results.cells if cell.workload.family != "grid"]
    tables = [_grid_table(peer, on_grid, said) for peer in _peers(on_grid)]
    if named:
        tables.append(_table(["workload", *_peers(named)], _rows_by_peer(named, said)))
    return "\n\n".join(tables)


def _peers(cells: list[Cell]) -> list[str]:
    return list(dict.fromkeys(run.peer for cell in cells for run in cell.peers if run.ratio))


def _grid_table(peer: str, cells: list[Cell], said: Any) -> str:
    """Rows by dtype, mask and mode, columns by head dim and length."""
    shapes = sorted({(cell.workload.head_dim, cell.workload.k_len) for cell in cells})
    kinds = dict.fromkeys((c.workload.dtype, c.workload.mask, c.mode) for c in cells)
    found = {(*_kind(c), c.workload.head_dim, c.workload.k_len): c for c in cells}
    rows = [
        [", ".join(kind), *(_text(found.get((*kind, *shape)), peer, said) for shape in shapes)]
        for kind in kinds
    ]
    header = [f"speedup over {peer}", *(f"D{dim} S{length}" for dim, length in shapes)]
    return _table(header, [row for row in rows if any(x != "-" for x in row[1:])])


def _kind(cell: Cell) -> tuple[str, str, str]:
    return cell.workload.dtype, cell.workload.mask, cell.mode


def _rows_by_peer(cells: list[Cell], said: Any) -> Iterator[list[str]]:
    for cell in cells:
        name = f"{cell.workload.name}, {cell.workload.dtype}, {cell.mode}{', cold' if cell.cold else ''}"
        yield [name, *(_text(cell, peer, said) for peer in _peers(cells))]


def _text(cell: Cell | None, peer: str, said: Any) -> str:
    run = cell.run(peer) if cell else None
    if cell is None or run is None or run.ratio is None:
        return "-"
    unsure = "?" if said.get((cell.label, peer)) == "open" else ""
    return f"{unsure}{ratio_digits(run.ratio.median)}{' ~' if run.noisy else ''}"


def _table(header: list[str], rows: Any) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
