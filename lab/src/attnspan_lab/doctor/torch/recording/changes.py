"""Changes that checks make to a step: other tokens, noise in inputs of a module, calls with hidden keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnspan_lab.doctor.torch.recording.calls import Call, Inject, changed_tokens, noise, sdpa
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["computed", "evaluating", "stirred", "with_other_tokens"]


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


def computed(call: Call, hidden: Tensor | None = None, *, keeps_mask: bool = True) -> Tensor:
    """Compute a call again without dropout.

    Args:
        call: The call.
        hidden: Keys to hide, bool (B, Sk).
        keeps_mask: The call's own mask also hides pairs.
    """
    given = {**call.given, "dropout_p": 0.0}
    if not call.is_torchs:
        scores = call.rows
        if hidden is not None:
            hidden = hidden.repeat_interleave(len(scores) // len(hidden), 0)
            hidden = hidden.view(len(hidden), *[1] * (scores.dim() - 2), -1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(given["dim"])
    if hidden is not None:
        shown = (~hidden)[:, None, None].expand(-1, 1, call.rows.shape[-2], -1)
        if given.pop("is_causal", False):
            shown = shown.tril()
        mask = given.get("attn_mask") if keeps_mask else None
        if mask is not None:
            shown = shown & mask if mask.dtype == torch.bool else mask.masked_fill(~shown, -torch.inf)
        given["attn_mask"] = shown
    return sdpa(**given)
