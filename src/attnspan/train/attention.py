"""The two ways to attend within documents, both with their mask prepared once per step.

Shapes: B rows, S tokens of a row, H query heads, G key/value heads, D head dimension, R spans of a query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from attnspan import causal, segments, spans
from attnspan.torch import attention
from attnspan.train.packing import PADDING

__all__ = ["PreparedMask", "attend", "prepare_mask"]


@dataclass(frozen=True)
class PreparedMask:
    """The mask of one batch, shared by all layers.

    Args:
        tensor: Bounds (B, 1, S, R, 2) int32 for attnspan, (B, 1, S, S) bool for sdpa.
        pairs: Visible (query, key) pairs of the batch, for one head.

    Example:
        >>> prepare_mask(torch.tensor([[0, 0, 1]], dtype=torch.int32), "attnspan").pairs
        4
    """

    tensor: Tensor
    pairs: int


def prepare_mask(ids: Tensor, kind: str) -> PreparedMask:
    """Lower "causal, within a segment" to what an attention takes; padding sees and is seen by nothing.

    Args:
        ids: Segment of each token, (B, S) int32.
        kind: "attnspan" or "sdpa".

    Example:
        >>> prepare_mask(torch.tensor([[0, 0, 1]], dtype=torch.int32), "sdpa").tensor.int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    lowered = (causal() & segments(ids, padding_id=PADDING)).spans(ids.shape[1], ids.shape[1])
    pairs = int(lowered.cost().sum())
    if kind == "attnspan":
        return PreparedMask(lowered.bounds, pairs)
    same = (ids[:, :, None] == ids[:, None, :]) & (ids != PADDING)[:, :, None]
    return PreparedMask(torch.tril(same)[:, None], pairs)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Attention of one layer.

    Args:
        q: Queries, (B, S, H, D).
        k: Keys, (B, S, G, D).
        v: Values, (B, S, G, D).
        mask: The tensor that `prepare_mask` made for this kind.
        kind: "attnspan" or "sdpa".

    Returns:
        (B, S, H, D).

    Example:
        >>> mask = prepare_mask(torch.tensor([[0, 1]], dtype=torch.int32), "sdpa").tensor
        >>> q = torch.ones(1, 2, 2, 4)
        >>> attend(q, q[:, :, :1], q[:, :, :1], mask, "sdpa").shape
        torch.Size([1, 2, 2, 4])
    """
    if kind == "attnspan":
        return attention(q, k, v, mask=spans(mask), layout="bshd")
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
    )
    return out.transpose(1, 2)
