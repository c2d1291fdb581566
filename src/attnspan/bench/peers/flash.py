"""The flash-attn package: CUDA, half precision, dense, causal, windowed and packed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnspan.bench.devices import device_named
from attnspan.bench.peers.job import Job, Ready, differentiated

__all__ = ["FlashAttn"]


class FlashAttn:
    """`flash_attn_func`, and `flash_attn_varlen_func` for packed documents.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> FlashAttn().refuses(Job.make(work, "forward", "cpu"))
        'it runs on CUDA devices, not on cpu'
    """

    name = "flash-attn"

    def refuses(self, job: Job) -> str | None:
        """None, or why it cannot do it.

        Args:
            job: What to compute.
        """
        if job.device != "cuda":
            return f"it runs on CUDA devices, not on {job.device}"
        if find_spec("flash_attn") is None:
            return "flash-attn is not installed"
        if job.workload.dtype == "float32":
            return "it takes bfloat16 and float16"
        if job.is_full or job.is_causal or job.window is not None or job.documents is not None:
            return None
        return "it cannot say the mask"

    def prepare(self, job: Job) -> Ready:
        """Boundaries of documents go to the device.

        Args:
            job: What to compute.
        """
        library = import_module("flash_attn")
        forward = _packed(library, job) if job.documents is not None else _plain(library, job)
        return Ready(differentiated(forward, job), device_named(job.device))


def _plain(library: Any, job: Job) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    window = job.window
    reach = (-1, -1) if window is None else (window.left, window.right)
    is_causal = job.is_causal and not job.is_full

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = library.flash_attn_func(*rows, causal=is_causal, window_size=reach)
        return out.transpose(1, 2)

    return forward


def _packed(library: Any, job: Job) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    assert job.documents is not None
    offsets = torch.tensor(job.documents, dtype=torch.int32, device=job.device)
    longest = int(offsets.diff().max())

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2)[0] for x in (q, k, v))
        out: Tensor = library.flash_attn_varlen_func(
            *rows, offsets, offsets, longest, longest, causal=job.documents_causal
        )
        return out[None].transpose(1, 2)

    return forward
