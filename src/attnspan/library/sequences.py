"""Masks of text: dilated and global windows, prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import checks, masks
from .._intervals import Interval, Rows, either_illegal
from .._runs import find_runs
from ..arrays import INT32_MAX, Array, is_array, is_bool
from ..errors import DtypeError, ShapeError, expect
from ..lowering import Lowering
from ..masks import Mask
from ._shared import seen_by, warn_of_size

__all__ = [
    "dilated",
    "global_rows",
    "global_sliding",
    "global_tokens",
    "prefix_documents",
    "prefix_lm",
    "shared_prefix",
    "strided_order",
]


@dataclass(frozen=True, eq=False, repr=False)
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

    Raises:
        OptionError, DtypeError: for numbers out of range.

    Example:
        >>> dilated(4, 2, causal=True).spans(1, 8).bounds[0, 0, 0].tolist()
        [[3, 4], [5, 6], [7, 8]]
    """

    window: int
    dilation: int
    causal: bool = False

    def __post_init__(self) -> None:
        window = checks.count("dilated: window", self.window)
        dilation = checks.count("dilated: dilation", self.dilation, 1)
        self._set(window=window, dilation=dilation, causal=bool(self.causal))

    def _lower(self, low: Lowering) -> Rows:
        if self.dilation == 1:
            return masks.window(self.window, 0 if self.causal else self.window)._lower(low)
        reach = self.window // self.dilation
        steps = [self.dilation * t for t in range(-reach, 1 if self.causal else reach + 1)]
        warn_of_size(low, len(steps))
        # No key lies where the index must be held back for its neighbours to be int32.
        far = INT32_MAX - self.window - 1
        index = low.arrays.clip(low.q_index, -far, far)
        return Rows(tuple(Interval(index + step, index + step + 1) for step in steps))


def strided_order(length: int, stride: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens by residue class: 0, stride, 2 * stride, ..., then 1, 1 + stride, and so on.

    Args:
        length: number of tokens.
        stride: at least 1.

    Returns:
        int64 (length,): the token at each place; `x[..., order, :]` puts a sequence into this order, and
        `np.argsort(order)` back.

    Raises:
        OptionError, DtypeError: for numbers out of range.

    Example:
        >>> strided_order(5, 2).tolist()
        [0, 2, 4, 1, 3]
    """
    length = checks.count("strided_order: length", length)
    stride = checks.count("strided_order: stride", stride, 1)
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
        max_runs: with an array, how many runs its true elements form at most. Rows of data with more are
            illegal.

    Raises:
        OptionError, DtypeError, ShapeError: for numbers out of range, or an array of a wrong dtype or rank.

    Example:
        >>> global_sliding(1, 1).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 1, 1]]
    """
    window = checks.count("global_sliding: window", window)
    local = masks.window(window, window)
    marked: Any = np.asarray(tokens) if isinstance(tokens, list | tuple) else tokens
    if not is_array(marked):
        n = checks.count("global_sliding: tokens", tokens)
        both = local | masks.global_keys(n)
        return both | global_rows(n) if rows else both
    what, expected, remedy = (
        "global_sliding: tokens",
        "a number of tokens, or a bool array",
        "Mark them by True",
    )
    expect(is_bool(marked), what, expected, str(marked.dtype), remedy, error=DtypeError)
    checks.rank(what, marked, (1, 2))
    return local | global_tokens(marked, bool(rows), checks.count("global_sliding: max_runs", max_runs, 1))


@dataclass(frozen=True, eq=False, repr=False)
class global_rows(Mask):
    """The first n rows see everything."""

    n: int

    def _lower(self, low: Lowering) -> Rows:
        arrays, index = low.arrays, low.q_index
        mine = (index >= 0) & (index < self.n)
        # A row that sees nothing is an empty span at its own index: still anchored.
        lo, hi = arrays.where(mine, 0, index), arrays.where(mine, INT32_MAX, index)
        return Rows((Interval(lo, hi, anchored=True),))


@dataclass(frozen=True, eq=False, repr=False)
class global_tokens(Mask):
    """The marked tokens see everything and are seen by all rows."""

    marked: Array
    rows: bool = True
    max_runs: int = 1

    def _key_len(self, traced: bool = False) -> Any:  # noqa: ARG002
        return self.marked.shape[-1]

    def _lower(self, low: Lowering) -> Rows:
        arrays = low.arrays
        marked = low.per_batch("global_sliding: tokens", self.marked, "int64")
        if marked.shape[-1] == 0:
            return Rows((Interval(0, 0),))
        one = arrays.full((marked.shape[0], 1), 1, "int64")
        pairs, broken = find_runs(arrays, one, marked, self.max_runs)
        intervals = [Interval(lo[:, None], hi[:, None]) for lo, hi in pairs]
        illegal = broken[:, None]
        if self.rows:
            own, nowhere, beyond = low.take(marked)
            whole = (own == 1 if nowhere is None else (own == 1) & ~nowhere)[:, None]
            ends = [INT32_MAX] + [0] * (len(intervals) - 1)
            intervals = [
                Interval(arrays.where(whole, 0, x.lo), arrays.where(whole, end, x.hi))
                for x, end in zip(intervals, ends, strict=True)
            ]
            illegal = either_illegal(illegal, None if beyond is None else beyond[:, None])
        return Rows(tuple(intervals), illegal)


def prefix_lm(lengths: int | Array, cu_seqlens: Array | None = None) -> Mask:
    """Causal, and the first keys are seen by all rows: j <= i or j < length. R = 1.

    Source: attention-gym's `prefix_lm`; T5 (Raffel et al. 2020), section 3.2.1.

    Args:
        lengths: int or integer (B,), of each batch row; with `cu_seqlens`, int, (n,) or (B, n), of each
            document.
        cu_seqlens: integer (n + 1,) or (B, n + 1), where packed documents start and the last one ends.

    Raises:
        OptionError, DtypeError, ShapeError: as `attnspan.prefix`.

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

    Raises:
        OptionError, DtypeError, ShapeError: for arrays that do not fit, or numbers of no document.

    Example:
        >>> shared_prefix([0, 2, 3, 4], [0, 0, 0]).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    offsets = checks.offsets("shared_prefix: cu_seqlens", cu_seqlens)
    table = checks.integers("shared_prefix: prefix_of", prefix_of, (1, 2))
    n, m = offsets.shape[-1] - 1, table.shape[-1]
    what, remedy = "shared_prefix: prefix_of", "Give a document without a prefix its own number"
    expect(n == m, what, "one number per document, {}", m, remedy, n, error=ShapeError)
    return (masks.causal() & masks.documents(offsets)) | prefix_documents(offsets, table)


@dataclass(frozen=True, eq=False, repr=False)
class prefix_documents(Mask):
    """The keys of another document, which each document names; its own number: none."""

    cu_seqlens: Array
    prefix_of: Array

    def _lower(self, low: Lowering) -> Rows:
        arrays, what = low.arrays, "shared_prefix: prefix_of"
        own = low.documents("shared_prefix: cu_seqlens", self.cu_seqlens)
        low.check_int32(what, self.prefix_of)
        table = low.per_batch(what, self.prefix_of, "int32")
        cu = low.per_batch("shared_prefix: cu_seqlens", self.cu_seqlens, "int32")
        n = cu.shape[-1] - 1
        bad = arrays.any((table < 0) | (table >= n))[:, None, None]
        remedy = "Give a document without a prefix its own number"
        illegal = low.broken(what, bad, (self.prefix_of,), "numbers of documents, 0 to {}", remedy, n - 1)
        named = arrays.clip(arrays.take_along(table, own.number), 0, n - 1)
        rows = own.inside & (named != own.number)
        lo, hi = arrays.take_along(cu, named)[:, None], arrays.take_along(cu, named + 1)[:, None]
        return Rows((seen_by(low, rows[:, None], lo, hi),), either_illegal(own.illegal, illegal))
