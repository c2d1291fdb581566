"""Queries that are all equal, because the rows of a parameter are equal. Training cannot separate them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, is_users
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
            if call.rows.shape[-2] < 2 or not _are_equal(call.rows):
                self.other.add(call.place)

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each parameter whose equal rows make the queries of a line."""
        found: dict[str, list[tuple[Place, Call]]] = {}
        for place, (call, step) in self.calls.items():
            if place in self.other or _depend_on_tokens(call, step):
                continue
            for name in _parameters(step, call.rows.shape[-2]):
                found.setdefault(name, []).append((place, call))
        for name, uses in found.items():
            (place, call), step = uses[0], self.calls[uses[0][0]][1]
            many = call.rows.shape[-2]
            what = f"All {many} queries are equal here, and training keeps them equal: rows of {name}"
            evidence = (
                f"in {counted(len(uses), 'line')} with attention, all queries of each call are equal",
                f"the {many} rows of {name} are equal, and so are their gradients",
                *(("other tokens change no query",) if call.is_torchs else ()),
            )
            made = _made(step, name)
            yield Finding("equal-queries", what, at(made, *(x for x, _ in uses)), evidence)


def _are_equal(rows: Tensor) -> bool:
    """Whether all queries of each head are equal. Scores may be -inf."""
    rows = rows.detach().nan_to_num(neginf=-9e3)
    return bool((rows - rows[..., :1, :]).abs().max() <= _ROUNDING * rows.abs().max())


def _depend_on_tokens(call: Call, step: Step) -> bool:
    subject, batch = step.subject, step.batch
    for name, x in subject.named(batch).items():
        if x.is_floating_point():
            batch = subject.with_tokens(batch, name, changed_tokens(x))
    tokens = subject.tokens(batch)
    if tokens is not None and not tokens[1].is_floating_point():
        batch = subject.with_tokens(batch, tokens[0], changed_tokens(tokens[1]))
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


def _made(step: Step, name: str) -> Place | None:
    """Find the line that makes a parameter, in the user's classes of its module."""
    owner, _, attribute = name.rpartition(".")
    assigned = re.compile(rf"self\.{attribute}\b[^=]*=[^=]")
    for kind in type(dict(step.subject.model.named_modules())[owner]).__mro__:
        try:
            lines, first = inspect.getsourcelines(kind)
            file = inspect.getsourcefile(kind) or ""
        except (OSError, TypeError):  # The class has no file.
            continue
        number = next((first + i for i, x in enumerate(lines) if assigned.search(x)), None)
        if number is not None and is_users(file):
            return Place(file, number, kind.__name__)
    return None
