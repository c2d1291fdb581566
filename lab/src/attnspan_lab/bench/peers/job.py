"""Job of a peer: a workload's inputs, and properties of its mask that decide which peers can run it.

Inputs have the layout of a model's tensors: (B, S, H, D) in memory, viewed as (B, H, S, D).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from attnspan import masks
from attnspan.kernels import cpu
from attnspan.masks import Mask
from attnspan.masks.expression import And, Prepared
from attnspan_lab.bench.cells import Workload
from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.workloads import mask_of

__all__ = ["Forward", "Job", "Peer", "Ready", "differentiated", "enough_memory", "held_below"]

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Job:
    """One workload in one mode, with its inputs on a device.

    Args:
        workload: The attention problem.
        mode: "forward" or "forward+backward". With the latter, q, k and v require gradients.
        device: "cpu" or "cuda".
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Sk, D).
        v: (B, Hkv, Sk, Dv).
        dout: Gradient of the output, (B, Hq, Sq, Dv).
        threads: Number of CPU threads that a peer may use.

    Example:
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> job = Job.make(work, "forward", "cpu")
        >>> job.q.shape, job.is_causal, job.is_full
        (torch.Size([1, 2, 4, 8]), True, False)
    """

    workload: Workload
    mode: str
    device: str
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    threads: int

    @classmethod
    def make(cls, workload: Workload, mode: str, device: str, seed: int = 0) -> Job:
        """Draw standard-normal inputs."""
        w = workload
        draw = torch.Generator().manual_seed(seed)
        needs_grad = mode == "forward+backward"

        def tensor(length: int, heads: int, dim: int, grad: bool) -> Tensor:
            x = torch.randn(w.batch, length, heads, dim, generator=draw)
            return x.to(device, getattr(torch, w.dtype)).transpose(1, 2).requires_grad_(grad)

        q = tensor(w.q_len, w.q_heads, w.head_dim, needs_grad)
        k = tensor(w.k_len, w.kv_heads, w.head_dim, needs_grad)
        v = tensor(w.k_len, w.kv_heads, w.v_dim, needs_grad)
        dout = tensor(w.q_len, w.q_heads, w.v_dim, False)
        return cls(w, mode, device, q, k, v, dout, torch.get_num_threads())

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self.mode == "forward+backward"

    @cached_property
    def mask(self) -> Mask:
        """The mask as an expression."""
        return mask_of(self.workload)

    @cached_property
    def prepared(self) -> Prepared:
        """The mask, lowered once, with its bounds on the device, so that calls convert nothing."""
        w = self.workload
        return self.mask.spans(w.q_len, w.k_len, batch=w.batch, heads=w.q_heads, like=self.q.detach())

    @property
    def grouped(self) -> bool:
        """Whether query heads share key heads."""
        return self.workload.q_heads != self.workload.kv_heads

    @cached_property
    def is_full(self) -> bool:
        """Whether every query sees every key, as in a decoding step of one token."""
        return self.prepared.lowered.coverage() == 1.0

    @property
    def is_causal(self) -> bool:
        """Whether the mask is plain causal with Sq = Sk, where all alignment conventions agree."""
        return isinstance(self.mask, masks.causal) and self.workload.q_len == self.workload.k_len

    @property
    def needs_causal_flag(self) -> bool:
        """Whether a causal flag is needed. One query that sees every key needs none."""
        return self.is_causal and not self.is_full

    @property
    def window(self) -> masks.window | None:
        """The mask if it is a plain sliding window with two bounds and Sq = Sk, or else None."""
        mask, square = self.mask, self.workload.q_len == self.workload.k_len
        bounded = isinstance(mask, masks.window) and mask.left is not None and mask.right is not None
        return mask if isinstance(mask, masks.window) and bounded and square else None

    @cached_property
    def documents(self) -> tuple[int, ...] | None:
        """Cumulative lengths if the mask is a document mask, causal or not, or else None."""
        parts = self.mask.operands if isinstance(self.mask, And) else (self.mask,)
        found = [part for part in parts if isinstance(part, masks.documents)]
        others = [part for part in parts if not isinstance(part, masks.documents | masks.causal)]
        if len(found) != 1 or others or self.workload.batch != 1:
            return None
        return tuple(int(x) for x in found[0].cu_seqlens_q)

    @property
    def documents_causal(self) -> bool:
        """Whether the mask is causal within each of the `documents`."""
        return any(isinstance(leaf, masks.causal) for leaf in self.mask.leaves())

    def dense_mask(self) -> Tensor:
        """The mask as a bool tensor (B|1, H|1, Sq, Sk)."""
        dense: Tensor = self.prepared.lowered.dense()
        return dense

    def folded_mask(self) -> Tensor:
        """The bool mask (B|1, Hkv|1, Hq / Hkv * Sq, Sk).

        Grouped query heads are more rows of their key head.
        """
        w, dense = self.workload, self.dense_mask()
        if dense.shape[1] == 1:
            return dense.repeat(1, 1, w.q_heads // w.kv_heads, 1)
        return dense.reshape(len(dense), w.kv_heads, -1, w.k_len)

    @property
    def folded_pairs(self) -> int:
        """Number of elements of `folded_mask`."""
        w, (rows, heads) = self.workload, self.prepared.lowered.bounds.shape[:2]
        return int(rows * max(heads, w.q_heads // w.kv_heads) * w.q_len * w.k_len)

    @property
    def square_bytes(self) -> int:
        """Bytes of all float32 scores, for each query, key, head and batch element."""
        w = self.workload
        return 4 * w.batch * w.q_heads * w.q_len * w.k_len

    @property
    def mask_bytes(self) -> int:
        """Bytes of a dense bool mask and of the additive mask that torch makes from it."""
        rows, heads = self.prepared.lowered.bounds.shape[:2]
        w = self.workload
        return int(rows * heads * w.q_len * w.k_len * (1 + self.q.element_size()))


@dataclass(frozen=True)
class Ready:
    """A peer, prepared for one job.

    Args:
        call: Computes the job once. It returns the output, or the output and the gradients of q, k and v.
        device: Device of the call.
        to_torch: Converts the result to tensors (B, H, S, D).
        trace_seconds: Time to trace on the host, if the peer traces before the first call.
        compile_seconds: Time of the peer's compiler. None means the first call minus a warm call.
        around: Makes a context manager around calls.
        note: Description of the code that runs.
    """

    call: Callable[[], Any]
    device: Device
    to_torch: Callable[[Any], Sequence[Tensor]] = lambda result: (
        result if isinstance(result, tuple | list) else (result,)
    )
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    note: str = ""


class Peer(Protocol):
    """An attention implementation with a unique name."""

    name: str

    def refuses(self, job: Job) -> str | None:
        """Return the reason why the peer cannot run the job, or None."""

    def prepare(self, job: Job) -> Ready:
        """Convert mask and inputs to the peer's own form. This step is not timed."""


def differentiated(forward: Forward, job: Job) -> Callable[[], Tensor | tuple[Tensor, ...]]:
    """Make the call of a torch peer: the forward pass on the job's inputs, or forward and gradients.

    Example:
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> call = differentiated(lambda q, k, v: q + k + v, Job.make(work, "forward+backward", "cpu"))
        >>> len(call())
        4
    """
    q, k, v, dout = job.q, job.k, job.v, job.dout
    if not job.backward:
        return lambda: forward(q, k, v)

    def both() -> tuple[Tensor, ...]:
        out = forward(q, k, v)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))

    return both


def enough_memory(job: Job, needed: float, what: str) -> str | None:
    """Return a reason if ``what`` needs more than half of the free memory, or None."""
    free = _free_bytes(job.device)
    if free is None or needed <= free / 2:
        return None
    return f"{what} would need {needed / 2**30:.1f} GiB of the {free / 2**30:.1f} GiB that are free"


def held_below(level: str | None = None, holders: Sequence[str] = ()) -> str | None:
    """Return a reason if ``ATTNSPAN_ISA`` limits attnspan to a lower instruction set than a peer, or None.

    Args:
        level: Highest instruction-set level of the peer. None means the machine's best.
        holders: Environment variables that limit the peer. If all are set, the peer counts as limited.

    Example:
        >>> held_below()
    """
    levels = cpu.isa_levels() if cpu.core is not None else []
    highest = level or (levels[-1] if levels else "")
    if highest not in levels or levels.index(cpu.isa()) >= levels.index(highest):
        return None
    missing = [name for name in holders if name not in os.environ]
    if holders and not missing:
        return None
    remedy = f"set {', '.join(missing)}" if missing else "no setting limits this peer"
    return f"attnspan is limited to {cpu.isa()} and this peer is not: {remedy}"


def _free_bytes(device: str) -> float | None:
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo") as lines:
            table = dict(line.split(":", 1) for line in lines)
    except OSError:  # Outside Linux, this file does not exist, and the peer runs.
        return None
    return float(table["MemAvailable"].split()[0]) * 1024
