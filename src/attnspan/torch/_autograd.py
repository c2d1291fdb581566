"""Operators: definition, derivatives, and autograd inside and below operators."""

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


def define(
    library: torch.library.Library,
    schema: str,
    fake: Callable[..., Any],
    *tags: torch.Tag,
    **kernels: Callable[..., Any],
) -> compat.OpOverload:
    """Define an operator, or an overload, that compilers accept, with a kernel for each dispatch key."""
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))  # type: ignore[no-untyped-call]
    packet, _, overload = schema.partition("(")[0].partition(".")
    op = getattr(getattr(getattr(torch.ops, library.ns), packet), overload or "default")
    for key, kernel in kernels.items():
        library.impl(op, kernel, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(op, fake, lib=library)
    return op  # type: ignore[no-any-return]


def tensors_in(inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The tensors among an operator's arguments, and within lists of tensors."""
    nested = (x if isinstance(x, (list, tuple)) else (x,) for x in inputs)
    return tuple(x for part in nested for x in part if isinstance(x, Tensor))


def differentiate(
    library: torch.library.Library,
    op: compat.OpOverload,
    function: type[torch.autograd.Function],
    *,
    forward_mode: str = 'For forward mode, call it `with attnspan.backend("math"):`',
    flat: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> None:
    """Record `function` as the derivative of an operator.

    Its ``forward`` takes the operator, the keyset and the operator's inputs as one tuple, and then the
    inputs, or the result of ``flat`` for them: autograd sees no tensors in lists. ``finish`` converts the
    function's results to the operator's results. ``forward_mode`` is the remedy for dual tensors.

    torch.library.register_autograd does not work here. If no input requires a gradient, its kernel drops the
    tangents of dual tensors, so forward mode would return zeros. Also, torch.func cannot differentiate it.
    """
    # Use the base class's apply, because Function.apply would pass the call to torch.func again.
    record = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    inner = single_level(function)

    def kernel(keyset: Any, *inputs: Any) -> Any:
        given = inputs if flat is None else flat(inputs)
        if compat.dual_level() >= 0 and any(map(has_tangent, given)):
            raise NotImplementedError(
                f"forward-mode derivatives of {op}: expected reverse mode, which it has, got a dual tensor. "
                f"{forward_mode}."
            )
        if not (torch.is_grad_enabled() and compat.any_requires_grad(*given)):
            return below_autograd(op, keyset, inputs)
        if compat.are_functorch_transforms_active():
            # torch.func has removed its level before this kernel runs, so one plain node is left to record.
            with compat.enable_single_level_autograd_function():
                made = inner((op, keyset, inputs), *given)
        else:
            made = record((op, keyset, inputs), *given)
        return made if finish is None else finish(made)

    library.impl(op, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def refuse_derivative(
    library: torch.library.Library, op: compat.OpOverload, remedy: str, *, text: str = "", **how: Any
) -> None:
    """Give an operator a derivative that raises. Without it, the derivative would be zero.

    ``text`` replaces the error for backward operators. `differentiate` describes the other keywords.
    """
    text = text or (
        f"second derivatives of {op}: expected first derivatives, which the kernel has, "
        f"got a derivative of a gradient. {remedy}."
    )

    class Refusal(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, source: Any, *inputs: Any) -> Any:
            del ctx, inputs
            found = below_autograd(*source)
            return tuple(found) if isinstance(found, list) else found

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> None:
            del ctx, grads
            raise NotImplementedError(text)

    differentiate(library, op, Refusal, **how)


def has_tangent(x: Any) -> bool:
    """Whether a tensor has a tangent of forward mode."""
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
