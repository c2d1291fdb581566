"""The operator outside of attention through which changed tokens reach results of other tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.torch.recording.changes import evaluating, with_other_tokens
from attnspan_lab.doctor.torch.recording.operators import storage
from attnspan_lab.doctor.torch.recording.trace import Operator, Trace
from attnspan_lab.doctor.torch.subject import Subject

if TYPE_CHECKING:
    from attnspan_lab.doctor.torch.isolation.visible_pairs import Foreign

__all__ = ["mixing_operator"]

_CLOSE = 1e-4
_COPIES = ("clone", "unsafe_view", "reshape_copy")  # Like views, these may only give another shape.


def mixing_operator(subject: Subject, batch: Any, name: str, foreign: Foreign) -> Operator | None:
    """Find the first operator through which changed tokens of one group change rows of other tokens.

    Args:
        subject, batch, name: The step, and the name of its tokens.
        foreign: The tokens to change. With several groups, these are changed in turn.

    Returns:
        The operator, or None if the two steps cannot be compared.
    """
    tokens = subject.named(batch)[name]
    groups = foreign.groups.to(tokens.device)
    numbers = sorted({int(x) for x in groups.flatten().tolist() if x >= 0})[:4]
    try:
        before = _operators(subject, batch)
        for number in numbers if foreign.only is None else [foreign.only]:
            changed = (groups == number).reshape(tokens.shape[: min(tokens.dim(), 2)])
            after = _operators(subject, with_other_tokens(subject, batch, name, changed))
            if (found := _first_mixed(before, after, groups != number)) is not None:
                return found
    except Exception:  # The caller then names a module.
        return None
    return None


def _operators(subject: Subject, batch: Any) -> list[Operator]:
    trace = Trace(x for x in tree_leaves(batch) if isinstance(x, Tensor))
    with evaluating(subject.model), trace:
        subject.call(subject.model, batch)
    return trace.operators


def _first_mixed(before: list[Operator], after: list[Operator], kept: Tensor) -> Operator | None:
    """Find the operator behind which rows of other tokens differ.

    Args:
        before, after: Operators of two steps.
        kept: Tokens that were not changed, bool (B, S).
    """
    mixed: dict[int, Operator] = {}  # Results without a row for each token that differ, by identity.
    for x, y in zip(before, after, strict=False):
        if x.name != y.name:
            return None  # The steps took different ways.
        known = next((mixed[id(z)] for z in y.given if id(z) in mixed), None)
        here = known or (None if y.place is None else y)
        rows, others = _rows(x.out, kept), _rows(y.out, kept)
        if here is None:
            continue
        if rows is None or others is None or rows.shape != others.shape:
            if not _same(y.out, x.out) and (known or not _is_reshape(y)):
                mixed[id(y.made)] = here
        elif not _same(others, rows):
            return here
    return None


def _is_reshape(x: Operator) -> bool:
    """Whether an operator only gives its first argument another shape. It mixes nothing yet."""
    first = x.given[0]
    is_view = x.made is not first and storage(x.made) == storage(first)
    return (is_view or x.name in _COPIES) and first.numel() == x.out.numel()


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two results are nearly equal."""
    if x.shape != y.shape:
        return False
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    both = x.isfinite() & y.isfinite()
    error = (x - y)[both].abs()
    return torch.equal(x.isfinite(), y.isfinite()) and bool((error <= _CLOSE * y[both].abs().max()).all())


def _rows(x: Tensor, kept: Tensor) -> Tensor | None:
    """Select the rows of tokens that were not changed. None if a tensor has not one dim of tokens."""
    batch, length = kept.shape
    if x.dim() and x.shape[0] == batch * length and batch > 1 and list(x.shape).count(length) == 0:
        return x[kept.flatten()]
    if not x.dim() or (x.shape[0] != batch and batch > 1):
        return None
    start = int(x.shape[0] == batch)
    dims = [i for i, n in enumerate(x.shape[start:], start) if n == length]
    if len(dims) != 1:
        return None
    x = x.movedim(dims[0], start)
    return x[kept] if start else x[kept[0]]
