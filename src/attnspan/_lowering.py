"""What the leaves of one mask expression share while it is lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ._intervals import Rows
from .arrays import INT32_MAX, Array, Arrays
from .errors import OptionError, ShapeError, shown


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

    def last_rows(self) -> Array:
        """int32 (1, 1, q_len): the indices of rows that are the last of the keys."""
        return self.arrays.arange(self.q_len)[None, None] + (self.top - self.q_len)

    def per_batch(self, what: str, x: Array, dtype: str) -> Array:
        """`x` of shape (n,) or (B, n) as (1|B, n)."""
        x = self.arrays.to_int32(x) if dtype == "int32" else self.arrays.asarray(x, dtype)
        x = x[None] if x.ndim == 1 else x
        if x.shape[0] != 1 and x.shape[0] != self.batch:
            self.check_axis(what, "batch", x.shape[0], self.batch)
        return x

    def check_axis(self, what: str, axis: str, size: int, expected: int) -> None:
        if size != 1 and size != expected:
            raise ShapeError(
                what,
                expected=f"1 or {expected} along the {axis} axis",
                got=shown(size),
                remedy=f"Pass {axis}={size} to spans(), or an array that fits",
            )

    def check_rows(self, what: str, size: int) -> None:
        if size != self.q_len:
            raise ShapeError(
                what,
                expected=f"one entry per query row, {self.q_len}",
                got=shown(size),
                remedy="It describes rows as they come: take the rows that the queries are",
            )

    def broken(
        self, what: str, bad: Array, *sources: Any, expected: Callable[[], str], remedy: str
    ) -> Array | None:
        """Raise if any of `bad` holds and `sources` can be read; else return it, to make its rows illegal.

        `expected` is called by the error alone: a size that is put into a text is a constant to a compiler.
        """
        # In a trace JAX makes tracers even of arrays whose values it knows.
        if not all(self.arrays.concrete(x) for x in (*sources, bad)):
            return bad
        if bool(bad.any()):
            raise OptionError(what, expected=expected(), got="values outside that", remedy=remedy)
        return None

    def check_int32(self, what: str, x: Array) -> None:
        """Raise for values beyond int32 where they can be read; elsewhere they saturate."""
        if not self.arrays.concrete(x):
            return
        values = self.arrays.to_numpy(x)
        if values.size and not -INT32_MAX <= values.min() <= values.max() <= INT32_MAX:
            far = max(values.min(), values.max(), key=lambda x: abs(int(x)))
            remedy = "Lengths and indices are int32"
            raise OptionError(what, expected=f"at most {INT32_MAX}", got=str(far), remedy=remedy)

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
        beyond = self.broken(
            "q_index",
            index >= n,
            self.q_index,
            expected=lambda: f"indices below {n}, the length of the ids",
            remedy="Pass ids of the whole, global sequence, or separate q_ids and kv_ids",
        )
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
        return self.broken(
            what,
            bad[:, None, None],
            source,
            expected=lambda: f"ascending offsets that start at 0 and end at {total} or before",
            remedy="Pass the cumulative lengths of the documents, as torch.cumsum gives with a 0 before them",
        )
