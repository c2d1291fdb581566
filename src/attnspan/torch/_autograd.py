"""Derivatives of operators: registration, and autograd inside and below operators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import compat

#: Remedy of operators that run on one rank.
BY_MATH = 'For higher derivatives, run both passes `with attnspan.backend("math"):`'


def below_autograd(op: compat.OpOverload, keyset: Any, inputs: tuple[Any, ...]) -> Any:
    """Call an operator below autograd, without the derivatives of outer transforms."""
    below = keyset & compat.after_autograd
    if compat.are_functorch_transforms_active():
        # A Function's forward pass switches derivatives off. The outer levels of torch.func must not inherit
        # this.
        with (
            torch.enable_grad(),
            compat.set_forward_mode_enabled(True),
            compat.BelowAutograd(),
        ):
            return op.redispatch(below, *inputs)
    with compat.BelowAutograd():
        return op.redispatch(below, *inputs)


@contextmanager
def with_autograd() -> Iterator[None]:
    """Enable autograd inside an operator, because torch switches it off there."""
    key = compat.DispatchKey
    excluded = compat.excluded_keys()
    for x in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView):
        excluded = excluded.remove(x)
    included = compat.included_keys()
    with compat.ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def single_level(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`apply` of a Function for one level, for kernels that run after torch.func has removed its level.

    `Function.apply` would call torch.func again. In torch 2.15 and later, so would `apply` of its base class.
    """
    parts = {name: staticmethod(getattr(function, name)) for name in ("forward", "backward")}
    return type(function.__name__, (compat.SingleLevelFunction,), parts).apply  # type: ignore[attr-defined,no-any-return]


def differentiate(
    library: torch.library.Library, op: compat.OpOverload, function: type[torch.autograd.Function]
) -> None:
    """Record `function` as the derivative of an operator.

    Its ``forward`` takes a pair, the operator and the keyset, and then the operator's inputs.

    torch.library.register_autograd does not work here. If no input requires a gradient, its kernel drops the
    tangents of dual tensors, so forward mode would return zeros. Also, torch.func cannot differentiate it.
    """
    # Use the base class's apply, because Function.apply would pass the call to torch.func again.
    record = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    inner = single_level(function)

    def kernel(keyset: Any, *inputs: Any) -> Any:
        if compat.dual_level() >= 0 and any(map(has_tangent, inputs)):
            raise NotImplementedError(
                f"forward-mode derivatives of {op}: expected reverse mode, which the kernel has, got a dual "
                'tensor. For forward mode, call it `with attnspan.backend("math"):`.'
            )
        if not (torch.is_grad_enabled() and compat.any_requires_grad(*inputs)):
            return below_autograd(op, keyset, inputs)
        if compat.are_functorch_transforms_active():
            # torch.func has removed its level before this kernel runs, so one plain node is left to record.
            with compat.enable_single_level_autograd_function():
                return inner((op, keyset), *inputs)
        return record((op, keyset), *inputs)

    library.impl(op, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def refuse_derivative(library: torch.library.Library, op: compat.OpOverload, remedy: str) -> None:
    """Give a backward operator a derivative that raises. Without it, second derivatives would be zero."""
    text = (
        f"second derivatives of {op}: expected first derivatives, which the kernel has, "
        f"got a derivative of a gradient. {remedy}."
    )

    class Refusal(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, source: Any, *inputs: Any) -> Any:
            del ctx
            return below_autograd(op, source[1], inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> None:
            del ctx, grads
            raise NotImplementedError(text)

    differentiate(library, op, Refusal)


def has_tangent(x: Any) -> bool:
    """Whether a tensor has a tangent of forward mode."""
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
