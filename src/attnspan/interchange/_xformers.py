"""Biases of xFormers. The module reads the names of their classes, and does not import xFormers."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnspan.base.arrays import arrays_for
from attnspan.base.checks import count
from attnspan.errors import DtypeError, OptionError, ShapeError, expect
from attnspan.masks import Mask, full

from ._bands import band
from ._values import as_mask
from ._varlen import from_varlen, packed

_NONE, _CAUSAL, _LOCAL, _WINDOW = "none", "causal", "window_size", "left and right"
_TOP, _BOTTOM = "top-left", "bottom-right"
#: Class -> its window, and the corner that aligns queries and keys, as its `materialize` says.
_KINDS = {
    "LowerTriangularMask": (_CAUSAL, _TOP),
    "LowerTriangularFromBottomRightMask": (_CAUSAL, _BOTTOM),
    "LowerTriangularFromBottomRightLocalAttentionMask": (_LOCAL, _BOTTOM),
    "LocalAttentionFromBottomRightMask": (_WINDOW, _BOTTOM),
    "BlockDiagonalMask": (_NONE, _BOTTOM),
    "BlockDiagonalCausalMask": (_CAUSAL, _TOP),
    "BlockDiagonalCausalFromBottomRightMask": (_CAUSAL, _BOTTOM),
    "BlockDiagonalCausalLocalAttentionMask": (_LOCAL, _TOP),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (_LOCAL, _BOTTOM),
    "BlockDiagonalPaddedKeysMask": (_NONE, _BOTTOM),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (_CAUSAL, _BOTTOM),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (_LOCAL, _BOTTOM),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (_WINDOW, _BOTTOM),
    "BlockDiagonalGappyKeysMask": (_NONE, _BOTTOM),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (_CAUSAL, _BOTTOM),
}


def from_xformers(bias: Any, q_len: int | None = None, k_len: int | None = None) -> Mask:
    """Read an `AttentionBias` of xFormers.

    Args:
        bias: An instance of a class of `xformers.ops.fmha.attn_bias`: a causal or local mask, or any
            `BlockDiagonal...` mask, also with padded keys or gaps. None shows all pairs.
        q_len, k_len: Numbers of queries and keys. Pass them for a `LowerTriangularMask`, because it aligns
            the first query with the first key. Default for `k_len`: q_len. The other classes do not use them.

    Returns:
        For block-diagonal masks that align the last query of a document with its last key, the expression
        `documents(...) & causal()` or `documents(...) & window(...)`, so attnspan can choose the kernels for
        such masks. For other block-diagonal masks, a mask from spans.

    Raises:
        DtypeError: If `bias` is no bias of xFormers.
        ShapeError: If you pass a `LowerTriangularMask` without `q_len`.
        OptionError: If the mask is paged (use a `PagedCache`), if it has a tensor that is added to the scores
            (pass it as `bias=`), or if the class is unknown.

    Example:
        >>> class LocalAttentionFromBottomRightMask:  # as in xformers.ops.fmha.attn_bias
        ...     window_left, window_right = 2, 1
        >>> from_xformers(LocalAttentionFromBottomRightMask())
        window(2, right=1)
    """
    if bias is None:
        return full()
    name = type(bias).__name__
    fits = hasattr(type(bias), "materialize") or name in _KINDS
    remedy = "Pass an instance of a class of xformers.ops.fmha.attn_bias"
    expect(fits, "from_xformers: bias", "an AttentionBias of xFormers", name, remedy, error=DtypeError)
    if name not in _KINDS:
        raise _unknown(name)
    kind, align = _KINDS[name]
    left, right = _window(bias, kind)
    if not name.startswith("BlockDiagonal"):
        return _one_sequence(left, right, align, q_len, k_len)
    q, k = bias.q_seqinfo, bias.k_seqinfo
    if not hasattr(k, "seqlen_py"):
        # The starts are tensors, and the result is on their device. Equal starts stay one object.
        sides = -1 if left is None else left, -1 if right is None else right
        cu_k = None if k is q else k.seqstart
        return from_varlen(q.seqstart, cu_k, window_size=sides, align=align)
    starts_q = np.array(q.seqstart_py, np.int64)
    starts_k, lengths_k = np.array(k.seqstart_py, np.int64), np.array(k.seqlen_py, np.int64)
    q_len, k_len = int(starts_q[-1]), int(starts_k[-1])
    lengths_q, starts_k = np.diff(starts_q), starts_k[: len(lengths_k)]
    bounds = packed(starts_q[:-1], lengths_q, starts_k, lengths_k, q_len, left, right, align)
    return as_mask("from_xformers", bounds, k_len, arrays_for([k.seqstart], what="from_xformers"))


def _window(bias: Any, kind: str) -> tuple[int | None, int | None]:
    if kind == _WINDOW:
        return int(bias.window_left), int(bias.window_right)
    # The window of a local mask counts the query's own key.
    left = int(bias._window_size) - 1 if kind == _LOCAL else None
    return left, None if kind == _NONE else 0


def _one_sequence(
    left: int | None, right: int | None, align: str, q_len: int | None, k_len: int | None
) -> Mask:
    if align == _BOTTOM:
        return band("from_xformers", np.zeros(0), 0, left, right)
    known, remedy = q_len is not None, "Pass q_len, and k_len if it differs"
    expect(known, "from_xformers: q_len", "the number of queries", "None", remedy, error=ShapeError)
    q_len = count("from_xformers: q_len", q_len)
    k_len = q_len if k_len is None else count("from_xformers: k_len", k_len)
    return band("from_xformers", np.arange(q_len), k_len, left, right)


def _unknown(name: str) -> OptionError:
    what, got = "from_xformers: bias", name
    if name.startswith("Paged"):
        call = "page_table_from_blocks(bias.block_tables, bias.k_seqinfo.seqlen, bias.page_size)"
        remedy = f"Read its pages with {call}, and attend with a PagedCache"
        return OptionError(what, expected="keys in one sequence", got=f"{got}, keys on pages", remedy=remedy)
    if "TensorBias" in name:
        remedy = "Pass mask=causal(), and the tensor as bias="
        got = f"{got}, which also adds a tensor to the scores"
        return OptionError(what, expected="a mask", got=got, remedy=remedy)
    remedy = "Pass from_dense(bias.materialize((q_len, k_len)) == 0), which takes O(q_len * k_len) memory"
    return OptionError(what, expected=f"one of {', '.join(_KINDS)}", got=got, remedy=remedy)
