"""Unions of many sets of key intervals at once, by sorted arrays instead of loops.

Shapes: m intervals in, k intervals out. A family is one set of intervals, for example of a chunk or a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

#: Whole numbers, int64.
Ints = NDArray[np.int64]
T = TypeVar("T")


def read_only(x: T) -> T:
    """Make an array read-only, or all arrays of a tuple, mapping or dataclass.

    Layouts and plans are cached, so a write to a returned array would change them for all callers.

    Example:
        >>> read_only((np.zeros(2), None))[0][0] = 1
        Traceback (most recent call last):
        ValueError: assignment destination is read-only
    """
    if isinstance(x, np.ndarray):
        x.setflags(write=False)
    elif isinstance(x, tuple | Mapping) or is_dataclass(x):
        parts = x if isinstance(x, tuple) else (x if isinstance(x, Mapping) else vars(x)).values()
        for part in parts:
            read_only(part)
    return x


def union(family: NDArray[Any], lo: NDArray[Any], hi: NDArray[Any], families: int) -> tuple[Ints, Ints, Ints]:
    """Unite the intervals of each family into ascending intervals that do not touch.

    Returns:
        starts (families + 1,) and lo, hi (k,): family f has the intervals starts[f]:starts[f + 1].

    Example:
        >>> starts, lo, hi = union(np.array([1, 1, 1]), np.array([4, 0, 2]), np.array([6, 3, 4]), 2)
        >>> starts.tolist(), lo.tolist(), hi.tolist()
        ([0, 0, 1], [0], [6])
    """
    width = int(hi.max(initial=0)) + 1  # one more than any end, so that families do not touch
    base = family.astype(np.int64) * width
    low, high = base + lo, base + hi
    if not (lo < hi).all():
        low, high = low[lo < hi], high[lo < hi]
    if (low[1:] < low[:-1]).any():
        order = np.argsort(low, kind="stable")
        low, high = low[order], high[order]
    reach = np.maximum.accumulate(high)
    opens = np.ones(len(low), bool)
    np.greater(low[1:], reach[:-1], out=opens[1:])
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(reach))[: len(first)] - 1
    low, high = low[first], reach[last]
    owner = low // width
    starts = np.searchsorted(owner, np.arange(families + 1))
    return starts, low - owner * width, high - owner * width


def sizes(starts: Ints, lo: Ints, hi: Ints) -> Ints:
    """Count the keys of each family of `union`.

    Example:
        >>> sizes(np.array([0, 2, 2]), np.array([1, 6]), np.array([3, 9])).tolist()
        [5, 0]
    """
    before: Ints = np.append(0, np.cumsum(hi - lo))
    return before[starts[1:]] - before[starts[:-1]]


def covered(starts: Ints, lo: Ints, hi: Ints, family: NDArray[Any], a: Ints, b: Ints) -> Ints:
    """Count the keys of [a, b) that a family of `union` holds, for many (family, a, b) at once.

    Example:
        >>> one = (np.array([0, 2]), np.array([1, 6]), np.array([3, 8]))
        >>> covered(*one, np.array([0, 0]), np.array([2, 0]), np.array([7, 10])).tolist()
        [2, 4]
    """
    width = max(int(hi.max(initial=0)), int(b.max(initial=0))) + 1
    low = np.repeat(np.arange(len(starts) - 1), np.diff(starts)) * width + lo
    sums, base = np.append(0, np.cumsum(hi - lo)), family.astype(np.int64) * width
    return below(low, sums, base + b) - below(low, sums, base + a)


def below(lo: Ints, sums: Ints, x: Ints) -> Ints:
    """Count integers below each x in ascending ranges. Range i starts at lo[i], after sums[i] other integers.

    Example:
        >>> below(np.array([1, 6]), np.array([0, 2, 4]), np.array([0, 2, 6, 9])).tolist()
        [0, 1, 2, 4]
    """
    if not len(lo):
        return np.zeros_like(x)
    at = np.searchsorted(lo, x, side="right") - 1
    inside = np.minimum(x - lo[at], np.diff(sums)[at])
    return np.where(at < 0, 0, sums[at] + inside)


def expand(lo: Ints, hi: Ints) -> Ints:
    """List the integers of half-open ranges, one range after the other.

    Example:
        >>> expand(np.array([3, 7]), np.array([5, 8])).tolist()
        [3, 4, 7]
    """
    counts = hi - lo
    return np.repeat(lo - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
