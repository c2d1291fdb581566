"""What the operators of this room share: a derivative at the autograd key, and autograd inside of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
    enable_single_level_autograd_function,
)
from torch.autograd import forward_ad

from ..torch.ops import below_autograd as below_autograd
from ..torch.ops import has_tangent, single_level

Function = type[torch.autograd.Function]


def differentiate(
    library: torch.library.Library,
    op: torch._ops.OpOverload,
    function: Function,
    forward_mode: str,
    finish: Callable[[Any], Any] = lambda made: made,
) -> None:
    """Record ``function`` as the derivative of an operator.

    Its ``forward`` takes the keyset, the operator's inputs, and the tensors among them; ``finish`` makes the
    operator's results of what it returns. Not by torch.library.register_autograd, which drops the tangents of
    dual tensors, and which torch.func cannot differentiate.
    """
    # The base class's apply: that of Function would hand the call to torch.func once more.
    record = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    inner = single_level(function)

    def kernel(keyset: Any, *inputs: Any) -> Any:
        tensors = _tensors(inputs)
        if forward_ad._current_level >= 0 and any(map(has_tangent, tensors)):
            raise NotImplementedError(
                f"forward-mode derivatives of {op}: expected reverse mode, got a dual tensor. {forward_mode}."
            )
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(tensors)):
            return below_autograd(op, keyset, inputs)
        if torch._C._are_functorch_transforms_active():
            # torch.func has peeled its level off; one plain node is left to record.
            with enable_single_level_autograd_function():
                return finish(inner(keyset, inputs, *tensors))
        return finish(record(keyset, inputs, *tensors))

    library.impl(op, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def _tensors(inputs: tuple[Any, ...]) -> list[Tensor]:
    nested = (x if isinstance(x, (list, tuple)) else (x,) for x in inputs)
    return [x for part in nested for x in part if isinstance(x, Tensor)]


def refuse_second_order(
    library: torch.library.Library, op: torch._ops.OpOverload, of: str, remedy: str
) -> None:
    """Give a backward operator a derivative that raises: without one, second derivatives would be 0."""

    class FirstOrderOnly(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, inputs: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
            del ctx, tensors
            return tuple(below_autograd(op, keyset, inputs))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> None:
            del ctx, grads
            raise NotImplementedError(
                f"second derivatives of {of}: expected first ones, got one of its backward. {remedy}."
            )

    differentiate(library, op, FirstOrderOnly, remedy, list)


@contextmanager
def with_autograd() -> Iterator[None]:
    """Autograd inside an operator, below whose own derivative it is switched off."""
    key = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for x in (key.AutogradFunctionality, key.AutogradOther, key.AutogradNestedTensor, key.ADInplaceOrView):
        excluded = excluded.remove(x)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield
