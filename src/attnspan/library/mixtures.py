"""Masks made of masks: by batch row, by head, by document, by batch within a sequence, by order of tokens."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array, Arrays, arrays_for
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.masks import Mask
from attnspan.masks.by_value import is_traced
from attnspan.masks.encoding import table
from attnspan.masks.intervals import Interval, Rows, either_illegal, split
from attnspan.masks.lowering import Lowering, key_len

__all__ = ["Mixture", "batchify", "per_document", "per_head", "per_row", "reordered"]

_CHUNK_KEYS = 1 << 22
"""(query, key) pairs that are put into a new order at once."""


class Mixture(Mask):
    """Lowers each mask for its own batch row or head, and pads R to the largest."""

    masks: Any

    axis: ClassVar[int]

    def __post_init__(self) -> None:
        self._set(masks=_several(type(self).__name__, self.masks))
        self._nest(self.masks)

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.masks))}])"

    # Lists, not generators: torch 2.15's compiler cannot leave one before its end.

    def _inner(self) -> list[Mask]:
        inner: list[Mask] = []
        for mask in self.masks:
            inner += mask.leaves()
        return inner

    def _key_len(self) -> Any:
        return key_len(self._inner())

    def _key_len_is_data(self) -> bool:
        return True in [leaf._key_len_is_data() for leaf in self._inner()]

    def _row_len(self) -> Any:
        known = [n for n in [leaf._row_len() for leaf in self._inner()] if n is not None]
        return known[0] if known else None

    def _each(self, low: Lowering, number: int) -> Lowering:
        raise NotImplementedError(f"{type(self).__name__} must say how one of its masks is lowered")

    def _lower(self, low: Lowering) -> Rows:
        low.check_axis(type(self).__name__, ("batch", "heads")[self.axis], len(self.masks))
        key_len(self._inner(), low.k_len, low.arrays.tracing())
        parts = [self._each(low, number).bounds(mask) for number, mask in enumerate(self.masks)]
        runs = max([part.shape[3] for part in parts])
        return low.rows_of(self._join(low, [_padded(low.arrays, part, runs) for part in parts]))

    def _join(self, low: Lowering, parts: list[Array]) -> Array:
        """Arrays with 1 along the axis as one with all of them."""
        return low.arrays.stack(parts).swapaxes(self.axis, -1)[..., 0]


class per_row(Mixture):
    """A mask of its own for each batch row. R is that of the largest.

    Args:
        masks: one for each batch row; arrays in them have no batch axis, or one of length 1. Each may imply
            its own default rows, as `cache(length)` does.

    Example:
        >>> from attnspan import causal, full
        >>> per_row([causal(), full()]).spans(2, 2, batch=2).bounds[:, 0, :, 0].tolist()
        [[[0, 1], [0, 2]], [[0, 2], [0, 2]]]
    """

    axis = 0

    def _anchor(self) -> tuple[Any, ...] | None:
        anchors = [leaf._anchor() for leaf in self._inner()]
        if all(anchor is None for anchor in anchors):
            return None
        return ("per_row", *(part for anchor in anchors for part in (anchor or (None,))))

    def _anchor_index(self, low: Lowering) -> Array:
        expected, remedy = "the rows' global indices, which differ from mask to mask", "Pass q_index too"
        expect(low.k_len is not None, "q_index", expected, "k_index alone", remedy)
        found = []
        for mask in self.masks:
            own = low.part(batch=1)
            own.index_rows(mask.leaves(), None, None)
            found.append(own.q_index)
        return self._join(low, [low.arrays.to_int32(x) for x in found])

    def _each(self, low: Lowering, number: int) -> Lowering:
        q_index = low.q_index[number : number + 1] if low.q_index.shape[0] > 1 else low.q_index
        return low.part(batch=1, q_index=q_index)


class per_head(Mixture):
    """A mask of its own for each query head: local and global heads, say. R is that of the largest.

    Args:
        masks: one for each query head; arrays in them have no head axis, or one of length 1.

    Example:
        >>> from attnspan import causal, window
        >>> per_head([causal(), window(0)]).spans(2, 2, heads=2).bounds[0, :, 1, 0].tolist()
        [[0, 2], [1, 2]]
    """

    axis = 1

    def _anchor(self) -> tuple[Any, ...] | None:
        for leaf in self._inner():
            if leaf._anchor() is not None:
                return leaf._anchor()
        return None

    def _anchor_index(self, low: Lowering) -> Array:
        own = low.part()
        own.index_rows(self._inner(), None, None)
        return own.q_index

    def _each(self, low: Lowering, number: int) -> Lowering:
        del number
        return low.part(heads=1)


class per_document(Mask):
    """Packed documents with a mask inside each, whose indices count from the document's start.

    R is the mask's. For masks that compare rows with keys, such as `causal()` and `window(w)`, it is `mask &
    documents(cu_seqlens)`; it differs where places count: `global_sliding`, `block_causal`, `prefix_lm(n)`.

    Source: attention-gym's `generate_doc_mask_mod(mask_mod, offsets)`.

    Args:
        mask: without arrays that describe keys, and without `cache` or documents of its own.
        cu_seqlens: integer (n + 1,) or (B, n + 1), where each document starts and the last one ends.

    Example:
        >>> from attnspan.library import prefix_lm
        >>> per_document(prefix_lm(2), [0, 3, 5]).spans(5, 5).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [0, 3], [3, 5], [3, 5]]
    """

    mask: Mask
    cu_seqlens: Array

    def __post_init__(self) -> None:
        _check_inner("per_document", self.mask, None)
        self._nest([self.mask])
        self._check(cu_seqlens=checks.offsets)

    def _lower(self, low: Lowering) -> Rows:
        own = low.documents("per_document: cu_seqlens", self.cu_seqlens)
        rows = _inside(low, self.mask, own.lo, own.hi, None)
        return Rows(rows.intervals, either_illegal(rows.illegal, own.illegal))


class batchify(Mask):
    """A sequence of batches of one size, each with the mask, whose indices count from the batch's start.

    R is the mask's.

    Source: attention-gym's `batchify_mask_mod`.

    Args:
        mask: its arrays that describe keys, if any, have `size` of them.
        size: tokens of a batch, at least 1.

    Example:
        >>> from attnspan import causal
        >>> batchify(causal(), 2).spans(4, 4).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [2, 3], [2, 4]]
    """

    mask: Mask
    size: int

    def __post_init__(self) -> None:
        self._check(size=checks.positive)
        _check_inner("batchify", self.mask, self.size)
        self._nest([self.mask])

    def _lower(self, low: Lowering) -> Rows:
        index = low.q_index
        lo = index // self.size * self.size
        # A row before the first key is in no batch: an empty span at its own index.
        lo = low.arrays.where(index >= 0, lo, index)
        hi = low.arrays.where(index >= 0, lo + self.size, index)
        return _inside(low, self.mask, lo, hi, self.size)


def _inside(low: Lowering, mask: Mask, lo: Array, hi: Array, length: int | None) -> Rows:
    """`mask` on indices counted from `lo`, and its keys within [lo, hi)."""
    arrays = low.arrays
    local = arrays.where(lo < hi, low.q_index - lo, 0)
    rows = low.part(q_index=local, k_len=length, tail=False).lower(mask)
    intervals = []
    for x in rows.intervals:
        # Cut before they are shifted: ends may be anything up to int32's own.
        first = lo if x.lo is None else lo + _cut(low, x.lo, hi - lo)
        last = hi if x.hi is None else lo + _cut(low, x.hi, hi - lo)
        intervals.append(Interval(first, last, x.anchored))
    return Rows(tuple(intervals), rows.illegal)


def _cut(low: Lowering, end: Any, size: Array) -> Array:
    return low.arrays.maximum(low.arrays.minimum(size, end), 0)


class reordered(Mask):
    """A mask for tokens that are stored in another order: place p holds token order[p].

    Rows and keys of the result count places; `mask` counts tokens. R depends on the order. It is found by
    enumerating the visible pairs, O(pairs log pairs) time and O(rows * R) memory, and needs indices that can
    be read: prepare it once, outside the compiled function. Exact for every mask and order.

    Args:
        mask: of the tokens in their own order.
        order: integer (S,), a permutation of 0..S-1; see `tile_order`, `morton_order`, `strided_order`.

    Example:
        >>> from attnspan import window
        >>> reordered(window(1), [0, 2, 1]).spans(3, 3).dense()[0, 0].astype(int).tolist()
        [[1, 0, 0], [0, 1, 1], [1, 0, 1]]
    """

    mask: Mask
    order: Array

    def __post_init__(self) -> None:
        _several("reordered", [self.mask])
        self._nest([self.mask])
        self._check(order=partial(checks.integers, ranks=(1,)))
        arrays = arrays_for([self.order])
        # A tensor on the meta device has no values.
        if not arrays.tracing() and getattr(arrays.device, "type", None) != "meta":
            _check_order(arrays.to_numpy(self.order))

    def _key_len(self) -> Any:
        return self.order.shape[0]

    def _lower(self, low: Lowering) -> Rows:
        readable = not (is_traced(low, self.order) or is_traced(low, low.q_index))
        expected = "values: the number of spans of such a mask depends on its order"
        remedy = "Lower it once outside the compiled function, with mask.prepare(...)"
        expect(readable, "reordered", expected, "a traced array", remedy)
        order = low.arrays.to_numpy(self.order).astype(np.int64)
        _check_order(order)  # It may have been written into.
        index = low.arrays.to_numpy(low.q_index)[:, 0]
        n = len(order)
        inside = (index >= 0) & (index < n)
        tokens = np.where(inside, order[np.clip(index, 0, n - 1)], 0).astype(np.int32)
        rows = low.arrays.asarray(tokens, "int32")
        found = self.mask.spans(low.q_len, n, batch=low.batch, heads=low.heads, q_index=rows)
        bounds = low.arrays.to_numpy(found.lowered.compact().validate().bounds)
        bounds = np.where(inside[:, None, :, None, None], bounds, 0)
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)
        bounds = low.arrays.asarray(_placed(bounds, place), "int32")
        return Rows(split(bounds[..., 0], bounds[..., 1]))


def _check_order(order: np.ndarray[Any, Any]) -> None:
    fits = np.array_equal(np.sort(order), np.arange(len(order)))
    remedy = "Pass the token at each place, each token once"
    expect(fits, "reordered: order", "a permutation of 0..{}", "another array", remedy, len(order) - 1)


def _placed(bounds: np.ndarray[Any, Any], place: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bounds (B, H, rows, R, 2) of tokens as bounds of the places where those tokens are."""
    *lead, _, _ = bounds.shape
    flat = bounds.reshape(-1, *bounds.shape[-2:])
    cost = np.cumsum((flat[..., 1] - flat[..., 0]).sum(axis=-1))
    cuts = np.searchsorted(cost, np.arange(_CHUNK_KEYS, cost[-1] if len(cost) else 0, _CHUNK_KEYS))
    edges = np.unique(np.concatenate([[0], cuts + 1, [len(flat)]]))
    runs = [_runs_of_places(flat[a:b], place, a) for a, b in pairwise(edges)]
    row, lo, hi = np.concatenate([np.zeros((3, 0), np.int64), *runs], axis=1)
    found = table(row, lo, hi, len(flat))
    return found.reshape(*lead, *found.shape[1:])


def _runs_of_places(
    flat: np.ndarray[Any, Any], place: np.ndarray[Any, Any], start: int
) -> np.ndarray[Any, Any]:
    """Row, start and stop of each run of rows (n, R, 2), which count from `start`, int64 (3, runs)."""
    lo, length = flat[..., 0].reshape(-1).astype(np.int64), (flat[..., 1] - flat[..., 0]).reshape(-1)
    keys = np.repeat(lo - (np.cumsum(length) - length), length) + np.arange(length.sum())
    row = np.repeat(np.repeat(np.arange(len(flat)), flat.shape[1]), length)
    # A gap after each row keeps runs of two rows apart.
    wide = len(place) + 1
    at = np.sort(row * wide + place[keys])
    first = np.diff(at, prepend=-2) != 1
    last = np.append(first[1:], True) if len(at) else first
    return np.stack([at[first] // wide + start, at[first] % wide, at[last] % wide + 1])


def _padded(arrays: Arrays, bounds: Array, runs: int) -> Array:
    """Bounds with empty spans up to a number of them."""
    empty = arrays.full((*bounds.shape[:3], 2, runs - bounds.shape[3]), 0)
    return arrays.concat([bounds.swapaxes(-1, -2), empty]).swapaxes(-1, -2)


def _several(what: str, masks: Any) -> tuple[Mask, ...]:
    several = isinstance(masks, list | tuple) and len(masks) > 0
    got = "none" if isinstance(masks, list | tuple) else type(masks).__name__
    expect(several, what, "a list of masks", got, "Pass one mask for each", error=DtypeError)
    for mask in masks:
        remedy = "Make them by the functions of attnspan"
        expect(isinstance(mask, Mask), what, "masks", type(mask).__name__, remedy, error=DtypeError)
    return tuple(masks)


def _check_inner(what: str, mask: Any, size: int | None) -> None:
    """Raise unless `mask` can be counted from the start of each of several stretches of keys."""
    (mask,) = _several(what, [mask])
    remedy = "Leave it outside, and compose with &"
    for leaf in mask.leaves():
        free = leaf._anchor() is None and leaf._row_len() is None
        expect(free, what, "a mask that follows from indices alone", repr(leaf), remedy)
        n = leaf._key_len()
        expected = "a mask without arrays for keys" if size is None else "arrays that describe {} keys"
        expect(n is None or n == size, what, expected, repr(leaf), remedy, size, error=ShapeError)
