"""Partition of chunks of rows over groups of ranks.

Shapes: n chunks of one plane, r groups. Every group gets at most ceil(n / r) chunks, so that row counts are
static.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .chunks import Chunks
from .documents import document_edges, share_documents
from .intervals import Ints, sizes
from .needs import Holders, lent, needs_of
from .search import Assignment

#: Names of the methods of partition.
Method = Literal["balanced", "contiguous", "zigzag"]
#: The group of each chunk, int32.
Owner = NDArray[np.int32]

#: Chunks per group. Packed text on 64 ranks fetches 0.46 of a ring's keys with 32 chunks, and 0.50 with 8.
#: More chunks take planning time and cut the rows into smaller runs.
_CHUNKS_PER_GROUP = range(24, 49)
#: An order whose busiest group has more than this ratio of the mean work costs more swaps than it saves.
_TOO_UNEVEN = 1.25
#: Up to this number of groups, four first assignments are tried. For more groups one is tried, because
#: planning must end within a step.
_FEW_GROUPS = 256
#: Parts of a document's fair share that a group takes first. The best of four is a tenth better than one.
_SHARES = (0.8, 1.0, 0.9, 0.6)
#: Most rounds of swaps. The limit is rounds, not seconds, because all ranks must find the same partition.
_ROUNDS = 384
#: Unevenness counts in steps of 0.5 %, because less is not worth a fetched key.
_STEP = 0.005
#: Weight of all received keys and gradients, relative to fetched keys. A key that is lent to many groups
#: comes back as many gradients. Assignments that fetch equally may differ by 2x for the busiest lender.
_LENT = 1 / 8


def chunk_size(q_len: int, groups: int) -> int:
    """Find the chunk size with the least padding. Of equal sizes, the largest.

    Example:
        >>> [chunk_size(*x) for x in [(131_072, 8), (100_003, 8), (3, 8)]]
        [512, 463, 1]
    """
    sizes = {max(ceil(q_len / (groups * each)), 1) for each in _CHUNKS_PER_GROUP}
    step = 1 + q_len // groups // 1000  # Padding below 0.1 % does not matter.

    def padding(size: int) -> tuple[int, int]:
        slots = ceil(ceil(q_len / size) / groups)
        return ceil((slots * size - ceil(q_len / groups)) / step), -size

    return min(sizes, key=padding)


def owners(chunks: Chunks, groups: int, method: Method, tolerance: float) -> Owner:
    """Assign each chunk to a group, (planes * n,). All planes together are balanced. See `Layout.of`."""
    found: list[Owner] = []
    load, foreign = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for number in range(chunks.planes):
        plane = chunks.of_plane(number) if chunks.planes > 1 else chunks
        if method != "balanced":
            found.append(_ORDERS[method](len(plane), groups))
            continue
        # Each plane evens out the planes before it.
        best = _balanced(plane, groups, tolerance, load, foreign)
        load, foreign = best.load, best.foreign
        found.append(_owner_of(best.table)[: len(plane)])
    return np.concatenate(found)


def rows_of(owner: Owner, q_len: int, groups: int, members: int, size: int) -> NDArray[np.int32]:
    """List the rows of each rank, (P, L, n), from the group of each chunk of `size` rows, (L, n_chunks)."""
    planes, count = owner.shape
    slots = -(-count // groups)
    # A group may have a short chunk. Chunks ascend, so its padding still comes last.
    order = np.argsort(owner, axis=1, kind="stable")
    sorted_owner = np.take_along_axis(owner, order, 1)
    counts = np.array([np.bincount(row, minlength=groups) for row in owner])
    first = np.cumsum(counts, axis=1) - counts
    place = np.arange(count) - np.take_along_axis(first, sorted_owner, 1)
    numbers = order[:, :, None] * size + np.arange(size)
    table = np.full((planes, groups, slots, size), -1, np.int32)
    table[np.arange(planes)[:, None], sorted_owner, place] = np.where(numbers < q_len, numbers, -1)
    each = -(-min(slots * size, q_len) // members)
    rows = np.full((planes, groups, members * each), -1, np.int32)
    width = min(members * each, slots * size)
    rows[:, :, :width] = table.reshape(planes, groups, -1)[:, :, :width]
    return rows.reshape(planes, groups * members, each).transpose(1, 0, 2).copy()


def contiguous(count: int, groups: int) -> Owner:
    """Assign chunks in order, in shares that differ by at most one chunk.

    Example:
        >>> contiguous(5, 2).tolist()
        [0, 0, 1, 1, 1]
    """
    return np.repeat(np.arange(groups, dtype=np.int32), _shares(count, groups))


def zigzag(count: int, groups: int) -> Owner:
    """Assign each group one run of chunks from the front, and one from the back in the opposite order.

    Example:
        >>> zigzag(8, 2).tolist()
        [0, 0, 1, 1, 1, 1, 0, 0]
    """
    shares, numbers = _shares(count, groups), np.arange(groups, dtype=np.int32)
    front = (shares + 1) // 2
    return np.append(np.repeat(numbers, front), np.repeat(numbers[::-1], (shares - front)[::-1]))


_ORDERS: dict[str, Callable[[int, int], Owner]] = {"contiguous": contiguous, "zigzag": zigzag}


def _shares(count: int, groups: int) -> NDArray[Any]:
    return np.diff(np.arange(groups + 1) * count // groups)


def by_pairs(pairs: Ints, load: Ints) -> Ints:
    """Assign the heaviest chunk first, to the least loaded group that is not full: (r, slots).

    Example:
        >>> by_pairs(np.array([1, 2, 3, 4]), np.array([0, 0])).tolist()
        [[0, 3], [1, 2]]
    """
    groups, slots = len(load), len(pairs) // len(load)
    table: list[list[int]] = [[] for _ in range(groups)]
    heap = [(int(x), group) for group, x in enumerate(load)]
    heapq.heapify(heap)
    for chunk in np.argsort(-pairs, kind="stable").tolist():
        total, group = heapq.heappop(heap)
        table[group].append(chunk)
        if len(table[group]) < slots:
            heapq.heappush(heap, (total + int(pairs[chunk]), group))
    return np.sort(np.array(table, np.int64).reshape(groups, slots), axis=1)


def _balanced(chunks: Chunks, groups: int, tolerance: float, load: Ints, foreign: Ints) -> Assignment:
    """Assign chunks so that pairs are equal within `tolerance`, then so that few keys are fetched and lent.

    Swaps even out several first assignments, and the best one is kept. If none becomes even, as for masks
    without any order, pairs alone decide.
    """
    full, found = _filled(chunks, groups), []
    least = _least_foreign(full, groups) + int(foreign.max())
    for table in _first_tables(full, groups, load):
        one = Assignment(full, table, load, foreign)
        one.even(tolerance, _ROUNDS)
        if _unevenness(one) <= tolerance and one.foreign.max() < least:
            return one
        found.append(one)
    if not found or min(map(_unevenness, found)) > tolerance:
        found.append(Assignment(full, by_pairs(full.pairs, load), load, foreign))
    return found[0] if len(found) == 1 else min(found, key=lambda one: _merit(one, tolerance))


def _owner_of(table: Ints) -> Owner:
    owner = np.empty(table.size, np.int32)
    owner[table] = np.arange(len(table), dtype=np.int32)[:, None]
    return owner


def _first_tables(chunks: Chunks, groups: int, load: Ints) -> Iterator[Ints]:
    for order in _ORDERS.values():
        table = np.argsort(order(len(chunks), groups), kind="stable").reshape(groups, -1)
        work = load + chunks.pairs[table].sum(axis=1)
        if work.max() <= _TOO_UNEVEN * work.mean():
            yield table
    edges = document_edges(chunks)
    if len(edges) <= len(chunks) // 2:
        for share in _SHARES if groups <= _FEW_GROUPS else _SHARES[:1]:
            yield share_documents(chunks.pairs, edges, load, share)


def _least_foreign(chunks: Chunks, groups: int) -> int:
    """Approximate lower bound of foreign keys of a group: the foreign keys of the chunk that needs most."""
    most = int(sizes(chunks.starts, chunks.lo, chunks.hi).max())
    return max(most - -(-chunks.q_len // groups), 0)


def _unevenness(one: Assignment) -> float:
    return float(one.load.max() / max(one.load.mean(), 1))


def _merit(one: Assignment, tolerance: float) -> tuple[int, float, int]:
    """Key for sorting, less is better: unevenness beyond the tolerance, largest counts, sum of counts."""
    beyond, moved = max(_unevenness(one) - tolerance, 0), one.foreign
    if one.chunks.q_len == one.chunks.k_len:
        edges, owner = one.chunks.edges, _owner_of(one.table)
        held = np.flatnonzero(np.diff(edges))
        holders = Holders(edges[held], edges[held + 1], owner[held].astype(np.int64))
        moved = moved + lent(needs_of(one.chunks, owner, len(one.table)), holders)
    return ceil(beyond / _STEP), float(one.foreign.max() + _LENT * moved.max()), int(one.foreign.sum())


def _filled(chunks: Chunks, groups: int) -> Chunks:
    """Add empty chunks until all groups have equally many."""
    more = -len(chunks) % groups
    return replace(
        chunks,
        edges=np.append(chunks.edges, np.full(more, chunks.edges[-1])),
        pairs=np.append(chunks.pairs, np.zeros(more, np.int64)),
        starts=np.append(chunks.starts, np.full(more, chunks.starts[-1])),
    )
