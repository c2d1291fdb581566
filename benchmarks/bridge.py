"""Overhead of calling JAX from torch, over JAX itself: python benchmarks/bridge.py [FILE]

The function sums n small tensors, so that the calls mostly measure the conversions. Each round has one call
of:

- jax: the jitted function on JAX arrays, with synchronization
- dlpack: only the conversions of each argument and the result, with the public API
- views: only the conversions, as the bridge makes them
- by hand: the jitted function with conversions by the public API
- bridge: `call_jax`
- bridge and backward, jax and its gradient: with a derivative, the latter on JAX arrays
- dlpack and backward: only the conversions, including the incoming and all outgoing gradients

The bridge's own cost is the median over rounds of bridge - jax, relative to the median of dlpack. The cost
with a derivative is computed in the same way. Raw samples go to FILE (JSON). The exit code is 1 if one cost
exceeds TARGET.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import torch

from attnspan.interop._convert import as_arguments, as_tensors
from attnspan.torch import call_jax
from attnspan_lab.bench.timing import Budget, host_times
from attnspan_lab.files import write_json

TARGET, BUDGET = 1.2, Budget(seconds=2.0, rounds=31, calls=20)
# The judged calls: the bridge, JAX alone, and the conversions alone.
WAYS = {
    "forward": ("bridge", "jax", "dlpack"),
    "forward and backward": ("bridge and backward", "jax and its gradient", "dlpack and backward"),
}


def _sum(*arrays: Any) -> Any:
    return sum(arrays[1:], start=arrays[0])


def calls(count: int, size: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Map the name of each measured call to the call, for ``count`` arguments of ``size`` elements."""
    tensors = [torch.ones(size, dtype=dtype) for _ in range(count)]
    arrays = [jax.dlpack.from_dlpack(x) for x in tensors]
    learned = [x.clone().requires_grad_() for x in tensors]
    jitted = jax.jit(_sum)
    cotangent, result = torch.ones(size, dtype=dtype), jitted(*arrays).block_until_ready()
    incoming = jax.dlpack.from_dlpack(cotangent)
    gradient = jax.jit(lambda g, *a: jax.vjp(_sum, *a)[1](g))
    outgoing = jax.block_until_ready(gradient(incoming, *arrays))
    return {
        "jax": lambda: jitted(*arrays).block_until_ready(),
        "dlpack": lambda: ([jax.dlpack.from_dlpack(x) for x in tensors], torch.from_dlpack(result)),
        "dlpack and backward": lambda: (
            [jax.dlpack.from_dlpack(x) for x in (*tensors, cotangent)],
            [torch.from_dlpack(x) for x in (result, *outgoing)],
        ),
        "views": lambda: (as_arguments(tensors), as_tensors([result])),
        "by hand": lambda: torch.from_dlpack(
            jitted(*[jax.dlpack.from_dlpack(x) for x in tensors]).block_until_ready()
        ),
        "bridge": lambda: call_jax(_sum, *tensors),
        "jax and its gradient": lambda: (
            jitted(*arrays).block_until_ready(),
            jax.block_until_ready(gradient(incoming, *arrays)),
        ),
        "bridge and backward": lambda: torch.autograd.grad(call_jax(_sum, *learned), learned, cotangent),
    }


def measure(count: int, size: int, dtype: torch.dtype) -> dict[str, tuple[float, ...]]:
    """Measure the seconds of one call of each."""

    def waited(call: Callable[[], object]) -> None:
        call()  # The call has already waited for its result.

    found = calls(count, size, dtype)
    return host_times({name: partial(waited, call) for name, call in found.items()}, BUDGET)


def judge(way: str, times: dict[str, tuple[float, ...]]) -> bool:
    """Print the bridge's own cost. Return whether it is within the target."""
    bridge, alone, conversions = (times[name] for name in WAYS[way])
    own = statistics.median(a - b for a, b in zip(bridge, alone, strict=True))
    ratio = own / statistics.median(conversions)
    met = ratio <= TARGET
    verdict = "met" if met else "MISSED"
    print(f"  {way}: own {own * 1e6:.1f} us, {ratio:.2f} of the conversions (at most {TARGET}: {verdict})")
    return met


def main() -> int:
    """Measure all cells. Return 0 if all targets are met."""
    kept, met = [], True
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 3, 8):
            times = measure(count, 64 * 64, dtype)
            kept.append({"dtype": str(dtype)[6:], "arguments": count, "seconds": times})
            middle = {name: statistics.median(x) * 1e6 for name, x in times.items()}
            print(
                f"{str(dtype)[6:]}, {count} arguments: "
                + ", ".join(f"{n} {x:.1f}" for n, x in middle.items())
            )
            for way in WAYS:
                met &= judge(way, times)
    report = {
        "jax": jax.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cells": kept,
    }
    if len(sys.argv) > 1:
        write_json(Path(sys.argv[1]), report)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
