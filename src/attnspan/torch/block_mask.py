"""FlexAttention's ``BlockMask`` from a mask: the way back from ``from_block_mask``."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnspan.base.arrays import own
from attnspan.base.checks import count
from attnspan.base.mistakes import not_a_mask
from attnspan.errors import expect
from attnspan.kernels.flex import block_mask as blocks_of
from attnspan.masks import Mask, Prepared
from attnspan.masks.bounds import Spans

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def to_block_mask(
    mask: Mask | Spans,
    q_len: int,
    k_len: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    block_size: int | tuple[int, int] = 128,
    device: torch.device | str | None = None,
) -> "BlockMask":
    """A mask for ``torch.nn.attention.flex_attention``: exact, block by block and pair by pair.

    Its lists of blocks follow from the spans' ends, without a look at all pairs: O(q_len * R + blocks) work
    where ``create_block_mask`` evaluates q_len * k_len pairs. Values are read, so this belongs outside
    compiled functions.

    Args:
        mask: What each query may see; lowered for the sizes given here if it is not yet.
        q_len, k_len: Numbers of query rows and keys.
        batch, heads: Batch rows and query heads that arrays of the mask must fit; by default 1. Axes on which
            nothing depends stay 1.
        block_size: Rows and keys of a block, one number or (rows, keys); FlexAttention's kernels may want
            multiples of 128.
        device: Where its tensors are; by default where the mask's are, or torch's default device for a mask
            without tensors.

    Returns:
        A ``BlockMask`` of ``seq_lengths`` (q_len, k_len). As in torch, a block that sticks out over the last
        row or key is listed as a partial one.

    Raises:
        TypeError: ``mask`` is no mask, a size no int.
        ValueError: Sizes that do not fit, a block size below 1, illegal spans.

    Example:
        >>> from attnspan import causal, window
        >>> block_mask = to_block_mask(causal() & window(100), 512, 512)
        >>> block_mask.kv_num_blocks.tolist(), block_mask.sparsity()
        ([[[1, 2, 2, 2]]], 56.25)
    """
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    two = len(sizes) == 2
    expect(two, "block_size", "an int, or rows and keys", f"{len(sizes)} numbers", "Pass (rows, keys)")
    q_block, k_block = (count("block_size", size, least=1) for size in sizes)
    spans = _lowered(mask, q_len, k_len, batch or 1, heads or 1, device)
    return blocks_of(spans.bounds, k_len, q_block=q_block, k_block=k_block)  # type: ignore[no-any-return]


def _lowered(
    mask: Mask | Spans, q_len: int, k_len: int, batch: int, heads: int, device: torch.device | str | None
) -> Spans:
    """Legal spans with the smallest R, whose bounds are a tensor on the device."""
    if isinstance(mask, Spans):
        mask = Prepared(mask.validate())
    if not isinstance(mask, Mask):
        raise not_a_mask(mask, "to_block_mask: mask")
    like = torch.empty(0, device=device)
    spans = mask.prepare(q_len, k_len, batch=batch, heads=heads, like=like).lowered
    bounds = torch.as_tensor(
        own(spans.bounds), device=None if isinstance(spans.bounds, Tensor) else like.device
    )
    return Spans(bounds if device is None else bounds.to(device), k_len)
