"""Which keys each group of ranks needs, and which of them it must fetch from where.

Keys are flat (`Chunks`): plane * k_len + key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._unions import Ints, covered, union
from .chunks import Chunks

__all__ = ["Holders", "Needs", "Pieces", "foreign", "foreign_pieces", "needs_of"]


@dataclass(frozen=True, eq=False)
class Needs:
    """The keys that the rows of each group see, as intervals.

    Attributes:
        starts: int64 (groups + 1,), group b needs the intervals starts[b]:starts[b + 1].
        lo, hi: int64 (m,), half-open intervals of flat keys; those of a group ascend, disjoint, not touching.

    Example:
        >>> needs = Needs(np.array([0, 1, 3]), np.array([0, 0, 6]), np.array([4, 2, 8]))
        >>> needs.groups, needs.rows.tolist()
        (2, [4, 4])
    """

    starts: Ints
    lo: Ints
    hi: Ints

    @property
    def groups(self) -> int:
        """Number of groups."""
        return len(self.starts) - 1

    @property
    def rows(self) -> Ints:
        """Keys that each group needs, its own among them, int64 (groups,)."""
        before: Ints = np.concatenate([[0], np.cumsum(self.hi - self.lo)])
        return before[self.starts[1:]] - before[self.starts[:-1]]


@dataclass(frozen=True, eq=False)
class Holders:
    """Which group holds which keys.

    Attributes:
        groups: number of groups.
        lo, hi: int64 (k,), half-open intervals of flat keys, ascending and disjoint.
        group: int64 (k,), who holds each.

    Example:
        >>> Holders.contiguous(k_len=5, planes=1, groups=2).hi.tolist()
        [3, 5]
    """

    groups: int
    lo: Ints
    hi: Ints
    group: Ints

    @classmethod
    def of(cls, chunks: Chunks, owner: NDArray[Any], groups: int) -> Holders:
        """Self-attention: a group holds the keys of its rows.

        Args:
            chunks: of a mask with as many keys as rows.
            owner: integer (n_chunks,), the group of each chunk.
            groups: number of groups.

        Raises:
            AssertionError: when keys and rows differ in number: then nobody holds a key by its row.

        Example:
            >>> from attnspan import causal
            >>> holders = Holders.of(Chunks.of(causal().spans(6, 6), 2), np.array([0, 0, 1]), 2)
            >>> holders.lo.tolist(), holders.hi.tolist(), holders.group.tolist()
            ([0, 4], [4, 6], [0, 1])
        """
        assert chunks.q_len == chunks.k_len, "keys lie like rows only where there are as many"
        group = np.asarray(owner, np.int64)
        first = np.flatnonzero(np.append(True, group[1:] != group[:-1])[: len(group)])
        edges = np.append(first * chunks.size, chunks.k_len)
        return cls._repeated(chunks.planes, chunks.k_len, groups, edges, group[first])

    @classmethod
    def contiguous(cls, k_len: int, planes: int, groups: int) -> Holders:
        """Cross attention: keys are dealt in order, ceil(k_len / groups) to each group as far as they go.

        Args:
            k_len: keys.
            planes: batch rows of the mask, as in `Chunks`.
            groups: number of groups.

        Example:
            >>> Holders.contiguous(k_len=2, planes=2, groups=2).lo.tolist()
            [0, 1, 2, 3]
        """
        each = max(-(-k_len // groups), 1)
        edges = np.append(np.arange(0, k_len, each), k_len)
        return cls._repeated(planes, k_len, groups, edges, np.arange(len(edges) - 1))

    @classmethod
    def _repeated(cls, planes: int, k_len: int, groups: int, edges: Ints, group: Ints) -> Holders:
        base = np.arange(planes)[:, None] * k_len
        lo, hi = (base + edges[:-1]).reshape(-1), (base + edges[1:]).reshape(-1)
        return cls(groups, lo, hi, np.tile(group, planes))


@dataclass(frozen=True, eq=False)
class Pieces:
    """Keys on their way: `source` sends the flat keys [lo, hi) to `group`. All int64 (n,).

    Ordered by receiving group, then by key.

    Example:
        >>> one = np.array([1])
        >>> Pieces(one, one - 1, one, one + 1).rows
        1
    """

    group: Ints
    source: Ints
    lo: Ints
    hi: Ints

    @property
    def rows(self) -> int:
        """Keys of all pieces together."""
        return int((self.hi - self.lo).sum())


def needs_of(chunks: Chunks, owner: NDArray[Any], groups: int) -> Needs:
    """The union of the keys that the chunks of each group need.

    Args:
        chunks: the rows.
        owner: integer (n_chunks,), the group of each chunk.
        groups: number of groups.

    Example:
        >>> from attnspan import window
        >>> needs = needs_of(Chunks.of(window(1).spans(6, 6), 2), np.array([0, 1, 0]), 2)
        >>> needs.starts.tolist(), needs.lo.tolist(), needs.hi.tolist()
        ([0, 2, 3], [0, 3, 1], [2, 6, 4])
    """
    family = np.repeat(np.asarray(owner, np.int64), np.diff(chunks.starts))
    return Needs(*union(family, chunks.lo, chunks.hi, groups))


def foreign(needs: Needs, holders: Holders) -> Ints:
    """How many flat keys each group needs and does not hold, int64 (groups,): what it receives.

    O(holders * log(needs)): no pieces are made.

    Args:
        needs: of all groups.
        holders: of all groups.

    Example:
        >>> from attnspan import causal
        >>> chunks, owner = Chunks.of(causal().spans(6, 6), 2), np.array([0, 1, 1])
        >>> foreign(needs_of(chunks, owner, 2), Holders.of(chunks, owner, 2)).tolist()
        [0, 2]
    """
    own = covered(needs.starts, needs.lo, needs.hi, holders.group, holders.lo, holders.hi)
    held = np.bincount(holders.group, weights=own, minlength=needs.groups)  # exact below 2**53
    return needs.rows - held.astype(np.int64)


def foreign_pieces(
    needs: Needs, holders: Holders, *, group: int | None = None, source: int | None = None
) -> Pieces:
    """What each group must fetch, cut where one holder's keys end and the next one's begin.

    The pieces of all groups may be many: as many as the groups times the runs of owned rows. One rank needs
    those that come to it and those that leave it.

    Args:
        needs: of all groups.
        holders: of all groups.
        group: only what this group receives.
        source: only what this group sends.

    Returns:
        Pieces, ordered by receiving group, then by key. None has its source as its group.

    Example:
        >>> from attnspan import causal
        >>> chunks, owner = Chunks.of(causal().spans(6, 6), 2), np.array([0, 1, 0])
        >>> pieces = foreign_pieces(needs_of(chunks, owner, 2), Holders.of(chunks, owner, 2))
        >>> list(zip(*(x.tolist() for x in (pieces.group, pieces.source, pieces.lo, pieces.hi))))
        [(0, 1, 2, 4), (1, 0, 0, 2)]
    """
    family = np.repeat(np.arange(needs.groups), np.diff(needs.starts))
    chosen = slice(None) if group is None else slice(needs.starts[group], needs.starts[group + 1])
    family, lo, hi = family[chosen], needs.lo[chosen], needs.hi[chosen]
    sends = np.ones(len(holders.lo), bool) if source is None else holders.group == source
    held_lo, held_hi, held_by = holders.lo[sends], holders.hi[sends], holders.group[sends]
    first = np.searchsorted(held_hi, lo, side="right")
    counts = np.searchsorted(held_lo, hi, side="left") - first
    need = np.repeat(np.arange(len(lo)), counts)
    place = np.arange(len(need)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    away = held_by[place] != family[need]
    need, place = need[away], place[away]
    return Pieces(
        family[need],
        held_by[place],
        np.maximum(lo[need], held_lo[place]),
        np.minimum(hi[need], held_hi[place]),
    )
