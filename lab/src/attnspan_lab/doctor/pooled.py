"""Padding that reaches results behind attention: the last position of a row, or a mean over all positions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.calls import Step
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, place_here
from attnspan_lab.doctor.remedies import distance

__all__ = ["pooled_finding"]

_SURE = re.compile(r"att|pad|^(input_|src_)?mask$")  # Other masks may choose tokens for another purpose.


class _Pooling(TorchFunctionMode):
    """Notes the lines at which a tensor (B, S, C) becomes (B, C)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.last: Place | None = None

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = fn(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() == 3]
        has_rows = any(tuple(x.shape[:2]) == self.shape for x in given)
        if has_rows and isinstance(out, Tensor) and out.dim() == 2 and len(out) == self.shape[0]:
            self.last = place_here()
        return out


def pooled_finding(step: Step, other: Step, name: str, padding: str, valid: Tensor) -> Finding | None:
    """Write the finding if padding changes a result without an axis of tokens, and else None.

    Args:
        step: The step.
        other: The same step with other padding. No attention call shows the padding.
        name: The padded sequence.
        padding: The mask that marks its padding.
        valid: Tokens that are not padding, bool (B, S).
    """
    shape = tuple(valid.shape)
    changes = [_change(x, other.results, k) for k, x in step.results.items() if _is_pooled(x, shape)]
    if not max(changes, default=0.0) > 1e-4:
        return None
    own = step.subject.copy()
    own.model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), _Pooling(shape) as pooling:
        own.call(own.model, step.batch)
    what = f"The padding of {name} changes results, and no attention call shows it"
    evidence = (
        f"changing padded entries of {name} ({padding}) changes results (B, C) by {max(changes):.1e} "
        "(relative error)",
    )
    cause = "A position that is padding in some samples, or a mean over all positions, is part of the result"
    if pooling.last is not None:
        cause += ". This line is the last one that leaves out the axis of the tokens"
    remedy = (
        f"With padding on the right, take the last token of each sample: x[torch.arange(len(x)), "
        f"{padding}.sum(1) - 1]. Or leave padding out of the mean: (x * {padding}[..., None]).sum(1) / "
        f"{padding}.sum(1, keepdim=True)"
    )
    severity = "" if _SURE.search(padding.lower()) else "note"
    return Finding("mask-lost", what, at(pooling.last), evidence, cause, remedy, severity=severity)


def _is_pooled(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.dim() == 2 and len(x) == shape[0] and tuple(x.shape) != shape


def _change(x: Tensor, others: Mapping[str, Tensor], name: str) -> float:
    y = others.get(name)
    return distance(y, x) if y is not None and y.shape == x.shape else 0.0
