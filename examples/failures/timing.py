"""Failure 3: one kernel, measured from PyTorch and from JAX, and called slower in one of them.

    python examples/failures/timing.py

attnspan calls one CPU kernel from torch, from JAX, and from torch through `call_jax`. This program measures
that kernel with three mistakes, one at a time. Each can make one framework look slower than the other:

- The first call is in the mean, so compiling or tracing is counted.
- Each call gets fresh inputs, so the time to make random inputs is counted.
- The program waits for each call, so the way there and back is counted for each call.

The last line is right: medians of warm calls, the frameworks in turn, and one wait for several calls. The
second table shows what block sizes do to the kernel's time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from report import medians, seconds, show

import attnspan.jax
import attnspan.torch
from attnspan.call.call import Problem
from attnspan.kernels import cpu

SHAPE = (1, 5, 512, 64)  # the reported shape is (1, 5, 16384, 128), which takes a CPU seconds
CALLS = 8
jax_attention = jax.jit(attnspan.jax.attention)


@dataclass(frozen=True)
class Way:
    """A way to the kernel."""

    call: Callable[..., Any]
    fresh: Callable[[], list[Any]]  # makes new inputs
    wait: Callable[[Any], Any]  # waits for a result, or for a list of results


def tensors() -> list[torch.Tensor]:
    return [torch.randn(SHAPE) for _ in range(3)]


def returned(result: Any) -> Any:
    return result  # torch has computed a CPU tensor when the call returns


def arrays() -> list[jax.Array]:
    return [jax.numpy.asarray(x.numpy()) for x in tensors()]


WAYS = {
    "torch": Way(torch.compile(attnspan.torch.attention), tensors, returned),
    "JAX": Way(jax_attention, arrays, jax.block_until_ready),
    "call_jax": Way(lambda *x: attnspan.torch.call_jax(jax_attention, *x), tensors, returned),
}


def first_call_counted() -> dict[str, float]:
    found = {}
    for name, way in WAYS.items():
        torch._dynamo.reset()
        jax.clear_caches()
        inputs = way.fresh()
        found[name] = seconds(lambda way=way, x=inputs: [way.wait(way.call(*x)) for _ in range(10)]) / 10
    return found


def fresh_inputs() -> dict[str, float]:
    return medians({name: lambda way=way: way.wait(way.call(*way.fresh())) for name, way in WAYS.items()})


def warm_calls() -> list[dict[str, float]]:
    """Medians over rows of CALLS calls, after the first row: with a wait for each call, and for each row."""

    def row(way: Way, inputs: list[Any], wait: Callable[[Any], Any]) -> None:
        way.wait([wait(way.call(*inputs)) for _ in range(CALLS)])

    inputs = {name: way.fresh() for name, way in WAYS.items()}
    each = {f"{name}, each": partial(row, way, inputs[name], way.wait) for name, way in WAYS.items()}
    rows = {name: partial(row, way, inputs[name], returned) for name, way in WAYS.items()}
    found = medians(each | rows)  # all take turns
    return [{name: found[name + kind] / CALLS for name in WAYS} for kind in (", each", "")]


def block_sizes() -> dict[str, float]:
    """Seconds of the kernel alone with its own block sizes, and with the smallest to the largest blocks."""
    q, k, v = np.random.default_rng(0).standard_normal((3, *SHAPE)).astype("float32")
    bounds = np.broadcast_to(np.array([0, SHAPE[2]], "int32"), (1, 1, SHAPE[2], 1, 2)).copy()
    out, lse, threads = np.empty_like(q), np.empty(SHAPE[:3], "float32"), torch.get_num_threads()
    run = partial(cpu.forward, q, k, v, bounds, out, lse, scale=0.125, num_threads=threads)
    first, *every = cpu.configs(Problem.of(q, k, v, bounds, "cpu"), "forward")[:-1]
    calls = {"the kernel's choice": partial(run, config=first)}
    for config in (every[0], every[len(every) // 2], every[-1]):
        calls[f"{config['block_q']} x {config['block_k']}"] = partial(run, config=config)
    return medians(calls)


def main() -> dict[str, dict[str, float]]:
    found = {
        "wrong: the first call is counted": first_call_counted(),
        "wrong: each call gets fresh inputs": fresh_inputs(),
    }
    found["wrong: each call is waited for"], found["right"] = warm_calls()
    rows = [(name, *(f"{times[way] * 1e3:.2f}" for way in WAYS)) for name, times in found.items()]
    show(f"One kernel, {SHAPE}, float32: milliseconds for each call", ("measured", *WAYS), rows)
    found["blocks"] = block_sizes()
    title = "The kernel alone, by queries x keys of a block"
    show(title, ("blocks", "ms"), [(name, f"{x * 1e3:.2f}") for name, x in found["blocks"].items()])
    return found


if __name__ == "__main__":
    main()
