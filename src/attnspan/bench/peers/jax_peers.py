"""JAX's `dot_product_attention` under jit, and tokamax's, which has the same arguments."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnspan.bench.devices import JaxDevice
from attnspan.bench.peers.job import Job, Ready, enough_memory

__all__ = ["JaxAttention", "from_jax", "start_jax", "threads_note", "to_jax"]


class JaxAttention:
    """A function like `jax.nn.dot_product_attention`, compiled ahead of the first call.

    Args:
        name: Of the peer.
        module: Package that must be installed, like "jax".
        path: Module of the function.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> job = Job.make(work, "forward", "cpu")
        >>> JaxAttention("absent", "absent_package", "absent_package").refuses(job)
        'absent_package is not installed'
    """

    def __init__(self, name: str, module: str, path: str) -> None:
        self.name = name
        self._module = module
        self._path = path

    def refuses(self, job: Job) -> str | None:
        """None, or why it cannot do it.

        Args:
            job: What to compute.
        """
        for name in ("jax", self._module):
            if find_spec(name) is None:
                return f"{name} is not installed"
        jax = start_jax(job.threads)
        wanted = "gpu" if job.device == "cuda" else job.device
        if jax.default_backend() != wanted:
            return f"JAX runs on {jax.default_backend()} here, not on {wanted}"
        # XLA stores the scores and the probabilities; the backward pass their gradients too.
        copies = 4 if job.backward else 2
        return enough_memory(job, copies * job.square_bytes, "the scores")

    def prepare(self, job: Job) -> Ready:
        """Copy inputs to JAX, build its mask, trace and compile.

        Args:
            job: What to compute.
        """
        jax = start_jax(job.threads)
        attend = _with_mask(import_module(self._path).dot_product_attention, job)

        def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return attend(q, k, v, mask)

        def both(q: Any, k: Any, v: Any, mask: Any, dout: Any) -> Any:
            out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
            return (out, *pull(dout))

        plain = job.is_full or job.is_causal or job.window is not None
        arrays = [to_jax(x) for x in (job.q, job.k, job.v)]
        arrays.append(None if plain else jax.numpy.asarray(job.dense_mask().cpu().numpy()))
        arrays += [to_jax(job.dout)] if job.backward else []
        start = time.perf_counter()
        lowered = jax.jit(both if job.backward else forward).lower(*arrays)
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
        return Ready(
            lambda: compiled(*arrays),
            JaxDevice("cpu" if job.device == "cpu" else "gpu"),
            from_jax,
            trace_seconds=traced - start,
            compile_seconds=done - traced,
            note=threads_note(job),
        )


def _with_mask(attention: Callable[..., Any], job: Job) -> Callable[..., Any]:
    """The call with the mask in the shortest form that the function has for it."""
    if job.is_full:
        return lambda q, k, v, mask: attention(q, k, v)  # noqa: ARG005 (one signature for all)
    if job.is_causal:
        return lambda q, k, v, mask: attention(q, k, v, is_causal=True)  # noqa: ARG005
    if job.window is not None:
        reach = (job.window.left, job.window.right)
        return lambda q, k, v, mask: attention(q, k, v, local_window_size=reach)  # noqa: ARG005
    return lambda q, k, v, mask: attention(q, k, v, mask=mask)


_started_with: int | None = None


def start_jax(threads: int) -> Any:
    """JAX, its pool of threads as large as torch's where that can still be chosen: it is sized at the start.

    Args:
        threads: Of torch.

    Example:
        >>> import pytest
        >>> _ = pytest.importorskip("jax")
        >>> start_jax(1).__name__
        'jax'
    """
    global _started_with
    if "jax" not in sys.modules or _started_with is None:
        fresh = "jax" not in sys.modules
        before = os.environ.get("NPROC")
        os.environ["NPROC"] = str(threads)
        # Half of the device's memory taken ahead would leave too little to the other peers.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        try:
            jax = import_module("jax")
            jax.devices()
        finally:
            if before is None:
                del os.environ["NPROC"]
            else:
                os.environ["NPROC"] = before
        _started_with = threads if fresh else 0
        return jax
    return import_module("jax")


def threads_note(job: Job) -> str:
    """Empty, or that JAX had been running before its threads could be chosen.

    Args:
        job: Says how many there should be.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> "already running" in (threads_note(Job.make(work, "forward", "cpu")) or "already running")
        True
    """
    if job.device != "cpu" or _started_with == job.threads:
        return ""
    return f"its own number of threads, not {job.threads}: JAX was already running"


def to_jax(x: Tensor) -> Any:
    """(B, H, S, D) to JAX's (B, S, H, D), which is how it lies in memory.

    Args:
        x: Any tensor of four dims.

    Example:
        >>> import pytest
        >>> _ = pytest.importorskip("jax")
        >>> to_jax(torch.zeros(1, 2, 3, 4)).shape
        (1, 3, 2, 4)
    """
    import jax

    rows = x.detach().transpose(1, 2).contiguous().cpu()
    if rows.dtype == torch.bfloat16:
        return jax.numpy.asarray(rows.view(torch.int16).numpy().view(jax.numpy.bfloat16))
    return jax.numpy.asarray(rows.numpy())


def from_jax(result: Any) -> tuple[Tensor, ...]:
    """Arrays (B, S, H, D) to float32 tensors (B, H, S, D).

    Args:
        result: An array, or several.

    Example:
        >>> import numpy as np
        >>> [x.shape for x in from_jax(np.zeros((1, 3, 2, 4)))]
        [torch.Size([1, 2, 3, 4])]
    """
    import numpy as np

    arrays = result if isinstance(result, tuple | list) else (result,)
    return tuple(torch.from_numpy(np.array(x, dtype=np.float32)).transpose(1, 2) for x in arrays)
