"""Sets of half-open key intervals for each query, during the lowering of a mask.

An interval's ends are arrays that broadcast to (B, H, q_len), Python ints, or None for "unbounded". They are
clipped to the keys only at the end of the lowering. Equal ends therefore stay recognizable: the union of two
intervals that share an end is one interval, which keeps R = 1 for many masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnspan.base.arrays import Array, Arrays

End = Any
"""An int32 array (B|1, H|1, q_len), an int, or None."""


@dataclass(frozen=True, eq=False)
class Interval:
    """The keys lo <= j < hi of each query.

    `anchored` promises lo <= i <= hi for the query's global index i. Two anchored intervals meet, so their
    union is one interval. An empty anchored interval is [i, i). Any other interval is empty if lo >= hi.

    Attributes:
        lo: int32 array (B|1, H|1, q_len), int, or None: no limit.
        hi: The same, exclusive.
        anchored: The promise above.

    Example:
        >>> Interval(0, 4)
        Interval(lo=0, hi=4, anchored=False)
    """

    lo: End = None
    hi: End = None
    anchored: bool = False


#: The interval of all keys.
FULL = Interval(anchored=True)


@dataclass(frozen=True, eq=False)
class Rows:
    """Key intervals of each query, and the queries that are illegal.

    Attributes:
        intervals: Intervals that are disjoint and ascending for each query. Empty intervals may be anywhere.
        illegal: bool (B|1, H|1, q_len), or None if no query is illegal.

    Example:
        >>> len(Rows((Interval(0, 2), Interval(4, 6))).intervals)
        2
    """

    intervals: tuple[Interval, ...]
    illegal: Array | None = None


def either_illegal(a: Array | None, b: Array | None) -> Array | None:
    """The queries that are illegal in either operand."""
    if a is None or b is None:
        return b if a is None else a
    return a | b


def _extreme(arrays: Arrays, a: End, b: End, *, larger: bool) -> End:
    """Elementwise max or min of two ends. None gives the other end, and equal objects stay that object."""
    if a is None or b is None or a is b:
        return b if a is None else a
    if isinstance(a, int):
        a, b = b, a
    if isinstance(a, int):
        return max(a, b) if larger else min(a, b)
    return arrays.maximum(a, b) if larger else arrays.minimum(a, b)


def clip_rows(arrays: Arrays, rows: Rows, clip: Rows) -> Rows:
    """Intersect with one interval for each query. The number of intervals stays."""
    (by,) = clip.intervals
    clipped = []
    for x in rows.intervals:
        lo, hi = _extreme(arrays, x.lo, by.lo, larger=True), _extreme(arrays, x.hi, by.hi, larger=False)
        clipped.append(Interval(lo, hi, x.anchored and by.anchored))
    return Rows(tuple(clipped), either_illegal(rows.illegal, clip.illegal))


def _same_end(a: End, b: End) -> bool:
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def _hull(arrays: Arrays, a: Interval, b: Interval) -> Interval | None:
    """The union of two intervals if it is one interval for any data, else None."""
    same_lo, same_hi = _same_end(a.lo, b.lo), _same_end(a.hi, b.hi)
    if not (same_lo or same_hi or (a.anchored and b.anchored)):
        return None
    # Empty intervals may have lo > hi. This is right for them too if they share an end.
    lo = None if a.lo is None or b.lo is None else _extreme(arrays, a.lo, b.lo, larger=False)
    hi = None if a.hi is None or b.hi is None else _extreme(arrays, a.hi, b.hi, larger=True)
    # With a shared end, the hull contains the anchored interval, which never has lo > hi.
    return Interval(lo, hi, a.anchored or b.anchored)


def merge_known(arrays: Arrays, intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Join intervals whose union is known to be one interval, until no such pair is left."""
    merged: list[Interval] = []
    for interval in intervals:
        k = 0
        while k < len(merged):
            hull = _hull(arrays, merged[k], interval)
            if hull is None:
                k += 1
            else:
                merged.pop(k)
                interval, k = hull, 0
        merged.append(interval)
    return tuple(merged)


def materialise(
    arrays: Arrays, intervals: Sequence[Interval], q_len: int, top: int
) -> tuple[list[Array], list[Array]]:
    """Turn ends into arrays, clipped to [0, top], with lo == hi for empty intervals.

    At least one end of each interval has an entry for every query, even if both ends are one number for each
    batch element.
    """
    los, his = [], []
    for x in intervals:
        lo = 0 if x.lo is None else x.lo
        hi = top if x.hi is None else x.hi
        lo = arrays.full((1, 1, q_len), lo) if isinstance(lo, int) else lo
        hi = arrays.full((1, 1, q_len), hi) if x.hi is None or isinstance(hi, int) else hi
        lo = arrays.clip(lo, 0, top)
        # If the size is a symbol, which is no int to JAX, it is the number of queries.
        if arrays.is_one(lo.shape[-1]) and arrays.is_one(hi.shape[-1]):
            lo = arrays.broadcast_to(lo, (*lo.shape[:-1], q_len))
        los.append(lo)
        his.append(arrays.maximum(arrays.clip(hi, 0, top), lo))
    return los, his


def split(lo: Array, hi: Array) -> tuple[Interval, ...]:
    """Split ends (..., R) into R intervals."""
    return tuple(Interval(lo[..., r], hi[..., r]) for r in range(lo.shape[-1]))


def common(arrays: Arrays, los: list[Array], his: list[Array]) -> tuple[Array, Array]:
    """Join ends into two arrays (..., R) of one shape."""
    both = arrays.stack([*los, *his])
    return both[..., : len(los)], both[..., len(los) :]


def sweep(arrays: Arrays, lo: Array, hi: Array, *, depth: int, count: int, top: int) -> tuple[Array, Array]:
    """Compute ascending disjoint intervals of the keys that at least `depth` given intervals cover.

    Depth 1 gives the union. Depth 2 of two lists, each of disjoint intervals, gives their intersection.

    Args:
        lo, hi: (..., N) ends in [0, top].
        depth: Number of intervals that must cover a key.
        count: The most intervals that a query can have.
        top: Bound on all ends. Empty intervals are moved there.

    Returns:
        lo, hi (..., count), with empty intervals last, as [top, top).
    """
    empty = lo >= hi
    lo, hi = arrays.where(empty, top, lo), arrays.where(empty, top, hi)
    n = lo.shape[-1]
    # Ties: in a union, starts come first, to join intervals that touch. In an intersection, starts come last,
    # so that it has no interval of length 0.
    ends = arrays.concat([lo, hi] if depth == 1 else [hi, lo])
    order = arrays.argsort(ends)
    ends = arrays.take_along(ends, order)
    is_start = order < n if depth == 1 else order >= n
    height = arrays.cumsum(arrays.where(is_start, arrays.full((1,), 1), arrays.full((1,), -1)))
    starts = arrays.where(is_start & (height == depth), ends, top)
    stops = arrays.where(~is_start & (height == depth - 1), ends, top)
    return arrays.sort(starts)[..., :count], arrays.sort(stops)[..., :count]


def union_of_two(
    arrays: Arrays, los: Sequence[Array], his: Sequence[Array], top: int
) -> tuple[list[Array], list[Array]]:
    """Compute the union of two intervals without sorting. It is by far the most common union."""
    empty = [a >= b for a, b in zip(los, his, strict=True)]
    lo = [arrays.where(x, top, a) for x, a in zip(empty, los, strict=True)]
    hi = [arrays.where(x, top, b) for x, b in zip(empty, his, strict=True)]
    first_lo, second_lo = arrays.minimum(lo[0], lo[1]), arrays.maximum(lo[0], lo[1])
    first_hi, second_hi = arrays.minimum(hi[0], hi[1]), arrays.maximum(hi[0], hi[1])
    meet = second_lo <= first_hi
    first_hi, second_lo = arrays.where(meet, second_hi, first_hi), arrays.where(meet, second_hi, second_lo)
    return [first_lo, second_lo], [first_hi, second_hi]
