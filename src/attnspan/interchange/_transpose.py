"""Convert ranges of rows for each column to spans of columns for each row, without a dense mask.

Let V[j] be the set of rows that see column j. At column j, a span of columns starts in each row of the
difference V[j] - V[j - 1]. A span ends before column j in each row of V[j - 1] - V[j]. Neighbouring columns
usually see similar rows, so there are few starts and ends. The k-th start of a row belongs to its k-th end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

Host = np.ndarray[Any, Any]


def transpose_planes(bounds: Host, size: int) -> Host:
    """Transpose each plane of (B|1, H|1, n, R, 2) to (B|1, H|1, size, R', 2). Equal planes are computed once.

    Args:
        bounds: Starts and ends in [0, size]. The ranges of an entry ascend and do not overlap.
        size: Number of entries along the other axis.

    Returns:
        int32. Spans ascend and do not touch. Empty spans come last, as (0, 0).
    """
    batch, heads = bounds.shape[:2]
    known: dict[bytes, Host] = {}
    found = []
    for plane in bounds.reshape(batch * heads, *bounds.shape[2:]):
        key = plane.tobytes() if batch * heads > 1 else b""
        if key not in known:
            known[key] = _transpose(plane[..., 0], plane[..., 1], size)
        found.append(known[key])
    if len(found) == 1:
        return found[0][None, None]
    runs = max(x.shape[1] for x in found)
    padded = [np.pad(x, ((0, 0), (0, runs - x.shape[1]), (0, 0))) if x.shape[1] < runs else x for x in found]
    return np.stack(padded).reshape(batch, heads, size, runs, 2)


def _transpose(lo: Host, hi: Host, size: int) -> Host:
    """Return spans (size, R', 2) along the other axis, from starts and ends (n, R)."""
    n = len(lo)
    if n == 0 or size == 0:
        return np.zeros((size, 1, 2), np.int32)
    before, after = partial(_beside, first=True), partial(_beside, first=False)
    starts = _changes((after(lo), after(hi)), (before(lo), before(hi)))
    stops = _changes((before(lo), before(hi)), (after(lo), after(hi)))
    bits = n.bit_length()
    row, column = starts >> bits, (1 << bits) - 1
    count = np.bincount(row, minlength=size)
    runs = max(int(count.max()), 1)
    bounds = np.zeros((size, runs, 2), np.int32)
    # The numbers are sorted, so the spans of a row are neighbours.
    place = np.arange(len(row)) - np.repeat(count.cumsum() - count, count) if runs > 1 else 0
    at = row * runs + place
    bounds.reshape(-1, 2)[at, 0] = starts & column
    bounds.reshape(-1, 2)[at, 1] = stops & column
    return bounds


def _beside(ends: Host, first: bool) -> Host:
    """Return ends (n + 1, R). The first or the last entry is new and has only empty ranges."""
    nothing = np.zeros_like(ends[:1])
    return np.concatenate([nothing, ends] if first else [ends, nothing])


def _changes(of: tuple[Host, Host], without: tuple[Host, Host]) -> Host:
    """Return the sorted numbers (row << bits) + column of all rows that are in the one set only."""
    n, runs = of[0].shape
    bits = (n - 1).bit_length()
    found = []
    for r in range(runs):
        for k in range(runs + 1):
            # The k-th gap between the ranges of the other set.
            lo = of[0][:, r] if k == 0 else np.maximum(of[0][:, r], without[1][:, k - 1])
            hi = of[1][:, r] if k == runs else np.minimum(of[1][:, r], without[0][:, k])
            column = np.flatnonzero(lo < hi)
            row, column = _expanded(lo[column].astype(np.int64), hi[column], column)
            found.append((row << bits) + column)
    changes = np.concatenate(found)
    changes.sort()
    return changes


def _expanded(lo: Host, hi: Host, column: Host) -> tuple[Host, Host]:
    """Return the rows lo, lo + 1, ..., hi - 1 of each column, and the column of each row."""
    length = hi - lo
    if (length == 1).all():
        return lo, column
    start = length.cumsum() - length
    return np.arange(length.sum()) + np.repeat(lo - start, length), np.repeat(column, length)
