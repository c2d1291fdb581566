"""A block under each kind of activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attnspan.torch import checkpoint_policy

#: How often the forward kernel runs in a step.
FORWARD_CALLS = {"none": 1, "selective": 1, "full": 2}


def checkpointed(kind: str, block: Callable[..., Any], *args: Any) -> Any:
    """What a block makes of its arguments, under one of the kinds of `FORWARD_CALLS`."""
    if kind == "none":
        return block(*args)
    selective = partial(create_selective_checkpoint_contexts, checkpoint_policy)
    extra: dict[str, Any] = {"context_fn": selective} if kind == "selective" else {}
    return checkpoint(block, *args, use_reentrant=False, **extra)
