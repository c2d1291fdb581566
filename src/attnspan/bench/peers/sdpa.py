"""torch's `scaled_dot_product_attention`: kernel by kernel, with a dense mask, and document by document."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnspan.bench.devices import device_named
from attnspan.bench.peers.job import Job, Ready, differentiated, enough_memory

__all__ = ["DenseMask", "FusedKernel", "PerDocument"]

_CUDA_CHECKS = {
    SDPBackend.FLASH_ATTENTION: "can_use_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "can_use_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "can_use_cudnn_attention",
}


class FusedKernel:
    """One of torch's fused kernels, for the masks that it takes without an array.

    Args:
        name: Of the peer.
        backend: The kernel.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("four", "window", 1, 2, 2, 4, 4, 8, 8, "float32", "window(2)")
        >>> FusedKernel("sdpa-flash", SDPBackend.FLASH_ATTENTION).refuses(Job.make(work, "forward", "cpu"))
        'it takes no mask but the full and the square causal one'
    """

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name = name
        self._backend = backend

    def refuses(self, job: Job) -> str | None:
        """None, or why the kernel cannot do it.

        Args:
            job: What to compute.
        """
        if not (job.is_full or job.is_causal):
            return "it takes no mask but the full and the square causal one"
        if job.device == "cuda":
            return _cuda_refusal(job, self._backend)
        if self._backend != SDPBackend.FLASH_ATTENTION:
            return f"it runs on CUDA devices, not on {job.device}"
        chosen = SDPBackend(
            torch._fused_sdp_choice(
                job.q, job.k, job.v, None, 0.0, job.is_causal and not job.is_full, enable_gqa=job.grouped
            )
        )
        return None if chosen == self._backend else f"torch takes {chosen.name} instead"

    def prepare(self, job: Job) -> Ready:
        """Nothing but the flag.

        Args:
            job: What to compute.
        """
        is_causal = job.is_causal and not job.is_full

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v, is_causal=is_causal, enable_gqa=job.grouped)

        # On CPU the choice was checked, and a context would weigh on the shortest calls.
        around: Callable[[], Any] | None = (
            (lambda: sdpa_kernel(self._backend)) if job.device == "cuda" else None
        )
        ready = Ready(differentiated(forward, job), device_named(job.device))
        return ready if around is None else Ready(ready.call, ready.device, around=around)


def _cuda_refusal(job: Job, backend: SDPBackend) -> str | None:
    """Why torch would not take the kernel, in its own words."""
    params = torch.backends.cuda.SDPAParams(
        job.q, job.k, job.v, None, 0.0, job.is_causal and not job.is_full, job.grouped
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if getattr(torch.backends.cuda, _CUDA_CHECKS[backend])(params, True):
            return None
    reasons = [str(entry.message).split(" (Triggered")[0] for entry in said]
    return reasons[0] if reasons else "torch does not take it for these inputs"


class DenseMask:
    """SDPA with a bool mask of every pair: torch's only way to say any mask.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("four", "dense", 1, 2, 2, 4, 4, 8, 8, "float32", "full")
        >>> DenseMask().refuses(Job.make(work, "forward", "cpu"))
        'there is nothing to mask'
    """

    name = "sdpa-dense-mask"

    def refuses(self, job: Job) -> str | None:
        """None, or why a dense mask makes no sense or does not fit.

        Args:
            job: What to compute.
        """
        if job.is_full:
            return "there is nothing to mask"
        return enough_memory(job, job.mask_bytes, "a dense mask")

    def prepare(self, job: Job) -> Ready:
        """Build the mask.

        Args:
            job: What to compute.
        """
        mask = job.dense_mask()

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v, attn_mask=mask, enable_gqa=job.grouped)

        return Ready(differentiated(forward, job), device_named(job.device))


class PerDocument:
    """SDPA called once for each document, the results joined: what users write who need no dense mask.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("four", "documents", 1, 2, 2, 4, 4, 8, 8, "float32", "causal & packed(2)")
        >>> job = Job.make(work, "forward", "cpu")
        >>> PerDocument().refuses(job), PerDocument().prepare(job).call().shape
        (None, torch.Size([1, 2, 4, 8]))
    """

    name = "sdpa-per-document"

    def refuses(self, job: Job) -> str | None:
        """None, or that the mask is not made of documents.

        Args:
            job: What to compute.
        """
        return None if job.documents is not None else "the mask is not made of packed documents"

    def prepare(self, job: Job) -> Ready:
        """Keep the boundaries as Python numbers.

        Args:
            job: What to compute.
        """
        offsets = job.documents
        assert offsets is not None
        parts = [slice(start, stop) for start, stop in pairwise(offsets) if stop > start]

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = [
                sdpa(
                    q[:, :, part],
                    k[:, :, part],
                    v[:, :, part],
                    is_causal=job.documents_causal,
                    enable_gqa=job.grouped,
                )
                for part in parts
            ]
            return torch.cat(out, dim=2)

        return Ready(differentiated(forward, job), device_named(job.device), note=f"{len(parts)} calls")
