"""Masks made of masks: by batch row, by head, by document, by batch within a sequence, by order of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _arguments as checked
from .._expression import Mask
from ..arrays import Array, arrays_for
from ..errors import DtypeError, OptionError, ShapeError
from ._mixtures import Batchify, PerDocument, PerHead, PerRow, Reordered

__all__ = ["batchify", "per_document", "per_head", "per_row", "reordered"]


def per_row(masks: Sequence[Mask]) -> Mask:
    """A mask of its own for each batch row. R is that of the largest.

    Args:
        masks: one for each batch row; arrays in them have no batch axis, or one of length 1. Each may imply
            its own default rows, as `cache(length)` does.

    Raises:
        OptionError, DtypeError, ShapeError: for something else than masks, or as many as there are no rows.

    Example:
        >>> from attnspan import causal, full
        >>> per_row([causal(), full()]).spans(2, 2, batch=2).bounds[:, 0, :, 0].tolist()
        [[[0, 1], [0, 2]], [[0, 2], [0, 2]]]
    """
    return PerRow(_several("per_row", masks))


def per_head(masks: Sequence[Mask]) -> Mask:
    """A mask of its own for each query head: local and global heads, say. R is that of the largest.

    Args:
        masks: one for each query head; arrays in them have no head axis, or one of length 1.

    Raises:
        OptionError, DtypeError, ShapeError: for something else than masks, or as many as there are no heads.

    Example:
        >>> from attnspan import causal, window
        >>> per_head([causal(), window(0)]).spans(2, 2, heads=2).bounds[0, :, 1, 0].tolist()
        [[0, 2], [1, 2]]
    """
    return PerHead(_several("per_head", masks))


def per_document(mask: Mask, cu_seqlens: Array) -> Mask:
    """Packed documents with a mask inside each, whose indices count from the document's start. R is the
    mask's.

    For masks that compare rows with keys, such as `causal()` and `window(w)`, it is `mask &
    document(cu_seqlens)`; it differs where places count: `global_sliding`, `block_causal`, `prefix_lm(n)`.

    Source: attention-gym's `generate_doc_mask_mod(mask_mod, offsets)`.

    Args:
        mask: without arrays that describe keys, and without `cache` or documents of its own.
        cu_seqlens: integer (n + 1,) or (B, n + 1), where each document starts and the last one ends.

    Raises:
        OptionError, DtypeError, ShapeError: for other masks or offsets.

    Example:
        >>> from attnspan.library import prefix_lm
        >>> per_document(prefix_lm(2), [0, 3, 5]).spans(5, 5).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 2], [0, 3], [3, 5], [3, 5]]
    """
    _check_inner("per_document", mask, None)
    return PerDocument(mask, checked.offsets("per_document: cu_seqlens", cu_seqlens))


def batchify(mask: Mask, size: int) -> Mask:
    """A sequence of batches of one size, each with the mask, whose indices count from the batch's start.

    R is the mask's.

    Source: attention-gym's `batchify_mask_mod`.

    Args:
        mask: its arrays that describe keys, if any, have `size` of them.
        size: tokens of a batch, at least 1.

    Raises:
        OptionError, DtypeError, ShapeError: for other masks or sizes.

    Example:
        >>> from attnspan import causal
        >>> batchify(causal(), 2).spans(4, 4).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [2, 3], [2, 4]]
    """
    size = checked.count("batchify: size", size, 1)
    _check_inner("batchify", mask, size)
    return Batchify(mask, size)


def reordered(mask: Mask, order: Array) -> Mask:
    """A mask for tokens that are stored in another order: place p holds token order[p].

    Rows and keys of the result count places; `mask` counts tokens. R depends on the order. It is found by
    enumerating the visible pairs, O(pairs log pairs) time and O(rows * R) memory, and needs indices that can
    be read: prepare it once, outside the compiled function. Exact for every mask and order.

    Args:
        mask: of the tokens in their own order.
        order: integer (S,), a permutation of 0..S-1; see `tile_order`, `morton_order`, `strided_order`.

    Raises:
        OptionError, DtypeError, ShapeError: for an order that is no permutation of the keys, or cannot be
            read.

    Example:
        >>> from attnspan import window
        >>> reordered(window(1), [0, 2, 1]).spans(3, 3).dense()[0, 0].astype(int).tolist()
        [[1, 0, 0], [0, 1, 1], [1, 0, 1]]
    """
    (mask,) = _several("reordered", [mask])
    order = checked.integers("reordered: order", order, (1,))
    arrays = arrays_for([order])
    if not arrays.tracing():
        values = arrays.to_numpy(order)
        if not np.array_equal(np.sort(values), np.arange(len(values))):
            raise OptionError(
                "reordered: order",
                expected=f"a permutation of 0..{len(values) - 1}",
                got="another array",
                remedy="Pass the token at each place, each token once",
            )
    return Reordered(mask, order)


def _several(what: str, masks: Any) -> tuple[Mask, ...]:
    if not isinstance(masks, list | tuple) or not masks:
        got = type(masks).__name__ if masks else "none"
        raise DtypeError(what, expected="a list of masks", got=got, remedy="Pass one mask for each")
    for mask in masks:
        if not isinstance(mask, Mask):
            raise DtypeError(
                what,
                expected="masks",
                got=type(mask).__name__,
                remedy="Make them by the functions of attnspan",
            )
    return tuple(masks)


def _check_inner(what: str, mask: Any, size: int | None) -> None:
    """Whether `mask` can be counted from the start of each of several stretches of keys."""
    (mask,) = _several(what, [mask])
    for leaf in mask._leaves():
        if leaf._anchor() is not None or leaf._row_len() is not None:
            raise OptionError(
                what,
                expected="a mask that follows from indices alone",
                got=repr(leaf),
                remedy="Leave it outside, and compose with &",
            )
        n = leaf._key_len()
        if n is not None and n != size:
            raise ShapeError(
                what,
                expected="a mask without arrays for keys"
                if size is None
                else f"arrays that describe {size} keys",
                got=repr(leaf),
                remedy="Leave it outside, and compose with &",
            )
