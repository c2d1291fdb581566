"""Masks of text: windows, prefixes, documents, padding."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _arguments as checked
from .. import masks
from .._expression import Mask
from ..arrays import Array, is_array, is_bool
from ..errors import DtypeError, ShapeError, shown
from ._patterns import Dilated, GlobalRows, GlobalTokens, PrefixOf

__all__ = [
    "causal_document",
    "dilated",
    "document",
    "global_sliding",
    "left_padding",
    "prefix_lm",
    "right_padding",
    "shared_prefix",
    "sliding_window",
    "strided_order",
]


def sliding_window(window: int) -> Mask:
    """Query i sees itself and the `window` keys before it: i - window <= j <= i. R = 1.

    Source: attention-gym's `sliding_window`; Mistral counts the query itself, so its window of w is w - 1
    here.

    Args:
        window: keys before the query, at least 0.

    Raises:
        OptionError, DtypeError: for a window that is no such number.

    Example:
        >>> sliding_window(1).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [1, 3]]
    """
    return masks.window(checked.count("sliding_window: window", window))


def dilated(window: int, dilation: int, causal: bool = False) -> Mask:
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
    window = checked.count("dilated: window", window)
    dilation = checked.count("dilated: dilation", dilation, 1)
    if dilation == 1:
        return masks.window(window, 0 if causal else window)
    return Dilated(window, dilation, bool(causal))


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
    length = checked.count("strided_order: length", length)
    stride = checked.count("strided_order: stride", stride, 1)
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
    window = checked.count("global_sliding: window", window)
    local = masks.window(window, window)
    marked: Any = np.asarray(tokens) if isinstance(tokens, list | tuple) else tokens
    if not is_array(marked):
        n = checked.count("global_sliding: tokens", tokens)
        both = local | masks.global_keys(n)
        return both | GlobalRows(n) if rows else both
    if not is_bool(marked):
        raise DtypeError(
            "global_sliding: tokens",
            expected="a number of tokens, or a bool array",
            got=str(marked.dtype),
            remedy="Mark the global tokens by True",
        )
    checked.rank("global_sliding: tokens", marked, (1, 2))
    return local | GlobalTokens(marked, bool(rows), checked.count("global_sliding: max_runs", max_runs, 1))


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


def document(cu_seqlens: Array) -> Mask:
    """Packed documents: a query sees its own, both ways. R = 1.

    Source: attention-gym's `document_mask` with no inner mask; `per_document` takes an inner mask.

    Args:
        cu_seqlens: integer (n + 1,) or (B, n + 1), where each document starts and the last one ends.

    Raises:
        OptionError, DtypeError, ShapeError: as `attnspan.documents`.

    Example:
        >>> document([0, 2, 3]).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [2, 3]]
    """
    return masks.documents(cu_seqlens)


def causal_document(cu_seqlens: Array) -> Mask:
    """Packed documents, each causal. R = 1.

    Source: attention-gym's `document_mask`, `generate_packed_causal_doc_mask_mod`.

    Args:
        cu_seqlens: as for `document`.

    Raises:
        OptionError, DtypeError, ShapeError: as `attnspan.documents`.

    Example:
        >>> causal_document([0, 2, 3]).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [2, 3]]
    """
    return masks.causal() & masks.documents(cu_seqlens)


def shared_prefix(cu_seqlens: Array, prefix_of: Array) -> Mask:
    """Prompts and their continuations in one pack: each document is causal, and sees all of its prefix
    document.

    A prompt with several answers is stored once. R = 2.

    Source: attention-gym's `shared_prefix`.

    Args:
        cu_seqlens: integer (n + 1,) or (B, n + 1), where each document starts and the last one ends.
        prefix_of: integer (n,) or (B, n), the number of the document that each document continues; its own
            number if none.

    Raises:
        OptionError, DtypeError, ShapeError: for arrays that do not fit, or numbers of no document.

    Example:
        >>> shared_prefix([0, 2, 3, 4], [0, 0, 0]).spans(4, 4).dense()[0, 0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    offsets = checked.offsets("shared_prefix: cu_seqlens", cu_seqlens)
    table = checked.integers("shared_prefix: prefix_of", prefix_of, (1, 2))
    if table.shape[-1] != offsets.shape[-1] - 1:
        raise ShapeError(
            "shared_prefix: prefix_of",
            expected=f"one number per document, {offsets.shape[-1] - 1}",
            got=shown(table.shape[-1]),
            remedy="Give a document without a prefix its own number",
        )
    return (masks.causal() & masks.documents(offsets)) | PrefixOf(offsets, table)


def right_padding(lengths: int | Array) -> Mask:
    """The first keys of each batch row are valid, and the rest is padding. R = 1.

    Source: FlexAttention's padding masks; the `attention_mask` of most tokenizers.

    Args:
        lengths: int or integer (B,), number of valid keys.

    Raises:
        OptionError, DtypeError, ShapeError: as `attnspan.key_padding`.

    Example:
        >>> right_padding([2, 3]).spans(1, 3, batch=2).bounds[:, 0, 0, 0].tolist()
        [[0, 2], [0, 3]]
    """
    return masks.key_padding(lengths, "right")


def left_padding(lengths: int | Array) -> Mask:
    """The last keys of each batch row are valid, as generation in batches pads its prompts. R = 1.

    Source: FlexAttention's padding masks.

    Args:
        lengths: int or integer (B,), number of valid keys.

    Raises:
        OptionError, DtypeError, ShapeError: as `attnspan.key_padding`.

    Example:
        >>> left_padding([2, 3]).spans(1, 3, batch=2).bounds[:, 0, 0, 0].tolist()
        [[1, 3], [0, 3]]
    """
    return masks.key_padding(lengths, "left")
