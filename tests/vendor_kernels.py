"""Torch's operators for GPUs that `attnspan.kernels.vendor` calls, as plain array code for CPU tensors.

What they compute and in which form is written here from torch's documentation and FlashAttention's: the mask
is aligned to the bottom right corner (cuDNN's to the top left), rows without a key have output 0 and lse
+inf, rows outside of all documents are not written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnspan.experimental import triton
from attnspan.kernels import vendor
from attnspan.torch import _vendor

GARBAGE = 1e30


@contextmanager
def standing_in(cudnn: bool = False) -> Iterator[None]:
    """Calls of ``backend="vendor"`` on CPU tensors run, by cuDNN's rules where it takes them, if asked."""
    fakes = SimpleNamespace(
        _flash_attention_forward=_flash_forward,
        _flash_attention_backward=_flash_backward,
        _scaled_dot_product_cudnn_attention=_cudnn_forward,
        _scaled_dot_product_cudnn_attention_backward=_cudnn_backward,
    )
    library = torch.library.Library("attnspan", "IMPL")
    library.impl("vendor_attention", _vendor._forward_kernel, "CPU")
    library.impl("vendor_attention_backward", _vendor._backward_kernel, "CPU")
    with pytest.MonkeyPatch.context() as patch, triton.interpreted():
        patch.setattr(vendor, "aten", fakes)
        patch.setattr(vendor, "DEVICE", "cpu")
        patch.setattr(vendor, "_has_cudnn", lambda *_: cudnn)
        patch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda _: True)
        yield
    library._destroy()


def _visible(q_len: int, k_len: int, left: int, right: int) -> Tensor:
    distance = torch.arange(k_len) - torch.arange(k_len - q_len, k_len)[:, None]
    return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(S, H, D) each, in float64; lse (H, S)."""
    scores = torch.einsum("qhd,khd->hqk", scale * q, k).masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return torch.einsum("hqk,khd->qhd", torch.exp(scores - lse[..., None]), v), lse


def _differentiate(*tensors: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, ...]:
    dout, q, k, v, out, lse = tensors
    scores = torch.einsum("qhd,khd->hqk", scale * q, k).masked_fill(~visible, -torch.inf)
    weights = torch.exp(scores - lse[..., None])
    dv = torch.einsum("hqk,qhd->khd", weights, dout)
    delta = (dout * out).sum(-1).T[..., None]
    dscores = scale * weights * (torch.einsum("qhd,khd->hqk", dout, v) - delta)
    return torch.einsum("hqk,khd->qhd", dscores, k), torch.einsum("hqk,qhd->khd", dscores, q), dv


def _documents(q: Tensor, k: Tensor, *given: Any) -> list[tuple[slice, slice]]:
    cu_q, cu_k, max_q, max_k = given
    found = []
    for x, ends, longest in ((q, cu_q, max_q), (k, cu_k, max_k)):
        assert ends is None or ends.dtype == torch.int32
        at = [0, x.shape[0]] if ends is None else ends.tolist()
        assert 0 == at[0] <= at[-1] <= x.shape[0], "memory that is not there would be read"
        found.append([slice(a, b) for a, b in pairwise(at)])
        assert all(a.stop - a.start <= longest for a in found[-1])
        assert ends is None or longest > 1 or x is k, "rows would be taken for those of documents in turn"
    return list(zip(*found, strict=True))


def _parts(
    q: Tensor, k: Tensor, ends: Any, is_causal: bool, window_size_left: int, window_size_right: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The queries and keys of each document, and which pairs are visible."""
    right = -1 if window_size_right >= ends[-1] else window_size_right
    band = (-1, 0) if is_causal else (window_size_left, right)
    for mine, theirs in _documents(q, k, *ends):
        yield mine, theirs, _visible(mine.stop - mine.start, theirs.stop - theirs.start, *band)


def _by_row(call: Any, tensors: Any, ends: Any, *rest: Any, **band: Any) -> tuple[Tensor, ...]:
    """Of packed documents, or of each batch row of tensors that have several."""
    assert band["scale"] > 0, "the largest product would not be the largest score"
    if ends[0] is not None:
        return call(*tensors, ends, *rest, **band)
    found = [call(*x, ends, *rest, **band) for x in zip(*tensors, strict=True)]
    return tuple(torch.stack(x) for x in zip(*found, strict=True))


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **band: Any) -> tuple[Any, ...]:
    *ends, dropout_p, is_causal, debug = rest
    assert (dropout_p, debug) == (0.0, False)
    return *_by_row(_forward, (q, k, v), ends, is_causal, **band), None, None, None


def _forward(*tensors: Any, scale: float, **window: int) -> tuple[Tensor, Tensor]:
    q, k, v, ends, is_causal = tensors
    group, out = q.shape[1] // k.shape[1], torch.full_like(q, GARBAGE)
    lse = torch.full((q.shape[1], q.shape[0]), GARBAGE)
    for mine, theirs, visible in _parts(q, k, ends, is_causal, **window):
        spread = (x[theirs].repeat_interleave(group, 1).double() for x in (k, v))
        found = _attend(q[mine].double(), *spread, visible, scale)
        out[mine], lse[:, mine] = found[0].to(q.dtype), found[1].float()
    return out, lse


def _flash_backward(*tensors: Any, **band: Any) -> tuple[Tensor, ...]:
    *given, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, _, _ = tensors
    assert dropout_p == 0.0
    assert not (given[-1] == -torch.inf).any(), "the kernel would compute exp(x + inf)"
    return _by_row(_backward, given, (cu_q, cu_k, max_q, max_k), is_causal, **band)


def _backward(*tensors: Any, scale: float, **window: int) -> tuple[Tensor, ...]:
    dout, q, k, v, out, lse, ends, is_causal = tensors
    group, gradients = q.shape[1] // k.shape[1], tuple(torch.full_like(x, GARBAGE) for x in (q, k, v))
    for mine, theirs, visible in _parts(q, k, ends, is_causal, **window):
        spread = (x[theirs].repeat_interleave(group, 1) for x in (k, v))
        parts = [x.double() for x in (dout[mine], q[mine], *spread, out[mine], lse[:, mine])]
        found = _differentiate(*parts, visible=visible, scale=scale)
        gradients[0][mine] = found[0].to(q.dtype)
        for to, x in zip(gradients[1:], found[1:], strict=True):
            to[theirs] = x.unflatten(1, (-1, group)).sum(2).to(q.dtype)
    return gradients


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> tuple[Any, ...]:
    bias, want_lse, dropout_p, is_causal, debug = rest
    assert (bias, want_lse, dropout_p, debug) == (None, True, 0.0, False)
    assert not is_causal or q.shape[2] == k.shape[2], "aligned to the top left corner"
    rows = (x.transpose(1, 2) for x in (q, k, v))
    sizes = q.shape[2], k.shape[2], 0.0, is_causal, False
    out, lse, *_ = _flash_forward(
        *rows, None, None, *sizes, scale=scale, window_size_left=-1, window_size_right=-1
    )
    return out.transpose(1, 2), lse[..., None], None, None, q.shape[2], k.shape[2], None, None, None


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: float
) -> tuple[Tensor, ...]:
    seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout_p, is_causal = rest
    assert seed.dtype == offset.dtype == torch.int64
    assert bias is cu_q is cu_k is None
    rows = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    unused = torch.zeros(2), torch.zeros(2)
    found = _flash_backward(
        *(*rows, lse[..., 0], None, None, max_q, max_k, dropout_p, is_causal, *unused),
        scale=scale,
        window_size_left=-1,
        window_size_right=-1,
    )
    return tuple(x.transpose(1, 2) for x in found)
