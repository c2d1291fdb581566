"""Masks made of masks: by batch element, head, document, batch within a sequence, or order of tokens."""

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
from attnspan.masks.expression import leaves_of
from attnspan.masks.intervals import Interval, Rows, either_illegal, split
from attnspan.masks.lowering import Lowering, key_len

_CHUNK_KEYS = 1 << 22
"""The most (query, key) pairs that are reordered at once."""


class Mixture(Mask):
    """A mask for each batch element or head. R is the largest R of these masks."""

    masks: Any

    axis: ClassVar[int]

    def __post_init__(self) -> None:
        self._set(masks=_several(type(self).__name__, self.masks))
        self._nest(self.masks)

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(map(repr, self.masks))}])"

    # Lists, not generators, because torch 2.15's compiler cannot leave a generator before its end.

    def _inner(self) -> list[Mask]:
        return leaves_of(self.masks)

    def _key_len(self) -> Any:
        return key_len(self._inner())

    def _key_len_is_data(self) -> bool:
        return True in [leaf._key_len_is_data() for leaf in self._inner()]

    def _row_len(self) -> Any:
        known = [n for n in [leaf._row_len() for leaf in self._inner()] if n is not None]
        return known[0] if known else None

    def _each(self, low: Lowering, number: int) -> Lowering:
        raise NotImplementedError(f"{type(self).__name__} must define _each")

    def _lower(self, low: Lowering) -> Rows:
        low.check_axis(type(self).__name__, ("batch", "heads")[self.axis], len(self.masks))
        key_len(self._inner(), low.k_len, low.arrays.tracing())
        parts = [self._each(low, number).bounds(mask) for number, mask in enumerate(self.masks)]
        runs = max([part.shape[3] for part in parts])
        return low.rows_of(self._join(low, [_padded(low.arrays, part, runs) for part in parts]))

    def _join(self, low: Lowering, parts: list[Array]) -> Array:
        """Join arrays with length 1 along the axis."""
        return low.arrays.stack(parts).swapaxes(self.axis, -1)[..., 0]


class per_row(Mixture):
    """A separate mask for each batch element. R is the largest R of these masks.

    Args:
        masks: One mask for each batch element. Arrays in them have no batch axis, or a batch axis of length
            1. Each mask may have its own default `q_index`, such as `cache(length)`.

    Raises:
        DtypeError: If `masks` is not a list of masks.
        ShapeError: If there are not as many masks as batch elements, or if their arrays describe different
            numbers of keys. Lowering checks this.

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
        expected, remedy = "q_index, because its default differs from mask to mask", "Pass q_index too"
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
    """A separate mask for each query head, for example local and global heads. R is their largest R.

    Args:
        masks: One mask for each query head. Arrays in them have no head axis, or a head axis of length 1.

    Raises:
        DtypeError: If `masks` is not a list of masks.
        ShapeError: If there are not as many masks as heads, or if their arrays describe different numbers of
            keys. Lowering checks this.

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
    """Packed documents with a mask inside each document. Indices count from the start of the document.

    For masks that compare queries with keys, such as `causal()` and `window(w)`, the result equals `mask &
    documents(cu_seqlens)`. It differs for masks that depend on absolute indices: `global_sliding`,
    `block_causal`, `prefix_lm(n)`. R is the R of the mask.

    Source: attention-gym's `generate_doc_mask_mod(mask_mod, offsets)`.

    Args:
        mask: A mask without arrays that describe keys, without `cache`, and without documents.
        cu_seqlens: integer (n + 1,) or (B, n + 1), the start of each document and the end of the last one.

    Raises:
        DtypeError: If `mask` is no mask or the offsets are not integers.
        ShapeError: If the mask has arrays for keys.
        OptionError: If the mask has its own default `q_index`, or if the offsets are wrong. Lowering checks
            offsets that can be read on the host.

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
    """A sequence of equally long batches, each with the mask. Indices count from the start of the batch.

    R is the R of the mask.

    Source: attention-gym's `batchify_mask_mod`.

    Args:
        mask: A mask whose arrays for keys, if any, describe `size` keys.
        size: Tokens of a batch, at least 1.

    Raises:
        DtypeError: If `mask` is no mask or `size` is not an int.
        ShapeError: If an array of the mask describes another number of keys.
        OptionError: If `size` is below 1, or if the mask has its own default `q_index`.

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
        # A query before the first key is in no batch. Its span is empty, at its own index.
        lo = low.arrays.where(index >= 0, lo, index)
        hi = low.arrays.where(index >= 0, lo + self.size, index)
        return _inside(low, self.mask, lo, hi, self.size)


def _inside(low: Lowering, mask: Mask, lo: Array, hi: Array, length: int | None) -> Rows:
    """Lower `mask` on indices that count from `lo`, and clip its keys to [lo, hi)."""
    arrays = low.arrays
    local = arrays.where(lo < hi, low.q_index - lo, 0)
    rows = low.part(q_index=local, k_len=length, tail=False).lower(mask)
    intervals = []
    for x in rows.intervals:
        # Ends are cut before they are shifted, because they may be as large as int32 allows.
        first = lo if x.lo is None else lo + _cut(low, x.lo, hi - lo)
        last = hi if x.hi is None else lo + _cut(low, x.hi, hi - lo)
        intervals.append(Interval(first, last, x.anchored))
    return Rows(tuple(intervals), rows.illegal)


def _cut(low: Lowering, end: Any, size: Array) -> Array:
    return low.arrays.maximum(low.arrays.minimum(size, end), 0)


class reordered(Mask):
    """A mask for tokens that are stored in another order: place p holds token order[p].

    Indices of the result count places, and indices of `mask` count tokens. The result is exact for every mask
    and order. R depends on the order.

    Lowering enumerates the visible pairs, in O(pairs log pairs) time and O(q_len * R) memory. It reads the
    indices, so prepare the mask once, outside the compiled function.

    Args:
        mask: The mask of the tokens in their own order.
        order: integer (S,), a permutation of 0..S-1, for example from `tile_order`, `morton_order` or
            `strided_order`.

    Raises:
        DtypeError: If `mask` is no mask or the order is not of integers.
        OptionError: If the order is no permutation, or if lowering cannot read it.

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
        expected = "readable values, because the number of spans depends on the order"
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
    """Convert bounds (B, H, rows, R, 2) of tokens to bounds of their places."""
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
    """Row, start and stop of each run, int64 (3, runs), of rows (n, R, 2) that count from `start`."""
    lo, length = flat[..., 0].reshape(-1).astype(np.int64), (flat[..., 1] - flat[..., 0]).reshape(-1)
    keys = np.repeat(lo - (np.cumsum(length) - length), length) + np.arange(length.sum())
    row = np.repeat(np.repeat(np.arange(len(flat)), flat.shape[1]), length)
    # A gap after each row keeps the runs of two rows apart.
    wide = len(place) + 1
    at = np.sort(row * wide + place[keys])
    first = np.diff(at, prepend=-2) != 1
    last = np.append(first[1:], True) if len(at) else first
    return np.stack([at[first] // wide + start, at[first] % wide, at[last] % wide + 1])


def _padded(arrays: Arrays, bounds: Array, runs: int) -> Array:
    """Pad bounds with empty spans to `runs` spans."""
    empty = arrays.full((*bounds.shape[:3], 2, runs - bounds.shape[3]), 0)
    return arrays.concat([bounds.swapaxes(-1, -2), empty]).swapaxes(-1, -2)


def _several(what: str, masks: Any) -> tuple[Mask, ...]:
    several = isinstance(masks, list | tuple) and len(masks) > 0
    got = "none" if isinstance(masks, list | tuple) else type(masks).__name__
    expect(several, what, "a list of masks", got, "Pass one mask for each", error=DtypeError)
    for mask in masks:
        remedy = "Make masks with the functions of attnspan"
        expect(isinstance(mask, Mask), what, "masks", type(mask).__name__, remedy, error=DtypeError)
    return tuple(masks)


def _check_inner(what: str, mask: Any, size: int | None) -> None:
    """Raise unless the indices of `mask` can count from the start of each document or batch."""
    (mask,) = _several(what, [mask])
    remedy = "Leave that part outside, and combine it by &"
    for leaf in mask.leaves():
        free = leaf._anchor() is None and leaf._row_len() is None
        expect(free, what, "a mask that depends only on indices", repr(leaf), remedy)
        n = leaf._key_len()
        expected = "a mask without arrays for keys" if size is None else "arrays that describe {} keys"
        expect(n is None or n == size, what, expected, repr(leaf), remedy, size, error=ShapeError)
