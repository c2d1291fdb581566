"""What masks of several files need: rows that see nothing, sizes of a canvas, a warning for many spans."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from .. import checks
from .._intervals import Interval
from ..arrays import Array
from ..errors import ShapeError, expect, shown
from ..lowering import Lowering
from ..masks import SpansLargerThanMask

_SMALL = 1 << 20
"""Bytes below which the size of spans does not matter."""


def seen_by(low: Lowering, rows: Array, lo: Any, hi: Any) -> Interval:
    """[lo, hi) for the rows where `rows` (bool, B|1, 1, q_len) holds, and nothing for the others."""
    return Interval(low.arrays.where(rows, lo, 0), low.arrays.where(rows, hi, 0))


def warn_of_size(low: Lowering, runs: int) -> None:
    """Warn if the spans take more memory than the booleans they stand for."""
    if low.arrays.tracing() or low.k_len is None:
        return
    if 8 * runs > low.k_len and 8 * runs * low.q_len > _SMALL:
        warnings.warn(
            f"mask: its rows have up to {runs} runs, so its spans take {8 * runs * low.q_len >> 20} MiB "
            f"where booleans would take {low.q_len * low.k_len >> 20} MiB. Spans are meant for masks with "
            f"few runs per row.",
            SpansLargerThanMask,
            stacklevel=2,
        )


def sizes(what: str, value: Any, axes: int | None = None, least: int = 1) -> tuple[int, ...]:
    """One size for each axis: a sequence, or an int that all of `axes` share."""
    if not isinstance(value, list | tuple):
        return (checks.count(what, value, least),) * (1 if axes is None else axes)
    n, fits = len(value), axes is None or len(value) == axes
    expect(fits, what, "{} sizes, one for each axis", n, "Pass as many", axes, error=ShapeError)
    expect(n > 0, what, "at least one axis", "none", "Pass a size for each axis", error=ShapeError)
    return tuple(checks.count(what, x, least) for x in value)


def divides(what: str, sizes_: Sequence[int], tile: tuple[int, ...]) -> tuple[int, ...]:
    """How many tiles each axis has; raises where they do not fit."""
    fits = not any(n % t for n, t in zip(sizes_, tile, strict=True))
    remedy = "Pad it, or choose a tile that divides it"
    expect(fits, what, "multiples of the tile {}", tuple(sizes_), remedy, tile)
    return tuple(n // t for n, t in zip(sizes_, tile, strict=True))


def fits_canvas(
    what: str, canvas: tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]
) -> None:
    """Raise if a kernel, with its dilation, is larger than the canvas."""
    times = f" times {shown(dilation)}" if max(dilation) > 1 else ""
    expected = "at most the canvas {}" + (" with its dilation" if times else "")
    remedy = "Use a smaller kernel, or full() along that axis: a kernel of its size"
    fits = all(k * d <= n for n, k, d in zip(canvas, kernel, dilation, strict=True))
    expect(fits, f"{what}: kernel", expected, shown(kernel) + times, remedy, canvas)


def product(sizes_: Iterable[int]) -> int:
    """The number of cells of a grid, which must be an index."""
    return checks.count("canvas: number of tokens", math.prod(sizes_), 1)
