"""Masks of packed sequences: a query sees the keys of its segment, group or document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import NUMPY, Array, Arrays
from attnspan.base.recorded import sure
from attnspan.errors import ShapeError, expect

from .bands import Band
from .expression import Mask
from .intervals import Interval, Rows, either_illegal
from .lowering import DocumentRows, Lowering


class segments(Mask):
    """A query sees the keys with its own segment id.

    Ids need not be sorted. The keys of each id must form at most `max_runs` contiguous runs. If an id has
    more runs, the spans of its queries become illegal. R = max_runs.

    Args:
        q_ids: integer (S,) or (B, S). Without `kv_ids`, it has the id of each key, and query i has the id at
            its global index.
        kv_ids: integer (S,) or (B, S), the id of each key. With it, `q_ids` is (q_len,) or (B, q_len), the id
            of each query of the call.
        padding_id: Queries with this id see nothing. No query sees the keys with this id.
        max_runs: The most runs of an id, at least 1. It is static: a different number recompiles.

    Raises:
        DtypeError: If the ids are not integers.
        ShapeError: If the number of ids does not fit the keys, the queries or the batch. Lowering checks
            this.
        OptionError: If `max_runs` is less than 1. `prepare` also raises it for an id with too many runs.

    Example:
        >>> segments([7, 7, 3]).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [2, 3]]
    """

    array_dims = 1

    q_ids: Array
    kv_ids: Array | None = None
    padding_id: int | None = None
    max_runs: int = 1

    def __post_init__(self) -> None:
        self._check(q_ids=checks.integers, kv_ids=checks.optional(checks.integers))
        self._check(padding_id=checks.optional(checks.number), max_runs=checks.positive)

    def _key_len(self) -> Any:
        return (self.q_ids if self.kv_ids is None else self.kv_ids).shape[-1]

    def _row_len(self) -> Any:
        return None if self.kv_ids is None else self.q_ids.shape[-1]

    def _lower(self, low: Lowering) -> Rows:
        is_padding = None if self.padding_id is None else _equal_to(low, self.q_ids, self.padding_id)
        if self.kv_ids is None:
            return _own_runs(low, "segments: q_ids", self.q_ids, is_padding, self.max_runs)
        q_ids = low.per_batch("segments: q_ids", self.q_ids, "int64")
        low.check_rows("segments: q_ids", q_ids.shape[-1])
        kv_ids = low.per_batch("segments: kv_ids", self.kv_ids, "int64")
        return _runs(low, q_ids, kv_ids, self.max_runs, None if is_padding is None else is_padding(q_ids))


class groups(Mask):
    """Tokens of a group see each other in both directions, for example the tokens of an image within text.

    For such text and images, use `causal() | groups(ids)`. R = 1.

    Args:
        ids: integer (S,) or (B, S), the group of each key. A negative id means no group: such a query sees
            nothing. The keys of a group must be contiguous. If they are not, the spans of its queries are
            illegal.

    Raises:
        DtypeError: If the ids are not integers.
        ShapeError: If the number of ids does not fit the keys or the batch. Lowering checks this.

    Example:
        >>> from attnspan import causal
        >>> (causal() | groups([-1, 4, 4])).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 3], [0, 3]]
    """

    array_dims = 1

    ids: Array

    def __post_init__(self) -> None:
        self._check(ids=checks.integers)

    def _key_len(self) -> Any:
        return self.ids.shape[-1]

    def _lower(self, low: Lowering) -> Rows:
        # Ids are compared as signed integers, where large unsigned ids would look negative.
        unsigned = "uint" in str(self.ids.dtype)
        return _own_runs(low, "groups: ids", self.ids, None if unsigned else lambda ids: ids < 0)


def _equal_to(low: Lowering, ids: Array, number: int) -> Callable[[Array], Array]:
    """Compare ids with a number as int64, or as int32 if JAX has 32 bits.

    A number outside the range of the ids' dtype equals no id.
    """
    dtype, size = str(ids.dtype), 8 * ids.dtype.itemsize
    wide = 64 if "64" in str(low.arrays._dtypes["int64"]) else 32
    least, most = (0, 1 << size) if "uint" in dtype else (-1 << (size - 1), 1 << (size - 1))
    if not least <= number < most:
        return lambda ids: ids != ids
    number -= 1 << wide if number >= 1 << (wide - 1) else 0  # as the cast wraps
    return lambda ids: ids == number


def _own_runs(
    low: Lowering,
    what: str,
    ids: Array,
    is_padding: Callable[[Array], Array] | None,
    max_runs: int = 1,
) -> Rows:
    """Spans of queries that see the runs of the id at their own index. Padding sees nothing."""
    ids = low.per_batch(what, ids, "int64")
    if sure(ids.shape[-1] == 0):
        return Rows((Interval(0, 0),))
    own, sees_nothing, beyond = low.take(ids)
    if is_padding is not None:
        sees_nothing = either_illegal(sees_nothing, is_padding(own))
    rows = _runs(low, own, ids, max_runs, sees_nothing, anchored=max_runs == 1)
    return rows if beyond is None else replace(rows, illegal=rows.illegal | beyond[:, None])


def _runs(
    low: Lowering,
    q_ids: Array,
    kv_ids: Array,
    max_runs: int,
    sees_nothing: Array | None,
    anchored: bool = False,
) -> Rows:
    """Spans of queries that see the runs of their id, or nothing where `sees_nothing` (1|B, q_len) holds."""
    if sure(kv_ids.shape[-1] == 0):
        return Rows((Interval(0, 0),))
    arrays = low.arrays
    pairs, broken = _find_runs(arrays, q_ids, kv_ids, max_runs)
    if sees_nothing is not None:
        # An empty span at the query's own index is still anchored.
        rest = low.q_index[:, 0] if anchored else 0
        pairs = [
            (arrays.where(sees_nothing, rest, lo), arrays.where(sees_nothing, rest, hi)) for lo, hi in pairs
        ]
        broken = broken & ~sees_nothing
    return Rows(tuple([Interval(lo[:, None], hi[:, None], anchored) for lo, hi in pairs]), broken[:, None])


class documents(Mask):
    """Documents packed one after the other (varlen): a query sees the keys of its document. R = 1.

    Tokens at or beyond the last offset are padding. They see nothing, and no query sees them. Their outputs
    are 0, without an error: `documents([0, 5])` over 8 tokens gives 0 for the last three tokens.

    Args:
        cu_seqlens_q: integer (n + 1,) or (B, n + 1), ascending from 0: the start of each document, and the
            end of the last one. Without `cu_seqlens_k`, it describes the keys, and query i is in the
            document at its global index.
        cu_seqlens_k: The same offsets for the keys. With it, `cu_seqlens_q` describes the queries of the
            call. The default `q_index` aligns the last query of each document with its last key.

    Raises:
        DtypeError: If the offsets are not integers.
        ShapeError: If there are fewer than 2 offsets, or if queries and keys have different numbers of
            documents.
        OptionError: If the offsets descend, do not start at 0, or end beyond the last token. Lowering checks
            values that can be read on the host. Otherwise, the spans become illegal.

    Example:
        >>> documents([0, 2, 3]).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [2, 3]]
    """

    array_dims = 1

    cu_seqlens_q: Array
    cu_seqlens_k: Array | None = None

    def __post_init__(self) -> None:
        self._check(cu_seqlens_q=checks.offsets, cu_seqlens_k=checks.optional(checks.offsets))
        if self.cu_seqlens_k is not None:
            n, m = self.cu_seqlens_q.shape[-1] - 1, self.cu_seqlens_k.shape[-1] - 1
            expected = "as many documents for keys as for queries, {}"
            remedy = "Give an absent document an empty range"
            expect(n == m, "documents", expected, m, remedy, n, error=ShapeError)

    def _anchor(self) -> tuple[Any, ...] | None:
        return None if self.cu_seqlens_k is None else ("documents", self.cu_seqlens_q, self.cu_seqlens_k)

    def band(self) -> Band:
        return Band(None, None, self.cu_seqlens_q, self.cu_seqlens_k)

    def _rows(self, low: Lowering) -> DocumentRows:
        return low.documents("documents: cu_seqlens_q", self.cu_seqlens_q, self.cu_seqlens_k)

    def _anchor_index(self, low: Lowering) -> Array:
        own, arrays = self._rows(low), low.arrays
        stops = low.per_batch("documents: cu_seqlens_q", self.cu_seqlens_q)
        after = arrays.arange(low.q_len)[None] - arrays.take_along(stops, own.number + 1)
        return arrays.where(own.inside[:, None], own.hi + after[:, None], -1)

    def _lower(self, low: Lowering) -> Rows:
        own = self._rows(low)
        return Rows((Interval(own.lo, own.hi, anchored=self.cu_seqlens_k is None),), own.illegal)


class prefix(Mask):
    """Every query sees the first keys. `causal() | prefix(n)` is the prefix-LM mask.

    Args:
        lengths: int or integer (B,), the number of leading keys of each batch element. With `cu_seqlens`:
            int, (n,) or (B, n), the number for each document. A number beyond the keys means all keys.
        cu_seqlens: integer (n + 1,) or (B, n + 1), as for `documents`. With it, a query sees the first keys
            of its document. If you pass the same array to `documents`, `(causal() | prefix(n, cu)) &
            documents(cu)` has R = 1. With another array it has R = 2.

    Raises:
        DtypeError: If an array is not of integers.
        ShapeError: If the numbers of lengths and documents differ, or if the lengths do not fit the batch.
        OptionError: If a length is negative or the offsets are wrong, where lowering can read them.
            Otherwise, the spans become illegal.

    Example:
        >>> from attnspan import causal
        >>> (causal() | prefix(2)).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [0, 3]]
    """

    array_dims = 0

    lengths: int | Array
    cu_seqlens: Array | None = None

    def __post_init__(self) -> None:
        ranks = (0, 1) if self.cu_seqlens is None else (1, 2)
        self._check(lengths=partial(checks.lengths, ranks=ranks), cu_seqlens=checks.optional(checks.offsets))
        if self.cu_seqlens is not None and not isinstance(self.lengths, int):
            n, m = self.cu_seqlens.shape[-1] - 1, self.lengths.shape[-1]
            remedy = "Pass an int for one length that all documents share"
            expect(n == m, "prefix: lengths", "one length per document, {}", m, remedy, n, error=ShapeError)

    def may_separate(self) -> bool:
        return self.cu_seqlens is not None

    def _lower(self, low: Lowering) -> Rows:
        if self.cu_seqlens is None:
            lengths, illegal = low.lengths("prefix", self.lengths, below=None)
            return Rows((Interval(None, lengths),), illegal)
        arrays = low.arrays
        own = low.documents("prefix: cu_seqlens", self.cu_seqlens)
        length, illegal = self.lengths, None
        if not isinstance(length, int):
            table = low.per_batch("prefix: lengths", length)
            bad = arrays.any(table < 0)[:, None, None]
            remedy = "Pass the number of leading keys that every query of the document may see"
            illegal = low.broken("prefix: lengths", bad, "lengths of at least 0", remedy)
            length = arrays.take_along(table, own.number)[:, None]
        # hi - lo first, because lo + length may overflow int32. Queries in no document have lo == hi and stay
        # empty.
        hi = own.lo + arrays.minimum(own.hi - own.lo, length)
        return Rows((Interval(own.lo, hi),), either_illegal(own.illegal, illegal))


def _find_runs(
    arrays: Arrays, q_ids: Array, kv_ids: Array, max_runs: int
) -> tuple[list[tuple[Array, Array]], Array]:
    """Find the runs of keys with the same id as the query.

    Args:
        q_ids: int64 (b, q).
        kv_ids: int64 (b, s).
        max_runs: Number of runs to return for each query.

    Returns:
        `max_runs` pairs lo, hi of int32 (b, q), ascending, with empty runs last, as (0, 0). Then bool (b, q):
        whether the id has more runs.
    """
    if arrays is NUMPY:
        ends, broken = _find_on_host(q_ids, kv_ids, max_runs)
        return list(map(tuple, ends)), broken
    if not (arrays.concrete(q_ids) and arrays.concrete(kv_ids)):
        return _look_up(arrays, kv_ids, q_ids, max_runs)
    keys = arrays.to_numpy(kv_ids)
    ends, broken = _find_on_host(keys if q_ids is kv_ids else arrays.to_numpy(q_ids), keys, max_runs)
    pairs = [(arrays.asarray(lo, "int32"), arrays.asarray(hi, "int32")) for lo, hi in ends]
    return pairs, arrays.asarray(broken, "bool")


_Host = np.ndarray[Any, Any]


def _find_on_host(q_ids: _Host, kv_ids: _Host, max_runs: int) -> tuple[_Host, _Host]:
    """Ends (max_runs, 2, b, q) and the mark of too many runs, from values. Searches runs, not tokens."""
    batch, rows = max(len(q_ids), len(kv_ids)), q_ids.shape[1]
    ends, broken = np.zeros((max_runs, 2, batch, rows), np.int32), np.zeros((batch, rows), bool)
    for b in range(batch):
        keys, queries = kv_ids[b % len(kv_ids)], q_ids[b % len(q_ids)]
        start, length = _run_lengths(keys)
        q_start, q_length = (start, length) if q_ids is kv_ids else _run_lengths(queries)
        order = keys[start].argsort(kind="stable")
        ids, start, length = keys[start][order], start[order], length[order]
        wanted = queries[q_start]
        first = ids.searchsorted(wanted)
        count = ids.searchsorted(wanted, side="right") - first
        broken[b] = (count > max_runs).repeat(q_length)
        for r in range(max_runs):
            run, exists = np.minimum(first + r, len(ids) - 1), count > r
            ends[r, 0, b] = (start[run] * exists).repeat(q_length)
            ends[r, 1, b] = ((start[run] + length[run]) * exists).repeat(q_length)
    return ends, broken


def _run_lengths(ids: _Host) -> tuple[_Host, _Host]:
    """Start and length of each run of equal neighbours in (s,)."""
    changes = np.ones(len(ids) + 1, bool)
    changes[1:-1] = ids[1:] != ids[:-1]
    ends = changes.nonzero()[0] if len(ids) else np.zeros(1, np.intp)
    return ends[:-1], ends[1:] - ends[:-1]


def _look_up(
    arrays: Arrays, kv_ids: Array, q_ids: Array, max_runs: int
) -> tuple[list[tuple[Array, Array]], Array]:
    """The results of `_find_runs` without reading values, from the keys sorted by id and place."""
    start = arrays.cast(arrays.argsort(kv_ids), "int32")
    ids, end = arrays.take_along(kv_ids, start), start + 1
    n = ids.shape[-1]
    # No slices of n - 1 elements: a compiler would specialize on n = 2, where they have one element.
    place = arrays.arange(n)
    before = arrays.maximum(place - 1, 0)
    opens = (ids != arrays.take_along(ids, before)) | (start != arrays.take_along(end, before))
    run = arrays.cast(arrays.cumsum(arrays.cast(opens & (place > 0)[None], "int32")), "int32")
    first = arrays.searchsorted(ids, q_ids)
    last = arrays.searchsorted(ids, q_ids, right=True) - 1
    known = last >= first
    first, last = arrays.clip(first, 0, n - 1), arrays.clip(last, 0, n - 1)
    first_run, last_run = arrays.take_along(run, first), arrays.take_along(run, last)
    pairs = []
    for r in range(max_runs):
        wanted = first_run + r
        exists = known & (wanted <= last_run)
        opening = first if r == 0 else arrays.clip(arrays.searchsorted(run, wanted), 0, n - 1)
        # The only run of a legal query ends with the last key of its id, so that no search is needed.
        closing = last if max_runs == 1 else arrays.searchsorted(run, wanted, right=True) - 1
        lo, hi = arrays.take_along(start, opening), arrays.take_along(end, arrays.clip(closing, 0, n - 1))
        pairs.append((arrays.where(exists, lo, 0), arrays.where(exists, hi, 0)))
    return pairs, known & (last_run - first_run >= max_runs)
