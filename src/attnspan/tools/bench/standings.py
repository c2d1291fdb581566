"""How attnspan stands over many cells: geometric means of ratios, the lowest cell, the share of a ceiling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from attnspan.tools.bench.cells import Ceilings, Cell, verdicts
from attnspan.tools.bench.results import Results
from attnspan.tools.bench.statistics import Interval

__all__ = ["MEAN_HEAD_DIMS", "MEAN_LENGTHS", "Standing", "View", "reached", "standings", "targets"]

# Cells of the grid that means are over; every cell counts for the lowest.
MEAN_LENGTHS = (1024, 2048, 4096, 8192)
MEAN_HEAD_DIMS = (64, 128)


@dataclass(frozen=True, order=True)
class View:
    """Cells that may be averaged: one device, one mode, one element type."""

    device: str
    mode: str
    dtype: str

    @classmethod
    def of(cls, cell: Cell) -> View:
        """The view that a cell belongs to."""
        return cls(cell.device, cell.mode, cell.workload.dtype)

    @property
    def label(self) -> str:
        """For people; the device is named where it is not the CPU."""
        return f"{self.mode}, {self.dtype}{'' if self.device == 'cpu' else f', {self.device}'}"


@dataclass(frozen=True)
class Standing:
    """Ratios of one group of cells against one peer.

    Args:
        view: Which cells.
        peer: Name of the peer; None stands for the fastest peer of each cell.
        ratios: Name of the workload, its ratio, and whether ours is "ahead", "behind" or it is "open".
        mask: Of the grid, the mask of the cells; "" for others.
        mean_ratios: Medians that the mean is over.
        shares: By head dim, shares of the highest ceiling in the cells that the mean is over.
    """

    view: View
    peer: str | None
    ratios: tuple[tuple[str, Interval, str], ...]
    mask: str
    mean_ratios: tuple[float, ...]
    shares: dict[int, tuple[float, ...]]

    @property
    def mean(self) -> float | None:
        """Geometric mean of the ratios: above 1, ours is faster on the whole."""
        return geometric_mean(self.mean_ratios) if self.mean_ratios else None

    @property
    def lowest(self) -> tuple[str, Interval]:
        """The cell that suits ours least."""
        return min(self.ratios, key=lambda entry: entry[1].median)[:2]

    def count(self, verdict: str) -> int:
        """Cells that are "ahead", "behind" or "open", corrected for their number."""
        return sum(found == verdict for _, _, found in self.ratios)

    def share(self, head_dim: int) -> float | None:
        """Geometric mean of the shares of the ceiling at a head dim."""
        return geometric_mean(self.shares[head_dim]) if self.shares.get(head_dim) else None


def standings(cells: Sequence[Cell]) -> tuple[Standing, ...]:
    """For each view the standing against the fastest peer of each cell, then against each peer.

    Example:
        >>> from attnspan.tools.bench.cells import Run, Workload
        >>> work = Workload("tiny", "dense", 1, 8, 8, 64, 64, 32, 32, "float32", "full()")
        >>> runs = (Run("attnspan"), Run("sdpa", ratio=Interval.of([2.0] * 9)))
        >>> found = standings([Cell(work, "forward", 32768, 4e6, 4e5, runs)])
        >>> [(standing.peer, standing.mean, standing.count("ahead")) for standing in found]
        [(None, 2.0, 1), ('sdpa', 2.0, 1)]
    """
    said = verdicts(cells)
    found: dict[View, dict[str | None, list[tuple[str, Interval, str]]]] = {}
    for cell in cells:
        compared = [(r.peer, r.ratio, said[cell.label, r.peer]) for r in cell.peers if r.ratio is not None]
        if not compared:
            continue
        by_peer = found.setdefault(View.of(cell), {None: []})
        by_peer[None].append((cell.workload.name, *min(compared, key=lambda entry: entry[1].median)[1:]))
        for peer, ratio, verdict in compared:
            by_peer.setdefault(peer, []).append((cell.workload.name, ratio, verdict))
    return tuple(
        Standing(view, peer, tuple(ratios), "", tuple(ratio.median for _, ratio, _ in ratios), {})
        for view, by_peer in found.items()
        for peer, ratios in by_peer.items()
    )


def targets(results: Results, peer: str = "sdpa-flash") -> tuple[Standing, ...]:
    """The grid by dtype, mode and mask against one peer; empty where the file has no cell of it."""
    groups: dict[tuple[View, str], list[Cell]] = {}
    for cell in results.cells:
        run = cell.run(peer)
        if cell.workload.family == "grid" and run is not None and run.ratio is not None:
            groups.setdefault((View.of(cell), cell.workload.mask.removesuffix("()")), []).append(cell)
    said, roof = verdicts(results.cells), results.roof
    return tuple(_target(*key, peer, cells, roof, said) for key, cells in groups.items())


def _target(
    view: View,
    mask: str,
    peer: str,
    cells: Iterable[Cell],
    ceilings: Ceilings | None,
    said: dict[tuple[str, str], str],
) -> Standing:
    ratios: list[tuple[str, Interval, str]] = []
    means: list[float] = []
    shares: dict[int, tuple[float, ...]] = {}
    for cell in cells:
        run, work = cell.run(peer), cell.workload
        assert run is not None
        assert run.ratio is not None
        ratios.append((work.name, run.ratio, said[cell.label, peer]))
        if work.k_len in MEAN_LENGTHS and work.head_dim in MEAN_HEAD_DIMS:
            means.append(run.ratio.median)
            share = cell.share(cell.ours, ceilings)
            if share is not None:
                shares[work.head_dim] = (*shares.get(work.head_dim, ()), share)
    return Standing(view, peer, tuple(ratios), mask, tuple(means), dict(sorted(shares.items())))


def reached(cells: Iterable[Cell], ceilings: Ceilings | None, view: View) -> tuple[str, float] | None:
    """Where ours comes nearest to the ceiling of its dtype: name of the workload, and its share."""
    found = [
        (cell.workload.name, share)
        for cell in cells
        if View.of(cell) == view and (share := cell.share(cell.ours, ceilings)) is not None
    ]
    return max(found, key=lambda entry: entry[1], default=None)
