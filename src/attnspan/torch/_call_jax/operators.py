"""The operator ``attnspan::call_jax`` and its derivative, as all that traces torch sees them.

They take a list of tensors and the name of a call (`functions.register`): the function with everything that
is no tensor. JAX is imported by the first call, not by this module.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
    enable_single_level_autograd_function,
)
from torch.autograd import forward_ad

from .._ops import _below_autograd, _has_tangent, single_level

_library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
for _schema in (
    "call_jax(Tensor[] tensors, str handle) -> Tensor[]",
    # The results, then what backward needs besides them and the arguments.
    "call_jax_vjp(Tensor[] tensors, str handle, bool[] wanted, bool recompute) -> Tensor[]",
    # Sizes: of all tensors of the forward call, one after the other. The anchor belongs to the forward call
    # in autograd's graph, where what is saved does not show that it depends on the arguments.
    "call_jax_backward(Tensor?[] grads, Tensor[] saved, SymInt[] sizes, str handle, bool[] wanted,"
    " bool recompute, Tensor? anchor=None) -> Tensor[]",
):
    _library.define(_schema, tags=_TAGS)  # type: ignore[no-untyped-call]

call_op = torch.ops.attnspan.call_jax.default
vjp_op = torch.ops.attnspan.call_jax_vjp.default
backward_op = torch.ops.attnspan.call_jax_backward.default


def _room(name: str) -> Any:
    """A module of this package that needs JAX."""
    return import_module(f".{name}", __package__)


def _call(tensors: Sequence[Tensor], handle: str) -> list[Tensor]:
    call = _room("functions").find(handle)
    return call.forward([x.shape for x in tensors])(tensors)  # type: ignore[no-any-return]


def _vjp(tensors: Sequence[Tensor], handle: str, wanted: Sequence[bool], recompute: bool) -> list[Tensor]:
    call = _room("functions").find(handle)
    return call.derived([x.shape for x in tensors], wanted, recompute)(tensors)  # type: ignore[no-any-return]


def _backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    sizes: Sequence[int],
    handle: str,
    wanted: Sequence[bool],
    recompute: bool,
    anchor: Tensor | None = None,
) -> list[Tensor]:
    del anchor
    call = _room("functions").find(handle)
    return call.derived(call.shapes_of(sizes), wanted, recompute).backward(grads, saved)  # type: ignore[no-any-return]


for _op, _real, _fake in (
    (call_op, _call, "call"),
    (vjp_op, _vjp, "vjp"),
    (backward_op, _backward, "backward"),
):
    _library.impl(_op, _real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

    def _faked(*inputs: Any, name: str = _fake) -> list[Tensor]:
        return getattr(_room("fake"), name)(*inputs)  # type: ignore[no-any-return]

    torch.library.register_fake(_op, _faked, lib=_library)


class Node(torch.autograd.Function):
    """A call with a derivative: through the operators, or past them where nothing watches.

    Its last result is no result of the function but the anchor: without elements, and with this node.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, keyset: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        wanted = tuple(_differentiable(x) for x in tensors)
        if keyset is None:
            program = call.derived([x.shape for x in tensors], wanted)
            made = program(tensors)
            ctx.program, ctx.recompute = program, False
        else:
            program, ctx.recompute = _room("fake").derived_of(call, tensors, wanted)
            made = _below_autograd(vjp_op, keyset, (list(tensors), call.handle, wanted, ctx.recompute))
            ctx.program = None
        results = made[: len(program.results)]
        ctx.mark_non_differentiable(
            *(x for x, of in zip(results, program.results, strict=True) if not of.floating)
        )
        ctx.set_materialize_grads(False)
        anchor = tensors[0].new_empty(0, dtype=torch.float32)
        ctx.save_for_backward(*program.saved_of(tensors, made), anchor)
        ctx.call, ctx.wanted = call, wanted
        ctx.sizes = [n for x in tensors for n in x.shape]
        return *results, anchor

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = list(incoming[:-1])
        if all(x is None for x in grads):
            return (None,) * (2 + len(ctx.wanted))
        *saved, anchor = ctx.saved_tensors
        if ctx.program is not None and not torch.is_grad_enabled() and not is_watched():
            found = ctx.program.backward(grads, saved)
        else:
            handle = _room("functions").register(ctx.call)
            held = anchor if torch.is_grad_enabled() else None
            found = backward_op(grads, saved, ctx.sizes, handle, ctx.wanted, ctx.recompute, held)
        made = iter(found)
        return None, None, *(next(made) if want else None for want in ctx.wanted)


# That of Function would ask functorch once more.
_record = super(torch.autograd.Function, Node).apply  # type: ignore[misc]
_record_inner = single_level(Node)


def record(call: Any, keyset: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a call, with its derivative."""
    if torch._C._are_functorch_transforms_active():
        return list(_record_inner(call, keyset, *tensors))[:-1]
    return list(_record(call, keyset, *tensors))[:-1]  # type: ignore[no-untyped-call]


def _differentiable(x: Tensor) -> bool:
    return x.requires_grad


def _autograd_call(keyset: Any, tensors: list[Tensor], handle: str) -> Any:
    _refuse_tangents(tensors)
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(tensors)):
        return _below_autograd(call_op, keyset, (tensors, handle))
    call = _room("functions").find(handle)
    if torch._C._are_functorch_transforms_active():
        with enable_single_level_autograd_function():
            return record(call, keyset, tensors)
    return record(call, keyset, tensors)


def _refuse_tangents(tensors: Sequence[Tensor | None]) -> None:
    if forward_ad._current_level >= 0 and any(map(_has_tangent, tensors)):
        raise NotImplementedError(
            "forward-mode derivatives of call_jax: expected reverse mode; got a dual tensor. Call "
            "call_jax(jax.jvp, ...) on a function that holds yours."
        )


class _NoDerivative(torch.autograd.Function):
    """A node that raises: without one, second derivatives would silently be zero."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, inputs: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        del ctx, tensors
        return tuple(_below_autograd(backward_op, keyset, inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        del ctx, grads
        raise NotImplementedError(
            "second derivatives of call_jax: expected first ones; got a derivative of its backward. Take the "
            "inner derivative in JAX: call_jax(jax.grad(fn), ...)."
        )


def _autograd_backward(keyset: Any, *inputs: Any) -> Any:
    tensors = [x for x in (*inputs[0], *inputs[1], *inputs[6:]) if x is not None]
    _refuse_tangents(tensors)
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(tensors)):
        return _below_autograd(backward_op, keyset, inputs)
    refuse = super(torch.autograd.Function, _NoDerivative).apply  # type: ignore[misc]
    if torch._C._are_functorch_transforms_active():
        with enable_single_level_autograd_function():
            return list(single_level(_NoDerivative)(keyset, inputs, *tensors))
    return list(refuse(keyset, inputs, *tensors))  # type: ignore[no-untyped-call]


_library.impl(call_op, _autograd_call, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
_library.impl(backward_op, _autograd_backward, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]

_functorch = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracer = torch._C._get_tracing_state


def is_watched() -> bool:
    """Would someone miss the operator: a transform, a mode, a tracer, a dual level?"""
    return _functorch() or _dispatch_modes() != 0 or _tracer() is not None or forward_ad._current_level >= 0
