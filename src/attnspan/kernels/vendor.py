"""Kernels that torch brings for NVIDIA's GPUs, for plain masks: cuDNN's, and FlashAttention 2.

FlashAttention 3 or 4 takes the place of 2, and goes before cuDNN, once the program has called torch's
``activate_flash_attention_impl``. None of them has options or a gradient of lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnspan.base.installed import lacking
from attnspan.call import Problem

from . import FIRST_TRITON

__all__ = ["backward", "forward", "kernel_of", "supports"]

aten = torch.ops.aten
DEVICE = "cuda"
MAX_HEAD_DIM = 256
_MIXES_NO_STRIDES = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 15)
#: Where FlashAttention has no backward pass beyond it: too little shared memory.
_SMALL = {86: 192, 87: 192, 89: 192, 120: 192, 121: 192}


def supports(problem: Problem) -> str | None:
    """Return None, or why these kernels cannot run the problem."""
    dim, at = problem.head_dim, problem.capability
    if problem.device != DEVICE or torch.version.hip is not None:
        return f"it runs on NVIDIA's GPUs, not on {'AMD' if torch.version.hip else problem.device}"
    if at is not None and at < 80:
        return f"it takes GPUs of compute capability 8.0 or newer, not {at / 10}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {problem.dtype}"
    if problem.extras:
        return f"it takes no {problem.extras}"
    if not problem.band:
        return "it takes full(), causal(), window(...), documents(...) and what & makes of them"
    if dim != problem.v_dim or dim % 8 != 0:
        return f"it takes one head dim, a multiple of 8, not {dim} and {problem.v_dim}"
    most = MAX_HEAD_DIM if at is None else _SMALL.get(at, MAX_HEAD_DIM)
    if dim > most:
        return f"it takes head dims up to {most}, not {dim}"
    if 0 in (problem.batch, problem.q_len, problem.k_len):
        return "it takes no empty arrays"
    if problem.band == "documents":
        if problem.batch != 1:
            return f"it takes documents of one batch row, not of {problem.batch}"
        return lacking("triton", FIRST_TRITON)  # offsets are checked on the GPU
    if problem.band != "full" and problem.q_len > problem.k_len:
        return "it takes no more queries than keys"
    return None


def kernel_of(
    q: Tensor, k: Tensor, v: Tensor, reach: tuple[int, int], documents: bool = False, backward: bool = False
) -> str:
    """Name of a call's kernel: "cuDNN", "FlashAttention 2", or the one that the program has activated."""
    left, right = _reach(reach, q)
    other = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if other is not None:
        return str(other)
    square = q.shape[2] == k.shape[2] or right < 0
    wide = q.shape[3] > 128  # its backward does not take all that its forward does
    if documents or left >= 0 or right > 0 or not square or wide or not _has_cudnn(q, backward):
        return "FlashAttention 2"
    grouped = q.shape[1] != k.shape[1]
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, right == 0, grouped)
    return "cuDNN" if torch.backends.cuda.can_use_cudnn_attention(params) else "FlashAttention 2"


def _has_cudnn(q: Tensor, backward: bool) -> bool:
    """Whether cuDNN's kernels are there, and trusted: on Hopper and Blackwell, not in decoding.

    torch prefers them after version 9.15.0. Versions after that give wrong results for one query on some GPUs
    (pytorch#193893, cudnn-frontend#1072). Before torch 2.15, torch takes a backward kernel that it has made
    before for other strides of the output's gradient.
    """
    if q.shape[2] == 1 or not torch.cuda.is_available() or (backward and not _MIXES_NO_STRIDES):
        return False
    is_new = torch.cuda.get_device_capability(q.device)[0] in (9, 10)
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return bool(is_new and version > 91500)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest: tuple[int, int],
    reach: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend.

    Args:
        q: Shape (B, Hq, Sq, D), with a unit last stride; B is 1 with documents.
        k, v: Shape (B, Hkv, Sk, D), likewise.
        cu_q, cu_k: Integer (n + 1,), where documents start among queries and keys, and the last one ends;
            both or None. Where they do not ascend from 0 to at most the length, results are NaN.
        longest: Queries and keys of the longest document, or more. (With 1 query, FlashAttention 2 would take
            the rows for those of all documents in turn.)
        reach: How many keys each query sees before and after its own, -1 for all. The last query's own key
            is the last one, in each document.
        scale: Factor of the scores.

    Returns:
        Output, stored as contiguous (B, Sq, Hq, D), and float32 lse (B, Hq, Sq).
    """
    is_causal, band = _window(reach, q, scale)
    if cu_q is None or cu_k is None:
        if kernel_of(q, k, v, reach) == "cuDNN":
            found = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, is_causal, False, scale=scale
            )
            return _stored(found[0]), found[1].reshape(found[0].shape[:3])
        rows = (x.transpose(1, 2) for x in (q, k, v))
        found = aten._flash_attention_forward(
            *rows, None, None, q.shape[2], k.shape[2], 0.0, is_causal, False, **band
        )
        return _stored(found[0].transpose(1, 2)), found[1]
    from ._offsets import Offsets

    offsets = Offsets.checked(cu_q, cu_k, q.shape[2], k.shape[2])
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    found = aten._flash_attention_forward(
        *rows, offsets.cu_q, offsets.cu_k, max(longest[0], 2), longest[1], 0.0, is_causal, False, **band
    )
    out, lse = _stored(found[0].transpose(0, 1)[None]), found[1][None].contiguous()
    offsets.clear_queries(out)
    offsets.finish_lse(lse)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    longest: tuple[int, int],
    reach: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `forward` to q, k and v, stored as contiguous (B, S, H, D).

    All of the kernels mean the same by lse: which of them wrote it does not matter.
    """
    is_causal, band = _window(reach, q, scale)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # what dropout would have drawn
    if cu_q is None or cu_k is None:
        sizes = q.shape[2], k.shape[2], 0.0, is_causal
        if kernel_of(q, k, v, reach, backward=True) == "cuDNN":
            seed = torch.zeros((), dtype=torch.int64, device=q.device)
            found = aten._scaled_dot_product_cudnn_attention_backward(
                dout, q, k, v, out, lse[..., None], seed, seed, None, None, None, *sizes, scale=scale
            )
            return tuple(map(_stored, found))  # type: ignore[return-value]
        rows = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        found = aten._flash_attention_backward(*rows, lse, None, None, *sizes, unused, unused, **band)
        return tuple(_stored(x.transpose(1, 2)) for x in found)  # type: ignore[return-value]
    from ._offsets import Offsets

    offsets = Offsets.checked(cu_q, cu_k, q.shape[2], k.shape[2])
    rows = (x[0].transpose(0, 1) for x in (dout, q, k, v, out))
    # FlashAttention has +inf where a row sees nothing.
    lse = torch.where(lse == -torch.inf, torch.inf, lse)[0]
    sizes = max(longest[0], 2), longest[1], 0.0, is_causal
    found = aten._flash_attention_backward(
        *rows, lse, offsets.cu_q, offsets.cu_k, *sizes, unused, unused, **band
    )
    dq, dk, dv = (_stored(x.transpose(0, 1)[None]) for x in found)
    offsets.clear_queries(dq)
    offsets.clear_keys(dk)
    offsets.clear_keys(dv)
    return dq, dk, dv


def _reach(reach: tuple[int, int], q: Tensor) -> tuple[int, int]:
    """With one query, no key is after its own."""
    left, right = reach
    return left, -1 if q.shape[2] == 1 and right == 0 else right


def _window(reach: tuple[int, int], q: Tensor, scale: float) -> tuple[bool, dict[str, float]]:
    """Whether the mask is causal, and the keywords of torch's operators."""
    left, right = _reach(reach, q)
    return (left, right) == (-1, 0), {"scale": scale, "window_size_left": left, "window_size_right": right}


def _stored(x: Tensor) -> Tensor:
    """(B, H, S, D), stored as contiguous (B, S, H, D): its strides too, where a dim has one element."""
    x = x.transpose(1, 2)
    return x.reshape(-1).view(x.shape).transpose(1, 2)
