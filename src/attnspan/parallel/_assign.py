"""Assignments of chunks to groups.

n chunks, r groups. No group gets more than `slots` = ceil(n / r) chunks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._deal import deal, documents_of
from ._swaps import Deal
from ._unions import union
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


# How much of a document's fair share a group takes in a first deal. No one value is best for all packings.
_SHARES = (0.8, 1.0, 0.9, 0.6)
# Orders less even than this cost more swaps than they are worth.
_HOPELESS = 1.25
_STEP = 0.005  # of unevenness: less than that is not worth any fetching
_NEAR = 1.02  # times the bound on foreign keys: other first deals would gain nothing
_MANY = 256  # groups beyond which one first deal must do
_MERGED, _ENOUGH = 4, 24  # small chunks of a larger one; how many of those each group has at least
# Steps, not seconds: all ranks must come to the same partition.
_ROUNDS = 384


def balanced(chunks: Chunks, groups: int, slots: int, tolerance: float) -> Owner:
    """Equal pairs within `tolerance` as far as possible, then the smallest largest count of foreign keys.

    Several first deals are evened out by swaps, and the best one is kept. Where none becomes even, as for
    masks without any order, pairs alone decide.

    Example:
        >>> from attnspan import causal
        >>> balanced(Chunks.of(causal().spans(4, 4), 1), 2, 2, 1.02).tolist()
        [0, 1, 1, 0]
    """
    full = _filled(chunks, groups * slots)
    # Documents are dealt in larger pieces: the deal is as good and much quicker, and rows lie together.
    coarse = _merged(full, _MERGED) if slots % _MERGED == 0 and slots >= _MERGED * _ENOUGH else full
    found, enough = [], _bound(coarse, groups)
    for table in _first_deals(coarse, groups):
        found.append(Deal(coarse, table))
        found[-1].even(tolerance, _ROUNDS)
        if _merit(found[-1], tolerance)[:2] <= (0, enough):
            break
    if found and coarse is not full and min(map(_unevenness, found)) > tolerance:
        # Smaller pieces fit better. A merit of larger steps: what is left to even out must not decide.
        table = min(found, key=lambda one: _merit(one, 1.02)).table
        parts = table[:, :, None] * _MERGED + np.arange(_MERGED)
        found = [Deal(full, parts.reshape(groups, slots))]
        found[0].even(tolerance, _ROUNDS)
    if not found or min(map(_unevenness, found)) > tolerance:
        found.append(Deal(full, _table(greedy(full.pairs, groups, slots), groups)))
    best = min(found, key=lambda one: _merit(one, tolerance))
    owner = np.empty(len(best.chunks), np.int32)
    owner[best.table] = np.arange(groups, dtype=np.int32)[:, None]
    return np.repeat(owner, len(full) // len(owner))[: len(chunks)]


def _first_deals(chunks: Chunks, groups: int) -> Iterator[NDArray[np.int64]]:
    for order in (contiguous, zigzag):
        table = _table(order(len(chunks), groups), groups)
        load = chunks.pairs[table].sum(axis=1)
        if load.max() <= _HOPELESS * load.mean():
            yield table
    edges = documents_of(chunks)
    if len(edges) <= len(chunks) // 2:
        for share in _SHARES if groups <= _MANY else _SHARES[:1]:
            yield deal(chunks.pairs, edges, groups, share)


def _bound(chunks: Chunks, groups: int) -> int:
    """About as few foreign keys as the largest group can have: those of the chunk that needs most."""
    needs = np.append(0, np.cumsum(chunks.hi - chunks.lo))
    most = int((needs[chunks.starts[1:]] - needs[chunks.starts[:-1]]).max())
    return int(_NEAR * max(most - len(chunks) // groups * chunks.size * chunks.planes, 0))


def _unevenness(deal: Deal) -> float:
    return float(deal.load.max() / max(deal.load.mean(), 1))


def _merit(deal: Deal, tolerance: float) -> tuple[int, int, int]:
    """Less is better: unevenness beyond the tolerance, in steps, then the largest foreign count, then all."""
    beyond = max(_unevenness(deal) - tolerance, 0)
    return ceil(beyond / _STEP), int(deal.foreign.max()), int(deal.foreign.sum())


def _table(owner: Owner, groups: int) -> NDArray[np.int64]:
    return np.argsort(owner, kind="stable").reshape(groups, -1)


def _merged(chunks: Chunks, factor: int) -> Chunks:
    """Chunks of `factor` neighbours each; their number must be a multiple of it."""
    count = len(chunks) // factor
    family = np.repeat(np.arange(len(chunks)) // factor, np.diff(chunks.starts))
    starts, lo, hi = union(family, chunks.lo, chunks.hi, count)
    pairs = chunks.pairs.reshape(count, factor).sum(axis=1)
    return replace(chunks, size=chunks.size * factor, pairs=pairs, starts=starts, lo=lo, hi=hi)


def _filled(chunks: Chunks, count: int) -> Chunks:
    """As many chunks as there is room for; those that are added have no rows and need nothing."""
    more = count - len(chunks)
    pairs = np.append(chunks.pairs, np.zeros(more, np.int64))
    return replace(chunks, pairs=pairs, starts=np.append(chunks.starts, np.full(more, chunks.starts[-1])))
