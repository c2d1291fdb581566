"""Masks of packed sequences: rows see the keys of their segment, group or document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import checks
from ._intervals import Interval, Rows, either_illegal
from ._runs import find_runs
from .arrays import Array
from .errors import ShapeError, expect
from .expression import Mask
from .lowering import Lowering

__all__ = ["documents", "groups", "prefix", "segments"]


@dataclass(frozen=True, eq=False, repr=False)
class segments(Mask):
    """A query sees the keys with its own segment id.

    Ids need not be sorted, but the keys of each id form at most `max_runs` contiguous runs, and R = max_runs.
    An id in more runs than that makes the rows of that id illegal: never a plausible wrong mask.

    Args:
        q_ids: integer (S,) or (B, S). Alone, it describes the keys, and query i has the id at its global
            index.
        kv_ids: integer (S,) or (B, S), the ids of the keys; then `q_ids` is (q_len,) or (B, q_len), per row
            as it comes.
        padding_id: rows with this id see nothing, and so nothing sees keys with it.
        max_runs: at least 1, static.

    Raises:
        DtypeError, ShapeError, OptionError: for ids that are not integers, of a wrong rank, or max_runs < 1.

    Example:
        >>> segments([7, 7, 3]).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [2, 3]]
    """

    q_ids: Array
    kv_ids: Array | None = None
    padding_id: int | None = None
    max_runs: int = 1

    def __post_init__(self) -> None:
        self._set(q_ids=checks.integers("segments: q_ids", self.q_ids, (1, 2)))
        if self.kv_ids is not None:
            self._set(kv_ids=checks.integers("segments: kv_ids", self.kv_ids, (1, 2)))
        if self.padding_id is not None:
            self._set(padding_id=checks.number("segments: padding_id", self.padding_id))
        self._set(max_runs=checks.count("segments: max_runs", self.max_runs, least=1))

    def _key_len(self, traced: bool = False) -> Any:  # noqa: ARG002
        return (self.q_ids if self.kv_ids is None else self.kv_ids).shape[-1]

    def _row_len(self) -> Any:
        return None if self.kv_ids is None else self.q_ids.shape[-1]

    def _lower(self, low: Lowering) -> Rows:
        q_ids = low.per_batch("segments: q_ids", self.q_ids, "int64")
        if self.kv_ids is not None:
            low.check_rows("segments: q_ids", q_ids.shape[-1])
            kv_ids = low.per_batch("segments: kv_ids", self.kv_ids, "int64")
            nobody = None if self.padding_id is None else q_ids == self.padding_id
            return _id_rows(low, q_ids, kv_ids, self.max_runs, nobody, None)
        if q_ids.shape[-1] == 0:
            return Rows((Interval(0, 0),))
        own, nowhere, beyond = low.take(q_ids)
        nobody = nowhere
        if self.padding_id is not None:
            nobody = either_illegal(nowhere, own == self.padding_id)
        return _id_rows(low, own, q_ids, self.max_runs, nobody, beyond, anchored=self.max_runs == 1)


@dataclass(frozen=True, eq=False, repr=False)
class groups(Mask):
    """Tokens of a group see each other both ways: `causal() | groups(ids)` for image tokens within text.

    Args:
        ids: integer (S,) or (B, S), of the keys; negative: in no group, such rows see nothing. The keys of a
            group are contiguous; rows of one that is not are illegal.

    Raises:
        DtypeError, ShapeError: for ids that are not integers or of a wrong rank.

    Example:
        >>> from attnspan import causal
        >>> (causal() | groups([-1, 4, 4])).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 3], [0, 3]]
    """

    ids: Array

    def __post_init__(self) -> None:
        self._set(ids=checks.integers("groups: ids", self.ids, (1, 2)))

    def _key_len(self, traced: bool = False) -> Any:  # noqa: ARG002
        return self.ids.shape[-1]

    def _lower(self, low: Lowering) -> Rows:
        ids = low.per_batch("groups: ids", self.ids, "int64")
        if ids.shape[-1] == 0:
            return Rows((Interval(0, 0),))
        own, nowhere, beyond = low.take(ids)
        return _id_rows(low, own, ids, 1, either_illegal(nowhere, own < 0), beyond, anchored=True)


def _id_rows(
    low: Lowering,
    q_ids: Array,
    kv_ids: Array,
    max_runs: int,
    nobody: Array | None,
    beyond: Array | None,
    anchored: bool = False,
) -> Rows:
    """Rows that see the runs of their id; those of `nobody` (1|B, q_len) see nothing, whatever it is."""
    arrays = low.arrays
    if kv_ids.shape[-1] == 0:
        return Rows((Interval(0, 0),))
    pairs, broken = find_runs(arrays, q_ids, kv_ids, max_runs)
    intervals = []
    for lo, hi in pairs:
        lo, hi = lo[:, None], hi[:, None]
        if nobody is not None:
            # An empty span at the row's own index is still anchored.
            rest = low.q_index if anchored else 0
            lo, hi = (arrays.where(nobody[:, None], rest, x) for x in (lo, hi))
        intervals.append(Interval(lo, hi, anchored))
    if nobody is not None:
        broken = broken & ~nobody
    return Rows(tuple(intervals), (broken if beyond is None else broken | beyond)[:, None])


@dataclass(frozen=True, eq=False, repr=False)
class documents(Mask):
    """Documents packed one after the other: a query sees the keys of its document.

    Rows and keys at or beyond the last offset are padding: they see nothing and are seen by none.

    Args:
        cu_seqlens_q: integer (n + 1,) or (B, n + 1), ascending from 0: where each document starts, and where
            the last one ends. Alone, it describes the keys, and query i is in the document of its global
            index.
        cu_seqlens_k: the same for the keys; then `cu_seqlens_q` describes the rows as they come, and the
            default `q_index` aligns the last row of each document with its last key.

    Raises:
        DtypeError, ShapeError, OptionError: for offsets that are not integers, of a wrong rank, or not
            ascending.

    Example:
        >>> documents([0, 2, 3]).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [2, 3]]
    """

    cu_seqlens_q: Array
    cu_seqlens_k: Array | None = None

    def __post_init__(self) -> None:
        cu_q = checks.offsets("documents: cu_seqlens_q", self.cu_seqlens_q)
        self._set(cu_seqlens_q=cu_q)
        if self.cu_seqlens_k is None:
            return
        cu_k = checks.offsets("documents: cu_seqlens_k", self.cu_seqlens_k)
        n, m = cu_q.shape[-1], cu_k.shape[-1]
        expected, remedy = (
            "as many documents for keys as for queries, {}",
            "Give an absent one an empty range",
        )
        if n != m:
            expect(False, "documents", expected, m - 1, remedy, n - 1, error=ShapeError)
        self._set(cu_seqlens_k=cu_k)

    def _anchor(self) -> tuple[Any, ...] | None:
        return None if self.cu_seqlens_k is None else ("documents", self.cu_seqlens_q, self.cu_seqlens_k)

    def _anchor_index(self, low: Lowering) -> Array:
        cu_q, cu_k, row, number, inside = self._rows(low)
        arrays = low.arrays
        shift = arrays.take_along(cu_k, number + 1) - arrays.take_along(cu_q, number + 1)
        return arrays.where(inside, row + shift, -1)[:, None]

    def _rows(self, low: Lowering) -> tuple[Array, Array, Array, Array, Array]:
        arrays = low.arrays
        cu_q = low.per_batch("documents: cu_seqlens_q", self.cu_seqlens_q, "int32")
        cu_k = low.per_batch("documents: cu_seqlens_k", self.cu_seqlens_k, "int32")
        row = arrays.arange(low.q_len)[None]
        number = arrays.searchsorted(cu_q, row, right=True) - 1
        number = arrays.clip(number, 0, cu_q.shape[-1] - 2)
        return cu_q, cu_k, row, number, row < cu_q[:, -1:]

    def _lower(self, low: Lowering) -> Rows:
        if self.cu_seqlens_k is None:
            own = low.documents("documents: cu_seqlens_q", self.cu_seqlens_q)
            return Rows((Interval(own.lo, own.hi, anchored=True),), own.illegal)
        arrays = low.arrays
        cu_q, cu_k, _, number, inside = self._rows(low)
        illegal = either_illegal(
            low.check_cu_seqlens("documents: cu_seqlens_q", self.cu_seqlens_q, cu_q, low.q_len),
            low.check_cu_seqlens("documents: cu_seqlens_k", self.cu_seqlens_k, cu_k, low.top),
        )
        lo = arrays.where(inside, arrays.take_along(cu_k, number), 0)[:, None]
        hi = arrays.where(inside, arrays.take_along(cu_k, number + 1), 0)[:, None]
        return Rows((Interval(lo, hi),), illegal)


@dataclass(frozen=True, eq=False, repr=False)
class prefix(Mask):
    """Every query sees the first keys: `causal() | prefix(n)` is the prefix-LM mask.

    Args:
        lengths: int or integer (B,), keys of each batch row; with `cu_seqlens`, int or (n,) or (B, n), of
            each document. More than there are keys means all of them.
        cu_seqlens: integer (n + 1,) or (B, n + 1), as for `documents`: a query sees the first keys of its
            document. Pass the very array that `documents` gets: then `(causal() | prefix(n, cu)) &
            documents(cu)` has R = 1, else 2.

    Raises:
        DtypeError, ShapeError, OptionError: for lengths that are not integers, of a wrong rank, or negative.

    Example:
        >>> from attnspan import causal
        >>> (causal() | prefix(2)).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [0, 3]]
    """

    lengths: int | Array
    cu_seqlens: Array | None = None

    def __post_init__(self) -> None:
        if self.cu_seqlens is None:
            self._set(lengths=checks.lengths("prefix: lengths", self.lengths))
            return
        offsets = checks.offsets("prefix: cu_seqlens", self.cu_seqlens)
        lengths = checks.lengths("prefix: lengths", self.lengths, (1, 2))
        if not isinstance(lengths, int):
            n, m = offsets.shape[-1] - 1, lengths.shape[-1]
            remedy = "Pass an int for one length that all documents share"
            expect(n == m, "prefix: lengths", "one length per document, {}", m, remedy, n, error=ShapeError)
        self._set(lengths=lengths, cu_seqlens=offsets)

    def _lower(self, low: Lowering) -> Rows:
        if self.cu_seqlens is None:
            lengths, illegal = low.lengths("prefix", self.lengths, below=None)
            return Rows((Interval(None, lengths),), illegal)
        arrays = low.arrays
        own = low.documents("prefix: cu_seqlens", self.cu_seqlens)
        length, illegal = self.lengths, None
        if not isinstance(length, int):
            low.check_int32("prefix: lengths", length)
            table = low.per_batch("prefix: lengths", length, "int32")
            bad = arrays.any(table < 0)[:, None, None]
            remedy = "Pass the number of leading keys that every row of the document may see"
            illegal = low.broken("prefix: lengths", bad, (length,), "lengths of at least 0", remedy)
            length = arrays.take_along(table, own.number)[:, None]
        # hi - lo first: lo + length may leave int32. Rows in no document have lo == hi and stay empty.
        hi = own.lo + arrays.minimum(own.hi - own.lo, length)
        return Rows((Interval(own.lo, hi),), either_illegal(own.illegal, illegal))
