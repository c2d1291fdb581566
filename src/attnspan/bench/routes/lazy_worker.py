"""The process of the lazy route: reads a task from stdin, and writes routes as JSON to stdout.

It runs in an environment that has PyTorch/XLA and may have a torch too old for `attnspan.torch`, which is
therefore never imported here.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnspan.bench._plain import from_plain, to_plain
from attnspan.bench.cells import Workload
from attnspan.bench.devices import JaxDevice
from attnspan.bench.routes.findings import Route
from attnspan.bench.routes.lazy import LAZY, LAZY_PARTNER, WHAT
from attnspan.bench.routes.rounds import TINY_LENGTH, Settings, take_routes
from attnspan.bench.routes.way import Opened
from attnspan.bench.routes.xla_clock import compiler_seconds
from attnspan.bench.timing import Budget
from attnspan.bench.workloads import mask_of

__all__ = ["Inputs", "measure"]

# Norm of the difference over the norm, as for every other route.
_BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class Inputs:
    """A workload and its arrays, (B, H, S, D), float32 until a route casts them.

    Example:
        >>> work = Workload("two", "report", 1, 2, 2, 32, 32, 8, 8, "float32", "full")
        >>> [x.shape for x in Inputs.make(work, "forward").arrays[:1]]
        [(1, 2, 32, 8)]
    """

    workload: Workload
    mode: str
    arrays: tuple[np.ndarray, ...]

    @classmethod
    def make(cls, workload: Workload, mode: str) -> Inputs:
        """Draw q, k, v and the gradient of the output.

        Args:
            workload: Gives sizes.
            mode: "forward" or "forward+backward".
        """
        w, draw = workload, np.random.default_rng(0)
        shapes = (
            (w.q_heads, w.q_len, w.head_dim),
            (w.kv_heads, w.k_len, w.head_dim),
            (w.kv_heads, w.k_len, w.v_dim),
            (w.q_heads, w.q_len, w.v_dim),
        )
        arrays = tuple(draw.standard_normal((w.batch, *shape), np.float32) for shape in shapes)
        return cls(workload, mode, arrays)

    @property
    def backward(self) -> bool:
        """Whether gradients are wanted."""
        return self.mode == "forward+backward"


class _LazyDevice:
    """PyTorch/XLA's queue; a call traces, hands over its graph, and returns."""

    name = "xla"
    is_asynchronous = True
    is_ordered = True

    def synchronize(self, result: Any) -> None:
        import torch_xla.core.xla_model as xm

        del result
        xm.wait_device_ops()

    def is_idle(self, result: Any) -> bool:
        # The queue cannot be asked; it was waited for just before.
        del result
        return True

    def timer(self) -> None:
        return None


class _Lazy:
    name = LAZY
    what = WHAT

    def refuses(self, job: Inputs) -> str | None:
        del job
        return None

    def open(self, job: Inputs) -> Opened:
        import torch
        import torch_xla

        from attnspan.xla import attention

        dtype, device = getattr(torch, job.workload.dtype), torch_xla.device()
        *leaves, dout = (torch.from_numpy(x).to(device, dtype) for x in job.arrays)
        q, k, v = (x.requires_grad_(job.backward) for x in leaves)
        mask = mask_of(job.workload)

        retraces: list[float] = []

        def call() -> Any:
            start = time.perf_counter()
            out: Any = attention(q, k, v, mask=mask)
            found = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout)) if job.backward else (out,)
            retraces.append(time.perf_counter() - start)
            torch_xla.sync(wait=False)
            return found

        note = "a step after each call"
        return Opened(call, _LazyDevice(), _from_torch, _lazy_compiler_seconds, retraces, note)


def _from_torch(result: Sequence[Any]) -> tuple[np.ndarray, ...]:
    return tuple(x.float().cpu().numpy() for x in result)


def _lazy_compiler_seconds() -> float:
    import torch_xla.debug.metrics as metrics

    # Number of compilations, their total in ns, and samples; None before the first.
    found = metrics.metric_data("CompileTime")
    return float(found[1]) / 1e9 if found else 0.0


class _JaxBeside:
    name = LAZY_PARTNER
    what = "attnspan.jax.attention, jax.jit, beside PyTorch/XLA"

    def refuses(self, job: Inputs) -> str | None:
        del job
        return None

    def open(self, job: Inputs) -> Opened:
        import jax

        from attnspan.jax import attention

        mask = mask_of(job.workload)
        arrays = [jax.numpy.array(x, job.workload.dtype) for x in job.arrays]

        def attend(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, mask=mask, backend="xla")

        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, pull = jax.vjp(attend, q, k, v)
            return (out, *pull(dout))

        jitted, given = (jax.jit(both), arrays) if job.backward else (jax.jit(attend), arrays[:3])
        device = JaxDevice(jax.default_backend())
        note = f"back end xla, jax {jax.__version__}"
        return Opened(lambda: jitted(*given), device, _from_jax, compiler_seconds(), note=note)


def _from_jax(result: Any) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(x, np.float32) for x in (result if isinstance(result, tuple) else (result,)))


def measure(task: dict[str, Any]) -> tuple[Route, ...]:
    """Take the two routes of this environment.

    Args:
        task: As `lazy_routes` writes it.
    """
    workload, mode = from_plain(Workload, task["workload"], "workload"), task["mode"]
    settings = Settings(from_plain(Budget, task["budget"], "budget"), cold_calls=task["cold_calls"])
    tiny = replace(workload, q_len=TINY_LENGTH, k_len=TINY_LENGTH)
    expected: list[np.ndarray] = []

    def compare(found: Sequence[Any]) -> tuple[float, float]:
        if not expected:
            expected.extend(found)
        pairs = zip(expected, found, strict=True)
        errors = [float(np.linalg.norm(b - a) / np.linalg.norm(a)) for a, b in pairs]
        return float(np.max(errors)), _BOUNDS[workload.dtype]

    ways = (_JaxBeside(), _Lazy())
    return take_routes(ways, Inputs.make(tiny, mode), Inputs.make(workload, mode), compare, settings)


if __name__ == "__main__":
    print(json.dumps([to_plain(route) for route in measure(json.loads(sys.stdin.read()))]))
