"""Routes through JAX: attnspan under jit, the same from torch by the bridge, and JAX's own attention."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnspan.bench.devices import JaxDevice, device_named
from attnspan.bench.peers.jax_peers import start_jax, threads_note
from attnspan.bench.peers.job import Job, differentiated, enough_memory
from attnspan.bench.routes.way import Opened
from attnspan.bench.routes.xla_clock import compiler_seconds

__all__ = ["CallJax", "JaxJit", "JaxNn", "jax_refusal"]


class JaxJit:
    """`attnspan.jax.attention` under `jax.jit`.

    Args:
        backend: Name of a back end, or None for the library's choice.

    Example:
        >>> JaxJit().name, JaxJit("xla").name
        ('jax-jit', 'jax-jit-xla')
    """

    def __init__(self, backend: str | None = None) -> None:
        self._backend = backend
        self.name = "jax-jit" if backend is None else f"jax-jit-{backend}"
        self.what = "attnspan.jax.attention, jax.jit" + (f", back end {backend}" if backend else "")

    def refuses(self, job: Job) -> str | None:
        """None, or why JAX cannot do it here.

        Args:
            job: What to compute.
        """
        return jax_refusal(job)

    def open(self, job: Job) -> Opened:
        """A new function under jit: JAX knows nothing of it yet.

        Args:
            job: What to compute.
        """
        attend = _attend(job, self._backend)
        return _opened(job, attend, _to_jax, lambda x: x, _backend_note(job, self._backend))


class JaxNn:
    """`jax.nn.dot_product_attention` under `jax.jit`.

    Example:
        >>> JaxNn().name
        'jax-nn'
    """

    name = "jax-nn"
    what = "jax.nn.dot_product_attention, jax.jit"

    def refuses(self, job: Job) -> str | None:
        """None, or why it cannot do it.

        Args:
            job: What to compute.
        """
        if not (job.is_full or job.is_causal):
            return "it takes no mask but the full and the causal one without an array"
        refusal = jax_refusal(job)
        copies = 4 if job.backward else 2
        return refusal or enough_memory(job, copies * job.square_bytes, "the scores")

    def open(self, job: Job) -> Opened:
        """A new function under jit, on arrays in its own layout.

        Args:
            job: What to compute.
        """
        import jax

        is_causal = job.is_causal and not job.is_full

        def attend(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)

        return _opened(job, attend, lambda x: _to_jax(x.transpose(1, 2)), lambda x: x.transpose(1, 2))


class CallJax:
    """`attnspan.jax.attention` on torch tensors, by `attnspan.torch.call_jax`.

    Example:
        >>> CallJax().name
        'call-jax'
    """

    name = "call-jax"
    what = "the same JAX function from torch, call_jax"

    def refuses(self, job: Job) -> str | None:
        """None, or why it cannot be called here.

        Args:
            job: What to compute.
        """
        return jax_refusal(job)

    def open(self, job: Job) -> Opened:
        """A new JAX function: the bridge keeps nothing of it yet.

        Args:
            job: What to compute.
        """
        from attnspan.torch import call_jax

        attend = _attend(job, None)

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = call_jax(attend, q, k, v)
            return out

        call = differentiated(forward, job)
        return Opened(
            call, device_named(job.device), compiler=compiler_seconds(), note=_backend_note(job, None)
        )


def _attend(job: Job, backend: str | None) -> Callable[[Any, Any, Any], Any]:
    """attnspan in JAX as a new function, its mask lowered inside of what is traced."""
    from attnspan.jax import attention

    mask = job.mask

    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=mask, backend=backend)

    return attend


def _backend_note(job: Job, backend: str | None) -> str:
    from attnspan.jax import explain

    arrays = [_to_jax(x.detach()) for x in (job.q, job.k, job.v)]
    found = explain(*arrays, mask=job.mask, backend=backend).backend
    return "; ".join(filter(None, (f"back end {found}", threads_note(job))))


def jax_refusal(job: Job) -> str | None:
    """None, or why JAX cannot run a job here; starts JAX with as many threads as torch has.

    Args:
        job: What to compute.

    Example:
        >>> from attnspan.bench.cells import Workload
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> jax_refusal(Job.make(work, "forward", "cpu")) in (None, "jax is not installed")
        True
    """
    if find_spec("jax") is None:
        return "jax is not installed"
    runs, wanted = start_jax(job.threads).default_backend(), "gpu" if job.device == "cuda" else job.device
    return None if runs == wanted else f"JAX runs on {runs} here, not on {wanted}"


def _opened(
    job: Job,
    attend: Callable[[Any, Any, Any], Any],
    to_jax: Callable[[Tensor], Any],
    from_jax: Callable[[Tensor], Tensor],
    note: str = "",
) -> Opened:
    import jax

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return (out, *pull(dout))

    arrays = [to_jax(x.detach()) for x in (job.q, job.k, job.v, *((job.dout,) if job.backward else ()))]
    jitted = jax.jit(both if job.backward else attend)

    def to_torch(result: Any) -> tuple[Tensor, ...]:
        found = result if isinstance(result, tuple) else (result,)
        return tuple(from_jax(torch.from_numpy(np.array(x, np.float32))) for x in found)

    device = JaxDevice("cpu" if job.device == "cpu" else "gpu")
    return Opened(
        lambda: jitted(*arrays), device, to_torch, compiler_seconds(), note=note or threads_note(job)
    )


def _to_jax(x: Tensor) -> Any:
    """The same numbers as a JAX array of its own."""
    import jax

    rows = x.contiguous().cpu()
    if rows.dtype == torch.bfloat16:
        return jax.numpy.array(rows.view(torch.int16).numpy().view(jax.numpy.bfloat16))
    return jax.numpy.array(rows.numpy())
