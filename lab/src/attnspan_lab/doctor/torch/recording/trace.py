"""Operators of a forward pass that compute with tensors of the batch, and the first one that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnspan_lab.doctor.places import Place, is_users, place_here
from attnspan_lab.doctor.torch.recording.calls import Step
from attnspan_lab.doctor.torch.recording.operators import is_plain, operator_name, storage

__all__ = ["ROUNDING", "Operator", "Trace", "apart", "first_difference", "forward_line", "traced"]

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


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the results that are made from some tensors, in their order.

    Args:
        inputs: The tensors.

    Attributes:
        operators: The results.
        draws: Whether an operator draws random numbers. Attention could draw some for dropout.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.draws = False
        self._kept = [x for x in inputs if is_plain(x)]  # Their addresses must not be used again.
        self._made, self._left = {storage(x) for x in self._kept}, _MOST

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if is_plain(x)]
        draws = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
        self.draws |= draws and "attention" not in operator_name(op)
        if any(storage(x) in self._made for x in inputs):
            place = place_here()
            for x in tree_leaves(out):
                if is_plain(x):
                    self._note(operator_name(op), place, x, inputs)
        return out

    def _note(self, name: str, place: Place | None, x: Tensor, inputs: list[Tensor]) -> None:
        self._made.add(storage(x))
        self._kept.append(x)
        self._left -= x.numel() * x.element_size()
        if self._left > 0:  # Later operators may change the tensor in place.
            self.operators.append(Operator(name.strip("_"), place, x.detach().clone(), x, inputs))


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
    if x.shape != y.shape:
        return True
    if not x.is_floating_point() or torch.equal(x, y):
        return not torch.equal(x, y)
    a, b = x.double(), y.double()
    usual = (a.abs() < _HUGE) & (b.abs() < _HUGE)
    size = b[usual].norm().clamp_min(1e-30)
    return float((a - b)[usual].norm() / size) > ROUNDING.get(x.dtype, SAME)


def forward_line(module: nn.Module) -> Place | None:
    """Find the first line of a module's forward pass, if it is the user's."""
    code = getattr(type(module).forward, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    return Place(code.co_filename, code.co_firstlineno, code.co_qualname)
