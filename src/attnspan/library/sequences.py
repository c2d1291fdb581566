"""Masks for text: dilated and global windows, prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnspan import masks
from attnspan.base import checks
from attnspan.base.arrays import INT32_MAX, Array, is_array
from attnspan.errors import ShapeError, expect
from attnspan.masks import Mask
from attnspan.masks.intervals import Interval, Rows, either_illegal
from attnspan.masks.lowering import Lowering


class dilated(Mask):
    """Query i sees key j iff |i - j| <= window and dilation divides i - j. With `causal`, also j <= i.

    R = 2 * (window // dilation) + 1, or window // dilation + 1 with `causal`. This is one span for each key,
    so the mask is as large as an index list, and a kernel gains little from it. The same attention has R = 1
    on tokens in `strided_order(length, dilation)`. In that order, the mask is `segments(order % dilation) &
    window(n, n)` with n = window // dilation (docs/library.md).

    Source: attention-gym's `dilated_sliding_window`. Longformer (Beltagy et al. 2020), section 3.1.

    Args:
        window: Distance that the query sees on both sides, at least 0.
        dilation: Distance between neighbouring keys, at least 1.
        causal: Hide the keys after the query.

    Raises:
        DtypeError: If an argument has another type.
        OptionError: If `window` is below 0 or `dilation` is below 1.

    Example:
        >>> dilated(4, 2, causal=True).spans(1, 8).bounds[0, 0, 0].tolist()
        [[3, 4], [5, 6], [7, 8]]
    """

    window: int
    dilation: int
    causal: bool = False

    def __post_init__(self) -> None:
        self._check(window=checks.count, dilation=checks.positive, causal=checks.flag)

    def _lower(self, low: Lowering) -> Rows:
        if self.dilation == 1:
            return masks.window(self.window, 0 if self.causal else self.window)._lower(low)
        reach = self.window // self.dilation
        steps = [self.dilation * t for t in range(-reach, 1 if self.causal else reach + 1)]
        return Rows(tuple(Interval(low.shifted(step), low.shifted(step + 1)) for step in steps))


def strided_order(length: int, stride: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Order of tokens by residue class: 0, stride, 2 * stride, ..., then 1, 1 + stride, and so on.

    Args:
        length: Number of tokens.
        stride: Distance of neighbours in the new order, at least 1.

    Returns:
        int64 (length,), the token at each place. `x[..., order, :]` puts a sequence into this order, and
        `np.argsort(order)` puts it back.

    Raises:
        DtypeError: If an argument is not an int.
        OptionError: If `length` is below 0 or `stride` is below 1.

    Example:
        >>> strided_order(5, 2).tolist()
        [0, 2, 4, 1, 3]
    """
    length = checks.count("strided_order: length", length)
    stride = checks.positive("strided_order: stride", stride)
    return np.argsort(np.arange(length) % stride, kind="stable")


def global_sliding(window: int, tokens: int | Array, rows: bool = True, max_runs: int = 1) -> Mask:
    """A window on both sides, and global tokens that all queries see.

    Query i sees key j iff |i - j| <= window, or j is global, or (with `rows`) i is global. R = 2 if the first
    tokens are global, else 1 + max_runs. Combine it with `causal()` for a decoder.

    Source: attention-gym's `global_sliding_window`. Longformer (Beltagy et al. 2020), section 3.1. With
    `rows=False`, global tokens are attention sinks as in StreamingLLM (Xiao et al. 2023).

    Args:
        window: Distance that a query sees on both sides, at least 0.
        tokens: Number of first tokens that are global. Or bool (S,) or (B, S): which of all keys are global.
        rows: Whether queries of global tokens see everything.
        max_runs: If `tokens` is an array, the most runs of its true elements.

    Raises:
        DtypeError: If an argument has another type.
        ShapeError: If the array does not fit the keys or the batch. Lowering checks this.
        OptionError: If a number is too small, or if the array has more than `max_runs` runs and is encoded on
            the host.

    Example:
        >>> global_sliding(1, 1).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
    """
    window = checks.count("global_sliding: window", window)
    rows = checks.flag("global_sliding: rows", rows)
    if max_runs is not None:
        max_runs = checks.count("global_sliding: max_runs", max_runs, least=1)
    marked: Any
    seen: Mask
    if is_array(tokens) or isinstance(tokens, list | tuple):
        marked = checks.booleans("global_sliding: tokens", tokens)
        seen = masks.keys(marked, max_runs)
    else:
        marked = checks.count("global_sliding: tokens", tokens)
        seen = masks.global_keys(marked)
    both = masks.window(window, window) | seen
    return both | global_rows(marked) if rows else both


class global_rows(Mask):
    """Queries of the first n tokens, or of marked tokens, see everything."""

    which: int | Array

    def _key_len(self) -> Any:
        return None if isinstance(self.which, int) else self.which.shape[-1]

    def _lower(self, low: Lowering) -> Rows:
        index, beyond = low.q_index, None
        if isinstance(self.which, int):
            mine = (index >= 0) & (index < self.which)
        else:
            marked = low.per_batch("global_sliding: tokens", self.which, "int64")
            own, nowhere, beyond = low.take(marked)
            mine = (own == 1 if nowhere is None else (own == 1) & ~nowhere)[:, None]
            beyond = None if beyond is None else beyond[:, None]
        # A query that sees nothing has an empty span at its own index, which is still anchored.
        lo, hi = low.arrays.where(mine, 0, index), low.arrays.where(mine, INT32_MAX, index)
        return Rows((Interval(lo, hi, anchored=True),), beyond)


def prefix_lm(lengths: int | Array, cu_seqlens: Array | None = None) -> Mask:
    """A causal mask whose first keys are visible to all queries: j <= i or j < length. R = 1.

    Source: attention-gym's `prefix_lm`. T5 (Raffel et al. 2020), section 3.2.1.

    Args:
        lengths: int or integer (B,), the prefix length of each batch element. With `cu_seqlens`: int, (n,) or
            (B, n), the prefix length of each document.
        cu_seqlens: integer (n + 1,) or (B, n + 1), the start of each packed document and the end of the last
            one.

    Raises:
        DtypeError: If an array is not of integers.
        ShapeError: If the numbers of lengths and documents differ, or do not fit the batch.
        OptionError: If a length is negative or the offsets are wrong. Lowering checks values that can be
            read on the host.

    Example:
        >>> prefix_lm(2).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [0, 3]]
    """
    both = masks.causal() | masks.prefix(lengths, cu_seqlens)
    return both if cu_seqlens is None else both & masks.documents(cu_seqlens)


def shared_prefix(cu_seqlens: Array, prefix_of: Array) -> Mask:
    """Packed prompts and continuations: each document is causal and also sees the document that it continues.

    A prompt with several answers is therefore stored once. R = 2.

    Source: attention-gym's `shared_prefix`.

    Args:
        cu_seqlens: integer (n + 1,) or (B, n + 1), the start of each document and the end of the last one.
        prefix_of: integer (n,) or (B, n), the number of the document that each document continues. A document
            that continues none has its own number.

    Raises:
        DtypeError: If an array is not of integers.
        ShapeError: If the arrays have different numbers of documents, or do not fit the batch.
        OptionError: If the offsets or the numbers are wrong. Lowering checks values that can be read on the
            host.

    Example:
        >>> shared_prefix([0, 2, 3, 4], [0, 0, 0]).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    offsets = checks.offsets("shared_prefix: cu_seqlens", cu_seqlens)
    table = checks.integers("shared_prefix: prefix_of", prefix_of)
    n, m = offsets.shape[-1] - 1, table.shape[-1]
    what, remedy = "shared_prefix: prefix_of", "Give a document without a prefix its own number"
    expect(n == m, what, "one number for each document, {}", m, remedy, n, error=ShapeError)
    return (masks.causal() & masks.documents(offsets)) | prefix_documents(offsets, table)


class prefix_documents(Mask):
    """Queries see the keys of the document that their document continues, if it is another one."""

    cu_seqlens: Array
    prefix_of: Array

    def _lower(self, low: Lowering) -> Rows:
        arrays, what = low.arrays, "shared_prefix: prefix_of"
        own = low.documents("shared_prefix: cu_seqlens", self.cu_seqlens)
        table = low.per_batch(what, self.prefix_of)
        cu = low.per_batch("shared_prefix: cu_seqlens", self.cu_seqlens)
        n = cu.shape[-1] - 1
        bad = arrays.any((table < 0) | (table >= n))[:, None, None]
        remedy = "Give a document without a prefix its own number"
        illegal = low.broken(what, bad, "numbers of documents, 0 to {}", remedy, n - 1)
        named = arrays.clip(arrays.take_along(table, own.number), 0, n - 1)
        rows = own.inside & (named != own.number)
        lo, hi = arrays.take_along(cu, named)[:, None], arrays.take_along(cu, named + 1)[:, None]
        return Rows((low.seen_by(rows[:, None], lo, hi),), either_illegal(own.illegal, illegal))
