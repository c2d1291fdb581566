"""One lowering of a mask: its framework, the problem's sizes, the indices of rows, and what parts share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ._intervals import Interval, Rows, common, either_illegal, materialise, split, sweep, union_of_two
from ._pytrees import arrays_in
from .arrays import INT32_MAX, Array, Arrays, arrays_for, is_array, is_integer, kind_of
from .errors import DtypeError, ShapeError, expect, shown
from .spans import check_index

__all__ = ["DocumentRows", "Lowering", "begin", "begin_in"]


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """Per query row: the document it is in, and the half-open range of that document's keys."""

    number: Array
    lo: Array
    hi: Array
    inside: Array
    illegal: Array | None


@dataclass(eq=False)
class Lowering:
    """One lowering: the problem's sizes, the rows' indices, and what has been computed already.

    Attributes:
        arrays: the framework in use.
        k_len: length of the global key sequence, None where nothing says it (only with `k_index`).
        q_index: int32 (B|1, 1, q_len), the rows' global indices.
        tail: the rows are the last of the keys, so that taking by `q_index` is a slice.
        counted_back: the rows are counted back from the end of the keys, which may lie before the first.
    """

    arrays: Arrays
    q_len: int
    k_len: int | None
    batch: int
    heads: int
    q_index: Array = None
    tail: bool = False
    counted_back: bool = False
    # Lists searched by identity, not dicts by id(): compilers trace `is` on tensors.
    lowered: list[tuple[object, Rows]] = field(default_factory=list)
    document_rows: list[tuple[object, DocumentRows]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A bound on key indices, exclusive.
        self.top = INT32_MAX if self.k_len is None else self.k_len

    def lower(self, mask: Any) -> Rows:
        """Lower a sub-expression, once."""
        for known, rows in self.lowered:
            if known is mask:
                return rows
        lowered: Rows = mask._lower(self)
        self.lowered.append((mask, lowered))
        return lowered

    def bounds(self, mask: Any) -> Array:
        """int32 (B|1, H|1, q_len, R, 2) of a mask; (0, -1) in each span of an illegal row."""
        arrays, rows = self.arrays, self.lower(mask)
        los, his = materialise(arrays, rows.intervals, self.q_len, self.top)
        illegal = rows.illegal
        # Marked before they are interleaved, which is faster by far; not at all where none is illegal.
        if illegal is not None and not (arrays.concrete(illegal) and not illegal.any()):
            los = [arrays.where(illegal, 0, lo) for lo in los]
            his = [arrays.where(illegal, -1, hi) for hi in his]
        if len(los) == 1:
            return arrays.cast(arrays.stack([los[0], his[0]])[..., None, :], "int32")
        return arrays.cast(arrays.stack(common(arrays, los, his)), "int32")

    def union(self, intervals: Sequence[Interval], illegal: Array | None = None) -> Rows:
        """The union of intervals in any order: as many, ascending and disjoint, those that touch joined."""
        if len(intervals) == 1:
            return Rows(tuple(intervals), illegal)
        los, his = materialise(self.arrays, intervals, self.q_len, self.top)
        if len(intervals) == 2:
            los, his = union_of_two(self.arrays, los, his, self.top)
            return Rows(tuple(map(Interval, los, his)), illegal)
        lo, hi = common(self.arrays, los, his)
        lo, hi = sweep(self.arrays, lo, hi, depth=1, count=len(intervals), top=self.top)
        return Rows(split(lo, hi), illegal)

    def intersection(self, a: Rows, b: Rows) -> Rows:
        """The intersection where both have several intervals: at most Ra + Rb - 1."""
        los, his = materialise(self.arrays, (*a.intervals, *b.intervals), self.q_len, self.top)
        lo, hi = common(self.arrays, los, his)
        lo, hi = sweep(self.arrays, lo, hi, depth=2, count=len(los) - 1, top=self.top)
        return Rows(split(lo, hi), either_illegal(a.illegal, b.illegal))

    def last_rows(self) -> Array:
        """int32 (1, 1, q_len): the indices of rows that are the last of the keys."""
        return self.arrays.arange(self.q_len)[None, None] + (self.top - self.q_len)

    def index_rows(self, leaves: list[Any], q_index: Any, k_index: Any) -> None:
        """Give the rows their indices: those that are given, those that a mask implies, or the last ones."""
        if q_index is not None:
            self.q_index = self._checked(q_index)
            return
        anchored = [leaf for leaf in leaves if leaf._anchor() is not None]
        if len(anchored) > 1:
            # A prepared mask compares its rows with those chosen, so that it need not be the same array.
            others = [leaf for leaf in anchored if leaf._anchor()[0] != "prepared"]
            anchored = others or anchored[:1]
        for leaf in anchored[1:]:
            if not _same_anchor(leaf, anchored[0]):
                got = f"one from {anchored[0]!r} and another from {leaf!r}"
                remedy = "Pass q_index, or make both from one and the same array"
                expect(False, "q_index", "one default for the rows' indices", got, remedy)
        if anchored:
            self.q_index = anchored[0]._anchor_index(self)
        elif k_index is not None:
            n = k_index.shape[0]
            expected, remedy = "no more rows than keys, {}, where it is left out", "Pass q_index with k_index"
            expect(self.q_len <= n, "q_index", expected, self.q_len, remedy, n, error=ShapeError)
            self.q_index = k_index[n - self.q_len :][None, None]
        else:
            self.q_index = self.last_rows()
            self.tail, self.counted_back = self.q_len <= self.top, True

    def _checked(self, q_index: Any) -> Array:
        got = kind_of(q_index)
        remedy, integer = "Pass int32 or int64 indices", is_array(q_index) and is_integer(q_index)
        expect(integer, "q_index", "an integer array", got, remedy, error=DtypeError)
        fits = q_index.ndim in (1, 2) and q_index.shape[-1] == self.q_len
        sizes = (self.q_len, self.batch, self.q_len)
        remedy = "Pass one global index per query row"
        expect(
            fits, "q_index", "shape ({},) or ({}, {})", tuple(q_index.shape), remedy, *sizes, error=ShapeError
        )
        if self.arrays.concrete(q_index) and self.q_len > 0:
            values = self.arrays.to_numpy(q_index)
            holds = values.min() >= -INT32_MAX and values.max() < INT32_MAX
            expect(holds, "q_index", "int32 indices", str(values.max()), "Use smaller ones")
        return self.per_batch("q_index", q_index, "int32")[:, None]

    def per_batch(self, what: str, x: Array, dtype: str) -> Array:
        """`x` of shape (n,) or (B, n) as (1|B, n)."""
        x = self.arrays.to_int32(x) if dtype == "int32" else self.arrays.asarray(x, dtype)
        x = x[None] if x.ndim == 1 else x
        if x.shape[0] != 1 and x.shape[0] != self.batch:
            self.check_axis(what, "batch", x.shape[0], self.batch)
        return x

    def check_axis(self, what: str, axis: str, size: int, expected: int) -> None:
        """Raise unless an array has one entry along an axis, or as many as the problem."""
        if size != 1 and size != expected:
            raise ShapeError(
                what,
                expected=f"1 or {expected} along the {axis} axis",
                got=shown(size),
                remedy=f"Pass {axis}={size} to spans(), or an array that fits",
            )

    def check_rows(self, what: str, size: int) -> None:
        """Raise unless an array has an entry for each query row."""
        remedy = "It describes rows as they come: take the rows that the queries are"
        expect(
            size == self.q_len,
            what,
            "one entry per query row, {}",
            size,
            remedy,
            self.q_len,
            error=ShapeError,
        )

    def needs_keys(self, what: str, expected: str = "the length of the global key sequence") -> None:
        """Raise where only `k_index` says which keys there are."""
        remedy = "Lower it over all keys, then use Spans.take_keys"
        expect(self.k_len is not None, what, expected, "k_index alone", remedy)

    def broken(
        self, what: str, bad: Array, sources: tuple[Any, ...], expected: str, remedy: str, *values: Any
    ) -> Array | None:
        """Raise if any of `bad` holds and `sources` can be read; else return it, to make its rows illegal."""
        # In a trace JAX makes tracers even of arrays whose values it knows.
        if not all(self.arrays.concrete(x) for x in (*sources, bad)):
            return bad
        if bool(bad.any()):
            expect(False, what, expected, "values outside that", remedy, *values)
        return None

    def check_int32(self, what: str, x: Array) -> None:
        """Raise for values beyond int32 where they can be read; elsewhere they saturate."""
        if not self.arrays.concrete(x):
            return
        values = self.arrays.to_numpy(x)
        if values.size and not -INT32_MAX <= values.min() <= values.max() <= INT32_MAX:
            far = max(values.min(), values.max(), key=lambda x: abs(int(x)))
            expect(False, what, "at most {}", str(far), "Lengths and indices are int32", INT32_MAX)

    def lengths(self, what: str, lengths: Any, below: int | None) -> tuple[Any, Array | None]:
        """Lengths as an int or (B, 1, 1), and the rows whose length is negative or above `below`."""
        remedy = "Pass the number of keys of each batch row"
        limit = () if below is None else (below,)
        legal = "at least 0" + (" and at most {}, the number of keys" if limit else "")
        if isinstance(lengths, int):
            if below is not None and lengths > below:
                expect(False, what, f"a length of {legal}", lengths, remedy, *limit)
            return lengths, None
        name = f"{what}: lengths"
        self.check_int32(name, lengths)
        values = self.arrays.to_int32(lengths).reshape(-1, 1, 1)
        self.check_axis(name, "batch", values.shape[0], self.batch)
        bad = values < 0 if below is None else (values < 0) | (values > below)
        return values, self.broken(name, bad, (lengths,), f"lengths of {legal}", remedy, *limit)

    def take(self, x: Array) -> tuple[Array, Array | None, Array | None]:
        """`x` (1|B, n), which describes keys, at the rows' own indices.

        Returns:
            The values (1|B, q_len); where the index is that of no key (None: nowhere): such rows see nothing;
            and the rows whose index lies beyond the keys, which are illegal.
        """
        if self.tail:
            offset = self.top - self.q_len
            return (x if offset == 0 else x[:, offset:]), None, None
        index, n = self.q_index[:, 0], x.shape[-1]
        remedy = "Pass ids of the whole, global sequence, or separate q_ids and kv_ids"
        expected = "indices below {}, the length of the ids"
        beyond = self.broken("q_index", index >= n, (self.q_index,), expected, remedy, n)
        values = self.arrays.take_along(x, self.arrays.clip(index, 0, n - 1))
        return values, (index < 0) | (index >= n), beyond

    def documents(self, what: str, cu_seqlens: Array) -> DocumentRows:
        """The document of each row by its global index; ends are one object per `cu_seqlens`."""
        for known, rows in self.document_rows:
            if known is cu_seqlens:
                return rows
        arrays = self.arrays
        cu = self.per_batch(what, cu_seqlens, "int32")
        illegal = self.check_cu_seqlens(what, cu_seqlens, cu, self.top)
        index = self.q_index[:, 0]
        number = arrays.searchsorted(cu, index, right=True) - 1
        inside = (index >= 0) & (index < cu[:, -1:])
        number = arrays.clip(number, 0, cu.shape[-1] - 2)
        # A row in no document is an empty span at its own index: still anchored.
        lo = arrays.where(inside, arrays.take_along(cu, number), index)[:, None]
        hi = arrays.where(inside, arrays.take_along(cu, number + 1), index)[:, None]
        rows = DocumentRows(number, lo, hi, inside, illegal)
        self.document_rows.append((cu_seqlens, rows))
        return rows

    def unordered(self, x: Array, *, repeats: bool) -> Array:
        """Bool (1|B,): whether a row of `x` (1|B, n) does not ascend, or repeats a value and must not."""
        # Not by slices of n - 1 elements: a compiler would make n a constant where they have one element.
        place = self.arrays.arange(x.shape[-1])
        before = self.arrays.take_along(x, self.arrays.maximum(place - 1, 0)[None])
        return self.arrays.any(x < before if repeats else (x <= before) & (place > 0))

    def check_cu_seqlens(self, what: str, source: Array, cu: Array, total: int) -> Array | None:
        """Illegal rows (1|B, 1, 1), or None."""
        self.check_int32(what, source)
        bad = self.unordered(cu, repeats=True) | (cu[:, 0] != 0) | (cu[:, -1] > total)
        expected = "ascending offsets that start at 0 and end at {} or before"
        remedy = "Pass the cumulative lengths of the documents, as torch.cumsum gives with a 0 before them"
        return self.broken(what, bad[:, None, None], (source,), expected, remedy, total)


def begin(
    mask: Any, q_len: int, k_len: int, batch: int, heads: int, q_index: Any, k_index: Any, like: Any
) -> Lowering:
    """Choose the framework, find the length of the global key sequence, and give the rows their indices."""
    arrays = arrays_for([*arrays_in(mask), q_index, k_index], like)
    return begin_in(arrays, mask._leaves(), q_len, k_len, batch, heads, q_index, k_index)


def begin_in(
    arrays: Arrays,
    leaves: list[Any],
    q_len: int,
    k_len: int,
    batch: int,
    heads: int,
    q_index: Any = None,
    k_index: Any = None,
) -> Lowering:
    """The same in a framework that is known."""
    tracing = arrays.tracing()
    if not tracing:
        for name, size in (("q_len", q_len), ("k_len", k_len), ("batch", batch), ("heads", heads)):
            if isinstance(size, int) and not 0 <= size <= INT32_MAX:
                expect(False, name, "0 to {}", size, "Use fewer", INT32_MAX)
    if k_index is not None:
        k_index = check_index(arrays, k_index, "k_index", below=None, ascending=True)
        n, remedy = k_index.shape[0], "Pass the global indices of the keys that are here"
        expect(n == k_len, "k_index", "one index per key, {}", n, remedy, k_len, error=ShapeError)
    keys = _key_len(leaves, None if k_index is not None else k_len, tracing)
    low = Lowering(arrays, q_len, keys, batch, heads)
    low.index_rows(leaves, q_index, k_index)
    return low


def _key_len(leaves: list[Any], known: int | None, tracing: bool) -> int | None:
    for leaf in leaves:
        # The program checks a length that is data: read here, it would be a constant.
        length = leaf._key_len(tracing and known is not None)
        if length is None:
            continue
        if known is not None and length != known:
            remedy = "They describe the whole, global sequence; pass k_index if only some keys are here"
            expect(False, repr(leaf), "arrays that describe {} keys", length, remedy, known, error=ShapeError)
        known = length
    return known


def _same_anchor(a: Any, b: Any) -> bool:
    left, right = a._anchor() or (), b._anchor() or ()
    return len(left) == len(right) and all(x is y for x, y in zip(left, right, strict=True))
