"""The routes: from torch, from JAX, and the kernel without a framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from _routes import DIM, AbsentError, Open, Opened, Problem

from attnspan_lab.bench.devices import JaxDevice, device_named

# Routes from torch.


def through_torch(problem: Problem, forward: Callable[..., Any], where: Any = None, **more: Any) -> Opened:
    """Open a torch function on tensors of a device. Default: the problem's device. `more` sets `Opened`."""
    import torch

    dtype = getattr(torch, problem.dtype)
    arrays = [torch.from_numpy(x).to(where or problem.device, dtype) for x in problem.arrays()]
    inputs, dout = [x.requires_grad_(problem.backward) for x in arrays[:3]], arrays[3:]

    def call() -> tuple[Any, ...]:
        out = forward(*inputs)
        return (out, *torch.autograd.grad(out, inputs, dout)) if dout else (out,)

    return Opened(call, **{"device": device_named(problem.device), **more})


def torch_eager(problem: Problem) -> Opened:
    """`attnspan.torch.attention` with its kernel: plain framework code would be another comparison."""
    from attnspan.torch import attention

    return through_torch(problem, partial(attention, backend="cpu"))


def torch_compile(problem: Problem) -> Opened:
    """`attnspan.torch.attention` under `torch.compile(fullgraph=True)`, without disk caches (never cold)."""
    import torch

    from attnspan.torch import attention

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, backend="cpu")

    options = {"fx_graph_cache": False}
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, options=options)
    return through_torch(problem, compiled, compiler=_torch_compiler_seconds)


def _torch_compiler_seconds() -> float:
    """Return the seconds of the compiler after Dynamo has traced Python."""
    from torch._dynamo.utils import calculate_time_spent

    spent = calculate_time_spent()
    return float(spent.get("backend_compile", 0.0) + spent.get("entire_backward_compile", 0.0))


def torch_sdpa(problem: Problem) -> Opened:
    """Torch's own attention."""
    from torch.nn.functional import scaled_dot_product_attention

    return through_torch(problem, scaled_dot_product_attention)


def kernel(block_q: int, block_k: int) -> Open:
    """The CPU kernel without a framework, with the nearest available block sizes. 0: its own choice."""

    def start(problem: Problem) -> Opened:
        import torch

        from attnspan import full
        from attnspan.kernels import cpu

        if problem.device != "cpu" or problem.backward or cpu.core is None:
            raise AbsentError("block sizes are compared only on CPU, forward, with the compiled module")
        q, k, v = (torch.from_numpy(x).to(getattr(torch, problem.dtype)) for x in problem.arrays())
        n = problem.length
        bounds, threads = torch.tensor(full().spans(n, n).bounds), torch.get_num_threads()
        q_step, q_most, k_step, k_most, _ = cpu.core.blocks("forward", problem.dtype)
        sizes = (block_q, q_step, q_most), (block_k, k_step, k_most)
        near = [size and min(max(round(size / step), 1) * step, most) for size, step, most in sizes]
        config = dict(zip(("block_q", "block_k", "threads"), (*near, 0), strict=True))

        def call() -> Any:
            out, lse = torch.empty_like(v), torch.empty(q.shape[:-1])
            cpu.forward(q, k, v, bounds, out, lse, scale=DIM**-0.5, num_threads=threads, config=config)
            return (out,)

        return Opened(call)

    return start


# Routes from JAX.


def _jax(problem: Problem) -> Any:
    """Start JAX with torch's number of threads."""
    if find_spec("jax") is None:
        raise AbsentError("jax is not installed")
    import torch

    from attnspan_lab.bench.peers.jax_peers import start_jax

    jax, wanted = start_jax(torch.get_num_threads()), {"cuda": "gpu"}.get(problem.device, problem.device)
    if jax.default_backend() != wanted:
        raise AbsentError(f"JAX runs on {jax.default_backend()} here, not on {wanted}")
    return jax


def through_jax(
    jax: Any, problem: Problem, attend: Callable[..., Any], axes: Sequence[int] = (0, 1, 2, 3)
) -> Opened:
    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return (out, *pull(dout))

    arrays = [jax.numpy.array(x.transpose(axes), problem.dtype) for x in problem.arrays()]
    jitted = jax.jit(both) if problem.backward else jax.jit(lambda *x: (attend(*x),))
    return Opened(
        lambda: jitted(*arrays),
        JaxDevice(jax.default_backend()),
        lambda found: [np.asarray(x, np.float32).transpose(axes) for x in found],
        _xla_seconds(),
    )


@cache
def _xla_seconds() -> Callable[[], float]:
    """Count the seconds of XLA's compilation for JAX, from the first use of this counter."""
    import jax

    spent = [0.0]

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        spent[0] += duration_secs if event == "/jax/core/compile/backend_compile_duration" else 0.0

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: spent[0]


def new_function(backend: str | None = None) -> Callable[..., Any]:
    """Make a new function, so that JAX has nothing cached."""
    from attnspan.jax import attention

    return lambda q, k, v: attention(q, k, v, backend=backend)


def jax_jit(backend: str | None = None) -> Open:
    """`attnspan.jax.attention` under jit."""
    return lambda problem: through_jax(_jax(problem), problem, new_function(backend))


def jax_nn(problem: Problem) -> Opened:
    """JAX's own attention under jit, in its own layout."""
    jax = _jax(problem)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v)

    return through_jax(jax, problem, attend, (0, 2, 1, 3))


def through_bridge(problem: Problem) -> Opened:
    """The JAX function on torch tensors, through `call_jax`."""
    _jax(problem)
    from attnspan.torch import call_jax

    attend = new_function()
    return through_torch(problem, lambda q, k, v: call_jax(attend, q, k, v), compiler=_xla_seconds())


ROUTES: dict[str, Open] = {
    "torch-eager": torch_eager,
    "torch-compile": torch_compile,
    "jax-jit": jax_jit(),
    "call-jax": through_bridge,
    "kernel": kernel(0, 0),
    "kernel-32x64": kernel(32, 64),
    "kernel-128x128": kernel(128, 128),
    "kernel-512x512": kernel(512, 512),
    "jax-jit-xla": jax_jit("xla"),
    "torch-sdpa": torch_sdpa,
    "jax-nn": jax_nn,
}
