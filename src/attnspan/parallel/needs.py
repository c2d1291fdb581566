"""Keys that each group of ranks needs, and keys that it must fetch, with their source.

Keys are flat: plane * k_len + key. Shapes: r groups, m intervals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .chunks import Chunks
from .intervals import Ints, covered, expand, sizes, union

if TYPE_CHECKING:
    from .layout import Layout


class Needs(NamedTuple):
    """Keys that the queries of each group see, as ascending intervals that do not touch.

    Attributes:
        starts: int64 (r + 1,), group b needs the intervals starts[b]:starts[b + 1].
        lo, hi: int64 (m,), half-open intervals.
    """

    starts: Ints
    lo: Ints
    hi: Ints

    @property
    def groups(self) -> int:
        """Number of groups, r."""
        return len(self.starts) - 1

    @property
    def rows(self) -> Ints:
        """Number of keys that each group needs, including its own, int64 (r,)."""
        return sizes(*self)


class Holders(NamedTuple):
    """Keys that each group holds, as ascending disjoint intervals lo:hi of a group, int64 (m,)."""

    lo: Ints
    hi: Ints
    group: Ints

    @classmethod
    def of(cls, keys: Layout, planes: int, members: int) -> Holders:
        """Holders of a layout's rows, for at least as many planes as the layout has.

        Example:
            >>> from attnspan.parallel import Layout
            >>> Holders.of(Layout.contiguous(3, ranks=2), planes=2, members=1).lo.tolist()
            [0, 2, 3, 5]
        """
        runs = keys.runs(planes)
        return cls(runs.edges[:-1], runs.edges[1:], runs.rank // members)


class Pieces(NamedTuple):
    """Keys that travel: `source` sends the flat keys lo:hi to `group`. Ordered by group, then by key."""

    group: Ints
    source: Ints
    lo: Ints
    hi: Ints


def needs_of(chunks: Chunks, owner: NDArray[Any], groups: int) -> Needs:
    """Unite the keys that the chunks of each group need. `owner` is the group of each chunk.

    Example:
        >>> from attnspan import window
        >>> chunks = Chunks.of(window(1).spans(6, 6), Chunks.even_edges(6, 1, 2))
        >>> needs = needs_of(chunks, np.array([0, 1, 0]), 2)
        >>> needs.starts.tolist(), needs.lo.tolist(), needs.hi.tolist()
        ([0, 2, 3], [0, 3, 1], [2, 6, 4])
    """
    family = np.repeat(np.asarray(owner, np.int64), np.diff(chunks.starts))
    return Needs(*union(family, chunks.lo, chunks.hi, groups))


def foreign(needs: Needs, holders: Holders, node: int = 1) -> Ints:
    """Count the keys that each group needs and no group of its node holds, int64 (r,).

    A node has `node` groups.

    Example:
        >>> needs = Needs(np.array([0, 1, 2]), np.array([0, 0]), np.array([2, 4]))
        >>> foreign(needs, Holders(np.array([0, 2]), np.array([2, 4]), np.array([0, 1]))).tolist()
        [0, 2]
    """
    found = needs.rows.astype(np.float64)  # exact below 2**53
    for step in range(node):
        # The needs of each group against the keys that one group of its node holds.
        group = holders.group // node * node + (holders.group + step) % node
        inside = group < needs.groups
        lo, hi, group = holders.lo[inside], holders.hi[inside], group[inside]
        own = covered(*needs, group, lo, hi)
        found -= np.bincount(group, weights=own, minlength=needs.groups)
    return found.astype(np.int64)


def lent(needs: Needs, holders: Holders) -> Ints:
    """Count the keys that each group sends, once for each receiver, int64 (r,).

    Example:
        >>> needs = Needs(np.array([0, 1, 2]), np.array([0, 0]), np.array([2, 4]))
        >>> lent(needs, Holders(np.array([0, 2]), np.array([2, 4]), np.array([0, 1]))).tolist()
        [2, 0]
    """
    read = _read(needs, holders.hi) - _read(needs, holders.lo)
    sums = np.bincount(holders.group, weights=read, minlength=needs.groups).astype(np.int64)
    return sums - (needs.rows - foreign(needs, holders))


def _read(needs: Needs, x: Ints) -> Ints:
    """Count the keys below each x that groups need, once for each group."""

    def since(starts: Ints) -> Ints:
        starts = np.sort(starts)
        passed = np.searchsorted(starts, x)
        return np.asarray(passed * x - np.append(0, np.cumsum(starts))[passed], np.int64)

    return since(needs.lo) - since(needs.hi)


def pieces(needs: Needs, holders: Holders, *, group: int | None = None, source: int | None = None) -> Pieces:
    """List the pieces that must travel: all pieces, or only the pieces that one group receives or sends.

    Example:
        >>> needs = Needs(np.array([0, 1, 2]), np.array([0, 0]), np.array([2, 4]))
        >>> holders = Holders(np.array([0, 2]), np.array([2, 4]), np.array([0, 1]))
        >>> [x.tolist() for x in pieces(needs, holders)]
        [[1], [0], [0], [2]]
    """
    family = np.repeat(np.arange(needs.groups), np.diff(needs.starts))
    chosen = slice(None) if group is None else slice(needs.starts[group], needs.starts[group + 1])
    family, lo, hi = family[chosen], needs.lo[chosen], needs.hi[chosen]
    sends = np.ones(len(holders.lo), bool) if source is None else holders.group == source
    held_lo, held_hi, held_by = (x[sends] for x in holders)
    first = np.searchsorted(held_hi, lo, side="right")
    counts = np.searchsorted(held_lo, hi, side="left") - first
    need, place = np.repeat(np.arange(len(lo)), counts), expand(first, first + counts)
    away = held_by[place] != family[need]
    need, place = need[away], place[away]
    return Pieces(
        family[need],
        held_by[place],
        np.maximum(lo[need], held_lo[place]),
        np.minimum(hi[need], held_hi[place]),
    )


class Traffic(NamedTuple):
    """Counts of the keys that an exchange moves.

    Attributes:
        counts: int64 (parts, r, r), number of keys that the second group receives from the first group.
        keys: Most keys of a plane that a group needs, including its own.
        readers: Most groups that need one key.
    """

    counts: Ints
    keys: int
    readers: int


def traffic(needs: Needs, holders: Holders, planes: int, k_len: int, parts: int = 1) -> Traffic:
    """Count the keys of an exchange without listing them, for each part of the planes.

    Example:
        >>> needs = Needs(np.array([0, 1, 2]), np.array([0, 0]), np.array([2, 4]))
        >>> holders = Holders(np.array([0, 2]), np.array([2, 4]), np.array([0, 1]))
        >>> found = traffic(needs, holders, planes=1, k_len=4)
        >>> found.counts.tolist(), found.keys, found.readers
        ([[[0, 2], [0, 0]]], 4, 2)
    """
    groups, k_len = needs.groups, max(k_len, 1)
    found = pieces(needs, holders)
    part = found.lo // k_len // (planes // parts)
    at = (part * groups + found.source) * groups + found.group
    counts = np.bincount(at, weights=found.hi - found.lo, minlength=parts * groups * groups)
    plane = np.tile(np.arange(planes, dtype=np.int64) * k_len, groups)
    family = np.repeat(np.arange(groups), planes)
    keys = covered(*needs, family, plane, plane + k_len)
    # Readers at the beginning of an interval: intervals that began, less intervals that ended.
    begun = np.arange(len(needs.lo)) + 1
    readers = (begun - np.searchsorted(np.sort(needs.hi), np.sort(needs.lo), "right")).max(initial=0)
    return Traffic(
        counts.astype(np.int64).reshape(parts, groups, groups), int(keys.max(initial=0)), int(readers)
    )
