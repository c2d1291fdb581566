"""The short way of an eager call: from plain CPU tensors straight to the compiled kernel.

The operators exist for whatever looks at a program: compilers, modes, transforms, profilers, tracers. Where
nothing looks, going through them costs more than a small problem's attention. A call takes the short way only
if every condition below holds; any other call, and every error, takes the ordinary way.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._dropout import threshold
from ..kernels import cpu
from ..masks import Prepared
from ..options import Options
from ..problem import check_scale
from ._lowered import as_tensors, lowered
from ._options import Given, lower_options
from .ops import backward_op

# The compiled module reads such tensors without a Python call; those of an older torch go the ordinary way.
_READABLE = hasattr(Tensor, "__dlpack_c_exchange_api__")

_PLAIN = (Tensor, torch.nn.Parameter)
_functorch = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_autocast = torch._C._is_any_autocast_enabled
_tracer = torch._C._get_tracing_state
_profiler = torch._C._autograd._profiler_enabled


def attend(
    q: Any, k: Any, v: Any, mask: Any, scale: float | None, layout: str, return_lse: bool, given: Given | None
) -> Any:
    """The result of `attention`, or None where the call must take the ordinary way.

    Args:
        q: As given to `attention`, as all.
        k: Keys.
        v: Values.
        mask: A mask, lowered or not.
        scale: Factor of the scores; None for 1/sqrt(D).
        layout: "bhsd" and "bshd" go the short way.
        return_lse: Give (out, lse) instead of out.
        given: The options; None for a plain call.

    Raises:
        ValueError: Illegal bounds or options, or a scale that is no finite number.

    Example:
        >>> from attnspan import causal
        >>> x = torch.ones(1, 1, 2, 8)
        >>> out = attend(x, x, x, causal(), None, "bhsd", False, None)
        >>> out is None or out.shape == x.shape
        True
    """
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN) or is_watched():
        return None
    core = cpu.compiled()
    if core is None or not _READABLE or not (q.dim() == k.dim() == v.dim() == 4):
        return None
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    elif layout != "bhsd":
        return None
    own = type(mask) is Prepared
    if own and type(mask.lowered.bounds) is np.ndarray:
        mask = as_tensors(mask, q.device)
    elif not own:
        # Indices that the call gives are those of the mask too.
        placed = given is None or given.q_index is None is given.k_index
        mask = lowered(mask, q, k) if placed and q.is_cpu else None
        if mask is None:
            return None
    bounds, k_len = mask.lowered.bounds, mask.lowered.k_len
    if type(bounds) is not Tensor or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    if scale is not None:
        check_scale(scale)
    options = arguments = None
    if given is not None:
        if not given.is_plain(_PLAIN) or not core.fits(q, k, v, bounds, k_len, None):
            return None
        options = lower_options(given, q, k, mask, own)
        bias, sinks = (None, None) if options is None else (options.bias, options.sinks)
        if (bias is not None and bias.is_neg()) or (sinks is not None and sinks.is_neg()):
            return None
        arguments = None if options is None else _arguments(options)
    wants = torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (options is not None and _wants_gradient(options))
    )
    if not wants:
        found = core.attend(
            *(q, k, v, bounds, k_len, scale, torch.get_num_threads(), torch.empty_strided, torch.float32),
            *(return_lse, arguments),
        )
    # The kernel runs inside the node, where a refusal would come too late to take another way.
    elif core.fits(q, k, v, bounds, k_len, arguments):
        scale = q.shape[3] ** -0.5 if scale is None else scale
        bias, sinks = (None, None) if options is None else (options.bias, options.sinks)
        dropout_p = 0.0 if options is None else options.dropout_p
        found = _record(core, q, k, v, bias, sinks, bounds, scale, return_lse, dropout_p, arguments)  # type: ignore[no-untyped-call]
        found = found if return_lse else (found, None)
    else:
        return None
    if found is None:
        return None
    out, lse = found
    out = out if layout == "bhsd" else out.transpose(1, 2)
    return (out, lse) if return_lse else out


def is_transformed() -> bool:
    """Are tensors not what they seem: a transform, a mode, a tracer?"""
    return _functorch() or _dispatch_modes() != 0 or _function_modes() != 0 or _tracer() is not None


def is_watched() -> bool:
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


def _wants_gradient(options: Options) -> bool:
    bias, sinks = options.bias, options.sinks
    return (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)


def _arguments(o: Options) -> tuple[Any, ...]:
    """The options as the compiled module takes them."""
    dropped = threshold(o.dropout_p) if o.dropout_p else 0
    return o.softcap, o.bias, o.bias_kind, o.sinks, dropped, o.dropout_seed, o.q_index, o.k_index


class _Attend(torch.autograd.Function):
    """The operators' derivative, without the operators."""

    @staticmethod
    def forward(
        ctx: Any,
        core: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        bounds: Tensor,
        scale: float,
        return_lse: bool,
        dropout_p: float,
        arguments: tuple[Any, ...] | None,
    ) -> Any:
        out, lse = core.attend(
            *(
                q,
                k,
                v,
                bounds,
                k.shape[2],
                scale,
                torch.get_num_threads(),
                torch.empty_strided,
                torch.float32,
            ),
            *(True, arguments),
        )
        ctx.set_materialize_grads(False)
        saved = [q, k, v, bounds, out, lse, bias, sinks, *(() if arguments is None else arguments[5:])]
        ctx.save_for_backward(*[x.clone() if x is not None and x.is_inference() else x for x in saved])
        ctx.scale, ctx.dropout_p = scale, dropout_p
        ctx.numbers = None if arguments is None else (arguments[0], arguments[2])
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, bounds, out, lse, bias, sinks, *rest = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 11
        dout = torch.zeros_like(out) if dout is None else dout
        needed = ctx.needs_input_grad
        given: tuple[Any, ...] = ()
        arguments = dbias = dsinks = None
        if ctx.numbers is not None:
            softcap, kind = ctx.numbers
            given = (softcap, bias, kind, sinks, ctx.dropout_p, *rest, needed[4])
            arguments = _arguments(Options(softcap, bias, kind, sinks, ctx.dropout_p, *rest))
            dbias = torch.empty(bias.shape, dtype=torch.float32) if needed[4] else None  # type: ignore[union-attr]
            dsinks = None if sinks is None else torch.empty(sinks.shape, dtype=torch.float32)
        # The operator takes what is unusual: higher derivatives, which it refuses by name, whoever watches,
        # and incoming gradients that need a copy.
        plain = type(dout) is Tensor and dlse is None and dout.stride(-1) == 1 and not dout.is_neg()
        found = None
        if plain and not torch.is_grad_enabled() and not is_watched():
            found = cpu.compiled().gradients(
                *(dout, q, k, v, out, lse, bounds, ctx.scale, torch.get_num_threads(), torch.empty_strided),
                *(arguments, dbias, dsinks),
            )
        if found is None:
            *found, dbias, dsinks = backward_op(dout, dlse, q, k, v, bounds, out, lse, ctx.scale, *given)
        if needed[4]:  # A dense bias may have q's dtype; its gradient is summed in float32.
            dbias = dbias.to(bias.dtype)  # type: ignore[union-attr]
        gradients = (*found, dbias, dsinks)
        wanted = (x if need else None for x, need in zip(gradients, needed[1:6], strict=True))
        return None, *wanted, *(None,) * 5


# That of Function would ask functorch once more.
_record = super(torch.autograd.Function, _Attend).apply  # type: ignore[misc]
