"""Backend "cudnn": NVIDIA's kernels through `jax.nn.dot_product_attention`, for a few masks.

The kernels return no usable lse: JAX rounds it to q's dtype and drops its gradient. If a call asks for the
lse, another backend runs it. JAX differentiates its own function.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import jax

from attnspan.call import Problem
from attnspan.jax.part import JaxPart

from .tiles import symbols

MAX_HEAD_DIM = 128
_WIDE_HEAD_DIM = 256  # Hopper and later


def supports(problem: Problem, part: JaxPart) -> str | None:
    """Return None, or the reason why cuDNN cannot run the problem."""
    if problem.device != "gpu":
        return f"it runs on GPUs, not on {problem.device}"
    return _lacks_option(part) or _lacks_mask(problem, part) or _lacks_size(problem) or _missing()


def _lacks_option(part: JaxPart) -> str | None:
    lacks = {
        "its lse is rounded to q's dtype and has no gradient": part.want_lse,
        "it has no softcap": part.softcap,
        "it has no position biases, and takes no dense bias that hides keys": part.bias_kind,
        "it has no sinks": part.sinks is not None,
        "its dropout drops other weights": part.dropout_p,
    }
    return next((reason for reason, asked in lacks.items() if asked), None)


def _lacks_mask(problem: Problem, part: JaxPart) -> str | None:
    if part.band is None:
        return "it needs a mask that is known at tracing time: full, causal, or a window"
    window, lengths = window_of(part), f"{problem.q_len} queries, {problem.k_len} keys"
    if window is None:
        return "its masks are full, causal, and windows without keys ahead"
    # cuDNN aligns the first query with the first key. With as many queries as keys, both alignments are
    # equal.
    differ = window[0] and problem.q_len != problem.k_len
    return f"it aligns the first query and key, not the last: {lengths}" if differ else None


def _lacks_size(problem: Problem) -> str | None:
    if reason := symbols(problem):
        return reason
    if problem.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {problem.dtype}"
    if problem.head_dim != problem.v_dim:
        return f"it takes one head dim for keys and values, not {problem.head_dim} and {problem.v_dim}"
    if problem.head_dim % 8:
        return f"it takes head dims that are multiples of 8, not {problem.head_dim}"
    most = _WIDE_HEAD_DIM if _is_hopper() else MAX_HEAD_DIM
    if problem.head_dim > most:
        return f"it takes head dims up to {most} on this device, not {problem.head_dim}"
    return "it takes no empty arrays" if min(problem.batch, problem.q_len, problem.k_len) == 0 else None


def window_of(part: JaxPart) -> tuple[bool, int | None] | None:
    """Return the mask in cuDNN's form: whether it is causal, and how many keys before itself a query sees.

    None for a mask without that form.
    """
    band = part.band
    if band is None or band.right not in (0, None):
        return None
    if band.right is None:
        return (False, None) if band.left is None else None
    return True, band.left


def forward(part: JaxPart) -> tuple[jax.Array, None]:
    """Return out of a supported call, and no lse. JAX differentiates out."""
    mask = window_of(part)
    assert mask is not None, part.band
    assert all(x is None for x in (part.bias, part.sinks, part.dropout_seed)), "options that would be ignored"
    causal, left = mask
    part = part.in_layout("bshd")
    given_mask: Any = {"is_causal": causal, "local_window_size": None if left is None else (left, 0)}
    given_mask |= {"scale": part.scale, "implementation": "cudnn"}
    out = jax.nn.dot_product_attention(part.q, part.k, part.v, **given_mask)
    return out.swapaxes(1, 2), None


@cache
def _is_hopper() -> bool:
    """Return whether JAX's GPUs are Hopper or later. False without GPUs."""
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError:
        return False
    major, _, _ = str(getattr(device, "compute_capability", "0")).partition(".")
    return int(major) >= 9


@cache
def _missing() -> str | None:
    there = any(find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))
    return None if there else "JAX has no CUDA here: install jax[cuda13]"
