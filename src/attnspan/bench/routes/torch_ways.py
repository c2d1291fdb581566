"""Routes within torch: eager, compiled, the kernel without any framework, and torch's own kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnspan.bench.devices import HostDevice, device_named
from attnspan.bench.peers.job import Job, differentiated
from attnspan.bench.routes.way import Opened
from attnspan.errors import BackendError
from attnspan.kernels import cpu
from attnspan.torch import attention, explain

__all__ = ["FixedBlocks", "Sdpa", "TorchCompile", "TorchEager"]


class TorchEager:
    """`attnspan.torch.attention`, called.

    Example:
        >>> TorchEager().name
        'torch-eager'
    """

    name = "torch-eager"
    what = "attnspan.torch.attention, eager"

    def refuses(self, job: Job) -> str | None:
        """None, or why no back end can do it.

        Args:
            job: What to compute.
        """
        return _refusal(job)

    def open(self, job: Job) -> Opened:
        """The mask is lowered once, as a model does it for all of its layers.

        Args:
            job: What to compute.
        """
        return Opened(differentiated(_forward(job), job), device_named(job.device), note=_note(job))


class TorchCompile:
    """The same under `torch.compile(fullgraph=True)`.

    Example:
        >>> TorchCompile().name
        'torch-compile'
    """

    name = "torch-compile"
    what = "attnspan.torch.attention, torch.compile"

    def refuses(self, job: Job) -> str | None:
        """None, or why no back end can do it.

        Args:
            job: What to compute.
        """
        return _refusal(job)

    def open(self, job: Job) -> Opened:
        """Nothing is compiled before the first call; caches on disk are left out, or it would not be cold.

        Args:
            job: What to compute.
        """
        compiled = torch.compile(
            _forward(job), fullgraph=True, dynamic=False, options={"fx_graph_cache": False}
        )
        call = differentiated(compiled, job)
        return Opened(call, device_named(job.device), compiler=_compiler_seconds, note=_note(job))


def _forward(job: Job) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    mask = job.prepared

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask)

    return forward


def _refusal(job: Job) -> str | None:
    try:
        found = explain(job.q, job.k, job.v, mask=job.prepared).backend
    except BackendError as error:
        return str(error)
    return "only the back end 'math' can do it here, which is not the kernel" if found == "math" else None


def _note(job: Job) -> str:
    return f"back end {explain(job.q, job.k, job.v, mask=job.prepared).backend}"


def _compiler_seconds() -> float:
    """What torch's compiler behind Dynamo has taken so far: everything after Python was traced."""
    from torch._dynamo.utils import calculate_time_spent

    spent: dict[str, float] = calculate_time_spent()
    return spent.get("backend_compile", 0.0) + spent.get("entire_backward_compile", 0.0)


class Sdpa:
    """torch's own `scaled_dot_product_attention`.

    Example:
        >>> Sdpa().name
        'torch-sdpa'
    """

    name = "torch-sdpa"
    what = "torch's scaled_dot_product_attention"

    def refuses(self, job: Job) -> str | None:
        """None, or that the mask is none that it takes without an array.

        Args:
            job: What to compute.
        """
        return None if job.is_full or job.is_causal else "it takes no mask but the full and the causal one"

    def open(self, job: Job) -> Opened:
        """Nothing but the flag.

        Args:
            job: What to compute.
        """
        is_causal = job.is_causal and not job.is_full

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=job.grouped)

        return Opened(differentiated(forward, job), device_named(job.device))


class FixedBlocks:
    """The CPU kernel without any framework, with given sizes of its blocks or with its own choice.

    Each instruction-set level has steps of its own: it runs the nearest sizes that it has, and the note says
    which.

    Args:
        block_q: Queries of a block; 0 is the kernel's choice.
        block_k: Keys of a block; 0 is the kernel's choice.

    Example:
        >>> FixedBlocks(128, 128).name, FixedBlocks(0, 0).what
        ('kernel-128x128', 'the CPU kernel itself, its own blocks')
    """

    def __init__(self, block_q: int, block_k: int) -> None:
        own = not block_q and not block_k
        self._config = None if own else {"block_q": block_q, "block_k": block_k, "threads": 0}
        self.name = "kernel" if own else f"kernel-{block_q}x{block_k}"
        self.what = (
            f"the CPU kernel itself, {'its own blocks' if own else f'blocks of {block_q} x {block_k}'}"
        )

    def refuses(self, job: Job) -> str | None:
        """None, or why the kernel cannot be called by itself.

        Args:
            job: What to compute.
        """
        if job.device != "cpu":
            return f"it runs on cpu, not on {job.device}"
        if job.backward:
            return "sizes of blocks are compared forward"
        return None if cpu.core is not None else "the compiled module is not built"

    def open(self, job: Job) -> Opened:
        """Allocate what a call writes in each call, as every other route does.

        Args:
            job: What to compute.
        """
        q, k, v = (x.detach() for x in (job.q, job.k, job.v))
        config = self._config and _nearest(self._config, str(q.dtype).removeprefix("torch."))
        bounds, scale = torch.as_tensor(job.prepared.lowered.bounds), job.workload.head_dim**-0.5

        def call() -> Any:
            out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), torch.empty(q.shape[:-1])
            cpu.forward(q, k, v, bounds, out, lse, scale=scale, num_threads=job.threads, config=config)
            return out

        sizes = f", blocks of {config['block_q']} x {config['block_k']}" if config else ""
        return Opened(call, HostDevice(), note=f"{cpu.isa()}{sizes}, threads: {job.threads}")


def _nearest(config: dict[str, int], dtype: str) -> dict[str, int]:
    """The sizes of blocks nearest to some, of those that the level in use has."""
    q_step, q_most, k_step, k_most, _ = cpu.core.blocks("forward", dtype)
    limits = {"block_q": (q_step, q_most), "block_k": (k_step, k_most)}
    nearest = {
        name: min(max(round(config[name] / step), 1) * step, most) for name, (step, most) in limits.items()
    }
    return {**config, **nearest}
