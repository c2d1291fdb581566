"""Booleans, which each attention function accepts."""

from __future__ import annotations

from attnspan.base.arrays import Array
from attnspan.base.mistakes import not_a_mask
from attnspan.masks import Mask, Spans


def to_dense(
    mask: Mask | Spans, q_len: int, k_len: int | None = None, *, batch: int | None = None, heads: int = 1
) -> Array:
    """Write a mask as booleans, True where a query may see a key, for SDPA and similar functions.

    It takes O(q_len * k_len) memory. It also works inside compiled functions. `attnspan.from_dense` converts
    in the other direction.

    Args:
        mask: A mask, or lowered spans.
        q_len: Number of queries.
        k_len: Number of keys. Default: q_len.
        batch, heads: Sizes that arrays of the mask must fit.

    Returns:
        bool (B|1, H|1, q_len, k_len), in the framework of the mask.

    Raises:
        DtypeError: If `mask` is no mask.
        ShapeError: If arrays of the mask do not fit the sizes.
        OptionError: If data of the mask are wrong and can be read.

    Example:
        >>> from attnspan import causal
        >>> to_dense(causal(), 2, 3)[0, 0].tolist()
        [[True, True, False], [True, True, True]]
    """
    if isinstance(mask, Spans):
        return mask.dense()
    if not isinstance(mask, Mask):
        raise not_a_mask(mask, "to_dense: mask")
    return mask.spans(q_len, q_len if k_len is None else k_len, batch=batch, heads=heads).lowered.dense()
