"""The short way of an eager call: from plain CPU tensors straight to the compiled kernel.

The operators exist for whatever looks at a program: compilers, modes, transforms, profilers, tracers. Where
nothing looks, going through them costs more than a small problem's attention. A call takes the short way only
if every condition below holds; any other call, and every error, takes the ordinary way.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..kernels import cpu
from ..masks import Prepared
from ..problem import check_scale
from ._ops import backward_op, savable
from ._static import prepared

# The compiled module reads such tensors without a Python call; those of an older torch go the ordinary way.
_READABLE = hasattr(Tensor, "__dlpack_c_exchange_api__")

_PLAIN = (Tensor, torch.nn.Parameter)
_functorch = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_autocast = torch._C._is_any_autocast_enabled
_tracer = torch._C._get_tracing_state
_profiler = torch._C._autograd._profiler_enabled


def attend(q: Any, k: Any, v: Any, mask: Any, scale: float | None, layout: str, return_lse: bool) -> Any:
    """The result of `attention`, or None where the call must take the ordinary way.

    Args:
        q: As given to `attention`, as all.
        k: Keys.
        v: Values.
        mask: A mask, lowered or not.
        scale: Factor of the scores; None for 1/sqrt(D).
        layout: "bhsd" and "bshd" go the short way.
        return_lse: Give (out, lse) instead of out.

    Raises:
        ValueError: Illegal bounds, or a scale that is no finite number.

    Example:
        >>> from attnspan import causal
        >>> x = torch.ones(1, 1, 2, 8)
        >>> out = attend(x, x, x, causal(), None, "bhsd", return_lse=False)
        >>> out is None or out.shape == x.shape
        True
    """
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN) or _is_watched():
        return None
    if layout == "bshd" and q.dim() == k.dim() == v.dim() == 4:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    elif layout != "bhsd":
        return None
    if type(mask) is not Prepared:
        mask = prepared(mask, q.shape[-2], k.shape[-2]) if q.dim() == k.dim() == 4 and q.is_cpu else None
        if mask is None:
            return None
    core = cpu.compiled()
    if core is None or not _READABLE:
        return None
    if scale is not None:
        check_scale(scale)
    found = _run(core, q, k, v, mask.lowered, scale, return_lse)
    if found is None:
        return None
    out, lse = found
    out = out if layout == "bhsd" else out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _run(
    core: Any, q: Tensor, k: Tensor, v: Tensor, spans: Any, scale: float | None, return_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    bounds = spans.bounds
    if type(bounds) is not Tensor or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        # The kernel runs inside, where a refusal would come too late to take another way.
        if not core.fits(q, k, v, bounds, spans.k_len):
            return None
        found = _record(q, k, v, bounds, q.shape[3] ** -0.5 if scale is None else scale, return_lse)  # type: ignore[no-untyped-call]
        return found if return_lse else (found, None)
    return core.attend(  # type: ignore[no-any-return]
        q,
        k,
        v,
        bounds,
        spans.k_len,
        scale,
        torch.get_num_threads(),
        torch.empty_strided,
        torch.float32,
        return_lse,
    )


def _is_watched() -> bool:
    """Would someone miss the operator: a transform, a mode, autocast, a tracer, a profiler, a dual level?"""
    return (
        _functorch()
        or _dispatch_modes() != 0
        or _function_modes() != 0
        or _autocast()
        or _tracer() is not None
        or _profiler()
        or forward_ad._current_level >= 0
    )


class _Attend(torch.autograd.Function):
    """The operators' derivative, without the operators."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, return_lse: bool
    ) -> Any:
        out, lse = cpu.compiled().attend(
            q,
            k,
            v,
            bounds,
            k.shape[2],
            scale,
            torch.get_num_threads(),
            torch.empty_strided,
            torch.float32,
            True,
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, savable(bounds), out, lse)
        ctx.scale = scale
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, bounds, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None, None, None
        dout = torch.zeros_like(out) if dout is None else dout
        # The operator takes what is unusual: higher derivatives, which it refuses by name, whoever watches,
        # and incoming gradients that need a copy.
        plain = type(dout) is Tensor and dlse is None and dout.stride(-1) == 1 and not dout.is_neg()
        gradients = None
        if plain and not torch.is_grad_enabled() and not _is_watched():
            gradients = cpu.compiled().gradients(
                dout, q, k, v, out, lse, bounds, ctx.scale, torch.get_num_threads(), torch.empty_strided
            )
        if gradients is None:
            gradients = backward_op(dout, dlse, q, k, v, bounds, out, lse, ctx.scale)
        needed = ctx.needs_input_grad
        dq, dk, dv = gradients[:3]
        return (
            dq if needed[0] else None,
            dk if needed[1] else None,
            dv if needed[2] else None,
            None,
            None,
            None,
        )


# That of Function would ask functorch once more.
_record = super(torch.autograd.Function, _Attend).apply  # type: ignore[misc]
