"""Swaps of chunks between groups, which even out the work at the least cost in foreign keys.

Shapes: r groups of s chunks each, all of one plane.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .chunks import Chunks
from .intervals import Ints, covered, expand, union
from .needs import Holders, Needs, foreign

#: One of this many groups swaps in each round. With few heavy groups, each looks at many partners. With many
#: groups, one swap per round would take too many rounds.
_AT_ONCE = 64
#: Light groups that a heavy group looks at for a swap, and chunks of a group that it looks at in one round. A
#: round then scores 8 * 32 * 32 swaps per group, which takes about a millisecond.
_PARTNERS, _LOOKED_AT = 8, 32
#: Rounds without a swap after which the search ends. The chunks that it looks at change from round to round.
_IDLE = 4
#: Prices of a swap, in shares of the excess work that it removes. If the largest foreign count grows by its
#: own size, the price is the first number, because ranks wait for it. Other growth has the second price.
_LARGEST, _ANY = 5.0, 0.2


class Assignment:
    """Assignment of chunks to groups, with the work and the foreign keys of each group.

    Args:
        chunks: r * s chunks of one plane. The last chunks may be empty.
        table: int64 (r, s), the chunks of each group.
        load, foreign: int64 (r,), load and foreign keys of the groups in other planes.

    Attributes:
        load: int64 (r,), visible pairs, other planes included.
        foreign: int64 (r,), keys that a group needs and does not own, other planes included.

    Example:
        >>> from attnspan import causal
        >>> chunks = Chunks.of(causal().spans(4, 4), Chunks.even_edges(4, 1, 1))
        >>> none = np.zeros(2, np.int64)
        >>> found = Assignment(chunks, np.array([[0, 1], [2, 3]]), none, none)
        >>> found.load.tolist(), found.foreign.tolist()
        ([3, 7], [0, 2])
        >>> found.even(1.0, rounds=3)
        >>> found.table.tolist(), found.load.tolist()
        ([[2, 1], [0, 3]], [5, 5])
    """

    def __init__(self, chunks: Chunks, table: Ints, load: Ints, foreign: Ints) -> None:
        self.chunks, self.table, self._before = chunks, table.copy(), foreign
        self.load: Ints = load + chunks.pairs[table].sum(axis=1)
        self.needs: list[tuple[Ints, Ints]] = [(table[:0, 0], table[:0, 0])] * len(table)
        self.foreign: Ints = foreign.copy()
        self._size = max(chunks.q_len // max(table.size, 1), 1)
        # In cross attention a group does not own the keys of its rows.
        self._own = chunks.q_len == chunks.k_len
        self._refresh(np.arange(len(table)))

    def even(self, aim: float, rounds: int) -> None:
        """Swap until every group has at most `aim` times the mean work, no swap helps, or rounds end."""
        most, idle = aim * self.load.mean(), 0
        for number in range(rounds):
            if self.load.max() <= most or idle == _IDLE:
                return
            idle = 0 if self._round(most, number) else idle + 1

    def _round(self, most: float, number: int) -> bool:
        """Swap once for each of the heaviest groups, with different light groups. False if no swap helps."""
        order = np.argsort(self.load, kind="stable")
        count = min(int((self.load > most).sum()), max(len(order) // _AT_ONCE, 1))
        partners = min(_PARTNERS, (len(order) - count) // count)
        heavy = order[::-1][:count]
        light = np.roll(order[: count * partners].reshape(partners, count), number, axis=1).T
        # If there are many chunks, each round looks at another part of them.
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
        """Score each swap, inf if it does not help.

        There are h heavy groups with l light partners each, and c `columns` of a group's chunks. The result
        is (h, l, c, c): heavy group, partner, the partner's chunk, the heavy group's chunk.
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
        scale = max(top, self._size)
        largest = np.maximum(
            to_heavy + foreign[heavy][:, None, None, None], to_light + foreign[light][:, :, None, None]
        )
        score += np.maximum(largest - top, 0) * (_LARGEST / scale)
        score += np.maximum(to_heavy + to_light, 0) * (_ANY / scale)
        score[worst >= loaded] = np.inf
        return score

    def _swap(self, a: Ints, i: Ints, b: Ints, j: Ints) -> None:
        """Swap chunk i of each group of `a` with chunk j of its partner in `b`. No group occurs twice."""
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
        self.foreign[groups] = self._before[groups] + self._foreign(groups)

    def _intervals(self, numbers: NDArray[Any]) -> tuple[Ints, Ints]:
        """Places of the intervals of some chunks, and the place of each interval's chunk in `numbers`."""
        first, last = self.chunks.starts[numbers], self.chunks.starts[numbers + 1]
        return expand(first, last), np.repeat(np.arange(len(numbers)), last - first)

    def _needs_of(self, groups: Ints) -> Needs:
        los, his = zip(*(self.needs[group] for group in groups.tolist()), strict=True)
        return Needs(np.append(0, np.cumsum([*map(len, los)])), np.concatenate(los), np.concatenate(his))

    def _extra(self, groups: Ints, numbers: NDArray[Any]) -> NDArray[np.float64]:
        """Estimate the foreign keys that a group gains with a chunk. Numbers and result: (groups, m)."""
        at, which = self._intervals(numbers.reshape(-1))
        lo, hi = self.chunks.lo[at], self.chunks.hi[at]
        new = hi - lo - covered(*self._needs_of(groups), which // numbers.shape[1], lo, hi)
        gained = np.bincount(which, weights=new, minlength=numbers.size).astype(np.float64)
        return gained.reshape(numbers.shape) - self._size * self._own

    def _foreign(self, groups: Ints) -> Ints:
        """Count the keys that groups need and do not own. In cross attention, all keys that they need."""
        needs, edges = self._needs_of(groups), self.chunks.edges
        if not self._own:
            return needs.rows
        owned, family = self.table[groups].reshape(-1), np.repeat(np.arange(len(groups)), self.table.shape[1])
        return foreign(needs, Holders(edges[owned], edges[owned + 1], family))
