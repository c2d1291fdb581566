"""Attention as two products and a softmax, compiled by inductor. oneDNN and MKL compute the products."""

from __future__ import annotations

from types import FunctionType

import torch
from torch import Tensor

from attnspan_lab.bench.devices import device_named
from attnspan_lab.bench.peers.job import Job, Ready, differentiated, enough_memory, held_below

__all__ = ["Inductor"]

_LEVELS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


class Inductor:
    """Plain attention under `torch.compile`, forward and backward, with stored scores."""

    name = "inductor"

    def refuses(self, job: Job) -> str | None:
        if job.device != "cpu":
            return f"it measures the products of CPU libraries, not of {job.device}"
        if held := held_below(holders=_LEVELS):
            return held
        # Scores and probabilities. The backward pass adds their gradients, and copies in other layouts.
        return enough_memory(job, (6 if job.backward else 3) * job.square_bytes, "the scores")

    def prepare(self, job: Job) -> Ready:
        w = job.workload
        mask = None if job.is_full else job.folded_mask()
        # The compiler counts recompilations per code object, so a new one for each job never reaches the
        # limit.
        attend = FunctionType(_attend.__code__.replace(), _attend.__globals__)
        # The number of threads is compiled into kernels, which are cached on disk.
        compiled = torch.compile(attend, dynamic=False, fullgraph=True, options={"cpp.threads": job.threads})
        scale, folded = w.head_dim**-0.5, (w.batch, w.kv_heads, -1, w.head_dim)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = compiled(q, k, v, mask, scale, folded)
            return out

        return Ready(differentiated(forward, job), device_named(job.device))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, folded: tuple[int, ...]
) -> Tensor:
    # Scale before the product: inductor would replace the form that scales scores by SDPA.
    scores = (q * scale).reshape(folded) @ k.mT
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    out = torch.softmax(scores, -1) @ v
    return out.reshape(*q.shape[:-1], v.shape[-1])
