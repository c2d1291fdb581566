"""What crosses the network: which keys each group needs from which other, and the index lists of one rank.

Everything here is arithmetic on bounds in NumPy, for any framework. Keys that travel are numbered flat, as
``plane * k_len + key``, where a plane is a batch row of the mask: masks per batch row need no case of their
own. docs/parallel.md tells the whole story.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError
from ..masks import Prepared
from .choose import holders_of
from .chunks import Chunks
from .local import LocalPlan, Stage, Transfer
from .needs import Holders, Needs, Pieces, foreign_pieces, needs_of
from .partition import Partition
from .strategy import HeadSlice, Strategy, split_heads

__all__ = ["Ints", "Kept", "Longs", "Plan", "expand"]

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Plan:
    """Who attends to what, and which keys cross the network for it.

    Args:
        mask: lowered for the whole problem, with bounds in NumPy.
        strategy: how ranks work together.
        rows: who owns which queries; its members and groups are those of the strategy.
        keys: who owns which keys; `rows` itself in self-attention.
        q_heads: Hq.
        kv_heads: Hkv.
        cut: the chunks that `rows` was made of, where they are at hand.

    Example:
        >>> from attnspan import causal
        >>> from attnspan.parallel.partition import partition
        >>> mask = causal().prepare(8, 8)
        >>> rows = partition(mask, 2, method="contiguous", rows_per_chunk=4)
        >>> plan = Plan(mask, Strategy("exchange", 1, 2), rows, rows, q_heads=4, kv_heads=2)
        >>> plan.local(1).transfer.receive_counts.tolist()
        [4, 0]
    """

    mask: Prepared
    strategy: Strategy
    rows: Partition
    keys: Partition
    q_heads: int
    kv_heads: int
    cut: Chunks | None = None

    @property
    def bounds(self) -> Ints:
        """int32 (planes, H|1, q_len, R, 2) of the whole problem."""
        return self.mask.lowered.bounds  # type: ignore[no-any-return]

    @property
    def k_len(self) -> int:
        """Number of keys."""
        return int(self.mask.lowered.k_len)

    @property
    def planes(self) -> int:
        """Batch rows of the mask."""
        return int(self.bounds.shape[0])

    @cached_property
    def heads(self) -> list[HeadSlice]:
        """The heads of each member of a group."""
        return split_heads(self.q_heads, self.kv_heads, self.strategy.members)

    @cached_property
    def chunks(self) -> Chunks:
        """The chunks of rows, with the keys that each needs."""
        if self.cut is not None and self.cut.size == self.rows.size:
            return self.cut
        return Chunks.of(self.mask.lowered, self.rows.size)

    @cached_property
    def needs(self) -> Needs:
        """The keys that each group needs."""
        return needs_of(self.chunks, self.rows.owner, self.strategy.groups)

    @cached_property
    def holders(self) -> Holders:
        """Which group holds which keys."""
        return holders_of(self.keys, self.planes)

    @cached_property
    def digest(self) -> dict[str, str]:
        """Fingerprints by which ranks compare whether they have the same plan.

        Example:
            >>> from attnspan import full
            >>> from attnspan.parallel.partition import partition
            >>> mask = full().prepare(4, 4)
            >>> rows = partition(mask, 2)
            >>> sorted(Plan(mask, Strategy("ring", 1, 2), rows, rows, 2, 2).digest)
            ['heads', 'mask', 'partition', 'strategy']
        """
        arrays = {
            "mask": (self.bounds, self.mask.q_index, np.asarray(self.k_len)),
            "partition": (self.rows.rows, self.keys.rows),
        }
        found = {name: _fingerprint(*parts) for name, parts in arrays.items()}
        words = {"strategy": self.strategy.name, "heads": f"{self.q_heads}, {self.kv_heads}"}
        return {**found, **{name: hashlib.sha256(text.encode()).hexdigest() for name, text in words.items()}}

    @property
    def fingerprint(self) -> int:
        """All of `digest` in 60 bits, never 0."""
        return int(hashlib.sha256("".join(self.digest.values()).encode()).hexdigest()[:15], 16) or 1

    def local(self, rank: int) -> LocalPlan:
        """The index lists of one rank; those of the members of a group differ in `rank` only.

        Args:
            rank: its number.
        """
        group = rank // self.strategy.members
        rows = self.rows.group_rows(group)
        taken = self.bounds[:, :, rows].copy()
        taken[:, :, rows < 0] = 0  # padding sees nothing
        if self.strategy.kind == "ring" or self.strategy.groups == 1:
            stages, transfer = self._ring(group, taken), None
        else:
            stages, transfer = self._exchange(group, taken)
        key_slots = self.keys.group_rows(group).shape[0]
        return LocalPlan(self.strategy, rank, self.planes, key_slots, self._q_index(rows), stages, transfer)

    def _q_index(self, rows: Ints) -> Ints:
        index = self.mask.q_index
        found = rows[None] + (self.k_len - self.rows.q_len) if index is None else np.asarray(index)[:, rows]
        placed: Ints = np.where(rows < 0, 0, found).astype(np.int32)
        return placed

    def _ring(self, group: int, bounds: Ints) -> tuple[Stage, ...]:
        stages = []
        for step in range(self.strategy.groups):
            keys = self.keys.group_rows((group - step) % self.strategy.groups)
            held = keys[keys >= 0]
            ranks = np.searchsorted(held, bounds.reshape(-1)).astype(np.int32).reshape(bounds.shape)
            stages.append(
                Stage(np.maximum(keys, 0)[None], ranks, bool((ranks[..., 1] > ranks[..., 0]).any()))
            )
        return tuple(stages)

    def _exchange(self, group: int, bounds: Ints) -> tuple[tuple[Stage, ...], Transfer]:
        _check_places(self.planes, self.keys.group_rows(group).shape[0])
        kept = Kept.of(self.needs, group, self.planes, self.k_len)
        planes = np.arange(self.planes, dtype=np.int64)[:, None, None, None, None] * self.k_len
        stage = Stage(kept.keys, (kept.count(bounds + planes) - kept.before(planes)).astype(np.int32))
        leaving = foreign_pieces(self.needs, self.holders, source=group)
        coming = foreign_pieces(self.needs, self.holders, group=group)
        order = np.argsort(coming.source, kind="stable")
        own = self._held(group)
        own = own[kept.has(own)]
        transfer = Transfer(
            self._slots(group, expand(leaving.lo, leaving.hi)),
            kept.place(expand(coming.lo[order], coming.hi[order])),
            self._slots(group, own),
            kept.place(own),
            self._counts(leaving.group, leaving),
            self._counts(coming.source, coming),
        )
        return (stage,), transfer

    def _held(self, group: int) -> Longs:
        """The flat keys that a group holds."""
        keys = self.keys.group_rows(group)
        planes = np.arange(self.planes, dtype=np.int64)[:, None] * self.k_len
        return (planes + keys[keys >= 0]).reshape(-1)

    def _counts(self, peer: Longs, pieces: Pieces) -> Ints:
        """How many keys go to or come from each group."""
        counts = np.bincount(peer, weights=pieces.hi - pieces.lo, minlength=self.strategy.groups)
        found: Ints = counts.astype(np.int32)
        return found

    def _slots(self, group: int, flat: Longs) -> Ints:
        keys = self.keys.group_rows(group)
        place = np.searchsorted(keys[keys >= 0], flat % self.k_len)
        slots: Ints = (flat // self.k_len * keys.shape[0] + place).astype(np.int32)
        return slots


@dataclass(frozen=True, eq=False)
class Kept:
    """The keys that a group needs, as ascending ranges of flat keys, and where each one lies among them.

    Attributes:
        lo: int64 (n,), first flat key of each range.
        sums: int64 (n + 1,), keys before each range.
        k_len: keys of a plane.
        keys: int32 (planes, K), global numbers of the keys of each plane, 0 behind the last.
    """

    lo: Longs
    sums: Longs
    k_len: int
    keys: Ints

    @classmethod
    def of(cls, needs: Needs, group: int, planes: int, k_len: int) -> Kept:
        """The keys of one group.

        Raises:
            ShapeError: More places than int32 numbers.

        Example:
            >>> needs = Needs(np.array([0, 2]), np.array([1, 6]), np.array([3, 8]))
            >>> Kept.of(needs, 0, planes=1, k_len=8).keys.tolist()
            [[1, 2, 6, 7]]
        """
        at = slice(needs.starts[group], needs.starts[group + 1])
        lo, hi = needs.lo[at].astype(np.int64), needs.hi[at].astype(np.int64)
        sums = np.concatenate([[0], np.cumsum(hi - lo)])
        k_len = max(k_len, 1)  # a divisor, also where there are no keys
        bare = cls(lo, sums, k_len, np.empty((planes, 0), np.int32))
        before = bare.count(np.arange(planes + 1) * k_len)
        most = int(np.diff(before).max(initial=0))
        _check_places(planes, most)
        keys = np.zeros((planes, most), np.int32)
        flat = expand(lo, hi)
        plane = flat // k_len
        keys[plane, np.arange(flat.shape[0]) - before[plane]] = flat % k_len
        return cls(lo, sums, k_len, keys)

    def count(self, flat: Longs) -> Longs:
        """Number of kept keys below each flat key."""
        if self.lo.shape[0] == 0:
            return np.zeros_like(flat)
        at = np.searchsorted(self.lo, flat, "right") - 1
        inside = np.minimum(flat - self.lo[at], self.sums[at + 1] - self.sums[at])
        return np.where(at < 0, 0, self.sums[at] + inside)

    def has(self, flat: Longs) -> NDArray[np.bool_]:
        """Which flat keys are kept."""
        return self.count(flat + 1) > self.count(flat)

    def before(self, flat: Longs) -> Longs:
        """Number of kept keys in the planes before that of each flat key."""
        return self.count(flat // self.k_len * self.k_len)

    def place(self, flat: Longs) -> Ints:
        """Where kept keys lie: plane * K + place in the plane."""
        inside = self.count(flat) - self.before(flat)
        found: Ints = (flat // self.k_len * self.keys.shape[1] + inside).astype(np.int32)
        return found


def expand(lo: Longs, hi: Longs) -> Longs:
    """All numbers of half-open ranges, one after the other.

    Example:
        >>> expand(np.array([3, 7]), np.array([5, 8])).tolist()
        [3, 4, 7]
    """
    counts = hi - lo
    return np.repeat(lo - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))


def _check_places(planes: int, keys: int) -> None:
    """Places are int32, as everything else in a plan: numbers that wrap would silently move other keys."""
    if planes * keys >= 2**31:
        raise ShapeError(
            "context parallelism: mask",
            expected=f"batch rows times keys of a group to be below {2**31:,}",
            got=f"{planes:,} x {keys:,} = {planes * keys:,}",
            remedy="Use more ranks or fewer batch rows, or a mask that batch rows share",
        )


def _fingerprint(*arrays: Any) -> str:
    digest = hashlib.sha256()
    for x in arrays:
        if x is not None:
            x = np.ascontiguousarray(x)
            digest.update(f"{x.dtype}{x.shape}".encode())
            digest.update(x.data)
    return digest.hexdigest()
