"""torch peers: attnspan itself, `scaled_dot_product_attention` in three ways, and flash-attn."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnspan.errors import BackendError
from attnspan.kernels import Explanation
from attnspan.torch import attention, explain
from attnspan_lab.bench.devices import device_named
from attnspan_lab.bench.peers.job import Forward, Job, Ready, differentiated, enough_memory

__all__ = ["Attnspan", "DenseMask", "FlashAttn", "FusedKernel", "PerDocument"]

_CUDA_CHECKS = {
    SDPBackend.FLASH_ATTENTION: "can_use_flash_attention",
    SDPBackend.EFFICIENT_ATTENTION: "can_use_efficient_attention",
    SDPBackend.CUDNN_ATTENTION: "can_use_cudnn_attention",
}


class _TorchPeer:
    """A peer that is a function of q, k and v (B, H, S, D). torch differentiates it."""

    def forward(self, job: Job) -> Forward:
        raise NotImplementedError

    def prepare(self, job: Job) -> Ready:
        return Ready(differentiated(self.forward(job), job), device_named(job.device))


class Attnspan(_TorchPeer):
    """attnspan with a mask that is prepared once, on the backend that `explain` names or a given backend."""

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self.name = "attnspan" if backend is None else f"attnspan-{backend}"

    def refuses(self, job: Job) -> str | None:
        try:
            backend = self._found(job).backend
        except BackendError as error:
            return str(error)
        # "math" stores scores, probabilities and their gradients.
        copies = 6 if job.backward else 3
        what = "the scores of its backend 'math'"
        return enough_memory(job, copies * job.square_bytes, what) if backend == "math" else None

    def forward(self, job: Job) -> Forward:
        # Pass the backend only to avoid a warning: otherwise its choice is part of a call's cost.
        backend = "math" if self._found(job).backend == "math" else self.backend
        return partial(attention, mask=job.prepared, backend=backend)

    def prepare(self, job: Job) -> Ready:
        found = self._found(job)
        note = ", ".join(filter(None, (f"backend {found.backend}", found.isa, found.kernel)))
        return replace(super().prepare(job), note=note)

    def _found(self, job: Job) -> Explanation:
        return explain(job.q, job.k, job.v, mask=job.prepared, backend=self.backend)


class FusedKernel(_TorchPeer):
    """One of torch's fused kernels, for the masks that it supports without an array."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name = name
        self._backend = backend

    def refuses(self, job: Job) -> str | None:
        if not (job.is_full or job.is_causal):
            return "it supports only full masks and causal masks with Sq = Sk"
        if job.device == "cuda":
            return _cuda_refusal(job, self._backend)
        if self._backend != SDPBackend.FLASH_ATTENTION:
            return f"it runs on CUDA devices, not on {job.device}"
        choice = torch._fused_sdp_choice(
            job.q, job.k, job.v, None, 0.0, job.needs_causal_flag, enable_gqa=job.grouped
        )
        chosen = SDPBackend(choice)
        return None if chosen == self._backend else f"torch takes {chosen.name} instead"

    def forward(self, job: Job) -> Forward:
        return partial(sdpa, is_causal=job.needs_causal_flag, enable_gqa=job.grouped)

    def prepare(self, job: Job) -> Ready:
        ready = super().prepare(job)
        # On CPU the kernel was checked before, and a context would slow down short calls.
        return replace(ready, around=lambda: sdpa_kernel(self._backend)) if job.device == "cuda" else ready


def _cuda_refusal(job: Job, backend: SDPBackend) -> str | None:
    """Return torch's own reason for not using the kernel."""
    inputs = (job.q, job.k, job.v, None, 0.0, job.needs_causal_flag, job.grouped)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if getattr(torch.backends.cuda, _CUDA_CHECKS[backend])(torch.backends.cuda.SDPAParams(*inputs), True):
            return None
    reasons = [str(entry.message).split(" (Triggered")[0] for entry in said]
    return reasons[0] if reasons else "torch does not use it for these inputs"


class DenseMask(_TorchPeer):
    """SDPA with a dense bool mask, which is torch's only form for arbitrary masks."""

    name = "sdpa-dense-mask"

    def refuses(self, job: Job) -> str | None:
        if job.is_full:
            return "there is nothing to mask"
        return enough_memory(job, job.mask_bytes, "a dense mask")

    def forward(self, job: Job) -> Forward:
        return partial(sdpa, attn_mask=job.dense_mask(), enable_gqa=job.grouped)


class PerDocument(_TorchPeer):
    """SDPA called once for each document, with joined results, as users write it to avoid a dense mask."""

    name = "sdpa-per-document"

    def refuses(self, job: Job) -> str | None:
        return None if job.documents is not None else "the mask is no document mask"

    def forward(self, job: Job) -> Forward:
        assert job.documents is not None
        parts = [slice(start, stop) for start, stop in pairwise(job.documents) if stop > start]
        options = {"is_causal": job.documents_causal, "enable_gqa": job.grouped}

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat(
                [sdpa(q[:, :, x], k[:, :, x], v[:, :, x], **options) for x in parts],  # type: ignore[arg-type]
                dim=2,
            )

        return forward


class FlashAttn(_TorchPeer):
    """FlashAttention's own package: CUDA, half precision, dense, causal, windowed and packed.

    Args:
        name: Name of the peer.
        module: Module with the functions. Each generation has its own.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name, self._module = name, module

    def refuses(self, job: Job) -> str | None:
        if job.device != "cuda":
            return f"it runs on CUDA devices, not on {job.device}"
        if not _is_installed(self._module):
            return f"{self._module} is not installed"
        if job.workload.dtype == "float32":
            return "it supports only bfloat16 and float16"
        known = job.is_full or job.is_causal or job.window is not None or job.documents is not None
        return None if known else "it does not support this mask"

    def forward(self, job: Job) -> Forward:
        return (_packed if job.documents is not None else _plain)(job, import_module(self._module))


def _is_installed(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or find_spec(parent) is not None) and find_spec(module) is not None


def _output(found: Any) -> Tensor:
    """Take the output of a result. Some versions also return the log-sum-exp."""
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def _plain(job: Job, module: Any) -> Forward:
    none = None if module.__name__.endswith(".cute") else -1
    sides = (None, None) if job.window is None else (job.window.left, job.window.right)
    reach = tuple(none if side is None else side for side in sides)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out = module.flash_attn_func(*rows, causal=job.needs_causal_flag, window_size=reach)
        return _output(out).transpose(1, 2)

    return forward


def _packed(job: Job, module: Any) -> Forward:
    assert job.documents is not None
    offsets = torch.tensor(job.documents, dtype=torch.int32, device=job.device)
    longest = int(offsets.diff().max())

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.transpose(1, 2)[0] for x in (q, k, v))
        ends = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        sizes = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        out = module.flash_attn_varlen_func(*rows, **ends, **sizes, causal=job.documents_causal)
        return _output(out)[None].transpose(1, 2)

    return forward
