"""Masks of text: dilated and global windows, prefixes."""

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

__all__ = [
    "dilated",
    "global_rows",
    "global_sliding",
    "prefix_documents",
    "prefix_lm",
    "shared_prefix",
    "strided_order",
]


class dilated(Mask):
    """Query i sees key j iff |i - j| <= window and dilation divides i - j; causal: and j <= i.

    R = 2 * (window // dilation) + 1, or window // dilation + 1 if causal: one span for each key, so this mask
    is as large as an index list, and a kernel gains little from it. The same attention has R = 1 on tokens in
    `strided_order(length, dilation)`: there it is `segments(order % dilation) & window(n, n)` with n = window
    // dilation (docs/library.md).

    Source: attention-gym's `dilated_sliding_window`; Longformer (Beltagy et al. 2020), section 3.1.

    Args:
        window: how far the query sees, on both sides, at least 0.
        dilation: at least 1.
        causal: nothing after the query.

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
    """Tokens by residue class: 0, stride, 2 * stride, ..., then 1, 1 + stride, and so on.

    Args:
        length: number of tokens.
        stride: at least 1.

    Returns:
        int64 (length,): the token at each place; `x[..., order, :]` puts a sequence into this order, and
        `np.argsort(order)` back.

    Example:
        >>> strided_order(5, 2).tolist()
        [0, 2, 4, 1, 3]
    """
    length = checks.count("strided_order: length", length)
    stride = checks.positive("strided_order: stride", stride)
    return np.argsort(np.arange(length) % stride, kind="stable")


def global_sliding(window: int, tokens: int | Array, rows: bool = True, max_runs: int = 1) -> Mask:
    """A window on both sides, and global tokens that all rows see; they see everything themselves if `rows`.

    Query i sees key j iff |i - j| <= window, or j is global, or i is. R = 2 with the first n tokens as global
    ones, else 1 + max_runs. Compose with `causal()` for a decoder.

    Source: attention-gym's `global_sliding_window`; Longformer (Beltagy et al. 2020), section 3.1. Keys only:
    sinks as tokens, StreamingLLM (Xiao et al. 2023).

    Args:
        window: how far a query sees, on both sides, at least 0.
        tokens: how many of the first tokens are global; or bool (S,) or (B, S), which ones, of all keys.
        rows: whether the global tokens' rows see everything too.
        max_runs: with an array, how many runs its true elements form at most.

    Example:
        >>> global_sliding(1, 1).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
    """
    window = checks.count("global_sliding: window", window)
    rows = checks.flag("global_sliding: rows", rows)
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
    """The first n rows, or those of marked tokens, see everything."""

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
        # A row that sees nothing is an empty span at its own index: still anchored.
        lo, hi = low.arrays.where(mine, 0, index), low.arrays.where(mine, INT32_MAX, index)
        return Rows((Interval(lo, hi, anchored=True),), beyond)


def prefix_lm(lengths: int | Array, cu_seqlens: Array | None = None) -> Mask:
    """Causal, and the first keys are seen by all rows: j <= i or j < length. R = 1.

    Source: attention-gym's `prefix_lm`; T5 (Raffel et al. 2020), section 3.2.1.

    Args:
        lengths: int or integer (B,), of each batch row; with `cu_seqlens`, int, (n,) or (B, n), of each
            document.
        cu_seqlens: integer (n + 1,) or (B, n + 1), where packed documents start and the last one ends.

    Example:
        >>> prefix_lm(2).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [0, 3]]
    """
    both = masks.causal() | masks.prefix(lengths, cu_seqlens)
    return both if cu_seqlens is None else both & masks.documents(cu_seqlens)


def shared_prefix(cu_seqlens: Array, prefix_of: Array) -> Mask:
    """Prompts and their continuations in one pack: each document is causal, and sees its prefix document.

    A prompt with several answers is stored once. R = 2.

    Source: attention-gym's `shared_prefix`.

    Args:
        cu_seqlens: integer (n + 1,) or (B, n + 1), where each document starts and the last one ends.
        prefix_of: integer (n,) or (B, n), the number of the document that each document continues; its own
            number if it continues none.

    Example:
        >>> shared_prefix([0, 2, 3, 4], [0, 0, 0]).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    offsets = checks.offsets("shared_prefix: cu_seqlens", cu_seqlens)
    table = checks.integers("shared_prefix: prefix_of", prefix_of)
    n, m = offsets.shape[-1] - 1, table.shape[-1]
    what, remedy = "shared_prefix: prefix_of", "Give a document without a prefix its own number"
    expect(n == m, what, "one number per document, {}", m, remedy, n, error=ShapeError)
    return (masks.causal() & masks.documents(offsets)) | prefix_documents(offsets, table)


class prefix_documents(Mask):
    """The keys of another document, which each document names; its own number: none."""

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
