"""torch's own kernels for plain masks on NVIDIA GPUs: cuDNN and FlashAttention 2.

If the program has called torch's ``activate_flash_attention_impl``, FlashAttention 3 or 4 replaces 2 and is
preferred to cuDNN. None of these kernels has options or a gradient of lse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnspan.base.installed import FIRST_TRITON, lacking
from attnspan.call import Problem

aten = torch.ops.aten
DEVICE = "cuda"
MAX_HEAD_DIM = 256
_MIXES_NO_STRIDES = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 15)
#: Largest head dim of FlashAttention's backward pass on GPUs with little shared memory.
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
    if extras := (*problem.options, *problem.extras):
        return f"it takes no {' or '.join(extras)}"
    if not problem.band:
        return "it takes full(), causal(), window(...), documents(...) and their combinations by &"
    if dim != problem.v_dim or dim % 8 != 0:
        return f"it takes one head dim, a multiple of 8, not {dim} and {problem.v_dim}"
    most = MAX_HEAD_DIM if at is None else _SMALL.get(at, MAX_HEAD_DIM)
    if dim > most:
        return f"it takes head dims up to {most}, not {dim}"
    if 0 in (problem.batch, problem.q_len, problem.k_len):
        return "it takes no empty arrays"
    if problem.band == "documents":
        if problem.batch != 1:
            return f"it takes documents of one batch element, not of {problem.batch}"
        return lacking("triton", FIRST_TRITON)  # offsets are checked on the GPU
    if problem.band != "full" and problem.q_len > problem.k_len:
        return "it takes no more queries than keys"
    return None


def kernel_of(
    q: Tensor, k: Tensor, v: Tensor, reach: tuple[int, int], documents: bool = False, backward: bool = False
) -> str:
    """Name of a call's kernel: "cuDNN", "FlashAttention 2", or the kernel that the program has activated."""
    left, right = _reach(reach, q)
    other = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if other is not None:
        return str(other)
    square = q.shape[2] == k.shape[2] or right < 0
    wide = q.shape[3] > 128  # the backward pass supports fewer problems than the forward pass
    if documents or left >= 0 or right > 0 or not square or wide or not _has_cudnn(q, backward):
        return "FlashAttention 2"
    grouped = q.shape[1] != k.shape[1]
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, right == 0, grouped)
    return "cuDNN" if torch.backends.cuda.can_use_cudnn_attention(params) else "FlashAttention 2"


def _has_cudnn(q: Tensor, backward: bool) -> bool:
    """Whether cuDNN's kernels are installed and trusted: on Hopper and Blackwell, except for decoding.

    torch prefers cuDNN after version 9.15.0. Later versions give wrong results for one query on some GPUs
    (pytorch#193893, cudnn-frontend#1072). torch before 2.15 may reuse a backward kernel that it has built
    for other strides of the output's gradient.
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
    """Compute attention.

    Args:
        q: Shape (B, Hq, Sq, D), with a last stride of 1. B is 1 with documents.
        k, v: Shape (B, Hkv, Sk, D), with a last stride of 1.
        cu_q, cu_k: Integer (n + 1,), the start of each document among queries and keys, and the end of the
            last one. Both or None. If they do not ascend from 0 to at most the length, results are NaN.
        longest: Queries and keys of the longest document, or larger numbers. The kernel gets
            at least 2 queries, because with 1, FlashAttention 2 would expect one query in each document.
        reach: Number of keys that each query sees before and after its own. -1 means all. In each document,
            the own key of the last query is the last key.
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
    """Compute the gradients of `forward` to q, k and v, stored as contiguous (B, S, H, D).

    All kernels have the same convention for lse, so any of them may have written it.
    """
    is_causal, band = _window(reach, q, scale)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout's random state, unused
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
    # FlashAttention uses +inf for a query that sees nothing.
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
    """The reach, where one query has no key after its own."""
    left, right = reach
    return left, -1 if q.shape[2] == 1 and right == 0 else right


def _window(reach: tuple[int, int], q: Tensor, scale: float) -> tuple[bool, dict[str, float]]:
    """Whether the mask is causal, and the keywords of torch's operators."""
    left, right = _reach(reach, q)
    return (left, right) == (-1, 0), {"scale": scale, "window_size_left": left, "window_size_right": right}


def _stored(x: Tensor) -> Tensor:
    """Store (B, H, S, D) as contiguous (B, S, H, D), with its strides also for a dim of one element."""
    x = x.transpose(1, 2)
    return x.reshape(-1).view(x.shape).transpose(1, 2)
