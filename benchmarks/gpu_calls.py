"""Host time of a call on a GPU, compared with SDPA: python benchmarks/gpu_calls.py

Eight heads of 128 causal queries, head dim 64, bfloat16: microseconds between consecutive calls, over 300
calls. Here the GPU needs less time than the host. Eager, compiled, and as a CUDA graph. Medians
and quartiles of 15 alternating rounds. `--device cpu` is a rehearsal without the graph.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import quantiles
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnspan import causal
from attnspan.torch import attention

CALLS, ROUNDS = 300, 15


def recorded(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture the call as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="write raw samples to this file")
    asked = parser.parse_args()
    wait = torch.cuda.synchronize if asked.device == "cuda" else lambda: None
    q, k, v = (torch.randn(1, 8, 128, 64, device=asked.device, dtype=torch.bfloat16) for _ in range(3))
    trained = [x.clone().requires_grad_() for x in (q, k, v)]
    prepared = causal().prepare(128, 128, like=q)

    def both(call: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(*trained).sum(), trained)

    def ours(*x: Any) -> Any:
        return attention(*x, mask=prepared)

    def unprepared(*x: Any) -> Any:
        return attention(*x, mask=causal())

    def sdpa(*x: Any) -> Any:
        return scaled_dot_product_attention(*x, is_causal=True)

    calls: dict[str, Callable[[], Any]] = {}
    for name, call in (("attnspan", ours), ("attnspan, mask not prepared", unprepared), ("sdpa", sdpa)):
        compiled = torch.compile(call, fullgraph=True)
        calls[f"{name}: eager"] = lambda call=call: call(q, k, v)  # type: ignore[misc]
        calls[f"{name}: compiled"] = lambda call=compiled: call(q, k, v)  # type: ignore[misc]
        calls[f"{name}: eager, forward+backward"] = both(call)
        calls[f"{name}: compiled, forward+backward"] = both(compiled)
        if asked.device == "cuda" and "not" not in name:
            calls[f"{name}: CUDA graph"] = recorded(lambda call=call: call(q, k, v))  # type: ignore[misc]
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for i in range(ROUNDS):
        for name in list(calls)[:: 1 if i % 2 else -1]:
            wait()
            began = time.perf_counter()
            for _ in range(CALLS):
                calls[name]()
            samples[name].append(1e6 * (time.perf_counter() - began) / CALLS)
    for name, found in samples.items():
        low, middle, high = quantiles(found, n=4)
        print(f"{name:45} {middle:8.1f} us ({low:.1f}-{high:.1f})", flush=True)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(samples, file)


if __name__ == "__main__":
    main()
