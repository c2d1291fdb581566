"""Assignments of chunks to groups that look at order and pairs alone.

n chunks, r groups. No group gets more than `slots` = ceil(n / r) chunks.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .chunks import Chunks

Owner = NDArray[np.int32]


def contiguous(count: int, groups: int) -> Owner:
    """Chunks in order, in shares that differ by at most one.

    Example:
        >>> contiguous(5, 2).tolist()
        [0, 0, 1, 1, 1]
    """
    return np.repeat(np.arange(groups, dtype=np.int32), _shares(count, groups))


def zigzag(count: int, groups: int) -> Owner:
    """One run of chunks per group from the front, and one from the back in the opposite order.

    Example:
        >>> zigzag(8, 2).tolist()
        [0, 0, 1, 1, 1, 1, 0, 0]
    """
    shares, numbers = _shares(count, groups), np.arange(groups, dtype=np.int32)
    front = (shares + 1) // 2
    return np.append(np.repeat(numbers, front), np.repeat(numbers[::-1], (shares - front)[::-1]))


def _shares(count: int, groups: int) -> NDArray[Any]:
    return np.diff(np.arange(groups + 1) * count // groups)


def balanced(chunks: Chunks, groups: int, slots: int, tolerance: float) -> Owner:
    """Equal pairs; so far without an eye on foreign rows.

    Example:
        >>> from attnspan import causal
        >>> balanced(Chunks.of(causal().spans(4, 4), 1), 2, 2, 1.02).tolist()
        [0, 1, 1, 0]
    """
    del tolerance
    return greedy(chunks.pairs, groups, slots)


def greedy(pairs: NDArray[np.int64], groups: int, slots: int) -> Owner:
    """The chunk with most pairs first, each to the group with fewest pairs that has room.

    Example:
        >>> greedy(np.array([1, 2, 3, 4]), 2, 2).tolist()
        [0, 1, 1, 0]
    """
    owner = np.zeros(len(pairs), np.int32)
    room = [slots] * groups
    heap = [(0, group) for group in range(groups)]
    for chunk in np.argsort(-pairs, kind="stable").tolist():
        load, group = heap[0]
        owner[chunk] = group
        room[group] -= 1
        if room[group]:
            heapq.heapreplace(heap, (load + int(pairs[chunk]), group))
        else:
            heapq.heappop(heap)
    return owner
