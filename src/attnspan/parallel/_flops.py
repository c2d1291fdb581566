"""FLOP formulas of the sharded operators: what this rank computes, visible pairs only."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils.flop_counter import register_flop_formula

from ._ops import sharded_backward, sharded_forward
from .local import decode


def _pairs(plan: Tensor, meta: Tensor, group: Any, batch: int, heads: int, rows: int, keys: int) -> int:
    """Visible pairs of a rank over its batch rows and heads; all pairs where the plan has no data."""
    if isinstance(plan, FakeTensor) or plan.is_meta:
        return batch * heads * rows * keys * _resolve_process_group(group).size()
    found = decode(plan, meta.tolist())
    total = 0
    for stage in found.stages:
        lo, hi = stage.bounds.unbind(-1)
        repeats = batch // stage.bounds.shape[0] * heads / stage.bounds.shape[1]
        total += int(int((hi - lo).sum(dtype=torch.int64)) * repeats)
    return total


@register_flop_formula(sharded_forward.overloadpacket, get_raw=True)  # type: ignore[untyped-decorator]
def sharded_forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor,
    meta: Tensor,
    group: str,
    members: int,
    heads_here: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Floating-point operations of one rank's forward call: 2 * pairs * (D + Dv).

    Where heads of the mask differ, each is taken to cost their mean.

    Args:
        q: Shape (B, Hq, n, D).
        k: Shape (B, Hkv, m, D).
        v: Shape (B, Hkv, m, Dv).
        plan: As the operator takes it, as all; without data (fake or meta) every pair counts.
        meta: Numbers of the plan.
        group: Name of the process group.
        members: Ranks that share out heads.
        heads_here: Query heads of this rank while it attends.
        *args: Further arguments of the operator, unused.
        **kwargs: The result, as torch's counter passes it, unused.
    """
    del args, kwargs
    rows = q.shape[2] * members
    pairs = _pairs(plan, meta, group, q.shape[0], heads_here, rows, k.shape[2])
    return 2 * pairs * (q.shape[3] + v.shape[3])


@register_flop_formula(sharded_backward.overloadpacket, get_raw=True)  # type: ignore[untyped-decorator]
def sharded_backward_flops(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kv_heads: int,
    plan: Tensor,
    meta: Tensor,
    group: str,
    members: int,
    heads_here: int,
    *args: Any,
    **kwargs: Any,
) -> int:
    """Floating-point operations of one rank's backward call: 2.5 times the forward's.

    Args:
        dout: Shape (B, Hq, n, Dv).
        dlse: Gradient of the lse, unused.
        q: Of the group's rows and this rank's heads, shape (B, H, N, D).
        k: Shape (B, G, S, D).
        v: Shape (B, G, S, Dv).
        out: Unused.
        lse: Unused.
        kv_heads: Unused.
        plan: As for the forward call.
        meta: Numbers of the plan.
        group: Name of the process group.
        members: Ranks that share out heads.
        heads_here: Query heads of this rank while it attends.
        *args: Further arguments of the operator, unused.
        **kwargs: The result, unused.
    """
    del dlse, out, lse, kv_heads, args, kwargs
    keys = k.shape[2] // members
    pairs = _pairs(plan, meta, group, dout.shape[0], heads_here, q.shape[2], keys)
    return 5 * pairs * (q.shape[3] + v.shape[3])
