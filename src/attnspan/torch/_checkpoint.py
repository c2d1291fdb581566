"""Selective activation checkpointing: recompute everything but attention."""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ._encode import encode_op
from ._ops import forward_op

#: Operators whose outputs are worth keeping: their recomputation costs most, their outputs are O(S).
SAVE_OPS: tuple[torch._ops.OpOverload, ...] = (forward_op, encode_op)
# Those of wrapped kernels, for the same reason.
_also: set[torch._ops.OpOverload] = set()


def checkpoint_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of attention, and of masks encoded in a compiled program; recompute everything else.

    For ``torch.utils.checkpoint.create_selective_checkpoint_contexts``; the forward kernel then runs once per
    step instead of twice.

    Args:
        ctx: Torch's context of the policy, unused.
        op: The operator about to run.
        *args: Its arguments, unused.
        **kwargs: Its keywords, unused.

    Returns:
        ``MUST_SAVE`` for `SAVE_OPS` and the operators of `wrap`, else ``PREFER_RECOMPUTE``.

    Example:
        >>> from functools import partial
        >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
        >>> block, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        >>> contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy)
        >>> checkpoint(block, x, use_reentrant=False, context_fn=contexts).shape
        torch.Size([2, 4])
    """
    del ctx, args, kwargs
    return CheckpointPolicy.MUST_SAVE if op in SAVE_OPS or op in _also else CheckpointPolicy.PREFER_RECOMPUTE


def save_also(op: torch._ops.OpOverload) -> None:
    """Let `checkpoint_policy` keep the results of another operator of attention.

    Example:
        >>> save_also(forward_op)
        >>> checkpoint_policy(None, forward_op)
        <CheckpointPolicy.MUST_SAVE: 0>
    """
    _also.add(op)
