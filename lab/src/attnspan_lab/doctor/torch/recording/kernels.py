"""Attention calls that are one operator, of torch, of attnspan or of another library."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attnspan import Spans
from attnspan_lab.doctor.torch.masks.hiding_values import HIDDEN, highest_hiding_in
from attnspan_lab.doctor.torch.recording.attention_call import Attention
from attnspan_lab.doctor.torch.recording.operators import Operation, in_backward, plain_in
from attnspan_lab.doctor.torch.recording.step_record import PAIRS, Record

__all__ = ["fused", "fused_kind"]


def fused_kind(op: Any, name: str) -> str:
    """Return the kind of the attention call that an operator is, or ""."""
    if not isinstance(op, torch._ops.OpOverload):
        return "flex" if name == "flex_attention" else ""
    if "backward" in name:
        return ""
    if op.namespace == "aten":
        is_fused = name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention"))
        return "sdpa" if is_fused and not name.endswith("_math") else ""
    if op.namespace == "attnspan":
        return "attnspan" if name == "attention" else ""
    return "custom" if "attention" in name or "attn" in name else ""


def fused(record: Record, kind: str, operation: Operation) -> None:
    """Record an attention call that is one operator."""
    q, k, *more = inputs = plain_in(operation.args)[:3]
    kernel = "" if kind == "flex" else str(operation.op).removesuffix(".default")
    call = Attention(kind, kernel, operation.place, tuple(q.shape), tuple(k.shape), q.dtype)
    call.recomputed = in_backward()
    call.key = k if record.keeps_keys or q.shape[-2] != k.shape[-2] else None
    record.operands(call, inputs, q)
    if kind == "sdpa":
        _of_sdpa(record, call, operation.named, q, k)
    elif kind == "flex":
        _of_flex(record, call, operation, q, k)
    elif kind == "attnspan":
        _of_attnspan(record, call, operation.named)
    if operation.outs and more:
        record.keep(call, operation.outs[0], more[0])
    record.calls.append(call)


def _of_sdpa(record: Record, call: Attention, given: dict[str, Any], q: Tensor, k: Tensor) -> None:
    call.given = record.function.given
    mask = next((given[x] for x in ("attn_mask", "attn_bias") if given.get(x) is not None), None)
    sizes = q.shape[-2], k.shape[-2]
    visible = torch.ones(len(q), 1, *sizes, dtype=torch.bool, device=q.device)
    if given.get("is_causal"):
        visible = visible.tril()
    if mask is not None:
        own = call.given.get("attn_mask")
        fits = prod(q.shape[:-1]) * k.shape[-2] <= PAIRS
        limit = highest_hiding_in(mask, q, k, given.get("scale")) if fits else HIDDEN
        shown = mask if mask.dtype == torch.bool else mask > limit
        if mask.dim() > 1 and min(mask.shape[-2:]) > 1:
            # torch converts a boolean mask to floating point. The user's line made the boolean one.
            record.mask(call, mask if own is None else own, limit)
        tag = record.tag_of(mask)
        call.overflow, call.mask_sources = tag.overflow, call.mask_sources | tag.sources
        visible = visible & shown.expand(*shown.shape[:-2], *sizes)
    record.see(call, visible)


def _of_flex(record: Record, call: Attention, operation: Operation, q: Tensor, k: Tensor) -> None:
    # A BlockMask arrives as a tuple that ends with its function.
    leaves = tree_leaves((operation.args, operation.kwargs))
    mask_mod = next((x for x in reversed(leaves) if callable(x) and not isinstance(x, Tensor)), None)
    if mask_mod is None or q.shape[-2] * k.shape[-2] * q.shape[0] > PAIRS:
        return
    from torch.nn.attention.flex_attention import create_mask

    try:
        batch, heads, q_len = q.shape[:3]
        visible = create_mask(mask_mod, batch, heads, q_len, k.shape[-2], device=str(q.device))
    except Exception:
        return  # The function is a score_mod, or reads other data than indices.
    record.see(call, visible)


def _of_attnspan(record: Record, call: Attention, given: dict[str, Any]) -> None:
    bounds, sizes = given.get("bounds"), (call.q[-2], call.k[-2])
    if isinstance(bounds, Tensor) and prod(sizes) * bounds.shape[0] <= PAIRS:
        visible = torch.as_tensor(Spans(bounds, sizes[1]).dense())
        # attnspan defines the result of a query that sees nothing: 0.
        record.see(call, visible)
        call.hidden = []
