"""JAX peers, compiled before the first call: attnspan's JAX interface, jax.nn's attention and tokamax."""

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

from attnspan.errors import BackendError
from attnspan.masks import Prepared
from attnspan.masks.bounds import Spans
from attnspan_lab.bench.devices import JaxDevice
from attnspan_lab.bench.peers.job import Job, Ready, enough_memory

__all__ = ["AttnspanJax", "JaxAttention", "start_jax"]


class JaxAttention:
    """A function like `jax.nn.dot_product_attention`.

    Args:
        name: Name of the peer, and of the package that must be installed.
        module: Module that contains the function.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._module = module

    def refuses(self, job: Job) -> str | None:
        # XLA stores the scores and the probabilities. The backward pass also stores their gradients.
        copies = 4 if job.backward else 2
        return _missing(job, self.name) or enough_memory(job, copies * job.square_bytes, "the scores")

    def prepare(self, job: Job) -> Ready:
        jax = start_jax(job.threads)
        attend = _with_mask(import_module(self._module).dot_product_attention, job)
        plain = job.is_full or job.is_causal or job.window is not None
        mask = None if plain else jax.numpy.asarray(job.dense_mask().cpu().numpy())
        return _compiled(attend, mask, job, _threads_note(job))


class AttnspanJax:
    """`attnspan.jax.attention` under jit. The mask is lowered once and passed as an argument."""

    name = "attnspan-jax"

    def refuses(self, job: Job) -> str | None:
        if missing := _missing(job, "jax"):
            return missing
        try:
            backend = self._backend(job)
        except BackendError as error:
            return str(error)
        copies = 6 if job.backward else 3
        # Only this backend stores scores. It runs only if it is requested.
        return enough_memory(job, copies * job.square_bytes, "the scores") if backend == "math" else None

    def prepare(self, job: Job) -> Ready:
        start_jax(job.threads)
        from attnspan.jax import attention

        def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return attention(q, k, v, mask=mask, layout="bshd")

        note = "; ".join(filter(None, (f"backend {self._backend(job)}", _threads_note(job))))
        return _compiled(forward, _lowered(job), job, note)

    def _backend(self, job: Job) -> str:
        from attnspan.jax import explain

        arrays = (_to_jax(x) for x in (job.q, job.k, job.v))
        return explain(*arrays, mask=_lowered(job), layout="bshd").backend


def _missing(job: Job, package: str) -> str | None:
    for name in ("jax", package):
        if find_spec(name) is None:
            return f"{name} is not installed"
    jax, wanted = start_jax(job.threads), "gpu" if job.device == "cuda" else job.device
    found = jax.default_backend()
    return None if found == wanted else f"JAX runs on {found} here, not on {wanted}"


def _lowered(job: Job) -> Any:
    """Lower the mask once. On GPUs, keep the expression: vendor kernels recognize a few kinds of masks."""
    if job.device == "cuda":
        return job.mask
    import jax

    lowered = job.prepared.lowered
    return Prepared(Spans(jax.numpy.asarray(lowered.bounds.numpy()), lowered.k_len))


def _with_mask(attention: Callable[..., Any], job: Job) -> Callable[..., Any]:
    """Pass the mask in the shortest form that the function supports."""
    given: dict[str, Any] | None = None
    if job.is_full:
        given = {}
    elif job.is_causal:
        given = {"is_causal": True}
    elif job.window is not None:
        given = {"local_window_size": (job.window.left, job.window.right)}
    return lambda q, k, v, mask: attention(q, k, v, **({"mask": mask} if given is None else given))


def _compiled(attend: Callable[..., Any], mask: Any, job: Job, note: str) -> Ready:
    """Trace and compile a function of q, k, v (B, S, H, D) and a mask, or its value and gradients."""
    jax = start_jax(job.threads)

    def both(q: Any, k: Any, v: Any, mask: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
        return (out, *pull(dout))

    arrays = [*map(_to_jax, (job.q, job.k, job.v)), mask]
    arrays += [_to_jax(job.dout)] if job.backward else []
    start = time.perf_counter()
    lowered = jax.jit(both if job.backward else attend).lower(*arrays)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    device = JaxDevice("cpu" if job.device == "cpu" else "gpu")
    return Ready(lambda: compiled(*arrays), device, _from_jax, traced - start, done - traced, note=note)


_started_with: int | None = None


def start_jax(threads: int) -> Any:
    """Start JAX with torch's number of threads, unless it is running: JAX sizes its pool at the start."""
    global _started_with
    if "jax" not in sys.modules or _started_with is None:
        fresh = "jax" not in sys.modules
        before = os.environ.get("NPROC")
        os.environ["NPROC"] = str(threads)
        # Without this, JAX would reserve most of the device's memory and leave too little for other peers.
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


def _threads_note(job: Job) -> str:
    """Return a note if JAX was running before its number of threads could be set, or else ""."""
    if job.device != "cpu" or _started_with == job.threads:
        return ""
    return f"its own number of threads, not {job.threads}: JAX was already running"


def _to_jax(x: Tensor) -> Any:
    """Convert (B, H, S, D) to JAX's (B, S, H, D), which is the layout in memory."""
    import jax

    rows = x.detach().transpose(1, 2).contiguous().cpu()
    if rows.dtype == torch.bfloat16:
        return jax.numpy.asarray(rows.view(torch.int16).numpy().view(jax.numpy.bfloat16))
    return jax.numpy.asarray(rows.numpy())


def _from_jax(result: Any) -> tuple[Tensor, ...]:
    """Convert arrays (B, S, H, D) to float32 tensors (B, H, S, D)."""
    import numpy as np

    arrays = result if isinstance(result, tuple | list) else (result,)
    return tuple(torch.from_numpy(np.array(x, dtype=np.float32)).transpose(1, 2) for x in arrays)
