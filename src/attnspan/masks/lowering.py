"""One lowering of a mask: its framework, sizes and query indices, and results that its parts share."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import INT32_MAX, Array, Arrays, is_array, kind_of
from attnspan.base.recorded import agree, sure
from attnspan.errors import DtypeError, ShapeError, expect

from .bounds import Spans, check_index
from .intervals import Interval, Rows, common, either_illegal, materialise, split, sweep, union_of_two

_LAYOUT = "pass layout='bshd' if k is (B, S, H, D)"
"""The remedy for keys that are counted along another axis."""

_SMALL = 1 << 20
"""The most bytes of spans without a warning."""


class SpansLargerThanMask(UserWarning):
    """Warning that the spans of a mask take more memory than booleans, because queries have too many runs."""


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """For each query: its document, and the half-open range of the document's keys."""

    number: Array
    lo: Array
    hi: Array
    inside: Array
    illegal: Array | None


@dataclass(eq=False)
class Lowering:
    """One lowering of a mask: sizes, query indices, and results that are computed once.

    `_lower` of a mask class receives it.

    Attributes:
        arrays: Array functions of the framework in use.
        q_len: Number of queries.
        k_len: Length of the global key sequence. None if nothing defines it, which happens only with
            `k_index`.
        batch, heads: Sizes that arrays of the mask must fit.
        q_index: int32 (B|1, 1, q_len), the global indices of the queries.
        tail: Whether the queries are the last keys, so that taking by `q_index` is a slice.
        counted_back: Whether the queries are counted back from the last key. With more queries than keys,
            indices are then negative.

    Example:
        >>> from attnspan.masks import Interval, Mask, Rows
        >>> class first_keys(Mask):
        ...     def _lower(self, low):
        ...         return Rows((Interval(0, low.q_len),))
        >>> first_keys().spans(2, 4).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2]]
    """

    arrays: Arrays
    q_len: int
    k_len: int | None
    batch: int
    heads: int
    q_index: Array = None
    tail: bool = False
    counted_back: bool = False
    # Lists that are searched by identity, not dicts by id(), because compilers trace `is` on tensors.
    lowered: list[tuple[object, Rows]] = field(default_factory=list)
    document_rows: list[tuple[object, object, DocumentRows]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Exclusive bound on key indices.
        self.top = INT32_MAX if self.k_len is None else self.k_len

    def part(self, **changes: Any) -> Lowering:
        """A lowering for a part of the problem. It shares no computed results."""
        return replace(self, lowered=[], document_rows=[], **changes)

    def lower(self, mask: Any) -> Rows:
        """Lower a sub-expression, once."""
        for known, rows in self.lowered:
            if known is mask:
                return rows
        lowered: Rows = mask._lower(self)
        self.lowered.append((mask, lowered))
        return lowered

    def bounds(self, mask: Any) -> Array:
        """Bounds of a mask, int32 (B|1, H|1, q_len, R, 2). Each span of an illegal query is (0, -1)."""
        arrays, rows = self.arrays, mask._lower(self)
        los, his = materialise(arrays, rows.intervals, self.q_len, self.top)
        illegal = rows.illegal
        # Illegal spans are marked before the ends are interleaved, which is much faster, and only if there
        # are any.
        if illegal is not None and not (arrays.concrete(illegal) and not illegal.any()):
            los = [arrays.where(illegal, 0, lo) for lo in los]
            his = [arrays.where(illegal, -1, hi) for hi in his]
        if len(los) == 1:
            return arrays.cast(arrays.stack([los[0], his[0]])[..., None, :], "int32")
        self._warn_of_size(len(los))
        return arrays.cast(arrays.stack(common(arrays, los, his)), "int32")

    def _warn_of_size(self, runs: int) -> None:
        q_len, k_len = self.q_len, self.k_len
        # Sizes may be symbols.
        if not (isinstance(q_len, int) and isinstance(k_len, int)) or self.arrays.tracing():
            return
        if 8 * runs > k_len and 8 * runs * q_len > _SMALL:
            warnings.warn(
                f"mask: its queries have up to {runs} runs, so its spans take {8 * runs * q_len >> 20} MiB "
                f"where booleans would take {q_len * k_len >> 20} MiB. Spans are meant for masks with few "
                "runs for each query.",
                SpansLargerThanMask,
                stacklevel=2,
            )

    def rows_of(self, bounds: Array) -> Rows:
        """Spans of a user's bounds (B|1, H|1, q_len, R, 2). Illegal spans stay illegal."""
        bounds = self.arrays.to_int32(bounds)
        return Rows(split(bounds[..., 0], bounds[..., 1]), Spans(bounds, self.top)._illegal_rows())

    def union(self, intervals: Sequence[Interval], illegal: Array | None = None) -> Rows:
        """The union of intervals in any order, as equally many ascending, disjoint intervals."""
        if len(intervals) == 1:
            return Rows(tuple(intervals), illegal)
        if len(intervals) == 2:
            ends = materialise(self.arrays, intervals, self.q_len, self.top)
            return Rows(tuple(map(Interval, *union_of_two(self.arrays, *ends, self.top))), illegal)
        return Rows(self._sweep(intervals, depth=1, count=len(intervals)), illegal)

    def intersection(self, a: Rows, b: Rows) -> Rows:
        """The intersection if both have several intervals, as at most Ra + Rb - 1 intervals."""
        both = (*a.intervals, *b.intervals)
        return Rows(self._sweep(both, depth=2, count=len(both) - 1), either_illegal(a.illegal, b.illegal))

    def _sweep(self, intervals: Sequence[Interval], depth: int, count: int) -> tuple[Interval, ...]:
        lo, hi = common(self.arrays, *materialise(self.arrays, intervals, self.q_len, self.top))
        return split(*sweep(self.arrays, lo, hi, depth=depth, count=count, top=self.top))

    def shifted(self, by: int) -> Array:
        """The query indices plus `by`, clipped to int32."""
        if by < 0:
            return self.arrays.maximum(self.q_index, -INT32_MAX - by) + by
        return self.arrays.minimum(self.q_index, INT32_MAX - by) + by

    def seen_by(self, rows: Array, lo: Any, hi: Any) -> Interval:
        """Interval [lo, hi) for the queries where `rows` (bool, B|1, 1, q_len) holds, else empty."""
        return Interval(self.arrays.where(rows, lo, 0), self.arrays.where(rows, hi, 0))

    def last_rows(self) -> Array:
        """Indices of queries that are the last keys, int32 (1, 1, q_len)."""
        return self.arrays.arange(self.q_len)[None, None] + (self.top - self.q_len)

    def index_rows(self, leaves: list[Any], q_index: Any, k_index: Any) -> None:
        """Set the query indices: as passed, as a mask defines them, or the last keys."""
        anchored = [leaf for leaf in leaves if leaf._anchor() is not None]
        if q_index is not None:
            self.q_index = self._checked(q_index)
        elif anchored:
            # A prepared mask compares its query indices with the chosen ones, so they may be another array.
            others = [leaf for leaf in anchored if leaf._anchor()[0] != "prepared"]
            first, *rest = others or anchored[:1]
            for leaf in rest:
                if not _same_anchor(leaf, first):
                    got = f"one from {first!r} and another from {leaf!r}"
                    remedy = "Pass q_index, or make both from the same array. For Layout.of, pass"
                    remedy += " mask.prepare(q_len, k_len, q_index=...)"
                    expect(False, "q_index", "one default q_index for all masks", got, remedy)
            self.q_index = first._anchor_index(self)
        elif k_index is not None:
            n = k_index.shape[0]
            expected, remedy = "no more queries than keys, {}, without q_index", "Pass q_index with k_index"
            expect(self.q_len <= n, "q_index", expected, self.q_len, remedy, n, error=ShapeError)
            self.q_index = k_index[n - self.q_len :][None, None]
        else:
            self.q_index = self.last_rows()
            self.tail, self.counted_back = self.q_len <= self.top, True

    def _checked(self, q_index: Any) -> Array:
        q_index = checks.integers("q_index", q_index)
        expected, n = "one global index for each query, {}", q_index.shape[-1]
        expect(n == self.q_len, "q_index", expected, n, "Pass as many indices", self.q_len, error=ShapeError)
        if self.arrays.concrete(q_index):
            largest = self.arrays.to_numpy(q_index).max(initial=0)
            # The key after the query's own must fit int32 too.
            expect(largest < INT32_MAX, "q_index", "int32 indices", str(largest), "Use smaller indices")
            return self.per_batch("q_index", q_index)[:, None]
        return self.arrays.minimum(self.per_batch("q_index", q_index)[:, None], INT32_MAX - 1)

    def int32(self, what: str, x: Array) -> Array:
        """Convert `x` to int32. Larger values raise if they can be read, and saturate otherwise."""
        if self.arrays.concrete(x):
            values = self.arrays.to_numpy(x)
            if values.size and not -INT32_MAX <= values.min() <= values.max() <= INT32_MAX:
                far = max(values.min(), values.max(), key=lambda x: abs(int(x)))
                expect(False, what, "at most {}", str(far), "Lengths and indices are int32", INT32_MAX)
        return self.arrays.to_int32(x)

    def per_batch(self, what: str, x: Array, dtype: str = "int32") -> Array:
        """Convert `x` of shape (n,) or (B, n) to (1|B, n)."""
        if dtype != "int32" and self.arrays.name == "jax" and isinstance(x, np.ndarray):
            # JAX has 32 bits by default, where ids that differ in higher bits would become equal.
            kept = x.astype(self.arrays.full((), 0, dtype).dtype)
            remedy = "Renumber them: np.unique(ids, return_inverse=True)[1]"
            expect((kept == x).all(), what, f"ids of {kept.dtype}, as JAX has them", "larger ids", remedy)
        x = self.int32(what, x) if dtype == "int32" else self.arrays.asarray(x, dtype)
        x = x[None] if x.ndim == 1 else x
        if not self.arrays.is_one(x.shape[0]):
            self.check_axis(what, "batch", x.shape[0])
        return x

    def check_axis(self, what: str, axis: str, size: int) -> None:
        """Raise unless an array's "batch" or "heads" axis has length 1 or the size of the problem."""
        own = self.batch if axis == "batch" else self.heads
        if not (sure(size == 1) or agree(size, own)):
            expected = f"{'' if isinstance(own, int) and own == 1 else '1 or '}{{}} along the {axis} axis"
            remedy = f"It must fit q: pass {axis}= to prepare(), spans() or Layout.of()"
            expect(False, what, expected, size, remedy, own, error=ShapeError)

    def check_rows(self, what: str, size: int) -> None:
        """Raise unless an array has one entry for each query."""
        expected = "one entry for each query, {}"
        remedy = "The array describes the queries of the call: select the entries of these queries"
        expect(size == self.q_len, what, expected, size, remedy, self.q_len, error=ShapeError)

    def check_planes(self, what: str, x: Array) -> None:
        """Raise unless x (B|1, H|1, ...) fits the batch size and the number of heads."""
        self.check_axis(what, "batch", x.shape[0])
        self.check_axis(what, "heads", x.shape[1])

    def needs_keys(self, what: str) -> None:
        """Raise if only `k_index` defines the keys."""
        expected, remedy = "the length of the global key sequence", "Lower it over all keys, then take_keys"
        expect(self.k_len is not None, what, expected, "k_index alone", remedy)

    def broken(self, what: str, bad: Array, expected: str, remedy: str, *values: Any) -> Array | None:
        """Raise if any of `bad` holds and can be read. Otherwise return it, to make these queries illegal."""
        if not self.arrays.concrete(bad):
            return bad
        expect(not bool(bad.any()), what, expected, "other values", remedy, *values)
        return None

    def lengths(
        self,
        what: str,
        lengths: Any,
        below: int | None,
        remedy: str = f"Pass the number of keys of each batch element, and {_LAYOUT}",
    ) -> tuple[Any, Array | None]:
        """Lengths as an int or (B, 1, 1), and batch elements whose length is negative or above `below`."""
        limit = () if below is None else (below,)
        legal = "at least 0" + (" and at most {}" if limit else "")
        if isinstance(lengths, int):
            fits = below is None or lengths <= below
            expect(fits, what, f"a length of {legal}", lengths, remedy, *limit)
            return lengths, None
        name = f"{what}: lengths"
        values = self.int32(name, lengths).reshape(-1, 1, 1)
        self.check_axis(name, "batch", values.shape[0])
        bad = values < 0 if below is None else (values < 0) | (values > below)
        return values, self.broken(name, bad, f"lengths of {legal}", remedy, *limit)

    def take(self, x: Array) -> tuple[Array, Array | None, Array | None]:
        """Take an array of keys, `x` (1|B, n), at the query indices.

        Returns:
            The values (1|B, q_len). Then the queries whose index belongs to no key, which see nothing, or
            None. Then the queries whose index is beyond the keys, which are illegal, or None.
        """
        if self.tail:
            offset = self.top - self.q_len
            return (x if offset == 0 else x[:, offset:]), None, None
        index, n = self.q_index[:, 0], x.shape[-1]
        remedy = "Pass ids of the whole, global sequence, or separate q_ids and kv_ids"
        expected = "indices below {}, the length of the ids"
        beyond = self.broken("q_index", index >= n, expected, remedy, n)
        values = self.arrays.take_along(x, self.arrays.clip(index, 0, n - 1))
        return values, (index < 0) | (index >= n), beyond

    def documents(self, what: str, cu_q: Array, cu_k: Array | None = None) -> DocumentRows:
        """The document of each query, at its global index, or with `cu_k` at its number among the queries.

        The same offsets give the same objects, so that intervals share their ends.
        """
        for known_q, known_k, rows in self.document_rows:
            if known_q is cu_q and known_k is cu_k:
                return rows
        arrays = self.arrays
        offsets, illegal = self._offsets(what, cu_q, self.top if cu_k is None else self.q_len)
        starts, index = offsets, self.q_index[:, 0] if cu_k is None else arrays.arange(self.q_len)[None]
        if cu_k is not None:
            starts, wrong = self._offsets(f"{what.removesuffix('q')}k", cu_k, self.top)
            illegal = either_illegal(illegal, wrong)
        number = arrays.searchsorted(offsets, index, right=True) - 1
        inside = (index >= 0) & (index < offsets[:, -1:])
        number = arrays.clip(number, 0, offsets.shape[-1] - 2)
        # A query in no document has an empty span at its own index, which is still anchored.
        lo = arrays.where(inside, arrays.take_along(starts, number), index)[:, None]
        hi = arrays.where(inside, arrays.take_along(starts, number + 1), index)[:, None]
        rows = DocumentRows(number, lo, hi, inside, illegal)
        self.document_rows.append((cu_q, cu_k, rows))
        return rows

    def _offsets(self, what: str, source: Array, total: int) -> tuple[Array, Array | None]:
        """Offsets of documents as (1|B, n + 1), and the illegal batch elements (1|B, 1, 1)."""
        cu = self.per_batch(what, source)
        bad = self.unordered(cu, repeats=True) | (cu[:, 0] != 0) | (cu[:, -1] > total)
        expected = "ascending offsets that start at 0 and end at {} or before"
        remedy = f"Pass the cumulative lengths of the documents with a 0 before them, and {_LAYOUT}"
        return cu, self.broken(what, bad[:, None, None], expected, remedy, total)

    def unordered(self, x: Array, *, repeats: bool) -> Array:
        """Whether a row of `x` (1|B, n) descends, or repeats a value without `repeats`, bool (1|B,)."""
        # No slices of n - 1 elements: a compiler would specialize on n = 2, where they have one element.
        place = self.arrays.arange(x.shape[-1])
        before = self.arrays.take_along(x, self.arrays.maximum(place - 1, 0)[None])
        return self.arrays.any(x < before if repeats else (x <= before) & (place > 0)[None])


def begin(
    arrays: Arrays,
    leaves: list[Any],
    q_len: int,
    k_len: int,
    batch: int,
    heads: int,
    q_index: Any = None,
    k_index: Any = None,
) -> Lowering:
    """Find the length of the global key sequence, and set the query indices."""
    tracing = arrays.tracing()
    if tracing:
        q_len, k_len, batch, heads = map(arrays.size, (q_len, k_len, batch, heads))
    else:
        for name, size in (("q_len", q_len), ("k_len", k_len), ("batch", batch), ("heads", heads)):
            if type(size) is not int:
                _check_size(name, size)
            elif not 0 <= size <= INT32_MAX:
                expect(False, name, "0 to {}", size, "Use fewer", INT32_MAX)
    if k_index is not None:
        if is_array(k_index) and k_index.ndim == 2:
            remedy = (
                "Pass k_index[0] if all its rows are equal. Else lower the mask for each b with k_index[b], "
            )
            remedy += "join the bounds along their first axis, and pass attnspan.spans(bounds) as the mask"
            got = tuple(k_index.shape)
            expect(False, "k_index", "(k_len,), for all batch elements", got, remedy, error=ShapeError)
        k_index = check_index(arrays, k_index, "k_index", below=None, ascending=True)
        n, remedy = k_index.shape[0], "Pass the global indices of the keys of the call"
        expect(n == k_len, "k_index", "one index for each key, {}", n, remedy, k_len, error=ShapeError)
    keys = key_len(leaves, None if k_index is not None else k_len, tracing)
    keys = arrays.size(keys) if tracing else keys
    low = Lowering(arrays, q_len, keys, batch, heads)
    low.index_rows(leaves, q_index, k_index)
    return low


def _check_size(name: str, size: Any) -> None:
    """Raise for a value that is no size. Symbols of a compiler are sizes, and so are jit.trace's tensors."""
    traced = is_array(size) and "torch" in sys.modules and sys.modules["torch"].jit.is_tracing()
    other = isinstance(size, (bool, float, list, str, tuple)) or size is None or is_array(size)
    if other and not traced:
        expect(False, name, "an int", kind_of(size), "Pass a number, such as q.shape[2]", error=DtypeError)
    if isinstance(size, np.integer):
        checks.count(name, size)


def key_len(leaves: list[Any], known: int | None = None, tracing: bool = False) -> int | None:
    """The length of the global key sequence, as known or as masks define it. Raises if they differ."""
    for leaf in leaves:
        # The program checks a length that is data. Read here, it would become a constant.
        length = None if tracing and known is not None and leaf._key_len_is_data() else leaf._key_len()
        if length is None:
            continue
        if known is not None and length is not known and not agree(length, known):
            remedy = f"They describe the whole, global sequence: {_LAYOUT}, pass a plan if ranks share the "
            remedy += "sequence, or pass k_index if the call has only some keys"
            expected = "arrays that describe {} keys"
            expect(False, repr(leaf), expected, length, remedy, known, error=ShapeError)
        known = length
    return known


def _same_anchor(a: Any, b: Any) -> bool:
    left, right = a._anchor() or (), b._anchor() or ()
    return len(left) == len(right) and all(x is y for x, y in zip(left, right, strict=True))
