"""Definition of operators: one implementation for all devices, a fake kernel, a first derivative."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnspan.torch import compat
from attnspan.torch._autograd import below_autograd, has_tangent, single_level

Op = compat.OpOverload


def define(
    library: torch.library.Library,
    schema: str,
    real: Callable[..., Any],
    fake: Callable[..., Any],
    strides: torch.Tag,
) -> Op:
    """Define an operator. The tag ``strides`` says which strides of its inputs a compiler must keep."""
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, strides))  # type: ignore[no-untyped-call]
    op: Op = getattr(getattr(torch.ops, library.ns), schema.partition("(")[0]).default
    library.impl(op, real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(op, fake, lib=library)
    return op


def differentiate(
    library: torch.library.Library,
    op: Op,
    function: type[torch.autograd.Function],
    forward_mode: str,
    finish: Callable[[Any], Any] = lambda made: made,
) -> None:
    """Record ``function`` as the derivative of an operator.

    Its ``forward`` takes the keyset, the operator's inputs, and the tensors among them. ``finish`` converts
    its result to the operator's results. torch.library.register_autograd is not suitable: it drops the
    tangents of dual tensors, and torch.func cannot differentiate it.
    """
    # Function.apply itself would pass the call to torch.func again.
    record = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    inner = single_level(function)

    def kernel(keyset: Any, *inputs: Any) -> Any:
        nested = (x if isinstance(x, (list, tuple)) else (x,) for x in inputs)
        tensors = [x for part in nested for x in part if isinstance(x, Tensor)]
        if compat.dual_level() >= 0 and any(map(has_tangent, tensors)):
            raise NotImplementedError(
                f"forward-mode derivatives of {op}: expected reverse mode, got a dual tensor. {forward_mode}."
            )
        if not (torch.is_grad_enabled() and compat.any_requires_grad(tensors)):
            return below_autograd(op, keyset, inputs)
        if compat.are_functorch_transforms_active():
            # torch.func has handled its level, so only a plain node remains to be recorded.
            with compat.enable_single_level_autograd_function():
                return finish(inner(keyset, inputs, *tensors))
        return finish(record(keyset, inputs, *tensors))

    library.impl(op, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def refuse_derivative(
    library: torch.library.Library,
    op: Op,
    text: str,
    forward_mode: str,
    finish: Callable[[Any], Any] = lambda made: made,
) -> None:
    """Give an operator a derivative that raises ``text``. Without it, gradients would be 0."""

    class Refusal(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, inputs: tuple[Any, ...], *tensors: Tensor) -> Any:
            del ctx, tensors
            found = below_autograd(op, keyset, inputs)
            return tuple(found) if isinstance(found, list) else found

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> None:
            del ctx, grads
            raise NotImplementedError(text)

    differentiate(library, op, Refusal, forward_mode, finish)
