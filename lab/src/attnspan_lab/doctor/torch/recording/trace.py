"""Operators of a forward pass that compute with tensors of the batch, and the first one that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.places import Place, is_users
from attnspan_lab.doctor.torch.masks.forms import distance
from attnspan_lab.doctor.torch.recording.calls import Step
from attnspan_lab.doctor.torch.recording.operators import Operation, Operations, plain_in, storage

__all__ = [
    "ROUNDING",
    "Operator",
    "Trace",
    "apart",
    "change_of",
    "first_difference",
    "forward_line",
    "traced",
]

#: Relative differences that other sizes of a product cause, by dtype. Other dtypes: `SAME`.
ROUNDING = {torch.float16: 3e-2, torch.bfloat16: 1e-1}
SAME = 1e-3
_MOST = 2**30  # bytes of results that are kept
_HUGE = 1e30  # Numbers of a mask would hide all other differences.


class Operator(NamedTuple):
    """One result of an operator: the tensor and a copy of it, and tensors that it was made from."""

    name: str
    place: Place | None
    out: Tensor
    made: Tensor
    given: list[Tensor]


class Trace(Operations):  # type: ignore[no-untyped-call]
    """Records the results that are made from some tensors, in their order.

    Args:
        inputs: The tensors.

    Attributes:
        operators: The results.
        others: Results of operators that do not compute with the tensors, without views.
        draws: Whether an operator draws random numbers. Attention could draw some for dropout.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.operators, self.others = list[Operator](), list[Operator]()
        self.draws = False
        self._kept = plain_in(list(inputs))  # Their addresses must not be used again.
        self._made, self._left = {storage(x) for x in self._kept}, [_MOST, _MOST // 16]

    def note(self, operation: Operation) -> None:
        """Record the results of an operator."""
        draws = torch.Tag.nondeterministic_seeded in getattr(operation.op, "tags", ())
        self.draws |= draws and "attention" not in operation.name
        given = {storage(x) for x in operation.inputs}
        is_other = given.isdisjoint(self._made)
        for x in operation.outs:
            if is_other and storage(x) in given:
                continue
            if not is_other:
                self._made.add(storage(x))
                self._kept.append(x)
            self._left[is_other] -= x.nbytes
            if self._left[is_other] > 0:  # Later operators may change the tensor in place.
                name = operation.name.strip("_")
                copy = x.detach().clone()
                found = self.others if is_other else self.operators
                found.append(Operator(name, operation.place, copy, x, operation.inputs))


def traced(step: Step, batch: Any = None, inputs: Iterable[Tensor] | None = None) -> tuple[Step, Trace]:
    """Run a step again, and record the results that are made from its batch.

    Args:
        step: The step.
        batch: Another batch.
        inputs: Record only results that are made from these tensors of the batch.
    """
    batch = step.batch if batch is None else batch
    trace = Trace(inputs or (x for x in tree_leaves(batch) if isinstance(x, Tensor)))
    return step.again(batch, mode=trace), trace


def first_difference(traces: Sequence[Trace], differs: Callable[..., bool]) -> Operator | None:
    """Find the first operator whose results differ in several runs of a model.

    Args:
        traces: Records of the runs.
        differs: Called with the operator's result in each run.
    """
    found: tuple[Operator, ...]
    for found in zip(*(x.operators for x in traces), strict=False):
        if len({x.name for x in found}) > 1:
            return None  # The runs took different ways.
        if differs(*(x.out for x in found)):
            return found[0]
    return None


def apart(x: Tensor, y: Tensor) -> bool:
    """Whether two results differ by more than rounding."""
    if x.shape != y.shape or not torch.equal(x.isnan(), y.isnan()):
        return True
    if not x.is_floating_point() or torch.equal(x, y):
        return not torch.equal(x, y)
    a, b = x.double(), y.double()
    usual = (a.abs() < _HUGE) & (b.abs() < _HUGE)
    size = b[usual].norm().clamp_min(1e-30)
    return float((a - b)[usual].norm() / size) > ROUNDING.get(x.dtype, SAME)


def change_of(x: Tensor, y: Tensor) -> float:
    """Compute the relative difference of two results. NaN in one of them alone is an infinite difference."""
    return distance(x, y) if torch.equal(x.isnan(), y.isnan()) else math.inf


def forward_line(module: nn.Module) -> Place | None:
    """Find the first line of a module's forward pass, if it is the user's."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    return Place(code.co_filename, code.co_firstlineno, code.co_qualname)
