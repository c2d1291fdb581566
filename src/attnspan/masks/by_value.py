"""Masks given by values: spans, booleans, a function of indices, a FlexAttention `BlockMask`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array, arrays_for

from .bounds import Spans
from .encoding import CHUNK_PAIRS, TRACED_RUNS, encode, encode_traced
from .expression import Mask, RowNumbered
from .intervals import Interval, Rows, split
from .lowering import Lowering
from .predicates import call, call_traced, name_of

_RUNS = checks.optional(checks.positive)

_TRACED_CHUNKS = 16
"""The most chunks of queries in a traced program. Each chunk is a copy of the predicate in the program."""


class Explicit(Mask):
    """See `attnspan.spans`."""

    array_dims = 4

    bounds: Array

    def __post_init__(self) -> None:
        Spans(self.bounds, 0)  # checks dtype and shape

    def _row_len(self) -> Any:
        return self.bounds.shape[2]

    def _lower(self, low: Lowering) -> Rows:
        low.check_rows("spans: bounds", self.bounds.shape[2])
        low.check_planes("spans: bounds", self.bounds)
        if low.arrays.concrete(self.bounds):
            # As a NumPy array: in a trace, JAX makes a tracer even of an array whose values it knows.
            Spans(low.arrays.to_numpy(self.bounds), low.top).validate()
        return low.rows_of(self.bounds)

    def __repr__(self) -> str:
        return f"spans{super().__repr__().removeprefix('Explicit')}"


class from_dense(Mask):
    """A mask from booleans, which lowering encodes as spans.

    Args:
        visible: bool (q_len, k_len), (B|1, q_len, k_len) or (B|1, H|1, q_len, k_len), for the queries of the
            call. True means that the query sees the key.
        max_runs: R, the most runs of visible keys that a query has, at least 1. None takes R from the data in
            eager code. In a traced program, where R cannot depend on data, None means 8.

    Raises:
        DtypeError: If `visible` is not boolean.
        ShapeError: If `visible` does not fit the queries, keys, batch or heads. Lowering checks the sizes.
        OptionError: If `max_runs` is less than 1, or if a query has more runs and is encoded on the host. In
            a traced program on a device, the spans of that query become illegal.

    Example:
        >>> import numpy as np
        >>> from_dense(np.array([[True, False, True]])).spans(1, 3).bounds[0, 0, 0].tolist()
        [[0, 1], [2, 3]]
    """

    array_dims = 2

    visible: Array
    max_runs: int | None = None

    def __post_init__(self) -> None:
        self._check(visible=partial(checks.booleans, ranks=(2, 3, 4)), max_runs=_RUNS)

    def _key_len(self) -> Any:
        return self.visible.shape[-1]

    def _row_len(self) -> Any:
        return self.visible.shape[-2]

    def _lower(self, low: Lowering) -> Rows:
        visible = self.visible
        if visible.ndim < 4:
            visible = visible[:, None] if visible.ndim == 3 else visible[None, None]
        low.check_rows("from_dense", visible.shape[2])
        return _encoded(low, "from_dense", visible, self.max_runs)


class keys(Mask):
    """Queries see only the marked keys of their batch element, which need not be contiguous.

    Args:
        valid: bool (k_len,) or (B, k_len). True means that all queries may see the key. For a Hugging Face
            `attention_mask`, pass `attention_mask != 0`.
        max_runs: R, as for `from_dense`.

    Raises:
        DtypeError: If `valid` is not boolean.
        ShapeError: If `valid` has other axes, or does not fit the keys or the batch.
        OptionError: If `max_runs` is less than 1, or if there are more runs and they are encoded on the host.

    Example:
        >>> import numpy as np
        >>> keys(np.array([True, False, True, True])).spans(1, 4).bounds.tolist()
        [[[[[0, 1], [2, 4]]]]]
    """

    array_dims = 1
    _separates = False

    valid: Array
    max_runs: int | None = None

    def __post_init__(self) -> None:
        self._check(valid=checks.booleans, max_runs=_RUNS)

    def _key_len(self) -> Any:
        return self.valid.shape[-1]

    def _lower(self, low: Lowering) -> Rows:
        valid = self.valid[:, None, None] if self.valid.ndim == 2 else self.valid[None, None, None]
        return _encoded(low, "keys", valid, self.max_runs)


class from_predicate(Mask):
    """A mask from FlexAttention's `mask_mod`: fn(b, h, q_index, k_index) -> bool, on global indices.

    The mask is the value of `fn` for single pairs, whose indices are integer arrays without axes. Lowering
    evaluates `fn` by vmap or NumPy, for a chunk of queries at a time, in O(chunk * k_len) memory. In a traced
    program, `fn` becomes part of the program. It can be any function that the compiler can read: a closure, a
    lambda, a `functools.partial` or a callable object.

    Args:
        fn: A function of four integers, written with `&`, `|` and `where`. The integers are arrays of the
            framework of the other arrays of the expression, or of `like`. Without these, they are arrays of
            the framework of the captured arrays.
        max_runs: R, as for `from_dense`.

    Raises:
        DtypeError: If `fn` is not callable, or if it does not return booleans.
        ShapeError: If `fn` returns more than one boolean for a pair.
        OptionError: If `fn` raises, if `max_runs` is less than 1, or if a query has more runs and is encoded
            on the host.
        UsageError: If `fn` is a NumPy function that must be called pair by pair, for more than 2^20 pairs.

    Example:
        >>> from_predicate(lambda b, h, q, k: q >= k).spans(2, 2).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2]]
    """

    fn: Callable[[Any, Any, Any, Any], Any]
    max_runs: int | None = None

    def __post_init__(self) -> None:
        self._check(fn=checks.function, max_runs=_RUNS)

    def _lower(self, low: Lowering) -> Rows:
        low.needs_keys(self._what())
        if is_traced(low, low.q_index):
            return self._traced(low)
        if low.q_len == 0 or low.k_len == 0:
            return _rows(low, [encode(np.zeros((1, 1, low.q_len, low.k_len), bool), self.max_runs)])
        chunks = []
        step = max(CHUNK_PAIRS // low.top, 1)
        for i in range(0, low.q_len, step):
            visible = call(self._what(), self.fn, low, low.q_index[:, :, i : i + step])
            if is_traced(low, visible):  # under vmap over an array that the function captures
                return self._traced(low)
            chunks.append(encode(low.arrays.to_numpy(visible), self.max_runs, self._what()))
        return _rows(low, chunks)

    def _traced(self, low: Lowering) -> Rows:
        chunks = (call_traced(self._what(), self.fn, low, rows) for rows in _traced_chunks(low))
        return _traced_rows(low, chunks, self.max_runs)

    def _what(self) -> str:
        return f"from_predicate({name_of(self.fn)})"

    def __repr__(self) -> str:
        return self._what()


class Blocks(RowNumbered, from_predicate):
    """See `from_block_mask`."""

    example: Array | None = None
    """An array of the framework that `fn` computes in."""
    lengths: tuple[int, int] | None = None
    """Numbers of queries and keys of the `BlockMask`, if it has them."""

    def __post_init__(self) -> None:
        pass  # `from_block_mask` has checked the fields.

    def _key_len(self) -> Any:
        return None if self.lengths is None else self.lengths[1]

    def _row_len(self) -> Any:
        return None if self.lengths is None else self.lengths[0]

    def _anchor_index(self, low: Lowering) -> Array:
        if self.lengths is not None:
            low.check_rows(self._what(), self.lengths[0])
        return super()._anchor_index(low)

    def _lower(self, low: Lowering) -> Rows:
        if self.example is not None and self.example.ndim > 2:
            low.check_planes(self._what(), self.example)
        return super()._lower(low)

    def _what(self) -> str:
        return f"from_block_mask({name_of(getattr(self.fn, 'mask_mod', self.fn))})"


def from_block_mask(block_mask: Any, max_runs: int | None = None) -> Mask:
    """Make a mask from a FlexAttention `BlockMask`: its block lists, and its `mask_mod` in partial blocks.

    FlexAttention counts queries and keys from 0 each. The default `q_index` of an expression with this mask
    does the same. If you pass `q_index`, it has the query numbers of the `BlockMask`.
    `attnspan.torch.to_block_mask` converts in the other direction.

    Args:
        block_mask: An object with a `mask_mod` attribute. Without block lists, `mask_mod` decides all pairs.
        max_runs: R, as for `from_dense`.

    Raises:
        DtypeError: If there is no `mask_mod`. Lowering also raises the errors of `from_predicate`.
        ShapeError: If the block lists do not fit the queries, keys, batch or heads. Lowering checks this.
        OptionError: If `max_runs` is less than 1.

    Example:
        >>> from types import SimpleNamespace
        >>> block_mask = SimpleNamespace(mask_mod=lambda b, h, q, k: q >= k)
        >>> from_block_mask(block_mask).spans(1, 2).bounds.tolist()
        [[[[[0, 1]]]]]
    """
    fn = checks.function("from_block_mask: mask_mod", getattr(block_mask, "mask_mod", None))
    runs = _RUNS("from_block_mask: max_runs", max_runs)
    blocks = getattr(block_mask, "kv_num_blocks", None)
    if blocks is None:
        return Blocks(fn, runs)
    rows, columns = block_mask.seq_lengths
    return Blocks(_BlockLists.of(block_mask, fn), runs, blocks, (rows, columns))


@dataclass(frozen=True, eq=False)
class _BlockLists:
    """The predicate of a `BlockMask`. Full blocks are visible, and `mask_mod` decides in partial blocks."""

    mask_mod: Callable[[Any, Any, Any, Any], Any]
    full: Array  # bool (B|1, H|1, q blocks, k blocks)
    listed: Array  # the same shape: full and partial blocks
    q_block: int  # queries of a block, then keys of a block
    k_block: int

    @classmethod
    def of(cls, block_mask: Any, mask_mod: Callable[[Any, Any, Any, Any], Any]) -> _BlockLists:
        """Read the lists of a `BlockMask`. They have any order, and unused entries are undefined."""
        q_block, k_block = block_mask.BLOCK_SIZE
        blocks = -(-block_mask.seq_lengths[1] // k_block)
        partial = _table(block_mask.kv_num_blocks, block_mask.kv_indices, blocks)
        if block_mask.full_kv_num_blocks is None:
            return cls(mask_mod, partial & ~partial, partial, q_block, k_block)
        full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks)
        return cls(mask_mod, full, full | partial, q_block, k_block)

    def __call__(self, b: Array, h: Array, q: Array, k: Array) -> Array:
        batch, heads = self.full.shape[:2]
        at = (b if batch > 1 else 0, h if heads > 1 else 0, q // self.q_block, k // self.k_block)
        # A negative q would index the lists from their end.
        return (q >= 0) & (self.full[at] | (self.listed[at] & self.mask_mod(b, h, q, k)))


def _table(counts: Array, indices: Array, blocks: int) -> Array:
    """Bool (B|1, H|1, q blocks, blocks) of counts (..., q blocks) and indices (..., q blocks, n)."""
    arrays, width = arrays_for([counts]), indices.shape[-1]
    lead = (1,) * (3 - counts.ndim)
    used = arrays.arange(width) < counts[..., None]
    row = arrays.arange(counts.numel())[:, None]
    # Unused entries may hold anything, so they go to an extra column.
    column = arrays.where(used, indices, blocks).reshape(-1, width)
    hits = arrays.scatter_add(
        counts.numel() * (blocks + 1),
        arrays.cast(row * (blocks + 1) + column, "int64").reshape(-1),
        arrays.full((counts.numel() * width,), 1, "int64"),
    )
    return hits.reshape(*lead, *counts.shape, blocks + 1)[..., :blocks] > 0


def is_traced(low: Lowering, x: Array) -> bool:
    """Whether the values of `x` cannot be read. An array on a device can be read, by synchronizing."""
    on_host = getattr(getattr(x, "device", None), "type", "cpu") in ("cpu", "meta")
    return low.arrays.tracing() or (on_host and not low.arrays.concrete(x))


def _encoded(low: Lowering, what: str, visible: Array, max_runs: int | None) -> Rows:
    """Spans of booleans (B|1, H|1, rows|1, k_len)."""
    low.check_planes(what, visible)
    if is_traced(low, visible):
        return _traced_rows(low, [low.arrays.asarray(visible, "bool")], max_runs)
    return _rows(low, [encode(low.arrays.to_numpy(visible), max_runs, what)])


def _rows(low: Lowering, chunks: list[np.ndarray[Any, Any]]) -> Rows:
    """Join chunks of bounds along the query axis."""
    runs = max(chunk.shape[3] for chunk in chunks)
    chunks = [np.pad(x, ((0, 0),) * 3 + ((0, runs - x.shape[3]), (0, 0))) for x in chunks]
    bounds = low.arrays.asarray(np.concatenate(chunks, axis=2), "int32")
    return Rows(split(bounds[..., 0], bounds[..., 1]))


def _traced_chunks(low: Lowering) -> list[Array]:
    """Query indices (B|1, 1, rows) in few chunks, or in one chunk if the lengths are symbols."""
    sizes = (low.q_len, low.top)
    if not (low.arrays.tracing() and all(map(low.arrays.is_static, sizes))):
        return [low.q_index]
    wanted = -(-low.q_len * low.top // CHUNK_PAIRS)
    step = max(-(-low.q_len // max(min(wanted, _TRACED_CHUNKS), 1)), 1)
    return [low.q_index[:, :, i : i + step] for i in range(0, max(low.q_len, 1), step)]


def _traced_rows(low: Lowering, chunks: Iterable[Array], max_runs: int | None) -> Rows:
    """Spans of chunks of booleans in a traced program. Queries with too many runs are illegal."""
    runs = TRACED_RUNS if max_runs is None else max_runs
    encoded = [encode_traced(low.arrays, chunk, runs) for chunk in chunks]
    ends = [low.arrays.concat([x[..., r, i] for x in encoded]) for r in range(runs) for i in range(2)]
    return Rows(tuple(map(Interval, ends[::2], ends[1::2])), ends[0] > ends[1])
