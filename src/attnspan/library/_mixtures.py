"""Masks made of others: one for each batch row or head, one inside each document, one for permuted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from .._expression import Mask, _common, _split
from .._intervals import Interval, Rows, either_illegal, materialise
from .._lowering import Lowering
from .._start import _index_rows
from ..arrays import Array
from ..errors import OptionError, ShapeError, shown
from ._leaf import Leaf, first_array, warn_of_size

_CHUNK_KEYS = 1 << 22
"""(query, key) pairs that are put into a new order at once."""


@dataclass(frozen=True, eq=False, repr=False)
class Mixture(Leaf):
    """Lowers each mask for its own batch row or head, and pads R to the largest."""

    masks: tuple[Mask, ...]

    axis: ClassVar[int]

    def __repr__(self) -> str:
        return f"{self.called}([{', '.join(map(repr, self.masks))}])"

    def _inner(self) -> Iterator[Mask]:
        for mask in self.masks:
            yield from mask._leaves()

    def _key_len(self) -> Any:
        return next((n for n in (leaf._key_len() for leaf in self._inner()) if n is not None), None)

    def _knows_k_len_as_data(self) -> bool:
        return any(leaf._knows_k_len_as_data() for leaf in self._inner())

    def _row_len(self) -> Any:
        return next((n for n in (leaf._row_len() for leaf in self._inner()) if n is not None), None)

    def _example(self) -> object:
        return first_array(self.masks)

    def _each(self, low: Lowering, q_index: Array, number: int) -> Lowering:
        raise NotImplementedError

    def _lower(self, low: Lowering) -> Rows:
        name = ("batch", "heads")[self.axis]
        low.check_axis(self.called, name, len(self.masks), (low.batch, low.heads)[self.axis])
        for leaf in self._inner():
            if low.arrays.tracing() and leaf._knows_k_len_as_data():
                continue  # It compares the length itself: read here, it would be a constant.
            if leaf._key_len() not in (None, low.k_len):
                raise ShapeError(
                    repr(leaf),
                    expected=f"arrays that describe {low.k_len} keys",
                    got=shown(leaf._key_len()),
                    remedy=f"All masks of {self.called} are of one key sequence",
                )
        lowered = [self._each(low, low.q_index, number).lower(mask) for number, mask in enumerate(self.masks)]
        runs = max(len(rows.intervals) for rows in lowered)
        los, his, illegal = [], [], []
        for rows in lowered:
            padded = rows.intervals + (Interval(0, 0),) * (runs - len(rows.intervals))
            lo, hi = _common(low.arrays, *materialise(low.arrays, padded, low.q_len, low.top))
            los.append(lo)
            his.append(hi)
            illegal.append(rows.illegal)
        return Rows(_split(self._join(low, los), self._join(low, his)), self._illegal(low, illegal))

    def _join(self, low: Lowering, parts: list[Array]) -> Array:
        """Arrays with 1 along the axis as one with all of them."""
        return low.arrays.stack(parts).swapaxes(self.axis, -1)[..., 0]

    def _illegal(self, low: Lowering, parts: list[Array | None]) -> Array | None:
        if all(part is None for part in parts):
            return None
        nobody = low.arrays.full((1, 1, low.q_len), 0, "bool")
        return self._join(low, [nobody if part is None else nobody | part for part in parts])


class PerRow(Mixture):
    called = "per_row"
    axis = 0

    def _anchor(self) -> tuple[Any, ...] | None:
        anchors = [leaf._anchor() for leaf in self._inner()]
        if all(anchor is None for anchor in anchors):
            return None
        return (self.called, *(part for anchor in anchors for part in (anchor or (None,))))

    def _anchor_index(self, low: Lowering) -> Array:
        if low.k_len is None:
            raise OptionError(
                "q_index",
                expected="the rows' global indices, which differ from mask to mask",
                got="k_index alone",
                remedy="Pass q_index beside k_index",
            )
        found = []
        for mask in self.masks:
            own = replace(low, batch=1, lowered=[], document_rows=[])
            _index_rows(own, list(mask._leaves()), None, None)
            found.append(own.q_index)
        return self._join(low, [low.arrays.to_int32(x) for x in found])

    def _each(self, low: Lowering, q_index: Array, number: int) -> Lowering:
        row = q_index[number : number + 1] if q_index.shape[0] > 1 else q_index
        return replace(low, batch=1, q_index=row, lowered=[], document_rows=[])


class PerHead(Mixture):
    called = "per_head"
    axis = 1

    def _anchor(self) -> tuple[Any, ...] | None:
        for leaf in self._inner():
            if leaf._anchor() is not None:
                return leaf._anchor()
        return None

    def _anchor_index(self, low: Lowering) -> Array:
        own = replace(low, lowered=[], document_rows=[])
        _index_rows(own, list(self._inner()), None, None)
        return own.q_index

    def _each(self, low: Lowering, q_index: Array, number: int) -> Lowering:
        del number
        return replace(low, heads=1, q_index=q_index, lowered=[], document_rows=[])


@dataclass(frozen=True, eq=False, repr=False)
class PerDocument(Leaf):
    mask: Mask
    cu_seqlens: Array

    called = "per_document"

    def _example(self) -> object:
        return first_array([self.mask])

    def _lower(self, low: Lowering) -> Rows:
        own = low.documents("per_document: cu_seqlens", self.cu_seqlens)
        rows = _inside(low, self.mask, own.lo, own.hi, None)
        return Rows(rows.intervals, either_illegal(rows.illegal, own.illegal))


@dataclass(frozen=True, eq=False, repr=False)
class Batchify(Leaf):
    mask: Mask
    size: int

    called = "batchify"

    def _example(self) -> object:
        return first_array([self.mask])

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
    own = replace(low, q_index=local, k_len=length, tail=False, lowered=[], document_rows=[])
    rows = own.lower(mask)
    intervals = []
    for x in rows.intervals:
        # Cut before they are shifted: ends may be anything up to int32's own.
        first = lo if x.lo is None else lo + _cut(low, x.lo, hi - lo)
        last = hi if x.hi is None else lo + _cut(low, x.hi, hi - lo)
        intervals.append(Interval(first, last, x.anchored))
    return Rows(tuple(intervals), rows.illegal)


def _cut(low: Lowering, end: Any, size: Array) -> Array:
    if isinstance(end, int):
        return low.arrays.minimum(size, max(end, 0))
    return low.arrays.maximum(low.arrays.minimum(end, size), 0)


@dataclass(frozen=True, eq=False, repr=False)
class Reordered(Leaf):
    mask: Mask
    order: Array

    called = "reordered"

    def _key_len(self) -> Any:
        return self.order.shape[0]

    def _example(self) -> object:
        return first_array([self.mask])

    def _lower(self, low: Lowering) -> Rows:
        _require_values(low, self.order, low.q_index)
        order = low.arrays.to_numpy(self.order).astype(np.int64)
        index = low.arrays.to_numpy(low.q_index)[:, 0]
        n = len(order)
        inside = (index >= 0) & (index < n)
        tokens = np.where(inside, order[np.clip(index, 0, n - 1)], 0).astype(np.int32)
        spans = self.mask.spans(
            low.q_len,
            n,
            batch=low.batch,
            heads=low.heads,
            q_index=low.arrays.asarray(tokens, "int32"),
        )
        bounds = low.arrays.to_numpy(spans.compact().validate().bounds)
        bounds = np.where(inside[:, None, :, None, None], bounds, 0)
        place = np.empty(n, np.int64)
        place[order] = np.arange(n)
        placed = _places(bounds, place)
        warn_of_size(low, placed.shape[3])
        bounds = low.arrays.asarray(placed, "int32")
        return Rows(_split(bounds[..., 0], bounds[..., 1]))


def _require_values(low: Lowering, *sources: Array) -> None:
    for source in sources:
        # A tensor on a device has values too; reading them waits for the device.
        on_host = getattr(getattr(source, "device", None), "type", "cpu") == "cpu"
        if low.arrays.tracing() or (on_host and not low.arrays.concrete(source)):
            raise OptionError(
                "reordered",
                expected="values: the number of spans of such a mask depends on its order",
                got="a traced array",
                remedy="Lower it once outside the compiled function, with mask.prepare(...)",
            )


def _places(bounds: np.ndarray[Any, Any], place: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Bounds (B, H, rows, R, 2) of tokens as bounds of the places where those tokens are."""
    *lead, _, _ = bounds.shape
    flat = bounds.reshape(-1, *bounds.shape[-2:])
    cost = np.cumsum((flat[..., 1] - flat[..., 0]).sum(axis=-1))
    cuts = np.searchsorted(cost, np.arange(_CHUNK_KEYS, cost[-1] if len(cost) else 0, _CHUNK_KEYS))
    edges = np.unique(np.concatenate([[0], cuts + 1, [len(flat)]]))
    chunks = [_places_of(flat[a:b], place) for a, b in pairwise(edges)]
    runs = max((chunk.shape[1] for chunk in chunks), default=1)
    chunks = [np.pad(x, ((0, 0), (0, runs - x.shape[1]), (0, 0))) for x in chunks]
    empty = np.zeros((0, runs, 2), np.int32)
    return np.concatenate([*chunks, empty]).reshape(*lead, runs, 2).astype(np.int32)


def _places_of(flat: np.ndarray[Any, Any], place: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same for rows (n, R, 2): list the keys, take them to their places, sort, and find the runs."""
    n, k_len = len(flat), len(place)
    lo, length = flat[..., 0].reshape(-1).astype(np.int64), (flat[..., 1] - flat[..., 0]).reshape(-1)
    starts = np.repeat(lo - (np.cumsum(length) - length), length)
    keys = starts + np.arange(length.sum())
    row = np.repeat(np.repeat(np.arange(n), flat.shape[1]), length)
    # A gap after each row keeps runs of two rows apart.
    at = np.sort(row * (k_len + 1) + place[keys])
    first = np.flatnonzero(np.diff(at, prepend=-2) != 1)
    last = np.append(first[1:], len(at)) - 1 if len(at) else first
    run_row = at[first] // (k_len + 1)
    count = np.bincount(run_row, minlength=n)
    runs = max(int(count.max(initial=0)), 1)
    bounds = np.zeros((n, runs, 2), np.int64)
    slot = np.arange(len(first)) - np.repeat(np.cumsum(count) - count, count)
    bounds[run_row, slot, 0] = at[first] % (k_len + 1)
    bounds[run_row, slot, 1] = at[last] % (k_len + 1) + 1
    return bounds
