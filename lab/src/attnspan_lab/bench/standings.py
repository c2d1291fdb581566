"""Summary of attnspan over many cells: geometric means of ratios, lowest cell, share of a ceiling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean

from attnspan_lab.bench.cells import Ceilings, Cell, verdicts
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.statistics import Interval

__all__ = ["MEAN_HEAD_DIMS", "MEAN_LENGTHS", "Standing", "View", "reached", "standings", "targets"]

# Cells of the grid that enter the means.
MEAN_LENGTHS = (1024, 2048, 4096, 8192)
MEAN_HEAD_DIMS = (64, 128)


@dataclass(frozen=True, order=True)
class View:
    """A set of cells that may be averaged: one device, one mode, one element type."""

    device: str
    mode: str
    dtype: str

    @classmethod
    def of(cls, cell: Cell) -> View:
        """Return the view of a cell."""
        return cls(cell.device, cell.mode, cell.workload.dtype)

    @property
    def label(self) -> str:
        """Text of the view. The device is omitted on CPU."""
        return f"{self.mode}, {self.dtype}{'' if self.device == 'cpu' else f', {self.device}'}"


@dataclass(frozen=True)
class Standing:
    """Ratios of one group of cells against one peer.

    Args:
        view: The group of cells.
        peer: Name of the peer. None means the fastest peer of each cell.
        ratios: Name of the workload, its ratio, and the verdict "ahead", "behind" or "open".
        mean: Geometric mean of the ratios. Above 1, attnspan is faster on average. None without ratios.
        mask: Mask of the grid's cells, or "" for other cells.
        shares: Geometric means of attnspan's shares of the highest ceiling, by head dim.
    """

    view: View
    peer: str | None
    ratios: tuple[tuple[str, Interval, str], ...]
    mean: float | None
    mask: str = ""
    shares: dict[int, float] = field(default_factory=dict)

    @property
    def lowest(self) -> tuple[str, Interval]:
        """The cell with the lowest ratio."""
        return min(self.ratios, key=lambda entry: entry[1].median)[:2]

    def count(self, verdict: str) -> int:
        """Count the cells with a verdict: "ahead", "behind" or "open"."""
        return sum(found == verdict for _, _, found in self.ratios)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value]
    return geometric_mean(known) if known else None


def standings(cells: Sequence[Cell]) -> tuple[Standing, ...]:
    """Compute for each view the standing against the fastest peer of each cell, then against each peer.

    Example:
        >>> from attnspan_lab.bench.cells import Run, Workload
        >>> work = Workload("tiny", "dense", 1, 8, 8, 64, 64, 32, 32, "float32", "full()")
        >>> runs = (Run("attnspan"), Run("sdpa", ratio=Interval.of([2.0] * 9)))
        >>> found = standings([Cell(work, "forward", 32768, 4e6, 4e5, runs)])
        >>> [(standing.peer, standing.mean, standing.count("ahead")) for standing in found]
        [(None, 2.0, 1), ('sdpa', 2.0, 1)]
    """
    said = verdicts(cells)
    found: dict[View, dict[str | None, list[tuple[str, Interval, str]]]] = {}
    for cell in cells:
        entries = {
            run.peer: (cell.workload.name, run.ratio, said[cell.label, run.peer])
            for run in cell.peers
            if run.ratio is not None
        }
        if entries:
            fastest = min(entries.values(), key=lambda entry: entry[1].median)
            by_peer = found.setdefault(View.of(cell), {})
            for peer, entry in ((None, fastest), *entries.items()):
                by_peer.setdefault(peer, []).append(entry)
    return tuple(
        Standing(view, peer, tuple(ratios), _mean(ratio.median for _, ratio, _ in ratios))
        for view, by_peer in found.items()
        for peer, ratios in by_peer.items()
    )


def targets(results: Results, peer: str = "sdpa-flash") -> tuple[Standing, ...]:
    """Summarize the grid by dtype, mode and mask against one peer. Empty if the file has no such cell.

    Means use the cells of `MEAN_LENGTHS` and `MEAN_HEAD_DIMS`. The lowest ratio is taken over all cells.
    """
    said, roof = verdicts(results.cells), results.roof
    groups: dict[tuple[View, str], list[tuple[Cell, Interval]]] = {}
    for cell in results.cells:
        run = cell.run(peer)
        if cell.workload.family == "grid" and run is not None and run.ratio is not None:
            key = (View.of(cell), cell.workload.mask.removesuffix("()"))
            groups.setdefault(key, []).append((cell, run.ratio))
    found = []
    for (view, mask), members in groups.items():
        entries = [(cell.workload.name, ratio, said[cell.label, peer]) for cell, ratio in members]
        counted = [
            (cell, ratio)
            for cell, ratio in members
            if cell.workload.k_len in MEAN_LENGTHS and cell.workload.head_dim in MEAN_HEAD_DIMS
        ]
        shares = {
            dim: _mean(cell.share(cell.ours, roof) for cell, _ in counted if cell.workload.head_dim == dim)
            for dim in MEAN_HEAD_DIMS
        }
        mean = _mean(ratio.median for _, ratio in counted)
        known = {dim: share for dim, share in shares.items() if share is not None}
        found.append(Standing(view, peer, tuple(entries), mean, mask, known))
    return tuple(found)


def reached(cells: Iterable[Cell], ceilings: Ceilings | None, view: View) -> tuple[str, float] | None:
    """Find the workload in which attnspan is nearest to the ceiling of the dtype, with its share."""
    found = [
        (cell.workload.name, share)
        for cell in cells
        if View.of(cell) == view and (share := cell.share(cell.ours, ceilings)) is not None
    ]
    return max(found, key=lambda entry: entry[1], default=None)
