"""Models that run in inference mode, which torch.compile supports for fewer models than torch.no_grad()."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.patched import patched
from attnspan_lab.doctor.places import at, line_of_class
from attnspan_lab.doctor.torch.steps import copied, run_compiled
from attnspan_lab.doctor.torch.subject import Subject

__all__ = ["with_no_grad"]

_USES = r"^\s*(@|with\s).*inference_mode\b"


def with_no_grad(finding: Finding, subject: Subject, backend: str) -> Finding:
    """Try torch.no_grad() if the compiler fails and the model's classes use torch.inference_mode()."""
    kinds = dict.fromkeys(map(type, subject.model.modules()))
    places = at(*(line_of_class(x, _USES) for x in kinds))
    if not places:
        return finding
    with _no_grad(kinds):
        _, error, _ = run_compiled(copied(subject), backend)
    if error is not None:
        return finding
    remedy = "Use torch.no_grad() instead of torch.inference_mode()"
    tried = "with torch.no_grad() instead, all batches compile"
    return replace(finding, places=at(*finding.places, *places), remedy=remedy, tried=tried)


@contextmanager
def _no_grad(kinds: Iterable[type]) -> Iterator[None]:
    """Replace inference mode in the methods of classes, also where it decorates them."""
    methods = (fn for kind in kinds for base in kind.__mro__ for fn in vars(base).values())
    with ExitStack() as changed:
        changed.enter_context(
            patched(torch, inference_mode=lambda mode=True: torch.set_grad_enabled(not mode))
        )
        for cell in (x for fn in methods for x in _contexts(fn)):
            changed.enter_context(patched(cell, cell_contents=torch.no_grad))
        yield


def _contexts(fn: Any) -> Iterator[Any]:
    """Yield the cell in which torch's decorator keeps inference mode."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        mode = getattr(cell.cell_contents, "__self__", None) if name == "ctx_factory" else None
        if isinstance(mode, torch.autograd.grad_mode.inference_mode) and mode.mode:
            yield cell
