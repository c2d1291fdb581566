"""Chunks of rows, with the work of each chunk and the keys that it needs. Partitions use nothing else.

Shapes: L batch elements (planes), H heads and S queries of the mask, R spans per query, n chunks, m
intervals of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnspan.masks.bounds import Spans

from .intervals import Ints, read_only, union


@dataclass(frozen=True, eq=False)
class Chunks:
    """Runs of neighbouring rows, with their visible pairs and the keys that they need.

    Rows and keys have flat numbers: row i of plane p is p * q_len + i, key j is p * k_len + j. Heads of a
    mask are merged: a chunk needs a key if one of its heads needs it.

    Attributes:
        planes: Batch elements that are partitioned one by one, L. It is 1 if all share a mask.
        q_len, k_len: Queries and keys of a plane.
        edges: int64 (n + 1,), chunk c has the flat rows edges[c]:edges[c + 1].
        pairs: int64 (n,), visible pairs of each chunk, summed over the heads of the mask.
        starts: int64 (n + 1,), chunk c needs the intervals starts[c]:starts[c + 1].
        lo, hi: int64 (m,), half-open intervals of flat keys. Intervals of a chunk ascend and do not touch.

    Example:
        >>> from attnspan import causal
        >>> chunks = Chunks.of(causal().spans(5, 5), Chunks.even_edges(5, 1, size=2))
        >>> chunks.pairs.tolist(), chunks.lo.tolist(), chunks.hi.tolist()
        ([3, 7, 5], [0, 0, 0], [2, 4, 5])
    """

    planes: int
    q_len: int
    k_len: int
    edges: Ints
    pairs: Ints
    starts: Ints
    lo: Ints
    hi: Ints

    def __post_init__(self) -> None:
        read_only(self)

    def __len__(self) -> int:
        return len(self.pairs)

    @staticmethod
    def even_edges(q_len: int, planes: int, size: int) -> Ints:
        """Make the edges of chunks of `size` rows. The last chunk of each plane may be shorter.

        Example:
            >>> Chunks.even_edges(5, 2, size=3).tolist()
            [0, 3, 5, 8, 10]
        """
        each = np.arange(0, q_len, size, dtype=np.int64)
        flat = (np.arange(planes, dtype=np.int64)[:, None] * q_len + each).reshape(-1)
        return np.append(flat, planes * q_len)

    @classmethod
    def of(cls, spans: Spans, edges: Ints, planes: int = 1) -> Chunks:
        """Cut the rows of a lowered mask, in O(S * R) per plane and head. Each plane begins a new chunk."""
        bounds: NDArray[Any] = spans.bounds
        mask_planes, heads, q_len, runs, _ = bounds.shape
        planes = max(planes, mask_planes)
        count = len(edges) - 1
        pairs = np.zeros(count, np.int64)
        base = np.arange(planes, dtype=np.int64)[:, None] * spans.k_len
        families, los, his = [], [], []
        for head, run in np.ndindex(heads, runs):
            lo, hi = (
                np.broadcast_to(bounds[:, head, :, run, side], (planes, q_len)).reshape(-1) for side in (0, 1)
            )
            if planes * q_len:
                pairs += np.add.reduceat(hi - lo, edges[:-1], dtype=np.int64)
            chunk, first, last = _strips(lo, hi, edges)
            shift = base[edges[chunk] // max(q_len, 1), 0]
            families.append(chunk)
            los.append(first + shift)
            his.append(last + shift)
        none = np.zeros(0, np.int64)
        family, low, high = (np.concatenate([none, *x]) for x in (families, los, his))
        return cls(planes, q_len, spans.k_len, edges, pairs, *union(family, low, high, count))

    def of_plane(self, plane: int) -> Chunks:
        """Chunks of one plane, with rows and keys numbered from 0."""
        row, key = plane * self.q_len, plane * self.k_len
        first, last = np.searchsorted(self.edges, [row, row + self.q_len])
        starts, pairs = self.starts[first : last + 1], self.pairs[first:last]
        edges, at = self.edges[first : last + 1] - row, slice(starts[0], starts[-1])
        lo, hi = self.lo[at] - key, self.hi[at] - key
        return Chunks(1, self.q_len, self.k_len, edges, pairs, starts - starts[0], lo, hi)


def _strips(lo: NDArray[Any], hi: NDArray[Any], edges: Ints) -> tuple[Ints, Ints, Ints]:
    """Join spans of neighbouring queries that overlap or touch, as (chunk, lo, hi), each int64 (m,).

    Most queries see the keys of the query before them and a few more, so few strips are left to sort.
    """
    begins = np.zeros(len(lo) + 1, bool)
    begins[edges] = True
    begins, rows, live = begins[:-1], None, lo < hi
    if not live.all():
        number, rows = np.cumsum(begins), np.flatnonzero(live)
        lo, hi, begins = lo[rows], hi[rows], np.diff(number[rows], prepend=0) > 0
    begins[1:] |= lo[1:] > hi[:-1]
    begins[1:] |= hi[1:] < lo[:-1]
    first = np.flatnonzero(begins)
    if not len(first):
        return first, first, first
    chunk = np.searchsorted(edges, first if rows is None else rows[first], side="right") - 1
    low, high = np.minimum.reduceat(lo, first), np.maximum.reduceat(hi, first)
    return chunk, low.astype(np.int64), high.astype(np.int64)
