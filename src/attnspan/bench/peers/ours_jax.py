"""attnspan in JAX: the same library by its other front end, compiled ahead of the first call."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

from attnspan.bench.devices import JaxDevice
from attnspan.bench.peers.jax_peers import from_jax, start_jax, threads_note, to_jax
from attnspan.bench.peers.job import Job, Ready, enough_memory
from attnspan.errors import BackendError
from attnspan.masks import Prepared
from attnspan.spans import Spans

__all__ = ["AttnspanJax"]


class AttnspanJax:
    """`attnspan.jax.attention` under jit, with a mask that was lowered once and is an argument.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> AttnspanJax().refuses(Job.make(work, "forward", "cpu")) in (None, "jax is not installed")
        True
    """

    name = "attnspan-jax"

    def refuses(self, job: Job) -> str | None:
        """None, or why no back end of JAX can do it here.

        Args:
            job: What to compute.
        """
        if find_spec("jax") is None:
            return "jax is not installed"
        jax = start_jax(job.threads)
        wanted = "gpu" if job.device == "cuda" else job.device
        if jax.default_backend() != wanted:
            return f"JAX runs on {jax.default_backend()} here, not on {wanted}"
        try:
            backend = self._backend(job)
        except BackendError as error:
            return str(error)
        copies = 6 if job.backward else 3
        # The only one that stores scores; no call comes to it by itself.
        return enough_memory(job, copies * job.square_bytes, "the scores") if backend == "math" else None

    def prepare(self, job: Job) -> Ready:
        """Copy inputs to JAX, lower the mask, trace and compile.

        Args:
            job: What to compute.
        """
        jax = start_jax(job.threads)
        from attnspan.jax import attention

        def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
            return attention(q, k, v, mask=mask, layout="bshd")

        def both(q: Any, k: Any, v: Any, mask: Any, dout: Any) -> Any:
            out, pull = jax.vjp(lambda q, k, v: forward(q, k, v, mask), q, k, v)
            return (out, *pull(dout))

        arguments = [*(to_jax(x) for x in (job.q, job.k, job.v)), _mask(job)]
        arguments += [to_jax(job.dout)] if job.backward else []
        start = time.perf_counter()
        lowered = jax.jit(both if job.backward else forward).lower(*arguments)
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
        note = "; ".join(filter(None, (f"back end {self._backend(job)}", threads_note(job))))
        return Ready(
            lambda: compiled(*arguments),
            JaxDevice("cpu" if job.device == "cpu" else "gpu"),
            from_jax,
            trace_seconds=traced - start,
            compile_seconds=done - traced,
            note=note,
        )

    def _backend(self, job: Job) -> str:
        from attnspan.jax import explain

        arrays = (to_jax(x) for x in (job.q, job.k, job.v))
        return explain(*arrays, mask=_mask(job), layout="bshd").backend


def _mask(job: Job) -> Any:
    """The mask lowered once; on GPUs as an expression, which the kernels for a few masks know by name."""
    if job.device == "cuda":
        return job.mask
    import jax

    lowered = job.prepared.lowered
    return Prepared(Spans(jax.numpy.asarray(lowered.bounds.numpy()), lowered.k_len))
