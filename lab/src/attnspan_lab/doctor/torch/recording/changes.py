"""Changes that checks make to a step: other tokens, noise in inputs of a module, calls with hidden keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnspan_lab.doctor.torch.recording.calls import Call, Inject, changed_tokens, noise
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["evaluating", "hiding", "stirred", "with_other_tokens"]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode, without gradients and compiler, until the end of the block."""
    training = [x for x in model.modules() if x.training]
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


def with_other_tokens(subject: Subject, batch: Any, name: str, index: Any = ...) -> Any:
    """Change a tensor of a batch at an index, by default everywhere."""
    tokens = subject.named(batch)[name]
    changed = tokens.clone()
    changed[index] = changed_tokens(tokens)[index]
    return subject.with_tokens(batch, name, changed)


def stirred(shape: tuple[int, ...], index: Any) -> Inject:
    """Add noise at an index to the inputs (X, Y, C) of a module that have this shape (X, Y)."""

    def change(x: Tensor) -> Tensor:
        if x.shape[:2] != shape:
            return x
        x, more = x.clone(), noise(x[index])
        x[index] += more
        return x

    return change


def _of_keys(call: Call, keys: Tensor) -> Tensor:
    """Bring a mask of keys (B, Sk) to the dims of a call's scores. Their first dim may be batch and heads."""
    keys = keys.repeat_interleave(len(call.rows) // len(keys), 0)
    return keys.view(len(keys), *[1] * (call.rows.dim() - 2), -1)


def hiding(call: Call, hidden: Tensor) -> Call:
    """Hide some keys (B, Sk) of a call, in addition to its own mask."""
    given, hidden = dict(call.given), _of_keys(call, hidden)
    if not call.is_torchs:
        given["scores"] = call.rows.masked_fill(hidden, -torch.inf)
        return replace(call, given=given)
    shown, mask = (~hidden).expand(*hidden.shape[:-2], call.q_len, -1), given.get("attn_mask")
    if given.pop("is_causal", False):
        shown = shown.tril()
    if mask is not None:
        shown = shown & mask if mask.dtype == torch.bool else mask.masked_fill(~shown, -torch.inf)
    return replace(call, given={**given, "attn_mask": shown})
