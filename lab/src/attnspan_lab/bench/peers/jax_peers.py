"""Peers of JAX, compiled ahead of the first call: attnspan's own front end, jax.nn's attention, tokamax's."""

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
        name: Of the peer, and of the package that must be installed.
        module: Where the function is.
    """

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._module = module

    def refuses(self, job: Job) -> str | None:
        # XLA stores the scores and the probabilities; the backward pass their gradients too.
        copies = 4 if job.backward else 2
        return _missing(job, self.name) or enough_memory(job, copies * job.square_bytes, "the scores")

    def prepare(self, job: Job) -> Ready:
        jax = start_jax(job.threads)
        attend = _with_mask(import_module(self._module).dot_product_attention, job)
        plain = job.is_full or job.is_causal or job.window is not None
        mask = None if plain else jax.numpy.asarray(job.dense_mask().cpu().numpy())
        return _compiled(attend, mask, job, _threads_note(job))


class AttnspanJax:
    """`attnspan.jax.attention` under jit, with a mask that was lowered once and is an argument."""

    name = "attnspan-jax"

    def refuses(self, job: Job) -> str | None:
        if missing := _missing(job, "jax"):
            return missing
        try:
            backend = self._backend(job)
        except BackendError as error:
            return str(error)
        copies = 6 if job.backward else 3
        # The only one that stores scores; no call comes to it by itself.
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
    """The mask lowered once; on GPUs as an expression, which the kernels for a few masks know by name."""
    if job.device == "cuda":
        return job.mask
    import jax

    lowered = job.prepared.lowered
    return Prepared(Spans(jax.numpy.asarray(lowered.bounds.numpy()), lowered.k_len))


def _with_mask(attention: Callable[..., Any], job: Job) -> Callable[..., Any]:
    """The call with the mask in the shortest form that the function has for it."""
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

    arrays = [
        *(_to_jax(x) for x in (job.q, job.k, job.v)),
        mask,
        *([_to_jax(job.dout)] if job.backward else []),
    ]
    start = time.perf_counter()
    lowered = jax.jit(both if job.backward else attend).lower(*arrays)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    device = JaxDevice("cpu" if job.device == "cpu" else "gpu")
    return Ready(lambda: compiled(*arrays), device, _from_jax, traced - start, done - traced, note=note)


_started_with: int | None = None


def start_jax(threads: int) -> Any:
    """JAX, with as many threads as torch if it was not running: its pool is sized at the start."""
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


def _threads_note(job: Job) -> str:
    """Empty, or that JAX had been running before its threads could be chosen."""
    if job.device != "cpu" or _started_with == job.threads:
        return ""
    return f"its own number of threads, not {job.threads}: JAX was already running"


def _to_jax(x: Tensor) -> Any:
    """(B, H, S, D) to JAX's (B, S, H, D), which is how it lies in memory."""
    import jax

    rows = x.detach().transpose(1, 2).contiguous().cpu()
    if rows.dtype == torch.bfloat16:
        return jax.numpy.asarray(rows.view(torch.int16).numpy().view(jax.numpy.bfloat16))
    return jax.numpy.asarray(rows.numpy())


def _from_jax(result: Any) -> tuple[Tensor, ...]:
    """Arrays (B, S, H, D) to float32 tensors (B, H, S, D)."""
    import numpy as np

    arrays = result if isinstance(result, tuple | list) else (result,)
    return tuple(torch.from_numpy(np.array(x, dtype=np.float32)).transpose(1, 2) for x in arrays)
