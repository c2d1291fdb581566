"""The module that receives an input and does not use it, and the attention call in this module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.places import Place, place_of
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import Step
from attnspan_lab.doctor.torch.recording.changes import evaluating
from attnspan_lab.doctor.torch.recording.trace import forward_line
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["attention_in", "receiver_of"]


def receiver_of(step: Step, changed: Any) -> tuple[str, nn.Module]:
    """Find the innermost module that receives other tensors with a changed input, and returns the same."""
    one, other = (_seen(step.subject, x) for x in (step.batch, changed))
    for name, (given, out) in one.items():
        if name in other and name and _differ(given, other[name][0]) and not _differ(out, other[name][1]):
            return name, dict(step.subject.model.named_modules())[name]
    return "", step.subject.model


def _seen(subject: Subject, batch: Any) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Record tensors that each module receives and returns."""
    own, found = subject.copy(), dict[str, tuple[list[Tensor], list[Tensor]]]()

    def tensors(given: Any) -> list[Tensor]:
        return [x.detach().clone() for x in tree_leaves(given) if isinstance(x, Tensor)]

    def note(name: str) -> Any:
        def after(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            found.setdefault(name, (tensors((args, kwargs)), tensors(out)))

        return after

    for name, module in own.model.named_modules():
        module.register_forward_hook(note(name), with_kwargs=True)
    with evaluating(own.model):
        own.call(own.model, batch)
    return found


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) != len(other) or any(not torch.equal(x, y) for x, y in zip(one, other, strict=True))


def attention_in(module: nn.Module, calls: list[Attention]) -> Place | None:
    """Find the last line of a module's forward pass that leads to an attention call."""
    first = forward_line(module)
    if first is None:
        return None
    last = max((x[2] or 0 for x in type(module).forward.__code__.co_lines()), default=0)
    for call in reversed(calls):
        for place in map(place_of, call.lines):
            if place.file == first.file and first.line <= place.line <= last:
                return Place(place.file, place.line, first.function)
    return None
