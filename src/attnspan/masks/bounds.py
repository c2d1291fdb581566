"""The lowered form of a mask: a few half-open key intervals for each query, and arithmetic on them."""

from __future__ import annotations

import sys
from dataclasses import field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import INT32_MAX, Array, Arrays, arrays_for, is_array, is_integer, kind_of
from attnspan.base.mistakes import refuse_operand, refuse_truth
from attnspan.base.plain import check_strided
from attnspan.base.pytrees import Node
from attnspan.errors import DtypeError, OptionError, ShapeError, expect

from .intervals import sweep

_PROMISES = (
    "(0, -1) marks a query whose mask data are wrong: the keys of a segment or group id form more than "
    "max_runs runs, or a length or index is beyond the keys. Pass ids in the order of the tokens, or raise "
    "max_runs"
)


class Spans(Node):
    """Spans of each query: query i may see key j iff lo[r] <= j < hi[r] for some r.

    Attributes:
        bounds: int32 (B|1, H|1, q_len, R, 2), a NumPy array, torch tensor or JAX array. For each query, 0 <=
            lo <= hi <= k_len, and the non-empty spans are ascending and disjoint. An empty span has lo == hi.
            Anything else is illegal. Lowering writes (0, -1) into each span of a query whose data are wrong.
        k_len: Number of keys.

    Raises:
        DtypeError: If the bounds are not an integer array, or if `k_len` is not an int.
        ShapeError: If the bounds have another shape.
        OptionError: If `k_len` is negative or no int32.

    Example:
        >>> from attnspan import causal
        >>> causal().spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [0, 3]]
    """

    bounds: Array
    k_len: int
    # `k_len` as an array of shape (). It is data to a compiler, where an int is a constant. Kernels check it.
    _k_len: Array | None = field(init=False)

    def __post_init__(self) -> None:
        bounds: Array = self.bounds
        k_len: Any = self.k_len
        check_strided("Spans", bounds)
        holds, remedy = is_array(bounds) and is_integer(bounds), "Convert the bounds to int32"
        expect(holds, "Spans", "an int32 array", kind_of(bounds), remedy, error=DtypeError)
        fits, shape = bounds.ndim == 5 and bounds.shape[-1] == 2, tuple(bounds.shape)
        expected, remedy = "bounds of shape (B|1, H|1, q_len, R, 2)", "Add the missing axes, each of length 1"
        expect(fits, "Spans", expected, shape, remedy, error=ShapeError)
        # Compilers pass symbols of other types as sizes, and torch.jit.trace passes tensors.
        arrays, what, remedy = self._arrays, "Spans: k_len", "Pass the number of keys"
        k_len = arrays.size(k_len)
        if is_array(k_len) and k_len.ndim == 0 and is_integer(k_len) and arrays.concrete(k_len):
            k_len = int(k_len)
            object.__setattr__(self, "k_len", k_len)
        holds = not (k_len is None or isinstance(k_len, (bool, float, str)) or is_array(k_len))
        # Symbols can be divided, as numbers can. Anything else is no number.
        holds = holds and (arrays.tracing() or hasattr(k_len, "__floordiv__"))
        expect(holds, what, "an int", type(k_len).__name__, remedy, error=DtypeError)
        if not arrays.tracing() and isinstance(k_len, int):
            expect(k_len >= 0, what, "at least 0", k_len, remedy)
            expect(k_len <= INT32_MAX, what, "at most {}", k_len, remedy, INT32_MAX)
        object.__setattr__(self, "_k_len", self._k_len_as_data())

    @classmethod
    def _checked(cls, bounds: Array, k_len: int) -> Spans:
        """Make spans from bounds that need no checks, because attnspan made them."""
        spans: Spans = object.__new__(cls)
        spans._set(bounds=bounds, k_len=k_len)
        return spans

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # torch's pytrees rebuild spans from arrays alone, so the number is read on first access.
            if name == "k_len" and self.__dict__.get("_k_len") is not None:
                _refuse_mapped(self._k_len)
                object.__setattr__(self, "k_len", int(self._k_len))
                return self.k_len
            if name == "_k_len" and "k_len" in self.__dict__:
                object.__setattr__(self, "_k_len", self._k_len_as_data())
                return self._k_len
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _k_len_as_data(self) -> Array | None:
        arrays = self._arrays
        # JAX compiles for each shape anyway, so it needs no array.
        return None if arrays.name == "jax" else arrays.full((), self.k_len, "int64")

    def __repr__(self) -> str:
        batch, heads, q_len, runs, _ = self.bounds.shape
        # torch's compiler cannot print the number if it is a symbol.
        keys = "" if self._arrays.tracing() else f"k_len={self.k_len}, "
        return f"Spans(B={batch}, H={heads}, q_len={q_len}, {keys}R={runs})"

    def __bool__(self) -> NoReturn:
        refuse_truth(self)

    # The error prints the mask, because the repr of an array may be long.
    def __and__(self, other: object) -> NoReturn:
        refuse_operand("&", self if is_array(other) else other, self)

    def __or__(self, other: object) -> NoReturn:
        refuse_operand("|", self if is_array(other) else other, self)

    __rand__, __ror__ = __and__, __or__

    @property
    def q_len(self) -> int:
        """Number of queries."""
        return self.bounds.shape[2]  # type: ignore[no-any-return]

    @property
    def runs(self) -> int:
        """R, the number of spans of a query."""
        return self.bounds.shape[3]  # type: ignore[no-any-return]

    @property
    def _arrays(self) -> Arrays:
        return arrays_for([self.bounds])

    def take_queries(self, index: Array) -> Spans:
        """Select the spans of some queries.

        Args:
            index: integer (n,), numbers of queries in any order.

        Raises:
            OptionError: If a number is out of range and can be read.

        Example:
            >>> from attnspan import causal
            >>> causal().spans(4, 4).take_queries(np.array([3, 0])).bounds[0, 0, :, 0].tolist()
            [[0, 4], [0, 1]]
        """
        arrays = self._arrays
        index = check_index(arrays, index, "take_queries", below=self.q_len, ascending=False)
        spans = Spans._checked(arrays.take(self.bounds, index, 2), self.k_len)
        # The same array, because a new one would be a constant to a compiler.
        spans._set(_k_len=self._k_len)
        return spans

    def take_keys(self, index: Array) -> Spans:
        """Restrict the spans to some keys. The result is exact, with the same R. Illegal spans stay illegal.

        {j : lo <= index[j] < hi} is contiguous because `index` is sorted. Its ends are the ranks of lo and
        hi.

        Args:
            index: integer (n,), strictly ascending numbers of keys. If other numbers cannot be read, they
                make all spans illegal.

        Raises:
            OptionError: If the numbers do not ascend or are out of range, and can be read.

        Example:
            >>> from attnspan import causal
            >>> causal().spans(4, 4).take_keys(np.array([1, 3])).bounds[0, 0, :, 0].tolist()
            [[0, 0], [0, 1], [0, 1], [0, 2]]
        """
        arrays = self._arrays
        index = check_index(arrays, index, "take_keys", below=self.k_len, ascending=True)
        ranks = arrays.searchsorted(index, arrays.cast(self.bounds, "int32").reshape(-1))
        bounds = arrays.cast(ranks, "int32").reshape(self.bounds.shape)
        illegal = self._illegal_rows()
        if not arrays.concrete(index):  # ranks in unsorted numbers would be a plausible wrong mask
            # No slices of n - 1 elements: a compiler would specialize on n = 2, where they have one element.
            place = arrays.arange(index.shape[0])
            before = arrays.take(index, arrays.maximum(place - 1, 0), 0)
            illegal = illegal | arrays.any((index <= before) & (place > 0))
        return Spans(_mark_illegal(arrays, bounds, illegal), index.shape[0])

    def _illegal_rows(self) -> Array:
        """Bool (B|1, H|1, q_len)."""
        arrays, bounds = self._arrays, self.bounds
        lo, hi = bounds[..., 0], bounds[..., 1]
        illegal = arrays.any((lo < 0) | (hi < lo) | (hi > self.k_len))
        if bounds.shape[3] > 1:
            reach = arrays.cummax(arrays.where(hi > lo, hi, 0))
            illegal = illegal | arrays.any((hi > lo)[..., 1:] & (lo[..., 1:] < reach[..., :-1]))
        return illegal

    def validate(self) -> Spans:
        """Return the spans themselves, or raise an error that names the first illegal query.

        This reads the values, so it synchronizes with the device.

        Raises:
            OptionError: If a span is illegal, or if the values cannot be read.

        Example:
            >>> Spans(np.array([[[[[0, 3]]]]], np.int32), k_len=2).validate()
            Traceback (most recent call last):
            attnspan.errors.OptionError: spans of batch 0, head 0, query 0: expected ascending, disjoint \
spans in [0, 2], got (0, 3). Clip and sort the bounds.
        """
        self._require_values("validate")
        rows = np.argwhere(self._arrays.to_numpy(self._illegal_rows()))
        if len(rows) == 0:
            return self
        b, h, i = rows[0].tolist()
        row = [tuple(map(int, span)) for span in self._arrays.to_numpy(self.bounds[b, h, i])]
        what = f"spans of batch {b}, head {h}, query {i}"
        expected = f"ascending, disjoint spans in [0, {self.k_len}]"
        got = ", ".join(map(str, row[:4])) + (", ..." if len(row) > 4 else "")
        remedy = _PROMISES if set(row) == {(0, -1)} else "Clip and sort the bounds"
        raise OptionError(what, expected=expected, got=got, remedy=remedy)

    def dense(self) -> Array:
        """The mask as bool (B|1, H|1, q_len, k_len): True where the query may see the key.

        It takes O(q_len * k_len) memory.

        Raises:
            OptionError: If a span is illegal and can be read.

        Example:
            >>> from attnspan import causal
            >>> causal().spans(2, 3).dense()[0, 0].tolist()
            [[True, True, False], [True, True, True]]
        """
        arrays = self._arrays
        if arrays.concrete(self.bounds):
            self.validate()
        keys = arrays.arange(self.k_len)[None, None, None]  # JAX can be configured to refuse fewer dims
        lo, hi = self.bounds[..., 0], self.bounds[..., 1]
        visible: Array = (keys >= lo[..., 0, None]) & (keys < hi[..., 0, None])
        for r in range(1, self.bounds.shape[3]):
            visible = visible | ((keys >= lo[..., r, None]) & (keys < hi[..., r, None]))
        return visible

    def cost(self) -> Array:
        """Number of visible keys of each query, int64 (B|1, H|1, q_len): the query's share of the work.

        Example:
            >>> from attnspan import causal
            >>> causal().spans(3, 3).cost().tolist()
            [[[1, 2, 3]]]
        """
        return self._arrays.sum(self.bounds[..., 1] - self.bounds[..., 0])

    def coverage(self) -> float:
        """The visible fraction of all (query, key) pairs, in [0, 1]. It is 0 if there is no pair.

        Raises:
            OptionError: If a span is illegal, or if the values cannot be read.

        Example:
            >>> from attnspan import causal
            >>> causal().spans(3, 3).coverage()
            0.6666666666666666
        """
        self._require_values("coverage")
        cost = self._arrays.to_numpy(self.validate().cost())
        return float(cost.sum()) / max(cost.size * self.k_len, 1)

    def block_pairs(self, q_block: int, k_block: int) -> Array:
        """Number of visible pairs in each tile of the mask, in O(q_len * R + tiles) time.

        Args:
            q_block: Queries of a tile, at least 1. The last tile may be smaller.
            k_block: Keys of a tile, at least 1.

        Returns:
            int64 (B|1, H|1, ceil(q_len / q_block), ceil(k_len / k_block)).

        Raises:
            OptionError: If a block size is below 1, or if a span is illegal and can be read.

        Example:
            >>> from attnspan import causal
            >>> causal().spans(4, 4).block_pairs(2, 2)[0, 0].tolist()
            [[3, 0], [4, 3]]
        """
        for name, size in (("q_block", q_block), ("k_block", k_block)):
            expect(size >= 1, name, "at least 1", size, "Pass a positive block size")
        arrays = self._arrays
        if arrays.concrete(self.bounds):
            self.validate()
        batch, heads, q_len = self.bounds.shape[:3]
        nq, nk = -(-q_len // q_block), -(-self.k_len // k_block)
        row_block = (arrays.arange(q_len) // q_block)[None, None, :, None, None]
        plane = arrays.arange(batch * heads).reshape(batch, heads, 1, 1, 1)
        # The keys below an end x fill the tiles before x // k_block, and x % k_block keys of that tile.
        at = (plane * nq + row_block) * (nk + 1) + self.bounds // k_block
        sign = arrays.asarray(np.array([-1, 1]), "int64").reshape(1, 1, 1, 1, 2)

        def per_tile(x: Array) -> Array:
            sums = arrays.scatter_add(batch * heads * nq * (nk + 1), at.reshape(-1), x.reshape(-1))
            return sums.reshape(batch, heads, nq, nk + 1)

        ends = per_tile(arrays.broadcast_to(sign, self.bounds.shape))
        later = arrays.sum(ends)[..., None] - arrays.cumsum(ends)[..., :nk]
        return later * k_block + per_tile(sign * (self.bounds % k_block))[..., :nk]

    def block_states(self, q_block: int, k_block: int) -> Array:
        """State of each tile of `block_pairs`, int32: 0 no pair is visible, 1 some pairs, 2 all pairs.

        The states are exact.

        Raises:
            OptionError: As `block_pairs`.

        Example:
            >>> from attnspan import causal
            >>> causal().spans(4, 4).block_states(2, 2)[0, 0].tolist()
            [[1, 0], [2, 1]]
        """
        arrays, q_len = self._arrays, self.bounds.shape[2]
        pairs = self.block_pairs(q_block, k_block)
        nq, nk = pairs.shape[2:]
        rows = arrays.minimum(q_len - arrays.arange(nq) * q_block, q_block)
        keys = arrays.minimum(self.k_len - arrays.arange(nk) * k_block, k_block)
        whole = (arrays.cast(rows[:, None], "int64") * keys[None])[None, None]
        return arrays.cast(pairs > 0, "int32") + arrays.cast((pairs == whole) & (pairs > 0), "int32")

    def compact(self) -> Spans:
        """Return the same mask with the smallest R, at least 1.

        Spans that touch are joined, and empty spans come last, as (0, 0). R depends on data, so this reads
        values and synchronizes with the device.

        Raises:
            OptionError: If the values cannot be read, as in a traced program.

        Example:
            >>> from attnspan import causal, global_keys, window
            >>> mask = causal() & (window(8) | global_keys(1))
            >>> mask.spans(4, 4), mask.spans(4, 4).compact()
            (Prepared(B=1, H=1, q_len=4, k_len=4, R=2), Spans(B=1, H=1, q_len=4, k_len=4, R=1))
        """
        self._require_values("compact")
        arrays, illegal = self._arrays, self._illegal_rows()
        lo, hi = self.bounds[..., 0], self.bounds[..., 1]
        if self.runs == 1 and bool((lo < hi).all()) and not bool(illegal.any()):
            # Most masks end here. The code below takes two fifths of the time of lowering long sequences.
            return Spans(arrays.contiguous(arrays.cast(self.bounds, "int32")), self.k_len)
        bounds = _mark_illegal(arrays, self.bounds, illegal)
        lo, hi = bounds[..., 0], bounds[..., 1]
        if self.runs > 1:
            lo, hi = sweep(arrays, lo, hi, depth=1, count=self.runs, top=self.k_len)
            runs = max(int(arrays.to_numpy(arrays.sum(lo < hi)).max(initial=0)), 1)
            lo, hi = lo[..., :runs], hi[..., :runs]
        bounds = arrays.stack([arrays.where(lo < hi, lo, 0), arrays.where(lo < hi, hi, 0)])
        bounds = _mark_illegal(arrays, arrays.cast(bounds, "int32"), illegal)
        return Spans(arrays.contiguous(bounds), self.k_len)

    def _require_values(self, what: str, of: str = "Spans") -> None:
        # A tensor on a device has values too. These calls may synchronize to read them.
        on_host = getattr(getattr(self.bounds, "device", None), "type", "cpu") == "cpu"
        readable = not on_host or self._arrays.concrete(self.bounds)
        expected, got = "an array whose values can be read", "a traced array"
        remedy = (
            "Call it outside the compiled function. Inside, mask.spans(...) lowers without reading values"
        )
        expect(readable, f"{of}.{what}", expected, got, remedy)


def _refuse_mapped(k_len: Array) -> None:
    """Raise if torch.func.vmap maps over stacked spans, because each would have another number of keys."""
    torch = sys.modules.get("torch")
    if torch is None or torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    remedy = "Map over the bounds, and make the mask of each call by spans(bounds)"
    mapped = torch._C._functorch.is_batchedtensor(k_len)
    expect(not mapped, "Spans: k_len", "one number", "one for each call under torch.func.vmap", remedy)


def _mark_illegal(arrays: Arrays, bounds: Array, illegal: Array) -> Array:
    """Write (0, -1) into each span of the queries where `illegal` (B|1, H|1, q_len) holds."""
    marker = arrays.asarray(np.array([0, -1]), "int32")
    return arrays.where(illegal[..., None, None], marker, bounds)


def check_index(arrays: Arrays, index: Any, what: str, *, below: int | None, ascending: bool) -> Array:
    """Convert `index` to int32 (n,) in the framework of `arrays`. Check the values if they can be read."""
    index = checks.integers(what, index, (1,))
    if arrays.concrete(index) and index.shape[0] > 0:
        values, limit = arrays.to_numpy(index), INT32_MAX if below is None else below
        low, high, remedy = values.min(), values.max(), "Index the whole, global sequence"
        expect(low >= 0 and high < limit, what, "indices in [0, {})", f"{low}..{high}", remedy, limit)
        ordered, remedy = not ascending or (values[1:] > values[:-1]).all(), "Sort keys and index together"
        expect(ordered, what, "strictly ascending indices", "unsorted indices", remedy)
    return arrays.to_int32(index)
