"""Masks with structure: each is lowered in O(q_len) without looking at its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._expression import Mask
from ._intervals import FULL, Interval, Rows, either_illegal
from ._lowering import Lowering
from ._runs import find_runs
from .arrays import INT32_MAX, Array
from .errors import OptionError


@dataclass(frozen=True, eq=False, repr=False)
class Full(Mask):
    def _lower(self, low: Lowering) -> Rows:
        del low
        return Rows((FULL,))


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    def _lower(self, low: Lowering) -> Rows:
        return Rows((Interval(None, low.q_index + 1, anchored=True),))


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    left: int | None
    right: int | None = 0

    def _lower(self, low: Lowering) -> Rows:
        lo = hi = None
        # Saturating, since index -+ width may leave int32 where a width means "all".
        if self.left is not None:
            lo = low.arrays.maximum(low.q_index, self.left - INT32_MAX) - self.left
        if self.right is not None:
            reach = min(self.right + 1, INT32_MAX)
            hi = low.arrays.minimum(low.q_index, INT32_MAX - reach) + reach
        return Rows((Interval(lo, hi, anchored=True),))


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    q_ids: Array
    kv_ids: Array | None = None
    padding_id: int | None = None
    max_runs: int = 1

    def _key_len(self) -> Any:
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
class Groups(Mask):
    ids: Array

    def _key_len(self) -> Any:
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
class Documents(Mask):
    cu_seqlens_q: Array
    cu_seqlens_k: Array | None = None

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
class Prefix(Mask):
    lengths: int | Array
    cu_seqlens: Array | None = None

    def _lower(self, low: Lowering) -> Rows:
        if self.cu_seqlens is None:
            lengths, illegal = _lengths(low, "prefix", self.lengths, below=None)
            return Rows((Interval(None, lengths),), illegal)
        arrays = low.arrays
        own = low.documents("prefix: cu_seqlens", self.cu_seqlens)
        length, illegal = self.lengths, None
        if not isinstance(length, int):
            low.check_int32("prefix: lengths", length)
            table = low.per_batch("prefix: lengths", length, "int32")
            illegal = low.broken(
                "prefix: lengths",
                arrays.any(table < 0)[:, None, None],
                length,
                expected=lambda: "lengths of at least 0",
                remedy="Pass the number of leading keys that every row of the document may see",
            )
            length = arrays.take_along(table, own.number)[:, None]
        # hi - lo first: lo + length may leave int32. Rows in no document have lo == hi and stay empty.
        hi = own.lo + arrays.minimum(own.hi - own.lo, length)
        return Rows((Interval(own.lo, hi),), either_illegal(own.illegal, illegal))


@dataclass(frozen=True, eq=False, repr=False)
class KeyPadding(Mask):
    lengths: int | Array
    side: str = "right"
    start: int = 0
    stop: int | None = None

    def __repr__(self) -> str:
        return super().__repr__().replace("keypadding", "key_padding")

    def _lower(self, low: Lowering) -> Rows:
        if self.stop is None and self.side == "left" and low.k_len is None:
            raise OptionError(
                "key_padding",
                expected='the length of the global key sequence, which side="left" counts from',
                got="k_index alone",
                remedy="Lower it over all keys, then use Spans.take_keys",
            )
        end = low.top if self.stop is None else self.stop
        # The number of keys may be a symbol: it is compared only where a part was named.
        if (self.start > 0 or self.stop is not None) and not self.start <= end <= low.top:
            raise OptionError(
                "key_padding: start, stop",
                expected=f"a part of the {low.top} keys",
                got=f"keys {self.start} to {end}",
                remedy="Pass where the part that may be padded begins and ends",
            )
        lengths, illegal = _lengths(low, "key_padding", self.lengths, below=end - self.start)
        # The valid keys of the part join those before it, or those after it.
        if self.side == "right":
            valid, rest = Interval(None, self.start + lengths), Interval(end, None)
            return Rows((valid,) if self.stop is None else (valid, rest), illegal)
        rest, valid = Interval(None, self.start), Interval(end - lengths, None)
        return Rows((valid,) if self.start == 0 else (rest, valid), illegal)


@dataclass(frozen=True, eq=False, repr=False)
class Cache(Mask):
    lengths: int | Array

    def _anchor(self) -> tuple[Any, ...]:
        return ("cache", self.lengths)

    def _anchor_index(self, low: Lowering) -> Array:
        lengths, _ = _lengths(low, "cache", self.lengths, below=low.top)
        return low.arrays.arange(low.q_len)[None, None] + (lengths - low.q_len)

    def _lower(self, low: Lowering) -> Rows:
        lengths, illegal = _lengths(low, "cache", self.lengths, below=low.top)
        return Rows((Interval(None, lengths),), illegal)


def _lengths(low: Lowering, what: str, lengths: Any, below: int | None) -> tuple[Any, Array | None]:
    """An int as it is, or (B,) as (B, 1, 1), and the rows whose length is none."""

    def legal() -> str:
        return "at least 0" if below is None else f"at least 0 and at most {below}, the number of keys"

    remedy = "Pass the number of keys of each batch row"
    if isinstance(lengths, int):
        if below is not None and lengths > below:
            raise OptionError(what, expected=f"a length of {legal()}", got=f"{lengths}", remedy=remedy)
        return lengths, None
    low.check_int32(f"{what}: lengths", lengths)
    values = low.arrays.to_int32(lengths).reshape(-1, 1, 1)
    low.check_axis(f"{what}: lengths", "batch", values.shape[0], low.batch)
    bad = values < 0 if below is None else (values < 0) | (values > below)
    illegal = low.broken(
        f"{what}: lengths", bad, lengths, expected=lambda: f"lengths of {legal()}", remedy=remedy
    )
    return values, illegal


@dataclass(frozen=True, eq=False, repr=False)
class GlobalKeys(Mask):
    n: int

    def _lower(self, low: Lowering) -> Rows:
        del low
        return Rows((Interval(None, self.n),))

    def __repr__(self) -> str:
        return f"global_keys({self.n})"
