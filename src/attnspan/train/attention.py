"""The two ways to attend within documents, both with their mask prepared once per step.

Shapes: B rows, S tokens of a row, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy

from attnspan import Prepared, causal, segments
from attnspan.torch import attention, checkpoint_policy
from attnspan.train.packing import PADDING

__all__ = ["StepMask", "attend", "keep_attention", "prepare_mask"]


class StepMask(NamedTuple):
    """The mask of one batch, shared by all layers.

    Args:
        mask: Prepared spans for attnspan, a dense (B, 1, S, S) bool tensor for SDPA.
        pairs: Visible (query, key) pairs of the batch, for one head.

    Example:
        >>> prepare_mask(torch.tensor([[0, 0, 1]], dtype=torch.int32), "attnspan").pairs
        4
    """

    mask: Prepared | Tensor
    pairs: int


def prepare_mask(ids: Tensor, kind: str) -> StepMask:
    """Lower "causal, within a segment" to what an attention takes; padding sees and is seen by nothing.

    Args:
        ids: Segment of each token, (B, S) int32.
        kind: "attnspan" or "sdpa".

    Example:
        >>> prepare_mask(torch.tensor([[0, 0, 1]], dtype=torch.int32), "sdpa").mask.int().tolist()
        [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    batch, seq_len = ids.shape
    mask = (causal() & segments(ids, padding_id=PADDING)).prepare(seq_len, seq_len, batch=batch)
    pairs = int(mask.lowered.cost().sum())
    return StepMask(mask if kind == "attnspan" else mask.lowered.dense(), pairs)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Prepared | Tensor) -> Tensor:
    """Attention of one layer: attnspan's under a prepared mask, torch's own under a dense one.

    Args:
        q: Queries, (B, S, H, D).
        k: Keys, (B, S, G, D).
        v: Values, (B, S, G, D).
        mask: What `prepare_mask` made.

    Returns:
        (B, S, H, D).

    Example:
        >>> ids = torch.tensor([[0, 1]], dtype=torch.int32)
        >>> q, k, v = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
        >>> out = attend(q, k, v, prepare_mask(ids, "sdpa").mask)
        >>> torch.allclose(out, v.expand_as(q))  # each token is alone in its document
        True
    """
    if isinstance(mask, Tensor):
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        return out.transpose(1, 2)
    return attention(q, k, v, mask=mask, layout="bshd")


def keep_attention(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of selective checkpointing: attnspan's, which keeps results of attention, and the same for SDPA.

    Args:
        ctx: Torch's context of the policy.
        op: The operator about to run.
        *args: Its arguments.
        **kwargs: Its keywords.

    Example:
        >>> keep_attention(None, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default).name
        'MUST_SAVE'
    """
    if op is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return CheckpointPolicy.MUST_SAVE
    return checkpoint_policy(ctx, op, *args, **kwargs)
