"""How attnspan stands over many cells: geometric means of ratios, the worst cell, the share of a ceiling."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from attnspan.bench.cells import Ceilings, Cell, Run
from attnspan.bench.samples import Ratio

__all__ = ["Standing", "View", "peak_share", "reached", "standings"]


@dataclass(frozen=True, order=True)
class View:
    """Cells that may be averaged: one device, one mode, one element type.

    Args:
        device: "cpu" or "cuda".
        mode: "forward" or "forward+backward".
        dtype: "float32", "bfloat16" or "float16".

    Example:
        >>> View("cpu", "forward", "float32").label
        'forward, float32'
    """

    device: str
    mode: str
    dtype: str

    @classmethod
    def of(cls, cell: Cell) -> View:
        """The view that a cell belongs to.

        Args:
            cell: A measured cell.
        """
        return cls(cell.device, cell.mode, cell.workload.dtype)

    @property
    def label(self) -> str:
        """For people; the device is named where it is not the CPU."""
        where = "" if self.device == "cpu" else f", {self.device}"
        return f"{self.mode}, {self.dtype}{where}"


@dataclass(frozen=True)
class Standing:
    """Ratios of one view against one peer.

    Args:
        view: Which cells.
        peer: Name of the peer; None stands for the fastest peer of each cell.
        ratios: Name of the workload and the ratio, cell by cell; one or more.

    Example:
        >>> ratios = (("short", Ratio(2.0, 1.9, 2.1, 9)), ("long", Ratio(0.5, 0.4, 0.6, 9)))
        >>> standing = Standing(View("cpu", "forward", "float32"), "sdpa", ratios)
        >>> standing.geometric_mean, standing.lowest[0], standing.ahead, standing.behind
        (1.0, 'long', 1, 1)
    """

    view: View
    peer: str | None
    ratios: tuple[tuple[str, Ratio], ...]

    @property
    def geometric_mean(self) -> float:
        """Of the median ratios: above 1, ours is faster on the whole."""
        return math.exp(math.fsum(math.log(ratio.median) for _, ratio in self.ratios) / len(self.ratios))

    @property
    def lowest(self) -> tuple[str, Ratio]:
        """The cell that suits ours least."""
        return min(self.ratios, key=lambda entry: entry[1].median)

    @property
    def ahead(self) -> int:
        """Cells where ours is faster beyond doubt."""
        return sum(ratio.is_faster for _, ratio in self.ratios)

    @property
    def behind(self) -> int:
        """Cells where ours is slower beyond doubt."""
        return sum(ratio.is_slower for _, ratio in self.ratios)

    @property
    def undecided(self) -> int:
        """Cells whose interval holds 1."""
        return len(self.ratios) - self.ahead - self.behind


def standings(cells: Iterable[Cell]) -> tuple[Standing, ...]:
    """For each view the standing against the fastest peer of each cell, then against each peer.

    Args:
        cells: Measured cells. Views and peers keep the order in which they appear; peers that ran nowhere
            in a view are absent from it.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("tiny", "dense", 1, 8, 8, 64, 64, 32, 32, "float32", "full()")
        >>> ratio = Ratio(2.0, 1.9, 2.1, 9)
        >>> cell = Cell(work, "forward", 32768, 4e6, 4e5, (Run("attnspan"), Run("sdpa", ratio=ratio)))
        >>> [(standing.peer, standing.geometric_mean) for standing in standings([cell])]
        [(None, 2.0), ('sdpa', 2.0)]
    """
    found: dict[View, dict[str | None, list[tuple[str, Ratio]]]] = {}
    for cell in cells:
        compared = [(run.peer, run.ratio) for run in cell.peers if run.ratio is not None]
        if not compared:
            continue
        by_peer = found.setdefault(View.of(cell), {None: []})
        by_peer[None].append((cell.workload.name, min((ratio for _, ratio in compared), key=_median)))
        for peer, ratio in compared:
            by_peer.setdefault(peer, []).append((cell.workload.name, ratio))
    return tuple(
        Standing(view, peer, tuple(ratios))
        for view, by_peer in found.items()
        for peer, ratios in by_peer.items()
    )


def _median(ratio: Ratio) -> float:
    return ratio.median


def reached(cells: Iterable[Cell], ceilings: Ceilings, view: View) -> tuple[str, float] | None:
    """Where ours comes nearest to the highest ceiling of its dtype.

    Args:
        cells: Measured cells.
        ceilings: Of the machine that they were measured on.
        view: Which of the cells.

    Returns:
        Name of the workload and its share, 0..1; None where nothing of the view was timed.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> from attnspan.bench.samples import Timing
        >>> work = Workload("tiny", "dense", 1, 8, 8, 64, 64, 32, 32, "float32", "full()")
        >>> cell = Cell(work, "forward", 32768, 4e6, 4e5, (Run("attnspan", execute=Timing((0.5,))),))
        >>> reached([cell], Ceilings({"fma_f32": 1e7}, 1e10), View.of(cell))
        ('tiny', 0.8)
    """
    found = [
        (cell.workload.name, share)
        for cell in cells
        if View.of(cell) == view and (share := peak_share(cell, cell.ours, ceilings)) is not None
    ]
    return max(found, key=lambda entry: entry[1], default=None)


def peak_share(cell: Cell, run: Run, ceilings: Ceilings) -> float | None:
    """Share of the highest ceiling that the dtype has.

    Args:
        cell: A measured cell.
        run: One of its runs.
        ceilings: Of the machine that it was measured on.

    Returns:
        0..1; None where nothing was timed or no ceiling fits.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> from attnspan.bench.samples import Timing
        >>> work = Workload("tiny", "dense", 1, 8, 8, 64, 64, 32, 32, "float32", "full()")
        >>> cell = Cell(work, "forward", 32768, 4e6, 4e5, (Run("attnspan", execute=Timing((0.5,))),))
        >>> peak_share(cell, cell.ours, Ceilings({"fma_f32": 1e7}, 1e10))
        0.8
    """
    return min(cell.shares(run, ceilings).values(), default=None)
