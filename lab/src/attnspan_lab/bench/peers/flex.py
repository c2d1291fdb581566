"""torch's FlexAttention, compiled, with a block mask that is created once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnspan.masks import Mask, causal, documents, full, window
from attnspan.masks.expression import And, Or
from attnspan_lab.bench.devices import device_named
from attnspan_lab.bench.peers.job import Job, Ready, differentiated, enough_memory

__all__ = ["Flex", "mask_mod"]

MaskMod = Callable[[Any, Any, Any, Any], Any]


class Flex:
    """`flex_attention` under `torch.compile`."""

    name = "flex"

    def refuses(self, job: Job) -> str | None:
        if job.device == "cpu" and job.backward:
            return "it has no backward pass on CPU"
        w = job.workload
        # To find the block mask, torch evaluates the function for every pair, with a few copies.
        return enough_memory(job, 8.0 * w.q_len * w.k_len, "finding its block mask")

    def prepare(self, job: Job) -> Ready:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Compile each workload separately: beyond the recompilation limit, calls would be slow and
        # uncompiled.
        torch._dynamo.reset()
        w = job.workload
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        sizes = (None, None, w.q_len, w.k_len)
        mask = None if job.is_full else create_block_mask(mask_mod(job), *sizes, device=job.device)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=job.grouped)
            return out

        return Ready(differentiated(forward, job), device_named(job.device))


def mask_mod(job: Job) -> MaskMod:
    """Write a job's mask as a user of FlexAttention would. Masks without a short form look up the spans."""
    return _short(job.mask, job) or _looked_up(job)


def _short(mask: Mask, job: Job) -> MaskMod | None:
    # The last query is the last key.
    shift = job.workload.k_len - job.workload.q_len
    if isinstance(mask, And | Or):
        parts = [_short(part, job) for part in mask.operands]
        known = [part for part in parts if part is not None]
        return _joined(known, isinstance(mask, And)) if len(known) == len(parts) else None
    if isinstance(mask, full):
        return lambda b, h, q, k: k >= 0  # noqa: ARG005 (the signature is FlexAttention's)
    if isinstance(mask, causal):
        return lambda b, h, q, k: q + shift >= k  # noqa: ARG005
    if isinstance(mask, window) and mask.left is not None and mask.right == 0:
        left = mask.left
        return lambda b, h, q, k: (q + shift >= k) & (q + shift - k <= left)  # noqa: ARG005
    if isinstance(mask, documents) and job.documents is not None:
        offsets = torch.tensor(job.documents, device=job.device)
        ids = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=job.device), offsets.diff())
        return lambda b, h, q, k: ids[q] == ids[k]  # noqa: ARG005
    return None


def _joined(parts: list[MaskMod], every: bool) -> MaskMod:
    def joined(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = parts[0](b, h, q, k)
        for part in parts[1:]:
            seen = seen & part(b, h, q, k) if every else seen | part(b, h, q, k)
        return seen

    return joined


def _looked_up(job: Job) -> MaskMod:
    bounds = torch.as_tensor(job.prepared.lowered.bounds, device=job.device)
    rows, heads, _, runs, _ = bounds.shape
    lo, hi = (x.contiguous() for x in bounds.unbind(-1))

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        row, head = b if rows > 1 else 0, h if heads > 1 else 0
        seen = (k >= lo[row, head, q, 0]) & (k < hi[row, head, q, 0])
        for r in range(1, runs):
            seen = seen | ((k >= lo[row, head, q, r]) & (k < hi[row, head, q, r]))
        return seen

    return visible
