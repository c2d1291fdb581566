"""Fast path of an eager call, from plain CPU tensors directly to the compiled kernel.

The operators exist for compilers, modes, transforms, profilers and tracers. If none of these is active, the
fast path needs 4 to 15 Python calls of this package instead of about 100. A call with 16 queries then takes
half the time, and a call with 128 queries two thirds (8 heads of 64 elements, one thread). The compiled
module checks its arguments. If it rejects a call, or if a condition below fails, the call takes the ordinary
path.
"""

from typing import Any

import torch
from torch import Tensor

from attnspan.call.dropout import threshold
from attnspan.call.options import FLOAT32_MAX, NO_OPTIONS, Given
from attnspan.kernels import cpu
from attnspan.masks import Prepared

from ._front import PLAIN
from ._lowered import lowered
from ._watched import is_watched
from .ops import record_forward

# The compiled module reads such tensors without a Python call. With an older torch, calls take the ordinary
# path.
_READABLE = hasattr(Tensor, "__dlpack_c_exchange_api__")

_PLAIN = (Tensor, torch.nn.Parameter)


def attend(q: Any, k: Any, v: Any, mask: Any, scale: Any, layout: str, return_lse: bool, given: Given) -> Any:
    """The result of `attention`, or None if the call must take the ordinary path."""
    core, fixed = cpu.core, type(mask) is Prepared
    if core is None or not _READABLE or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return None
    if is_watched() or not (q.is_cpu and q.dim() == k.dim() == v.dim() == 4):
        return None
    if q.is_nested or k.is_nested or v.is_nested:
        return None
    if scale is not None and not (type(scale) in (float, int) and abs(scale) <= FLOAT32_MAX):
        return None
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    elif layout != "bhsd":
        return None
    plain = given is NO_OPTIONS
    # The call's indices also apply to the mask.
    indexed = not (plain or given.q_index is None is given.k_index)
    if not fixed or type(mask.lowered.bounds) is not Tensor:
        mask = None if indexed and not fixed else lowered(mask, q, k)
        if mask is None or type(mask.lowered.bounds) is not Tensor:
            return None
    bounds, k_len, options, arguments = mask.lowered.bounds, mask.lowered.k_len, None, None
    tensors = [q, k, v]
    if not plain:
        own = given.sinks, given.dropout_seed, given.q_index, given.k_index
        if [x for x in own if x is not None and type(x) not in _PLAIN]:
            return None
        options = given.lower(PLAIN, q, k, mask, fixed)
    if options is not None:
        softcap, bias, kind, sinks, dropout_p, *rest = options
        arguments = softcap, bias, kind, sinks, threshold(dropout_p) if dropout_p else 0, *rest
        tensors += [x for x in (bias, sinks, *rest) if x is not None]
    wants = False
    for x in tensors:
        if type(x) not in _PLAIN or x.is_neg():
            return None
        wants = wants or x.requires_grad
    wants = wants and torch.is_grad_enabled()
    lse_dtype = torch.float64 if wants else torch.float32 if return_lse else None
    make = torch.get_num_threads(), torch.empty_strided, lse_dtype
    found = core.attend(q, k, v, bounds, k_len, scale, *make, arguments)
    if found is None:
        return None
    if wants:
        scale = q.shape[3] ** -0.5 if scale is None else scale
        found = record_forward(found, q, k, v, bounds, scale, *(options or ()))  # type: ignore[no-untyped-call]
    out, lse = found
    out = out if layout == "bhsd" else out.transpose(1, 2)
    return (out, lse.float()) if return_lse else out
