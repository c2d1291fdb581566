"""Queries that are all equal, because the rows of a parameter are equal. Training cannot separate them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, line_of_class
from attnspan_lab.doctor.torch.recording.calls import Call, CannotRun, Step, changed_tokens
from attnspan_lab.doctor.words import counted

__all__ = ["EqualQueries"]

_ROUNDING = 1e-5


@dataclass
class EqualQueries:
    """Lines whose calls have equal queries in all batches.

    Attributes:
        calls: The first call of each line, with its step.
        other: Lines with different queries in a call.
    """

    calls: dict[Place, tuple[Call, Step]] = field(default_factory=dict)
    other: set[Place] = field(default_factory=set)

    def add(self, step: Step) -> None:
        """Collect the calls of one batch."""
        for call in step.calls:
            if call.place is None or call.rows.dim() < 3 or not call.rows.numel():
                continue
            self.calls.setdefault(call.place, (call, step))
            if call.q_len < 2 or not _are_equal(call.rows):
                self.other.add(call.place)

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each parameter whose equal rows make the queries of a line."""
        found: dict[str, list[tuple[Place, Call, Step]]] = {}
        for place, (call, step) in self.calls.items():
            if place in self.other or _depend_on_tokens(call, step):
                continue
            for name in _parameters(step, call.q_len):
                found.setdefault(name, []).append((place, call, step))
        for name, uses in found.items():
            _, call, step = uses[0]
            many = call.q_len
            what = f"All {many} queries are equal here, and training keeps them equal: rows of {name}"
            evidence = (
                f"in {counted(len(uses), 'line')} with attention, all queries of each call are equal",
                f"the {many} rows of {name} are equal, and so are their gradients",
                *(("other tokens change no query",) if call.is_torchs else ()),
            )
            owner, _, attribute = name.rpartition(".")
            kind = type(step.subject.model.get_submodule(owner))
            made = line_of_class(kind, rf"self\.{attribute}\b[^=]*=[^=]")
            yield Finding("equal-queries", what, at(made, *(x for x, *_ in uses)), evidence)


def _are_equal(rows: Tensor) -> bool:
    """Whether all queries of each head are equal. Scores may be -inf."""
    rows = rows.detach().nan_to_num(neginf=-9e3)
    return bool((rows - rows[..., :1, :]).abs().max() <= _ROUNDING * rows.abs().max())


def _depend_on_tokens(call: Call, step: Step) -> bool:
    subject, batch = step.subject, step.batch
    tokens, _ = subject.tokens(batch) or ("", None)
    for name, x in subject.named(batch).items():
        if x.is_floating_point() or name == tokens:
            batch = subject.with_tokens(batch, name, changed_tokens(x))
    again = step.again(batch)
    if len(again.calls) <= call.number:
        return True
    return call.is_torchs and not torch.equal(again.calls[call.number].rows, call.rows)


def _parameters(step: Step, many: int) -> list[str]:
    """Name parameters with so many equal rows and equal gradients of these rows."""
    subject, found = replace(step.subject, start=None), list[str]()
    try:
        with torch.compiler.set_stance("force_eager"), torch.enable_grad():
            subject.step(subject.model, step.batch)
    except Exception as error:
        raise CannotRun(f"the backward pass raises {type(error).__name__}") from error
    for name, x in subject.model.named_parameters():
        has_rows = x.dim() > 1 and x.shape[-2] == many and x.grad is not None
        if has_rows and _are_equal(x) and bool(x.grad.any()) and _are_equal(x.grad):  # type: ignore[union-attr, arg-type]
            found.append(name)
    return found
