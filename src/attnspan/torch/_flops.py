"""FLOP formulas: without them, counters and memory-budget partitioners think that attention is free."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula


def visible_pairs(q: Tensor, k: Tensor, bounds: Tensor) -> int:
    """Count the (query, key) pairs that a call computes, over all batch rows and query heads.

    Args:
        q: Shape (B, Hq, Sq, D).
        k: Shape (B, Hkv, Sk, D).
        bounds: Shape (B|1, Hq|1, Sq, R, 2), int32; without data (fake or meta) every pair counts.

    Returns:
        The count; an upper bound where the bounds have no data.

    Example:
        >>> x = torch.zeros(2, 3, 2, 8)
        >>> visible_pairs(x, x, torch.tensor([[0, 1], [0, 2]], dtype=torch.int32).view(1, 1, 2, 1, 2))
        18
    """
    batch, heads, q_len, _ = q.shape
    if isinstance(bounds, FakeTensor) or bounds.is_meta:
        return batch * heads * q_len * k.shape[2]
    lo, hi = bounds.unbind(-1)
    repeats = (batch // bounds.shape[0]) * (heads // bounds.shape[1]) if bounds.shape[0] else 0
    return int((hi - lo).clamp(min=0).sum(dtype=torch.int64)) * repeats


@register_flop_formula(torch.ops.attnspan.forward, get_raw=True)  # type: ignore[untyped-decorator]
def forward_flops(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *args: Any, **kwargs: Any) -> int:
    """Floating-point operations of one forward call: 2 * pairs * (D + Dv), visible pairs only.

    Args:
        q: Shape (B, Hq, Sq, D).
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        bounds: Shape (B|1, Hq|1, Sq, R, 2), int32.
        *args: Further arguments of the operator, unused.
        **kwargs: The result, as torch's counter passes it, unused.

    Returns:
        The count (FlashAttention-2, arXiv:2307.08691, section 4.1).

    Example:
        >>> x = torch.zeros(1, 1, 2, 8)
        >>> forward_flops(x, x, x, torch.tensor([[0, 1], [0, 2]], dtype=torch.int32).view(1, 1, 2, 1, 2))
        96
    """
    del args, kwargs
    return 2 * visible_pairs(q, k, bounds) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.attnspan.backward, get_raw=True)  # type: ignore[untyped-decorator]
def backward_flops(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Floating-point operations of one backward call: 2.5 times the forward's.

    Args:
        dout: Gradient of the output, unused.
        dlse: Gradient of the lse, unused.
        q: Shape (B, Hq, Sq, D).
        k: Shape (B, Hkv, Sk, D).
        v: Shape (B, Hkv, Sk, Dv).
        bounds: Shape (B|1, Hq|1, Sq, R, 2), int32.
        *args: Further arguments of the operator, unused.
        **kwargs: The result, as torch's counter passes it, unused.

    Returns:
        The count (FlashAttention-2, arXiv:2307.08691, section 4.1).

    Example:
        >>> x = torch.zeros(1, 1, 2, 8)
        >>> bounds = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32).view(1, 1, 2, 1, 2)
        >>> backward_flops(x, None, x, x, x, bounds)
        240
    """
    del dout, dlse, args, kwargs
    return forward_flops(q, k, v, bounds) * 5 // 2
