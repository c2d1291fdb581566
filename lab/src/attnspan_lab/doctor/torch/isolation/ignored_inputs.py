"""Inputs of a batch that no result depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.coverage import Coverage
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import at
from attnspan_lab.doctor.torch.isolation.receiver import attention_in, receiver_of
from attnspan_lab.doctor.torch.isolation.sequences import LABELS, sequences
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.calls import CannotRun, Step, awake, changed_tokens, recorded
from attnspan_lab.doctor.torch.recording.trace import forward_line, traced
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["ignored_findings"]

_TOPIC = "inputs"


class _Every(Subject):
    """A subject whose results are all tensors that the model returns, a loss included."""

    def results(self, out: Any, batch: Any) -> dict[str, Tensor]:
        del batch
        return {str(i): x for i, x in enumerate(tree_leaves(out)) if isinstance(x, Tensor)}


def ignored_findings(
    step: Step, calls: list[Attention], coverage: Coverage, read: set[str]
) -> Iterator[Finding]:
    """Yield a finding for each sequence of the batch that no result depends on.

    Args:
        step: The step.
        calls: Calls that the watcher saw.
        coverage: Collects the checks. It also lists other inputs, such as masks, that change no result.
        read: Names of the inputs that have a finding, or that a result depends on.
    """
    subject, batch = step.subject, step.batch
    names = [x for x in subject.named(batch) if x not in read and not LABELS.search(x.lower())]
    if not names:
        return
    every = _Every(**{x.name: getattr(subject, x.name) for x in dataclasses.fields(subject)})
    whole = awake(dataclasses.replace(step, subject=every)).again()
    results = [x for x in whole.results.values() if x.numel()]
    if not results or not all(bool(x.isfinite().all()) for x in results):
        coverage.missed(_TOPIC, "the model returns NaN, or no tensor")
        return
    for name in names:
        is_sequence = name in sequences(subject, batch)
        changed = subject.with_tokens(batch, name, _changed(name, subject.named(batch)[name]))
        try:
            changes = whole.differs(whole.again(changed)) > 0
            if not changes and is_sequence:
                other = _with_other_parameters(whole)
                changes = other.differs(other.again(changed)) > 0
        except CannotRun as error:  # A position may be too large, for example.
            coverage.absent(f"input {name}", f"with other values, {error}")
            continue
        coverage.made(_TOPIC, "each tensor was changed alone")
        if changes or is_sequence:
            read.add(name)
            coverage.checked.pop(f"input {name}", None)  # Another batch may not depend on it.
        else:
            coverage.made(f"input {name}", "other values of it change no result")
        if not changes and is_sequence:
            yield _finding(step, changed, name, calls)


def _with_other_parameters(step: Step) -> Step:
    """Run a step with other parameters. A student may be equal to its teacher, so that their loss is 0."""
    own = step.subject.copy()
    parameters = [x for x in own.model.parameters() if x.is_floating_point()]
    with torch.no_grad():
        for i, x in enumerate(parameters):
            x.mul_(1 + 0.2 * (i + 1) / len(parameters))
    return recorded(own, step.batch, step.lines)


def _changed(name: str, x: Tensor) -> Tensor:
    """Change an input. In a mask, every second entry of a row is inverted, so that no row hides all."""
    if x.dtype == torch.bool or "mask" in name:
        y = x.clone()
        y[..., 1::2] = (x[..., 1::2] == 0).to(x.dtype)
        return y
    return changed_tokens(x) if x.numel() else x


def _finding(step: Step, changed: Any, name: str, calls: list[Attention]) -> Finding:
    module, receiver = receiver_of(step, changed)
    root = step.subject.model
    _, trace = traced(step, inputs=[step.subject.named(step.batch)[name]])
    last = trace.operators[-1].place if trace.operators else None
    evidence = [f"with other values of {name}, all results are the same bits"]
    remedy = ""
    place = forward_line(receiver) or forward_line(root)
    if module:
        kind = type(receiver).__name__
        evidence.append(f"{module} ({kind}) receives a tensor that is made from {name}, and does not use it")
        attention = attention_in(receiver, calls)
        if attention is not None:
            place, more = attention, "cross attention, its queries and its keys come from one sequence"
            evidence.append(f"if the call at {attention} is the {more}")
            remedy = f"Pass the tensor that is made from {name} to the cross attention, for keys and values"
    if last is not None:
        evidence.append(f"the last line that computes with it: {last}")
    what = f"No result depends on {name}"
    return Finding("ignored-input", what, at(place), tuple(evidence), remedy=remedy)
