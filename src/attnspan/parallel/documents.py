"""First assignment of chunks that keeps documents together, before swaps even it out.

A group that owns a late row of a document needs all keys before it. So each group gets

- the last chunks of one document, which are the heaviest, and whose fetches cannot be avoided,
- chunks from the beginning of the same document, whose keys it fetches anyway,
- and, if that is too much work, chunks that need few keys: small documents, and beginnings of others.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .chunks import Chunks
from .intervals import sizes

_TRIED = 8  # documents to look at in a search for one whose last chunks weigh just enough


def document_edges(chunks: Chunks) -> NDArray[Any]:
    """Find the documents: runs of chunks that see mostly the same keys as their predecessor.

    Two neighbours are in one run if they share at least half of the keys that the larger one sees. The
    result has the start of each run, then the end of the last run.

    Example:
        >>> from attnspan import causal, documents
        >>> chunks = Chunks.of((causal() & documents([0, 6, 12])).spans(12, 12), Chunks.even_edges(12, 1, 2))
        >>> document_edges(chunks).tolist()
        [0, 3, 6]
    """
    count = len(chunks)
    seen = sizes(chunks.starts, chunks.lo, chunks.hi)
    # With most masks each chunk needs a single interval, so that two chunks share at most one interval.
    first = np.minimum(chunks.starts[:-1], max(len(chunks.lo) - 1, 0))
    last = np.maximum(chunks.starts[1:] - 1, 0)
    if not len(chunks.lo):
        return np.array([0, count])
    lo, hi = chunks.lo[first], chunks.hi[last]
    shared = np.minimum(hi[1:], hi[:-1]) - np.maximum(lo[1:], lo[:-1])
    cuts = 2 * shared < np.maximum(seen[1:], seen[:-1])
    return np.concatenate([[0], np.flatnonzero(cuts) + 1, [count]])


class _Pool:
    """Chunks without a group, by document and in order."""

    def __init__(self, cost: list[int], edges: list[int]) -> None:
        self.cost = cost
        self.left = [list(range(a, b)) for a, b in pairwise(edges)]
        self.start = edges[:-1]
        self.work = [sum(cost[a:b]) for a, b in pairwise(edges)]
        self.last = np.array([cost[b - 1] for b in edges[1:]], np.float64)  # -1 for none
        self.fronts = [(0, cost[a], number) for number, a in enumerate(edges[:-1])]
        heapq.heapify(self.fronts)

    def heaviest(self) -> int:
        """Find the document whose last chunk weighs most."""
        return int(self.last.argmax())

    def sufficient(self, count: int, work: float) -> int:
        """Find the lightest document whose `count` last chunks weigh at least `work`."""
        enough = np.flatnonzero(self.last >= max(work / count, 0))
        for number in enough[np.argsort(self.last[enough], kind="stable")[:_TRIED]].tolist():
            ends = self.left[number][-count:]
            if sum(self.cost[x] for x in ends) >= work * len(ends) / count:
                return int(number)
        return self.heaviest()

    def share(self, number: int, slots: int, work: float) -> int:
        """Count a document's chunks that a group takes if all groups take equally many."""
        chunks, light = len(self.left[number]), self.fronts[0][1] if self.fronts else 0
        beyond, room = self.work[number] - light * chunks, work - light * slots
        if beyond <= 0 or room <= 0:
            return min(slots, chunks)
        return max(1, min(slots, chunks, round(chunks * room / beyond)))

    def fillers(self, count: int) -> list[int]:
        """Take up to `count` chunks from the fronts of documents, fewest keys before them first."""
        found: list[int] = []
        while self.fronts and len(found) < count:
            number = self.fronts[0][2]
            left = self.left[number]
            if not left:
                heapq.heappop(self.fronts)
                continue
            now = (left[0] - self.start[number], self.cost[left[0]], number)
            if now != self.fronts[0]:
                heapq.heapreplace(self.fronts, now)
            else:
                found += self._take(number, min(count - len(found), len(left)), None, 0)
        return found

    def ends(self, number: int, count: int, work: float) -> list[int]:
        """Take `count` chunks of a document that weigh about `work`: last ones, first ones, one between."""
        left, cost = self.left[number], self.cost
        front = [0, *accumulate(cost[x] for x in left[:count])]
        back = [0, *accumulate(cost[x] for x in reversed(left[-count:]))]
        late = max(
            bisect_left(range(count + 1), True, key=lambda t: back[t] + front[count - t] > work) - 1, 0
        )
        early = count - late
        if late == count or count == len(left):
            return self._take(number, early, None, late)
        early -= 1
        rest, stop = work - back[late] - front[early], len(left) - late
        at = min(bisect_left(left, rest, lo=early, hi=stop, key=cost.__getitem__), stop - 1)
        if at > early and rest - cost[left[at - 1]] < cost[left[at]] - rest:
            at -= 1
        return self._take(number, early, at, late)

    def _take(self, number: int, early: int, at: int | None, late: int) -> list[int]:
        left = self.left[number]
        taken = left[len(left) - late :]
        del left[len(left) - late :]
        if at is not None:
            taken.append(left.pop(at))
        taken += left[:early]
        del left[:early]
        self.work[number] -= sum(self.cost[x] for x in taken)
        self.last[number] = self.cost[left[-1]] if left else -1
        return taken


def share_documents(
    cost: NDArray[np.int64], edges: NDArray[Any], load: NDArray[np.int64], share: float
) -> NDArray[np.int64]:
    """Assign the chunks, group by group: (groups, slots).

    Args:
        cost: int64 (groups * slots,), visible pairs of each chunk.
        edges: Beginnings of documents, and the end of the last document.
        load: int64 (groups,), pairs that groups have already.
        share: Part of a document's fair share that each group takes. Below 1, more slots are left for light
            chunks.

    Example:
        >>> share_documents(np.array([1, 2, 3, 4]), np.array([0, 4]), np.zeros(2, int), 1.0).tolist()
        [[3, 0], [1, 2]]
    """
    groups = len(load)
    pool, slots = _Pool(cost.tolist(), edges.tolist()), len(cost) // groups
    table = np.empty((groups, slots), np.int64)
    remaining = int(cost.sum()) + int(load.sum())
    for group in range(groups):
        work = remaining / (groups - group) - int(load[group])
        number = pool.heaviest()
        count = pool.share(number, slots, work)
        got: list[int] = []
        if count < min(slots, len(pool.left[number])):
            count = max(1, round(count * share))
            got = pool.fillers(slots - count)
        weight = sum(pool.cost[x] for x in got)
        while True:
            count = min(len(pool.left[number]), slots - len(got))
            more = pool.ends(number, count, work - weight)
            got += more
            weight += sum(pool.cost[x] for x in more)
            if len(got) == slots:
                break
            number = pool.sufficient(slots - len(got), work - weight)
        table[group] = got
        remaining -= weight + int(load[group])
    return table
