"""What the library's masks share: their names, checks of their sizes, and rows that see nothing."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from .. import _arguments as checked
from .._expression import Mask, _common, _split
from .._intervals import Interval, Rows, materialise, sweep
from .._lowering import Lowering
from ..arrays import Array, is_array
from ..errors import OptionError, ShapeError, shown
from ..masks import SpansLargerThanMask

_SMALL = 1 << 20
"""Bytes below which the size of spans is nobody's concern."""


class Leaf(Mask):
    """A mask that is shown under the name of the function that makes it."""

    called: ClassVar[str]

    def __repr__(self) -> str:
        _, _, arguments = super().__repr__().partition("(")
        return f"{self.called}({arguments}"


class RowNumbered(Leaf):
    """A mask whose rows are counted from 0, whatever the keys are: cross attention."""

    def _anchor(self) -> tuple[Any, ...] | None:
        return ("row numbers",)

    def _anchor_index(self, low: Lowering) -> Array:
        return low.arrays.arange(low.q_len)[None, None]


def seen_by(low: Lowering, rows: Array, lo: Any, hi: Any) -> Interval:
    """[lo, hi) for the rows where `rows` (bool, B|1, 1, q_len) holds, and nothing for the others."""
    return Interval(low.arrays.where(rows, lo, 0), low.arrays.where(rows, hi, 0))


def sorted_rows(low: Lowering, intervals: Sequence[Interval], illegal: Array | None = None) -> Rows:
    """The union of intervals in any order: as many, ascending and disjoint, those that touch joined."""
    if len(intervals) == 1:
        return Rows(tuple(intervals), illegal)
    los, his = materialise(low.arrays, intervals, low.q_len, low.top)
    lo, hi = _common(low.arrays, los, his)
    lo, hi = sweep(low.arrays, lo, hi, depth=1, count=len(intervals), top=low.top)
    return Rows(_split(lo, hi), illegal)


def warn_of_size(low: Lowering, runs: int) -> None:
    """Say so where the spans take more memory than the booleans they stand for."""
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


def first_array(masks: Iterable[Mask]) -> object:
    """An array that the masks must be lowered beside, or None."""
    for mask in masks:
        for leaf in mask._leaves():
            found = [getattr(leaf, field.name) for field in fields(leaf)]  # type: ignore[arg-type]
            for value in (*found, leaf._example()):
                if is_array(value):
                    return value
    return None


def sizes(what: str, value: Any, axes: int | None = None, least: int = 1) -> tuple[int, ...]:
    """One size for each axis: a sequence, or an int that all of `axes` share."""
    if isinstance(value, list | tuple):
        if axes is not None and len(value) != axes:
            raise ShapeError(
                what,
                expected=f"{axes} sizes, one for each axis",
                got=shown(len(value)),
                remedy="Pass as many",
            )
        if not value:
            raise ShapeError(
                what, expected="at least one axis", got="none", remedy="Pass a size for each axis"
            )
        return tuple(checked.count(what, x, least) for x in value)
    return (checked.count(what, value, least),) * (1 if axes is None else axes)


def divides(what: str, sizes_: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    """How many tiles each axis has; raises where they do not fit."""
    if any(n % t for n, t in zip(sizes_, tile, strict=True)):
        raise OptionError(
            what,
            expected=f"multiples of the tile {shown(tuple(tile))}",
            got=shown(tuple(sizes_)),
            remedy="Pad it, or choose a tile that divides it",
        )
    return tuple(n // t for n, t in zip(sizes_, tile, strict=True))


def product(sizes_: Iterable[int]) -> int:
    """The number of cells of a grid, which must be an index."""
    return checked.count("canvas: number of tokens", math.prod(sizes_), 1)
