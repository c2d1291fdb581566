"""Failure 3: one kernel, measured from PyTorch and from JAX, and called slower in one of them.

    python examples/failures/timing.py

attnspan calls the same CPU kernel from torch, from JAX, and from torch through `call_jax`. This program
measures that kernel with the mistakes that can make one framework look slower than the other, one at a time:

- compiling or tracing is counted, because the first call is in the mean
- memory that nobody has touched is counted, because each call gets fresh inputs
- each call is waited for, which adds the way there and back to every call

The last line is right: the first call is left out, the ways take turns, each sample is a row of calls with
one wait, and the result is a median. Then you see what block sizes do to the kernel's time.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from report import seconds, show

import attnspan.jax
import attnspan.torch
from attnspan.call.call import Problem
from attnspan.kernels import cpu

SHAPE = (1, 5, 512, 64)  # the reported shape is (1, 5, 16384, 128), which takes a CPU seconds
CALLS, ROUNDS = 8, 15
jax_attention = jax.jit(attnspan.jax.attention)


@dataclass(frozen=True)
class Way:
    """A way to the kernel: the call, fresh inputs for it, and what waits for a result."""

    call: Callable[..., Any]
    fresh: Callable[[], list[Any]]
    wait: Callable[[Any], Any]

    def calls(self, inputs: list[Any]) -> Any:
        """A row of calls with one wait."""
        return self.wait([self.call(*inputs) for _ in range(CALLS)])


def tensors() -> list[torch.Tensor]:
    return [torch.randn(SHAPE) for _ in range(3)]


def arrays() -> list[jax.Array]:
    return [jax.numpy.asarray(x.numpy()) for x in tensors()]


def ready(result: Any) -> Any:
    return result  # torch has computed a CPU tensor when the call returns


WAYS = {
    "torch": Way(torch.compile(attnspan.torch.attention), tensors, ready),
    "JAX": Way(jax_attention, arrays, jax.block_until_ready),
    "call_jax": Way(lambda *x: attnspan.torch.call_jax(jax_attention, *x), tensors, ready),
}


def first_call_counted(way: Way) -> float:
    torch._dynamo.reset()
    jax.clear_caches()
    inputs = way.fresh()
    return seconds(lambda: [way.wait(way.call(*inputs)) for _ in range(10)]) / 10


def fresh_inputs(way: Way) -> float:
    return statistics.median(seconds(lambda: way.wait(way.call(*way.fresh()))) for _ in range(ROUNDS))


def each_call_waited_for(way: Way) -> float:
    inputs = way.fresh()
    return statistics.median(
        seconds(lambda: [way.wait(way.call(*inputs)) for _ in range(CALLS)]) / CALLS for _ in range(ROUNDS)
    )


def right() -> dict[str, float]:
    """Warm calls, ways in turn, one wait for each row of calls, medians."""
    inputs = {name: way.fresh() for name, way in WAYS.items()}
    samples: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS):
        for name, way in WAYS.items():
            samples[name].append(seconds(partial(way.calls, inputs[name])) / CALLS)
    return {name: statistics.median(x) for name, x in samples.items()}


def block_sizes() -> dict[str, float]:
    """Seconds of the kernel alone with its own block sizes, and with the smallest to the largest blocks."""
    q, k, v = np.random.default_rng(0).standard_normal((3, *SHAPE)).astype("float32")
    bounds = np.broadcast_to(np.array([0, SHAPE[2]], "int32"), (1, 1, SHAPE[2], 1, 2)).copy()
    out, lse, threads = np.empty_like(q), np.empty(SHAPE[:3], "float32"), torch.get_num_threads()
    every = cpu.configs(Problem.of(q, k, v, bounds, "cpu"), "forward")[:-1]
    chosen = [every[0], every[1], every[len(every) // 2], every[-1]]
    times: list[list[float]] = [[] for _ in chosen]
    for _ in range(ROUNDS):
        for config, samples in zip(chosen, times, strict=True):
            run = partial(cpu.forward, q, k, v, bounds, out, lse, scale=0.125, num_threads=threads)
            samples.append(seconds(partial(run, config=config)))
    names = ["the kernel's choice", *(f"{x['block_q']} x {x['block_k']}" for x in chosen[1:])]
    return {name: statistics.median(x) for name, x in zip(names, times, strict=True)}


MISTAKES = {
    "wrong: the first call is counted": first_call_counted,
    "wrong: each call gets fresh inputs": fresh_inputs,
    "wrong: each call is waited for": each_call_waited_for,
}


def main() -> dict[str, dict[str, float]]:
    found = {name: {x: measure(way) for x, way in WAYS.items()} for name, measure in MISTAKES.items()}
    found["right"] = right()
    rows = [(name, *(f"{times[way] * 1e3:.2f}" for way in WAYS)) for name, times in found.items()]
    show(f"One kernel, {SHAPE}, float32: milliseconds for each call", ("measured", *WAYS), rows)
    found["blocks"] = block_sizes()
    title = "The kernel alone, by queries x keys of a block"
    show(title, ("blocks", "ms"), [(name, f"{x * 1e3:.2f}") for name, x in found["blocks"].items()])
    return found


if __name__ == "__main__":
    main()
