"""Swaps of chunks between groups: work is made even, at the least cost in foreign keys.

Shapes: r groups of s chunks each.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._unions import Ints, covered, union
from .chunks import Chunks

_PARTNERS = 8  # light groups that a heavy one looks at for a swap
_FETCH = 5.0  # what a growth of the largest foreign count by itself costs, in shares of the excess work
_TOTAL = 0.2  # the same for any other growth


class Deal:
    """Who has which chunks, with the work, the needs and the foreign keys of each group.

    Args:
        chunks: of r * s chunks; the last ones may be empty, to fill the groups.
        table: int64 (r, s), the chunks of each group.

    Attributes:
        load: int64 (r,), visible pairs.
        foreign: int64 (r,), keys that are needed and not owned.

    Example:
        >>> from attnspan import causal
        >>> deal = Deal(Chunks.of(causal().spans(4, 4), 1), np.array([[0, 1], [2, 3]]))
        >>> deal.load.tolist(), deal.foreign.tolist()
        ([3, 7], [0, 2])
        >>> deal.even(1.0, steps=3)
        >>> deal.table.tolist(), deal.load.tolist()
        ([[2, 1], [0, 3]], [5, 5])
    """

    def __init__(self, chunks: Chunks, table: Ints) -> None:
        self.chunks, self.table = chunks, table.copy()
        self.load: Ints = chunks.pairs[table].sum(axis=1)
        self.needs: list[tuple[Ints, Ints]] = []
        family = np.empty(len(chunks), np.int64)
        family[table] = np.arange(len(table))[:, None]
        starts, lo, hi = union(np.repeat(family, np.diff(chunks.starts)), chunks.lo, chunks.hi, len(table))
        ends = starts.tolist()
        self.needs = [(lo[a:b], hi[a:b]) for a, b in pairwise(ends)]
        self.foreign = self._foreign(np.arange(len(table)))

    def even(self, aim: float, steps: int) -> None:
        """Swap until no group has more than `aim` times the mean work, no swap helps, or `steps` are used."""
        most = aim * self.load.mean()
        for _ in range(steps):
            heavy = int(self.load.argmax())
            if self.load[heavy] <= most or not self._relieve(heavy, most):
                return

    def _relieve(self, heavy: int, most: float) -> bool:
        """The best swap of the heavy group with one of the lightest; False if none makes it lighter."""
        light = np.argsort(self.load, kind="stable")[:_PARTNERS]
        light = light[light != heavy]
        mine, theirs = self.table[heavy], self.table[light]
        pairs = self.chunks.pairs
        given = pairs[mine][None, :, None] - pairs[theirs][:, None, :]
        worst = np.maximum(self.load[heavy] - given, self.load[light][:, None, None] + given)
        excess = np.maximum(worst - most, 0) / (self.load[heavy] - most)
        to_heavy = self._extra(np.array([heavy]), theirs.reshape(1, -1)).reshape(theirs.shape)
        to_light = self._extra(light, np.broadcast_to(mine, (len(light), len(mine))))
        scale = max(float(self.foreign.max()), self.chunks.size)
        largest = np.maximum(
            (self.foreign[heavy] + to_heavy)[:, None, :],
            (self.foreign[light][:, None] + to_light)[:, :, None],
        )
        growth = np.maximum(largest - self.foreign.max(), 0) / scale
        total = np.maximum(to_heavy[:, None, :] + to_light[:, :, None], 0) / scale
        score = np.where(worst < self.load[heavy], excess + _FETCH * growth + _TOTAL * total, np.inf)
        best = int(score.argmin())
        if not np.isfinite(score.flat[best]):
            return False
        partner, i, j = (int(x) for x in np.unravel_index(best, score.shape))
        self._swap(heavy, i, int(light[partner]), j)
        return True

    def _swap(self, a: int, i: int, b: int, j: int) -> None:
        table, pairs = self.table, self.chunks.pairs
        given = pairs[table[a, i]] - pairs[table[b, j]]
        table[a, i], table[b, j] = table[b, j], table[a, i]
        self.load[a] -= given
        self.load[b] += given
        for group in (a, b):
            at, _ = self._intervals(table[group])
            _, lo, hi = union(np.zeros(len(at), np.int64), self.chunks.lo[at], self.chunks.hi[at], 1)
            self.needs[group] = lo, hi
        both = np.array([a, b])
        self.foreign[both] = self._foreign(both)

    def _intervals(self, numbers: NDArray[Any]) -> tuple[Ints, Ints]:
        """Places of the intervals of some chunks, and for each the place of its chunk in `numbers`."""
        first, counts = self.chunks.starts[numbers], np.diff(self.chunks.starts)[numbers]
        which = np.repeat(np.arange(len(numbers)), counts)
        return np.arange(len(which)) + np.repeat(first - (np.cumsum(counts) - counts), counts), which

    def _needs_of(self, groups: Ints) -> tuple[Ints, Ints, Ints]:
        needs = [self.needs[group] for group in groups.tolist()]
        starts = np.append(0, np.cumsum([len(lo) for lo, _ in needs]))
        return starts, np.concatenate([lo for lo, _ in needs]), np.concatenate([hi for _, hi in needs])

    def _extra(self, groups: Ints, numbers: NDArray[Any]) -> NDArray[np.float64]:
        """Foreign keys that a group gains with a chunk, about; numbers and result (groups, m)."""
        at, which = self._intervals(numbers.reshape(-1))
        lo, hi = self.chunks.lo[at], self.chunks.hi[at]
        new = hi - lo - covered(*self._needs_of(groups), which // numbers.shape[1], lo, hi)
        gained = np.bincount(which, weights=new, minlength=numbers.size).astype(np.float64)
        return gained.reshape(numbers.shape) - self.chunks.size * self.chunks.planes

    def _foreign(self, groups: Ints) -> Ints:
        """Keys that groups need and do not own; in cross attention, that they need."""
        needs = self._needs_of(groups)
        widths = np.append(0, np.cumsum(needs[2] - needs[1]))
        rows: Ints = widths[needs[0][1:]] - widths[needs[0][:-1]]
        chunks = self.chunks
        if chunks.q_len != chunks.k_len:
            return rows
        lo = np.minimum(self.table[groups] * chunks.size, chunks.k_len)
        lo = (np.arange(chunks.planes)[:, None, None] * chunks.k_len + lo).reshape(chunks.planes, -1)
        hi = np.minimum(lo + chunks.size, (np.arange(chunks.planes)[:, None] + 1) * chunks.k_len)
        family = np.tile(np.repeat(np.arange(len(groups)), self.table.shape[1]), chunks.planes)
        own = covered(*needs, family, lo.reshape(-1), hi.reshape(-1))
        return rows - np.bincount(family, weights=own, minlength=len(groups)).astype(np.int64)
