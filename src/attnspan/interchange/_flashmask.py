"""Masks of FlashMask (PaddlePaddle, and forks of flash-attention), which hide ranges of queries from keys."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array
from attnspan.errors import OptionError, ShapeError, expect
from attnspan.masks import Mask, Spans

from ._transpose import transpose_planes
from ._values import Host, as_mask, integers, lowered, without_copies

_NUMBERS = {True: (1, 2), False: (2, 4)}


class FlashMask(NamedTuple):
    """A mask in the format of FlashMask's kernels. `to_flashmask` returns it.

    Attributes:
        startend_row_indices: int32 (B|1, H|1, k_len, 1, 2 or 4), in the framework of the mask.
        causal: The `causal` argument to pass with these numbers.

    Raises:
        TypeError: If you leave out a field.

    Example:
        >>> import numpy as np
        >>> FlashMask(np.full((1, 1, 4, 1), 4), causal=True).causal
        True
    """

    startend_row_indices: Array
    causal: bool


def from_flashmask(
    startend_row_indices: Array, causal: bool, *, q_len: int | None = None, heads: int | None = None
) -> Mask:
    """Read a mask of FlashMask, which hides one or two ranges of queries from each key.

    The conversion takes O(S log S + spans) time and makes no dense mask. FlashMask hides these queries from a
    key j:

    - causal, 1 number a: queries i >= a, and queries i < j.
    - causal, 2 numbers a, b: queries a <= i < b, and queries i < j.
    - not causal, 2 numbers a, b: queries i >= a, and queries i < b.
    - not causal, 4 numbers a, b, c, d: queries a <= i < b, and queries c <= i < d.

    Args:
        startend_row_indices: integer (B, H_kv or 1, k_len, 1, 2 or 4). Numbers above `q_len` mean
            `q_len`.
        causal: The `causal` argument with which you call FlashMask's kernel.
        q_len: Number of queries. Default: k_len. With `causal=True`, q_len must equal k_len.
        heads: Number of query heads, if it differs from H_kv > 1 (GQA). Each query head gets the mask of its
            key head.

    Returns:
        A mask from spans, in the framework of the input. The maximum number R of spans per query is
        `mask.bounds.shape[3]`. If a dense mask would take less memory, you get a `SpansLargerThanMask`
        warning.

    Raises:
        DtypeError: If the numbers are not integers, or if `causal` is not a bool.
        ShapeError: If the shape does not fit, or if `heads` is no multiple of H_kv.
        OptionError: If a number is negative, or if the values cannot be read, as in a compiled function.

    Example:
        >>> import numpy as np
        >>> ends = np.array([2, 2, 4, 4]).reshape(1, 1, 4, 1)  # two causal documents of two tokens
        >>> from_flashmask(ends, causal=True).prepare(4, 4).dense()[0, 0].astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 0],
               [0, 0, 1, 1]])
    """
    what = "from_flashmask: startend_row_indices"
    causal = checks.flag("from_flashmask: causal", causal)
    numbers, arrays = integers(what, startend_row_indices, (4,))
    key_heads, k_len, count = numbers.shape[1:]
    expected = f"{' or '.join(map(str, _NUMBERS[causal]))} numbers for each key with causal={causal}"
    expect(count in _NUMBERS[causal], what, expected, count, "Pass the causal of the call", error=ShapeError)
    low = int(numbers.min(initial=0))
    expect(low >= 0, what, "query numbers of at least 0", low, "Write 0 for no hidden queries above")
    q_len = k_len if q_len is None else checks.count("from_flashmask: q_len", q_len)
    square = not causal or q_len == k_len
    remedy = "Pass causal=False with two or four numbers for each key"
    expect(square, "from_flashmask: q_len", "{} with causal=True", q_len, remedy, k_len, error=ShapeError)
    visible = _visible(without_copies(numbers.clip(0, q_len)), causal, q_len)
    bounds = transpose_planes(visible, q_len)
    if heads is not None and bounds.shape[1] > 1:
        fits, remedy = heads % key_heads == 0, "Pass the number of query heads"
        expected = "a multiple of the {} key heads"
        expect(fits, "from_flashmask: heads", expected, heads, remedy, key_heads, error=ShapeError)
        bounds = bounds.repeat(heads // key_heads, axis=1)
    return as_mask("from_flashmask", bounds, k_len, arrays)


def _visible(numbers: Host, causal: bool, q_len: int) -> Host:
    """Return the queries that see each key, (B, H, k_len, R, 2), from numbers (B, H, k_len, n)."""
    k_len, n = numbers.shape[2:]
    ends = list(np.moveaxis(numbers, -1, 0))
    if causal:
        key = np.arange(k_len)
        first = np.maximum(ends[0], key)
        pairs = [(key, first)] if n == 1 else [(key, first), (np.maximum(ends[1], first), q_len)]
    elif n == 2:
        pairs = [(ends[1], np.maximum(*ends))]
    else:
        a, b, c, d = ends
        # Two hidden intervals, in the order of their starts.
        swap = c < a
        a, b, c, d = (np.where(swap, x, y) for x, y in ((c, a), (d, b), (a, c), (b, d)))
        b = np.maximum(a, b)
        pairs = [(np.zeros_like(a), a), (b, np.maximum(b, c)), (np.maximum(b, np.maximum(c, d)), q_len)]
    flat = np.broadcast_arrays(*(x for pair in pairs for x in pair), numbers[..., 0])[:-1]
    return np.stack(flat, axis=-1).reshape(*numbers.shape[:3], len(pairs), 2)


def to_flashmask(
    mask: Mask | Spans,
    q_len: int,
    k_len: int | None = None,
    *,
    batch: int | None = None,
    heads: int = 1,
    causal: bool | None = None,
) -> FlashMask:
    """Write a mask in FlashMask's format, with as few numbers for each key as the mask allows.

    The result is exact: `from_flashmask(*to_flashmask(mask, n))` has the same visible pairs.

    Args:
        mask: A mask, or lowered spans.
        q_len: Number of queries.
        k_len: Number of keys. Default: q_len.
        batch, heads: Batch size and number of heads. Arrays in the mask must fit them. If the mask does not
            vary along one of these axes, the axis has size 1 in the result. FlashMask's kernels accept one
            mask for all heads, or one for each key head.
        causal: True writes the causal form, and False writes the other form. None (default) writes the form
            with fewer numbers, or the causal form if both have as many.

    Raises:
        OptionError: If FlashMask cannot express the mask. The error names the first query and key that do not
            fit. Also if `mask.prepare` raises it.
        ShapeError: If arrays in the mask do not fit the sizes, or if `causal` is True and q_len is not k_len.

    Example:
        >>> from attnspan import causal, documents
        >>> found = to_flashmask(causal() & documents([0, 2, 4]), 4)
        >>> found.startend_row_indices[0, 0, :, 0].tolist(), found.causal
        ([2, 2, 4, 4], True)
    """
    bounds, k_len, arrays = lowered("to_flashmask", mask, q_len, k_len, batch, heads)
    square = not causal or q_len == k_len
    remedy = "Pass causal=False"
    expect(square, "to_flashmask: causal", "q_len = k_len", (q_len, k_len), remedy, error=ShapeError)
    visible = transpose_planes(bounds, k_len)
    both = [True, False] if q_len == k_len else [False]
    forms = both if causal is None else [checks.flag("to_flashmask: causal", causal)]
    best: FlashMask | None = None
    for form in forms:
        numbers, beyond = _numbers(visible, form, q_len)
        if (beyond == q_len).all() and (best is None or numbers.shape[-1] < len(best[0][0, 0, 0])):
            best = FlashMask(numbers, form)
        if best is not None and numbers.shape[-1] == 1:
            break
    if best is None:
        raise _refusal(beyond, form)
    return FlashMask(arrays.asarray(best.startend_row_indices, "int32"), best.causal)


def _numbers(visible: Host, causal: bool, q_len: int) -> tuple[Host, Host]:
    """Return the numbers of each key, and the first query that they cannot hide or show, or q_len.

    Args:
        visible: (B, H, k_len, R, 2), the queries that see each key, with empty ranges last.
        causal: The form to write.
        q_len: Number of queries.

    Returns:
        (B, H, k_len, n), then (B, H, k_len).
    """
    runs = range(visible.shape[3])
    empty = [visible[..., r, 0] >= visible[..., r, 1] for r in runs]
    lo, hi = ([np.where(empty[r], q_len, visible[..., r, i]) for r in runs] for i in (0, 1))
    if not causal and len(runs) == 1:
        return np.stack([hi[0], lo[0]], -1), np.full(lo[0].shape, q_len)
    key = np.arange(visible.shape[2])
    # Hidden queries: before the first interval, between intervals, after the last one. A causal kernel hides
    # the queries before the key.
    first = np.broadcast_to(key if causal else 0, lo[0].shape)
    starts, stops = [first, *(np.maximum(x, first) for x in hi)], [*lo, np.full_like(lo[0], q_len)]
    found, beyond = _gaps(starts, stops, 1 if causal else 2, q_len)
    if causal:
        (a, b), beyond = found[0], np.where(lo[0] < key, lo[0], beyond)
        return (a[..., None] if (b == q_len).all() else np.stack([a, b], -1)), beyond
    (c, d), (a, b) = found
    # FlashMask writes a single interval below the diagonal first.
    below = (a == q_len) & (c >= key)
    a, b, c, d = (np.where(below, x, y) for x, y in ((c, a), (d, b), (0, c), (0, d)))
    return np.stack([a, b, c, d], -1), beyond


def _gaps(
    starts: list[Host], stops: list[Host], most: int, q_len: int
) -> tuple[list[tuple[Host, Host]], Host]:
    """Return the first gaps of each key that are not empty, or (q_len, q_len), and the start of the next."""
    count, absent = np.zeros(starts[0].shape, np.int8), np.full(starts[0].shape, q_len)
    found = [(absent, absent)] * (most + 1)
    for start, stop in zip(starts, stops, strict=True):
        is_gap = start < stop
        for n in range(most + 1):
            here = is_gap & (count == n)
            if here.any():
                found[n] = np.where(here, start, found[n][0]), np.where(here, stop, found[n][1])
        count = np.minimum(count + is_gap, most + 1, dtype=np.int8)
    return found[:-1], found[-1][0]


def _refusal(beyond: Host, causal: bool) -> OptionError:
    b, h, j = np.unravel_index(beyond.argmin(), beyond.shape)
    one = "no visible later key, and at most one hidden range of later queries,"
    two = "at most two hidden ranges of queries"
    return OptionError(
        "to_flashmask",
        expected=f"{one if causal else two} for each key with causal={causal}",
        got=f"query {beyond[b, h, j]} and key {j} (batch {b}, head {h}), which do not fit",
        remedy="Pass causal=None, split the mask into several calls, or use to_ranges or to_dense",
    )
