"""The grid in a few figures: mean ratios by dtype, mode and mask, the slowest cell, the share of the peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean

from attnspan.bench.cells import Ceilings, Cell
from attnspan.bench.results import Results
from attnspan.bench.samples import Ratio

__all__ = ["MEAN_HEAD_DIMS", "MEAN_LENGTHS", "Target", "mask_kind", "targets"]

# Cells that the means are over; every cell counts for the slowest.
MEAN_LENGTHS = (1024, 2048, 4096, 8192)
MEAN_HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class Target:
    """One field of the table of targets.

    Args:
        dtype: Element type.
        mode: "forward" or "forward+backward".
        mask: "full" or "causal".
        peer: Whom the ratios are against.
        ratios: Label and ratio of every cell of the grid that was compared.
        mean_ratios: Medians of the ratios of the cells that the mean is over.
        shares: By head dim, the shares of each ceiling of the dtype in those cells, by kind.

    Example:
        >>> ratio = Ratio(1.5, 1.4, 1.6, 9)
        >>> target = Target("float32", "forward", "full", "sdpa-flash", (("a", ratio),), (1.5,), {})
        >>> target.mean, target.slowest[0], target.share(64)
        (1.5, 'a', None)
    """

    dtype: str
    mode: str
    mask: str
    peer: str
    ratios: tuple[tuple[str, Ratio], ...]
    mean_ratios: tuple[float, ...]
    shares: dict[int, tuple[dict[str, float], ...]]

    @property
    def mean(self) -> float | None:
        """Geometric mean of the ratios; None where none of its cells was measured."""
        return geometric_mean(self.mean_ratios) if self.mean_ratios else None

    @property
    def slowest(self) -> tuple[str, Ratio]:
        """The cell with the lowest ratio."""
        return min(self.ratios, key=lambda entry: entry[1].median)

    @property
    def losses(self) -> int:
        """Cells where ours is slower beyond doubt."""
        return sum(ratio.is_slower for _, ratio in self.ratios)

    def reached(self, head_dim: int) -> dict[str, float]:
        """Geometric mean of the shares of each ceiling at a head dim, the lowest ceiling first.

        Args:
            head_dim: One of `MEAN_HEAD_DIMS`.
        """
        found = self.shares.get(head_dim, ())
        return {kind: geometric_mean(share[kind] for share in found) for kind in (found[0] if found else ())}

    def share(self, head_dim: int) -> float | None:
        """Geometric mean of the shares of the highest ceiling at a head dim, or None.

        Args:
            head_dim: One of `MEAN_HEAD_DIMS`.
        """
        return min(self.reached(head_dim).values(), default=None)


def targets(results: Results, peer: str = "sdpa-flash") -> tuple[Target, ...]:
    """The table of targets of a results file; empty where it has no cell of the grid.

    Args:
        results: What was measured.
        peer: Whom to compare with.

    Example:
        >>> targets(Results())
        ()
    """
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in results.cells:
        if cell.workload.family == "grid":
            key = (cell.workload.dtype, cell.mode, mask_kind(cell))
            groups.setdefault(key, []).append(cell)
    found = (_target(*key, peer, cells, results.ceilings) for key, cells in groups.items())
    return tuple(target for target in found if target.ratios)


def mask_kind(cell: Cell) -> str:
    """The mask of a cell without its parentheses.

    Args:
        cell: Of the grid.

    Example:
        >>> from attnspan.bench.workloads import grid
        >>> mask_kind(Cell(grid()[0], "forward", 1, 1.0, 1.0, ()))
        'full'
    """
    return cell.workload.mask.removesuffix("()")


def _target(
    dtype: str, mode: str, mask: str, peer: str, cells: Iterable[Cell], ceilings: Ceilings | None
) -> Target:
    ratios: list[tuple[str, Ratio]] = []
    mean_ratios: list[float] = []
    shares: dict[int, list[dict[str, float]]] = {}
    for cell in cells:
        run = cell.run(peer)
        if run is None or run.ratio is None:
            continue
        ratios.append((cell.workload.name, run.ratio))
        work = cell.workload
        if work.k_len in MEAN_LENGTHS and work.head_dim in MEAN_HEAD_DIMS:
            mean_ratios.append(run.ratio.median)
            reached = cell.shares(cell.ours, ceilings) if ceilings else {}
            if reached:
                shares.setdefault(work.head_dim, []).append(reached)
    by_dim = {dim: tuple(found) for dim, found in sorted(shares.items())}
    return Target(dtype, mode, mask, peer, tuple(ratios), tuple(mean_ratios), by_dim)
