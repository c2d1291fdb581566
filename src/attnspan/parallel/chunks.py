"""Rows cut into chunks: the work of each and the keys it needs. All that a partition looks at.

Shapes: B batch rows of the mask, H heads of the mask, S query rows, R spans per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..spans import Spans
from ._unions import Ints, union

__all__ = ["Chunks"]

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Chunks:
    """Rows cut into chunks of `size`, and what each chunk costs and needs.

    A key of batch row (plane) p is the flat key p * k_len + key, so that masks per batch row need no case of
    their own. All heads of a mask are one: whoever needs a key for one head gets it.

    Attributes:
        q_len: query rows.
        k_len: keys.
        size: rows per chunk; the last chunk may be shorter.
        planes: batch rows of the mask, 1 when all share it.
        pairs: int64 (n,), visible pairs of each chunk's rows, over batch rows and heads of the mask.
        starts: int64 (n + 1,), chunk c needs the intervals starts[c]:starts[c + 1].
        lo, hi: int64 (m,), half-open intervals of flat keys; those of a chunk ascend, disjoint, not touching.

    Example:
        >>> from attnspan import causal
        >>> chunks = Chunks.of(causal().spans(5, 5), size=2)
        >>> chunks.pairs.tolist(), chunks.lo.tolist(), chunks.hi.tolist()
        ([3, 7, 5], [0, 0, 0], [2, 4, 5])
    """

    q_len: int
    k_len: int
    size: int
    planes: int
    pairs: Ints
    starts: Ints
    lo: Ints
    hi: Ints

    def __len__(self) -> int:
        return len(self.pairs)

    @classmethod
    def of(cls, spans: Spans, size: int) -> Chunks:
        """Cut the rows of a lowered mask. O(S * R) for each batch row and head of the mask.

        Args:
            spans: bounds of NumPy, torch or JAX whose values can be read.
            size: rows per chunk, at least 1.

        Raises:
            OptionError: for a size below 1, or an illegal row, which is named.

        Example:
            >>> from attnspan import window
            >>> Chunks.of(window(1).spans(4, 4), size=2).lo.tolist()
            [0, 1]
        """
        if size < 1:
            raise OptionError(
                "Chunks.of: size", expected="at least 1 row", got=str(size), remedy="Cut larger chunks"
            )
        bounds = spans._arrays.to_numpy(spans.validate().bounds)
        planes, heads, q_len, runs, _ = bounds.shape
        count = -(-q_len // size)
        pairs = np.zeros(count, np.int64)
        families, los, his = [], [], []
        for plane, head, run in np.ndindex(planes, heads, runs):
            lo, hi = bounds[plane, head, :, run, 0], bounds[plane, head, :, run, 1]
            if q_len:
                pairs += np.add.reduceat(hi - lo, np.arange(0, q_len, size), dtype=np.int64)
            chunk, first, last = _strips(lo, hi, size)
            families.append(chunk)
            los.append(first + plane * spans.k_len)
            his.append(last + plane * spans.k_len)
        family, lo, hi = (np.concatenate([_NONE, *x]) for x in (families, los, his))
        return cls(q_len, spans.k_len, size, planes, pairs, *union(family, lo, hi, count))


def _strips(lo: NDArray[Any], hi: NDArray[Any], size: int) -> tuple[Ints, Ints, Ints]:
    """Join the spans of neighbouring rows that overlap or touch: (chunk, lo, hi) of each, int64 (m,).

    Rows of a chunk mostly see what the row before them sees and a little more: few strips are left to sort.
    """
    live = lo < hi
    if live.all():
        rows = None
        breaks = np.zeros(max(len(lo) - 1, 0), bool)
        breaks[size - 1 :: size] = True
    else:
        rows = np.flatnonzero(live)
        lo, hi = lo[rows], hi[rows]
        breaks = np.diff(rows // size) != 0
    breaks |= lo[1:] > hi[:-1]
    breaks |= hi[1:] < lo[:-1]
    if not len(lo):
        return _NONE, _NONE, _NONE
    first = np.append(0, np.flatnonzero(breaks) + 1)
    chunk = (first if rows is None else rows[first]) // size
    low, high = np.minimum.reduceat(lo, first), np.maximum.reduceat(hi, first)
    return chunk, low.astype(np.int64), high.astype(np.int64)
