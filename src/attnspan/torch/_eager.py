"""The short way of an eager call: from plain CPU tensors straight to the compiled kernel.

The operators exist for whatever looks at a program: compilers, modes, transforms, profilers, tracers. Where
nothing looks, this way takes 4 to 15 Python calls of this package and the ordinary one about 150, which costs
more than a small problem's attention. The compiled module checks what it is given; a call that it refuses, or
that fails a condition below, takes the ordinary way, which says what is wrong.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._dropout import threshold
from ..kernels import cpu
from ..masks import Prepared
from ..options import FLOAT32_MAX, Bias, Given, Options
from ._front import PLAIN, _dispatch_modes, _function_modes, _functorch, _tracer
from ._lowered import as_tensors, lowered
from .ops import backward_op

# The compiled module reads such tensors without a Python call; those of an older torch go the ordinary way.
_READABLE = hasattr(Tensor, "__dlpack_c_exchange_api__")

_PLAIN = (Tensor, torch.nn.Parameter)
_autocast = torch._C._is_any_autocast_enabled
_profiler = torch._C._autograd._profiler_enabled


def attend(
    q: Any, k: Any, v: Any, mask: Any, scale: Any, layout: str, return_lse: bool, given: Given | None
) -> Any:
    """The result of `attention`, or None where the call must take the ordinary way.

    Arguments are those of `attention`; ``given`` is None for a call without options.
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
    if scale is not None and not (type(scale) in (float, int) and abs(scale) <= FLOAT32_MAX):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    fixed = type(mask) is Prepared
    if fixed and type(mask.lowered.bounds) is np.ndarray:
        mask = as_tensors(mask, q.device)
    elif not fixed:
        # Indices that the call gives are those of the mask too.
        indexed = given is not None and not (given.q_index is None is given.k_index)
        mask = None if indexed or not q.is_cpu else lowered(mask, q, k)
    if mask is None or type(mask.lowered.bounds) is not Tensor:
        return None
    bounds, k_len = mask.lowered.bounds, mask.lowered.k_len
    options, bias, sinks, arguments = None, None, None, None
    if given is not None:
        if not _is_plain(given) or not core.fits(q, k, v, bounds, k_len, None):
            return None
        options = given.lower(PLAIN, q, k, mask, fixed)
        if options is not None:
            bias, sinks, arguments = options.bias, options.sinks, _arguments(options)
            if (bias is not None and bias.is_neg()) or (sinks is not None and sinks.is_neg()):
                return None
    wants = q.requires_grad or k.requires_grad or v.requires_grad
    wants = wants or (bias is not None and bias.requires_grad) or (sinks is not None and sinks.requires_grad)
    if wants and torch.is_grad_enabled():
        # The kernel runs inside the node, where a refusal would come too late to take another way.
        if not core.fits(q, k, v, bounds, k_len, arguments):
            return None
        scale = q.shape[3] ** -0.5 if scale is None else scale
        found = _record(core, q, k, v, bias, sinks, bounds, scale, options, arguments)  # type: ignore[no-untyped-call]
    else:
        make = torch.get_num_threads(), torch.empty_strided, torch.float32
        found = core.attend(q, k, v, bounds, k_len, scale, *make, return_lse, arguments)
        if found is None:
            return None
    out, lse = found
    out = out if layout == "bhsd" else out.transpose(1, 2)
    return (out, lse) if return_lse else out


def is_watched() -> bool:
    """Would someone miss the operator: a transform, a mode, autocast, a tracer, a profiler, a dual level?"""
    return (
        _functorch()
        or _dispatch_modes() != 0
        or _function_modes() != 0
        or _tracer() is not None
        or _autocast()
        or _profiler()
        or forward_ad._current_level >= 0
    )


def _is_plain(given: Given) -> bool:
    """Whether the tensors of the options are plain ones. A bias may hold NumPy arrays too."""
    for x in (given.sinks, given.dropout_seed, given.q_index, given.k_index):
        if x is not None and type(x) not in _PLAIN:
            return False
    for x in vars(given.bias).values() if isinstance(given.bias, Bias) else (given.bias,):
        if isinstance(x, Tensor) and type(x) not in _PLAIN:
            return False
    return True


def _arguments(o: Options) -> tuple[Any, ...]:
    """The options as the compiled module takes them."""
    dropped = threshold(o.dropout_p) if o.dropout_p else 0
    return o.softcap, o.bias, o.bias_kind, o.sinks, dropped, o.dropout_seed, o.q_index, o.k_index


class _Attend(torch.autograd.Function):
    """The operators' derivative, without the operators."""

    @staticmethod
    def forward(ctx: Any, core: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any, *rest: Any) -> Any:
        bounds, scale, o, arguments = rest
        make = torch.get_num_threads(), torch.empty_strided, torch.float32
        out, lse = core.attend(q, k, v, bounds, k.shape[2], scale, *make, True, arguments)
        ctx.set_materialize_grads(False)
        others = () if o is None else (o.dropout_seed, o.q_index, o.k_index)
        saved = [q, k, v, bounds, out, lse, bias, sinks, *others]
        ctx.save_for_backward(*[x.clone() if x is not None and x.is_inference() else x for x in saved])
        ctx.scale, ctx.numbers = scale, None if o is None else (o.softcap, o.bias_kind, o.dropout_p)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bounds, out, lse, bias, sinks, *rest = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needed)
        dout = torch.zeros_like(out) if dout is None else dout
        given: tuple[Any, ...] = ()
        arguments = dbias = dsinks = None
        if ctx.numbers is not None:
            softcap, kind, dropout_p = ctx.numbers
            given = (softcap, bias, kind, sinks, dropout_p, *rest)
            arguments = _arguments(Options(*given))
            dbias = torch.empty(bias.shape, dtype=torch.float32) if needed[4] else None  # type: ignore[union-attr]
            dsinks = None if sinks is None else torch.empty(sinks.shape, dtype=torch.float32)
            given = (*given, needed[4])
        # The operator takes what is unusual: higher derivatives, which it refuses by name, whoever watches,
        # and incoming gradients that need a copy.
        plain = type(dout) is Tensor and dlse is None and dout.stride(-1) == 1 and not dout.is_neg()
        found = None
        if plain and not torch.is_grad_enabled() and not is_watched():
            make = torch.get_num_threads(), torch.empty_strided
            found = cpu.compiled().gradients(
                dout, q, k, v, out, lse, bounds, ctx.scale, *make, arguments, dbias, dsinks
            )
        if found is None:
            *found, dbias, dsinks = backward_op(dout, dlse, q, k, v, bounds, out, lse, ctx.scale, *given)
        if needed[4]:  # A dense bias may have q's dtype; its gradient is summed in float32.
            dbias = dbias.to(bias.dtype)  # type: ignore[union-attr]
        wanted = zip((None, *found, dbias, dsinks), needed, strict=False)
        return (*[x if need else None for x, need in wanted], *(None,) * 4)


# That of Function would ask functorch once more.
_record = super(torch.autograd.Function, _Attend).apply  # type: ignore[misc]
