"""The operators ``attnspan::vendor_attention`` and ``attnspan::vendor_attention_backward``.

They run `attnspan.kernels.vendor`. Tensors have the order (B, H, S, D), and results are stored as contiguous
(B, S, H, D), as in ``attnspan::attention``. Offsets are data, so another packing does not recompile.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnspan.base.arrays import own
from attnspan.kernels import vendor
from attnspan.kernels._on_device import on_device_of
from attnspan.masks.bands import Band

from . import compat
from ._autograd import BY_MATH, below_autograd, define, differentiate, refuse_derivative
from ._front import is_captured
from ._lowered import stream_of
from ._signature import KEEPS_STRIDE_ORDER, library
from ._watched import is_transformed
from .ops import new_outputs, stored_bshd

# Document offsets, lengths of the longest document, number of keys to the left and right (-1: all), scale.
_BAND = "Tensor? cu_q, Tensor? cu_k, SymInt max_q, SymInt max_k, int left, int right, float scale"


def _band(cu_q: Any, cu_k: Any, *numbers: Any) -> tuple[Any, ...]:
    max_q, max_k, left, right, scale = numbers
    return cu_q, cu_k, (max_q, max_k), (left, right), scale


def _forward_kernel(q: Tensor, k: Tensor, v: Tensor, *band: Any) -> tuple[Tensor, Tensor]:
    with on_device_of(q):
        return vendor.forward(_aligned(q), _aligned(k), _aligned(v), *_band(*band))


def _backward_kernel(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *band: Any
) -> tuple[Tensor, Tensor, Tensor]:
    with on_device_of(q):
        dout, q, k, v, out = (_aligned(x) for x in (dout, q, k, v, out))
        return vendor.backward(dout, q, k, v, out, lse.contiguous(), *_band(*band))


def _aligned(x: Tensor) -> Tensor:
    """The tensor, or an aligned copy. These kernels read 16 bytes at a time and do not check alignment."""
    steps = (step for n, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in steps)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *band: Any) -> tuple[Tensor, Tensor]:
    del k, band
    return new_outputs(q, v, torch.float32)


def _backward_fake(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    del dout, rest
    return tuple(stored_bshd(x, x.shape[1], x.shape[2], x.shape[3]) for x in (q, k, v))


_INPUTS = "Tensor q, Tensor k, Tensor v"
vendor_op = define(
    library,
    f"vendor_attention({_INPUTS}, {_BAND}) -> (Tensor out, Tensor lse)",
    *(_forward_fake, KEEPS_STRIDE_ORDER),
    CUDA=_forward_kernel,
)
_backward_op = define(
    library,
    f"vendor_attention_backward(Tensor dout, {_INPUTS}, Tensor out, Tensor lse, {_BAND})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    *(_backward_fake, KEEPS_STRIDE_ORDER),
    CUDA=_backward_kernel,
)


class _Forward(torch.autograd.Function):
    """Derivative of the forward operator. lse is not differentiable."""

    @staticmethod
    def forward(ctx: Any, source: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = below_autograd(source[0], source[1], inputs)
        ctx.mark_non_differentiable(lse)
        q, k, v, cu_q, cu_k, *ctx.band = inputs
        kept = (q, k, v, out, lse, cu_q, cu_k)
        # Autograd cannot save a tensor from inference mode, but it can save a copy.
        ctx.save_for_backward(*(x.clone() if x is not None and x.is_inference() else x for x in kept))
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Any) -> tuple[Any, ...]:
        del dlse
        *tensors, cu_q, cu_k = ctx.saved_tensors
        found = _backward_op(dout, *tensors, cu_q, cu_k, *ctx.band)
        pairs = zip(found, ctx.needs_input_grad[1:4], strict=True)
        return None, *(x if need else None for x, need in pairs), *(None,) * 7


differentiate(library, vendor_op, _Forward)
refuse_derivative(library, _backward_op, BY_MATH)


def attend(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    """Output and lse of a call whose mask is a band."""
    offsets: list[Tensor | None] = [None, None]
    longest: tuple[Any, Any] = q.shape[2], k.shape[2]
    if band.cu_q is not None:
        ends = band.cu_q, band.cu_k
        if not any(isinstance(x, Tensor) for x in ends):  # on the host, so they can be read
            longest = tuple(max(int((x[1:] - x[:-1]).max()), 1) for x in ends)  # type: ignore[assignment]
        offsets = [_on_device(x, q) for x in ends]
    return vendor_op(q, k, v, *offsets, *longest, *_reach(band), scale)  # type: ignore[no-any-return]


def _on_device(x: Any, q: Tensor) -> Tensor:
    """Offsets as a tensor. A copy from the host synchronizes, so it is cached for the next layer."""
    if isinstance(x, Tensor) or torch.compiler.is_compiling() or is_transformed() or is_captured(q):
        return torch.as_tensor(own(x), device=q.device)
    return _copied(x.tobytes(), x.dtype.str, q.device, stream_of(q))


@lru_cache(maxsize=16)
def _copied(data: bytes, dtype: str, device: torch.device, stream: int) -> Tensor:
    del stream  # Part of the key: another stream could still read an evicted copy.
    with torch.inference_mode(False):  # Autograd could not save an inference tensor.
        return torch.as_tensor(np.frombuffer(data, dtype).astype(np.int64), device=device)


def kernel_of(q: Tensor, k: Tensor, v: Tensor, band: Any) -> str:
    """Name of the kernel that runs a call."""
    return vendor.kernel_of(q, k, v, _reach(band), band.cu_q is not None)


def _reach(band: Band) -> tuple[int, int]:
    return (-1 if band.left is None else band.left), (-1 if band.right is None else band.right)


def _pairs(q: Tensor, k: Tensor, cu_q: Any, cu_k: Any, left: int, right: int) -> int:
    """Number of visible pairs. Symbolic sizes count all pairs, and offsets without data one document."""
    rows = [(q.shape[2], k.shape[2])]
    if not all(isinstance(n, int) for n in rows[0]):
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if type(cu_q) is Tensor and not cu_q.is_meta:
        rows = list(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True))
    return q.shape[0] * q.shape[1] * sum(_band_pairs(*sizes, left, right) for sizes in rows)


def _band_pairs(q_len: int, k_len: int, left: int, right: int) -> int:
    at = np.arange(k_len - q_len, k_len)
    first = at * 0 if left < 0 else at - left
    last = at * 0 + k_len if right < 0 else at + right + 1
    return int((last.clip(0, k_len) - first.clip(0, k_len)).clip(0).sum())


@compat.flop_formula(torch.ops.attnspan.vendor_attention)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, *band: Any, **_: Any) -> int:
    left, right = band[2:4]
    return 2 * _pairs(q, k, cu_q, cu_k, left, right) * (q.shape[3] + v.shape[3])


@compat.flop_formula(torch.ops.attnspan.vendor_attention_backward)
def _backward_flops(dout: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **_: Any) -> int:
    del dout
    return _forward_flops(q, k, v, *rest[2:]) * 5 // 2
