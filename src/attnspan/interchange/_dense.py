"""Dense boolean masks, which most attention functions accept."""

from __future__ import annotations

from attnspan.base.arrays import Array
from attnspan.base.mistakes import not_a_mask
from attnspan.masks import Mask, Spans


def to_dense(
    mask: Mask | Spans, q_len: int, k_len: int | None = None, *, batch: int | None = None, heads: int = 1
) -> Array:
    """Write a mask as a dense boolean array, True where a query may see a key, for SDPA and others.

    The result takes O(q_len * k_len) memory. You can call `to_dense` inside compiled functions too.
    `attnspan.from_dense` converts in the other direction.

    Args:
        mask: A mask, or lowered spans.
        q_len: Number of queries.
        k_len: Number of keys. Default: q_len.
        batch, heads: Batch size and number of heads. Arrays in the mask must fit them.

    Returns:
        bool (B|1, H|1, q_len, k_len), in the framework of the mask.

    Raises:
        DtypeError: If `mask` is no mask.
        ShapeError: If arrays in the mask do not fit the sizes.
        OptionError: If the mask contains invalid values. Compiled functions cannot check values.

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
