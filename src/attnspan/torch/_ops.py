"""The two operators ``attnspan::forward`` and ``attnspan::backward``, as everything that traces torch sees them.

Schemas, CPU kernels, fake kernels, autograd. Tensors are in (B, H, S, D) order with a unit last stride; results are
stored as contiguous (B, S, H, D) whatever the strides of the inputs, so that a fake kernel does no stride arithmetic and
no guard ever depends on a stride. docs/design.md has the contract.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels import cpu

# The plain Library instead of the custom_op decorator: the decorator adds Python wrappers to every call.
_library = torch.library.Library("attnspan", "DEF")
# Strides in the order of eager mode are what a unit last stride needs; exact ones would add copies.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_library.define("forward(Tensor q, Tensor k, Tensor v, Tensor bounds, float scale) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor bounds, Tensor out, Tensor lse, float scale)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_TAGS,
)


def _stored_bshd(like: Tensor, heads: int, length: int, dim: int) -> Tensor:
    """An uninitialised (B, H, S, D) tensor that is stored as contiguous (B, S, H, D)."""
    return like.new_empty((like.shape[0], length, heads, dim)).transpose(1, 2)


def _new_outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, q_len, _ = q.shape
    return _stored_bshd(q, heads, q_len, v.shape[3]), q.new_empty((batch, heads, q_len), dtype=torch.float32)


def _new_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_stored_bshd(x, x.shape[1], x.shape[2], x.shape[3]) for x in (q, k, v))
    return dq, dk, dv


def _readable(x: Tensor) -> Tensor:
    """The tensor itself where its last stride is 1, else the one explicit copy that the kernel needs."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Raise for dual numbers, whose tangents an opaque operator would silently drop."""
    if forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "forward-mode derivatives of attnspan::forward: expected reverse mode, which the kernel has; "
                'got a dual tensor. Call attention(..., backend="math") for forward mode.'
            )


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _refuse_forward_mode(q, k, v)
    out, lse = _new_outputs(q, k, v)
    q, k, v = _readable(q), _readable(k), _readable(v)
    cpu.forward(q, k, v, bounds, out, lse, scale=scale, num_threads=torch.get_num_threads())
    return out, lse


def _backward_cpu(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse_forward_mode(dout, dlse, q, k, v)
    dq, dk, dv = _new_gradients(q, k, v)
    dout, q, k, v = _readable(dout), _readable(q), _readable(k), _readable(v)
    cpu.backward(
        dout, dlse, q, k, v, out, lse, bounds, dq, dk, dv, scale=scale, num_threads=torch.get_num_threads()
    )
    return dq, dk, dv


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _refuse_forward_mode(q, k, v)
    return _new_outputs(q, k, v)


def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _new_gradients(q, k, v)


_library.impl("forward", _forward_cpu, "CPU")
_library.impl("backward", _backward_cpu, "CPU")
torch.library.register_fake("attnspan::forward", _forward_fake, lib=_library)
torch.library.register_fake("attnspan::backward", _backward_fake, lib=_library)

forward_op = torch.ops.attnspan.forward.default
backward_op = torch.ops.attnspan.backward.default


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bounds, scale = inputs
    # An unused output then has gradient None, and the kernel skips the lse term.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, bounds, *output)
    ctx.scale = scale


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return None, None, None, None, None
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = backward_op(dout, dlse, q, k, v, bounds, out, lse, ctx.scale)
    needed = ctx.needs_input_grad
    return dq if needed[0] else None, dk if needed[1] else None, dv if needed[2] else None, None, None


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise NotImplementedError(
        "second derivatives of attnspan::forward: expected at most first derivatives, which the kernel has; got a "
        'derivative of attnspan::backward. Call attention(..., backend="math") for higher derivatives.'
    )


torch.library.register_autograd("attnspan::forward", _differentiate, setup_context=_setup_context, lib=_library)
# Without a formula, an opaque backward would be a constant to autograd and second derivatives silently zero.
torch.library.register_autograd("attnspan::backward", _refuse_second_derivative, lib=_library)
