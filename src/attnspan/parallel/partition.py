"""Who owns which rows: equal work, equal row counts, and as few rows as possible that must be fetched.

Shapes: P ranks = r groups of u members; n rows per rank, padding included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array
from ..errors import OptionError, ShapeError
from ..masks import Mask, Prepared
from ..spans import Spans
from ._assign import balanced, contiguous, greedy, zigzag
from ._parts import checked, concat, fill_of, filled, take
from .chunks import Chunks

__all__ = ["Method", "Partition", "Ranks", "default_rows_per_chunk", "partition", "rows_of", "slots_of"]

Method = Literal["balanced", "greedy", "contiguous", "zigzag"]
Ranks = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Partition:
    """Which rows each rank owns.

    Rank p = b * members + a is member a of group b. Each group owns whole chunks; its rows, in ascending
    order, are dealt to its members in order.

    Attributes:
        q_len: rows of the whole problem.
        groups: r.
        members: u, ranks of a group, which hold the same rows' heads while attending.
        size: rows of a chunk.
        owner: int32 (n_chunks,), the group of each chunk.
        rows: int32 (P, n), the rows of each rank, ascending; -1 is padding, at the end.

    Example:
        >>> from attnspan import causal
        >>> part = partition(causal(), 2, q_len=8, rows_per_chunk=2, method="zigzag")
        >>> part.rows.tolist()
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    q_len: int
    groups: int
    members: int
    size: int
    owner: Ranks
    rows: Ranks

    @classmethod
    def of_owner(cls, owner: NDArray[Any], *, q_len: int, groups: int, members: int, size: int) -> Partition:
        """Deal the rows of chunks whose groups are known.

        Args:
            owner: integer (ceil(q_len / size),), the group of each chunk.
            q_len: rows.
            groups, members: r and u.
            size: rows per chunk.

        Raises:
            ShapeError: for a wrong number of chunks, or a group with more of them than its ranks have room.

        Example:
            >>> Partition.of_owner(np.array([1, 0]), q_len=3, groups=2, members=1, size=2).rows.tolist()
            [[2, -1], [0, 1]]
        """
        n_chunks, slots = -(-q_len // size), slots_of(q_len, groups, size)
        owner = np.asarray(owner, np.int32)
        if owner.shape != (n_chunks,):
            raise ShapeError(
                "Partition: owner",
                expected=f"the group of each of the {n_chunks} chunks of {size} rows",
                got=str(owner.shape),
                remedy="Give every chunk one group",
            )
        if owner.min(initial=0) < 0 or owner.max(initial=0) >= groups:
            raise ShapeError(
                "Partition: owner",
                expected=f"groups 0 to {groups - 1}",
                got=str(int(owner.min() if owner.min() < 0 else owner.max())),
                remedy="Number the groups from 0",
            )
        counts = np.bincount(owner, minlength=groups)
        if counts.max() > slots:
            raise ShapeError(
                "Partition: owner",
                expected=f"at most {slots} chunks in each of {groups} groups",
                got=f"{int(counts.max())} chunks in group {int(counts.argmax())}",
                remedy="Rows per rank are static: deal the chunks evenly",
            )
        # A group may be given a short chunk; chunks ascend, so its padding still comes last.
        order = np.argsort(owner, kind="stable")
        place = np.arange(n_chunks) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = order[:, None] * size + np.arange(size)
        table = np.full((groups, slots, size), -1, np.int32)
        table[owner[order], place] = np.where(numbers < q_len, numbers, -1)
        each = rows_of(q_len, groups, members, size)
        rows = np.full((groups, members * each), -1, np.int32)
        width = min(members * each, slots * size)
        rows[:, :width] = table.reshape(groups, -1)[:, :width]
        return cls(q_len, groups, members, size, owner, rows.reshape(groups * members, each))

    def __repr__(self) -> str:
        dealt = f"groups={self.groups}, members={self.members}, rows_per_rank={self.rows_per_rank}"
        return f"Partition(q_len={self.q_len}, {dealt}, rows_per_chunk={self.size})"

    @property
    def ranks(self) -> int:
        """P."""
        return self.groups * self.members

    @property
    def rows_per_rank(self) -> int:
        """n, the same on all ranks."""
        return int(self.rows.shape[1])

    def group_rows(self, group: int) -> Ranks:
        """The rows of a group, int32 (members * n,), -1 for padding at the end.

        Example:
            >>> part = Partition.of_owner(np.array([1, 0]), q_len=3, groups=2, members=1, size=2)
            >>> part.group_rows(0).tolist()
            [2, -1]
        """
        return self.rows[group * self.members : (group + 1) * self.members].reshape(-1)

    def valid(self, rank: int) -> NDArray[np.bool_]:
        """Which rows of a rank are real, bool (n,).

        Example:
            >>> part = Partition.of_owner(np.array([1, 0]), q_len=3, groups=2, members=1, size=2)
            >>> part.valid(0).tolist()
            [True, False]
        """
        return np.asarray(self.rows[rank] >= 0)

    def positions(self, rank: int) -> NDArray[np.int64]:
        """The global row number of each row of a rank, int64 (n,); 0 for padding.

        Example:
            >>> part = Partition.of_owner(np.array([1, 0]), q_len=3, groups=2, members=1, size=2)
            >>> part.positions(0).tolist()
            [2, 0]
        """
        return np.asarray(np.maximum(self.rows[rank], 0), np.int64)

    def shard(self, x: Any, rank: int, dim: int = 1, fill: Any = 0) -> Any:
        """The rows of one rank.

        Args:
            x: array or tensor with q_len rows along `dim`, or a mapping of them.
            rank: 0..P-1.
            dim: the dimension of the rows.
            fill: value of padding rows. For a mapping a number for all its entries or a mapping by name;
                names that it lacks get -1 (`ids`, `segment_ids`), -100 (`labels`, `targets`) or 0. The
                default, 0, leaves those names their own fill.

        Returns:
            The same with n rows along `dim`, always a copy; a dict for a mapping.

        Raises:
            ShapeError: for another number of rows.
            OptionError: for a rank that does not exist.
            DtypeError: for something that is no array.

        Example:
            >>> part = Partition.of_owner(np.array([1, 0]), q_len=3, groups=2, members=1, size=2)
            >>> part.shard({"tokens": np.array([[5, 6, 7]]), "ids": np.array([[0, 0, 1]])}, rank=0)
            {'tokens': array([[7, 0]]), 'ids': array([[ 1, -1]])}
        """
        if not 0 <= rank < self.ranks:
            raise OptionError(
                "Partition.shard: rank",
                expected=f"0 to {self.ranks - 1}",
                got=str(rank),
                remedy="Pass the rank within the context-parallel group",
            )
        if isinstance(x, Mapping):
            return {name: self._shard(name, part, rank, dim, fill_of(name, fill)) for name, part in x.items()}
        return self._shard("x", x, rank, dim, fill)

    def _shard(self, name: str, x: Array, rank: int, dim: int, fill: Any) -> Array:
        arrays = checked(f"Partition.shard: {name}", x, dim, self.q_len)
        count = int(self.valid(rank).sum())
        part = take(arrays, x, self.rows[rank, :count], dim)
        if count == self.rows_per_rank:
            return part
        shape = list(x.shape)
        shape[dim] = self.rows_per_rank - count
        return concat(arrays, [part, filled(arrays, x, shape, fill)], dim)

    def unshard(self, parts: Sequence[Array], dim: int = 1) -> Array:
        """The whole from the parts of all ranks; padding is dropped.

        Args:
            parts: P arrays or tensors with n rows along `dim`, in the order of the ranks.
            dim: the dimension of the rows.

        Raises:
            ShapeError: for another number of parts or rows.

        Example:
            >>> part = Partition.of_owner(np.array([1, 0]), q_len=3, groups=2, members=1, size=2)
            >>> part.unshard([part.shard(np.array([5, 6, 7]), rank, dim=0) for rank in range(2)], dim=0)
            array([5, 6, 7])
        """
        if len(parts) != self.ranks:
            raise ShapeError(
                "Partition.unshard: parts",
                expected=f"one part of each of {self.ranks} ranks",
                got=str(len(parts)),
                remedy="Gather the parts of all ranks, in their order",
            )
        for part in parts:
            arrays = checked("Partition.unshard: parts", part, dim, self.rows_per_rank)
        flat = self.rows.reshape(-1)
        real = np.flatnonzero(flat >= 0)
        place = np.empty(self.q_len, np.int64)
        place[flat[real]] = real
        return take(arrays, concat(arrays, parts, dim), place, dim)


def slots_of(q_len: int, groups: int, size: int) -> int:
    """Chunks that a group has room for.

    Example:
        >>> slots_of(10, groups=2, size=2)
        3
    """
    n_chunks = -(-q_len // size)
    return -(-n_chunks // groups)


def rows_of(q_len: int, groups: int, members: int, size: int) -> int:
    """n, rows of each rank: static, whatever the mask.

    Example:
        >>> rows_of(10, groups=2, members=2, size=2)
        3
    """
    return -(-min(slots_of(q_len, groups, size) * size, q_len) // members)


def partition(
    mask: Mask | Spans | Chunks,
    ranks: int,
    *,
    q_len: int | None = None,
    k_len: int | None = None,
    batch: int = 1,
    heads: int = 1,
    members: int = 1,
    method: Method = "balanced",
    rows_per_chunk: int | None = None,
    tolerance: float = 1.005,
) -> Partition:
    """Decide who owns which rows.

    The same arguments give the same partition on every rank. The rows per rank depend on `q_len`, `ranks`,
    `members` and `rows_per_chunk` alone, so that shapes stay when the mask changes.

    Args:
        mask: what each row sees: an expression (with `q_len`), prepared or its spans, or chunks that are cut
            already.
        ranks: P.
        q_len, k_len: rows and keys of an expression; k_len defaults to q_len.
        batch, heads: sizes that an expression's arrays must fit.
        members: u, ranks that share their rows (Ulysses); divides `ranks`.
        method: "balanced": visible pairs equal within `tolerance`, then as few foreign rows as possible;
            "greedy": pairs only, the largest chunk to the lightest group; "contiguous": rows in order;
            "zigzag": two runs of rows per group, one from each end.
        rows_per_chunk: granularity, at least 1. Default: `default_rows_per_chunk`.
        tolerance: largest over mean visible pairs of a group that "balanced" aims at, at least 1. Where no
            assignment is that even (one chunk outweighs a group's share), it comes as near as it can.

    Raises:
        OptionError, ShapeError: for sizes that do not fit each other.

    Example:
        >>> from attnspan import causal
        >>> part = partition(causal(), 4, q_len=1000)
        >>> part.rows_per_rank, sorted(part.rows[part.rows >= 0].tolist()) == list(range(1000))
        (250, True)
    """
    groups = _groups(ranks, members)
    if not tolerance >= 1:
        raise OptionError(
            "partition: tolerance",
            expected="at least 1",
            got=str(tolerance),
            remedy="It is the largest group's work over the mean",
        )
    chunks = _chunks(mask, groups, q_len, k_len, batch, heads, rows_per_chunk)
    if not len(chunks):
        raise ShapeError(
            "partition: mask", expected="at least 1 row", got="0", remedy="Do not partition empty batches"
        )
    slots = slots_of(chunks.q_len, groups, chunks.size)
    if method == "balanced":
        owner = balanced(chunks, groups, slots, tolerance)
    elif method == "greedy":
        owner = greedy(chunks.pairs, groups, slots)
    elif method == "contiguous":
        owner = contiguous(len(chunks), groups)
    elif method == "zigzag":
        owner = zigzag(len(chunks), groups)
    else:
        raise OptionError(
            "partition: method",
            expected="balanced, greedy, contiguous or zigzag",
            got=repr(method),
            remedy="Pass one of them",
        )
    return Partition.of_owner(owner, q_len=chunks.q_len, groups=groups, members=members, size=chunks.size)


def _groups(ranks: int, members: int) -> int:
    if ranks < 1 or members < 1 or ranks % members:
        raise OptionError(
            "partition: ranks, members",
            expected="at least one of each, and members to divide ranks",
            got=f"{ranks}, {members}",
            remedy="A group has equally many members everywhere",
        )
    return ranks // members


def _chunks(
    mask: Mask | Spans | Chunks,
    groups: int,
    q_len: int | None,
    k_len: int | None,
    batch: int,
    heads: int,
    rows_per_chunk: int | None,
) -> Chunks:
    if isinstance(mask, Chunks):
        if rows_per_chunk not in (None, mask.size):
            raise OptionError(
                "partition: rows_per_chunk",
                expected=f"{mask.size}, as the chunks were cut",
                got=str(rows_per_chunk),
                remedy="Leave it out, or cut the chunks anew",
            )
        return mask
    if isinstance(mask, Prepared) and q_len is None:
        mask = mask.lowered
    elif isinstance(mask, Mask):
        if q_len is None:
            raise OptionError(
                "partition: q_len",
                expected="the number of rows",
                got="None",
                remedy="A mask has none of its own",
            )
        mask = mask.spans(q_len, q_len if k_len is None else k_len, batch=batch, heads=heads).lowered
    if rows_per_chunk is None:
        rows_per_chunk = default_rows_per_chunk(mask.q_len, groups)
    return Chunks.of(mask, rows_per_chunk)


def default_rows_per_chunk(q_len: int, groups: int) -> int:
    """Rows per chunk: enough chunks per group to balance them, and little padding.

    Of 96 to 192 chunks per group the number that pads the fewest rows; of equals, the fewest chunks. They are
    that small for the sake of windows, whose first rows alone are lighter than the others: each group must
    get some of these few. Documents are dealt four chunks at a time.

    Example:
        >>> [default_rows_per_chunk(*x) for x in [(131_072, 8), (100_003, 8), (3, 8)]]
        [128, 92, 1]
    """
    sizes = {max(-(-q_len // (groups * per_group)), 1) for per_group in range(96, 193, 4)}
    least = -(-q_len // groups)
    # None at all is best; more is counted in steps of 0.1 %, and of equals those that can be dealt by fours.
    step = 1 + least // 1000

    def demerits(size: int) -> tuple[int, bool, int]:
        slots = slots_of(q_len, groups, size)
        return -(-(slots * size - least) // step), slots % 4 > 0, -size

    return min(sizes, key=demerits)
