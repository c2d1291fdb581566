"""Whole submodules without a gradient: teachers, targets and frozen encoders, which are usually meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at
from attnspan_lab.doctor.torch.steps import outcome_of
from attnspan_lab.doctor.torch.subject import Subject
from attnspan_lab.doctor.words import counted, error_text
from attnspan_lab.zoo.step import Outcome, differences

__all__ = ["common_line", "finding_of", "whole_modules"]


def whole_modules(model: nn.Module, left: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the topmost submodules whose trainable parameters all lack a gradient, with these parameters.

    A single layer is no teacher and no encoder, so a module has to contain others.
    """
    missing, taken = set(left), ""
    for name, module in model.named_modules():
        if not name or (taken and f"{name}.".startswith(f"{taken}.")):
            continue
        own = [f"{name}.{k}" for k, x in module.named_parameters() if x.requires_grad]
        if own and any(True for _ in module.children()) and missing.issuperset(own):
            taken = name
            yield name, own


def common_line(stacks: Sequence[Sequence[Place]]) -> Place | None:
    """Find the innermost line that all stacks share. Stacks begin with the innermost line."""
    if not stacks:
        return None
    return next((x for x in stacks[0] if all(x in other for other in stacks)), None)


def finding_of(subject: Subject, batch: Any, name: str, own: list[str], place: Place | None) -> Finding:
    """Write the note on a submodule without gradients, and measure what autograd saves for it.

    Args:
        subject, batch: The step.
        name: Name of the submodule.
        own: Its trainable parameters.
        place: The line that cuts them off.
    """
    what = f"The parameters of {name} are trainable but get no gradient, from this line"
    evidence = [f"{counted(len(own), 'trainable parameter')}. If you change them, the results change"]
    saved, tried = _measured(subject, batch, name, own)
    if saved:
        evidence.append(f"autograd saves {bytes_text(saved)} for {name} in each step, and never uses it")
    cause = "A teacher, a target or a frozen encoder must not train, and this is right for them"
    do = f"If you mean it, call {name}.requires_grad_(False)"
    if saved:
        do += f", and run it in torch.no_grad(): this saves {bytes_text(saved)} of memory in this step"
    remedy = f"{do}. If not, remove the detach() or torch.no_grad() at this line"
    return Finding("no-gradient", what, at(place), tuple(evidence), cause, remedy, tried, severity="note")


def _measured(subject: Subject, batch: Any, name: str, own: list[str]) -> tuple[int, str]:
    """Freeze a submodule, and run it in torch.no_grad(). Return the saved bytes, and the outcome."""
    module = subject.model.get_submodule(name)
    parameters = [subject.model.get_parameter(x) for x in own]

    def measured(*, tracked: bool) -> tuple[Outcome, int]:
        with torch.compiler.set_stance("force_eager"), _saved_in(module, tracked=tracked) as sizes:
            return outcome_of(subject, subject.model, batch), sum(sizes.values())

    try:
        before, size = measured(tracked=True)
        try:
            for x in parameters:
                x.requires_grad_(False)
            after, size_after = measured(tracked=False)
        finally:
            for x in parameters:
                x.requires_grad_(True)
    except Exception as error:
        return 0, f"with it frozen, the step raises {error_text(error)}"
    if differences(after, before) != (0.0, 0.0):  # Other gradients pass through the submodule, for example.
        return 0, ""
    return size - size_after, "frozen and in torch.no_grad(), results and all other gradients are equal"


@contextmanager
def _saved_in(module: nn.Module, *, tracked: bool) -> Iterator[dict[int, int]]:
    """Collect the sizes of the storages that autograd saves while a module or its submodules run.

    Args:
        module: The module.
        tracked: False to run it in torch.no_grad().
    """
    sizes, before = dict[int, int](), list[bool]()
    parameters = {x.untyped_storage().data_ptr() for x in module.parameters()}
    kept: list[Tensor] = []  # Other tensors must not get the addresses of these.

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if before and storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
            kept.append(x)
        return x

    def begin(*_: Any) -> None:
        before.append(torch.is_grad_enabled())
        torch.set_grad_enabled(before[-1] and tracked)

    def end(*_: Any) -> None:
        torch.set_grad_enabled(before.pop())

    with ExitStack() as stack:
        for x in module.modules():
            stack.callback(x.register_forward_pre_hook(begin).remove)
            stack.callback(x.register_forward_hook(end, always_call=True).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
        yield sizes
