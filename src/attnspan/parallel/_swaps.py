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

_AT_ONCE = 64  # of so many groups one is relieved at a time: a free choice of partners is worth it
_PARTNERS = 8  # light groups that a heavy one looks at for a swap
_LOOKED_AT = 32  # chunks of a group that are looked at in one round
_IDLE = 4  # rounds without a swap after which there is none
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
        >>> deal.even(1.0, rounds=3)
        >>> deal.table.tolist(), deal.load.tolist()
        ([[2, 1], [0, 3]], [5, 5])
    """

    def __init__(self, chunks: Chunks, table: Ints) -> None:
        self.chunks, self.table = chunks, table.copy()
        self.load: Ints = chunks.pairs[table].sum(axis=1)
        self.needs: list[tuple[Ints, Ints]] = [(table[:0, 0], table[:0, 0])] * len(table)
        self.foreign: Ints = np.zeros(len(table), np.int64)
        self._refresh(np.arange(len(table)))

    def even(self, aim: float, rounds: int) -> None:
        """Swap until no group has more than `aim` times the mean work, or no swap helps, or rounds end."""
        most, idle = aim * self.load.mean(), 0
        for number in range(rounds):
            if self.load.max() <= most or idle == _IDLE:
                return
            idle = 0 if self._round(most, number) else idle + 1

    def _round(self, most: float, number: int) -> bool:
        """One swap for each of the heaviest groups, with light groups of its own; False if there is none."""
        order = np.argsort(self.load, kind="stable")
        count = min(int((self.load > most).sum()), max(len(order) // _AT_ONCE, 1))
        partners = min(_PARTNERS, (len(order) - count) // count)
        heavy = order[::-1][:count]
        light = np.roll(order[: count * partners].reshape(partners, count), number, axis=1).T
        # Of many chunks a part is looked at, in each round another one.
        step = -(-self.table.shape[1] // _LOOKED_AT)
        columns = np.arange(number % step, self.table.shape[1], step)
        score = self._score(heavy, light, columns, most).reshape(count, -1)
        best = score.argmin(axis=1)
        good = np.flatnonzero(np.isfinite(score[np.arange(count), best]))
        partner, j, i = np.unravel_index(best[good], (partners, len(columns), len(columns)))
        if len(good):
            self._swap(heavy[good], columns[i], light[good, partner], columns[j])
        return len(good) > 0

    def _score(self, heavy: Ints, light: Ints, columns: Ints, most: float) -> NDArray[np.float64]:
        """What each swap leaves to be desired, inf for those that help nobody.

        Args:
            heavy: (h,) groups.
            light: (h, l), the partners of each.
            columns: (c,), which chunks of each group are looked at.
            most: work that no group should exceed.

        Returns:
            (h, l, c, c): by partner, its chunk, and the chunk of the heavy group.
        """
        mine, theirs = self.table[heavy][:, columns], self.table[light][:, :, columns]
        pairs, load = self.chunks.pairs, self.load.astype(np.float64)
        given = pairs[mine].astype(np.float64)[:, None, None, :] - pairs[theirs][:, :, :, None]
        loaded = load[heavy][:, None, None, None]
        worst = np.maximum(loaded - given, load[light][:, :, None, None] + given)
        score = np.maximum(worst - most, 0) / (loaded - most)
        to_heavy = self._extra(heavy, theirs.reshape(len(heavy), -1)).reshape(theirs.shape)[:, :, :, None]
        to_light = self._extra(light.reshape(-1), np.repeat(mine, light.shape[1], axis=0))
        to_light = to_light.reshape(*light.shape, 1, len(columns))
        top, foreign = float(self.foreign.max()), self.foreign
        scale = max(top, self.chunks.size)
        largest = np.maximum(
            to_heavy + foreign[heavy][:, None, None, None], to_light + foreign[light][:, :, None, None]
        )
        score += np.maximum(largest - top, 0) * (_FETCH / scale)
        score += np.maximum(to_heavy + to_light, 0) * (_TOTAL / scale)
        score[worst >= loaded] = np.inf
        return score

    def _swap(self, a: Ints, i: Ints, b: Ints, j: Ints) -> None:
        """Chunk i of each group of `a` against chunk j of its partner in `b`; no group comes twice."""
        table, pairs = self.table, self.chunks.pairs
        given = pairs[table[a, i]] - pairs[table[b, j]]
        table[a, i], table[b, j] = table[b, j], table[a, i]
        self.load[a] -= given
        self.load[b] += given
        self._refresh(np.append(a, b))

    def _refresh(self, groups: Ints) -> None:
        at, which = self._intervals(self.table[groups].reshape(-1))
        family = which // self.table.shape[1]
        starts, lo, hi = union(family, self.chunks.lo[at], self.chunks.hi[at], len(groups))
        for group, (first, last) in zip(groups.tolist(), pairwise(starts.tolist()), strict=True):
            self.needs[group] = lo[first:last], hi[first:last]
        self.foreign[groups] = self._foreign(groups)

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
