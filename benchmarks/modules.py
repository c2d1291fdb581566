"""Comparison of two builds of the compiled module: python benchmarks/modules.py OLD.so NEW.so [CASE...]

Each build has its own process, and calls alternate between them, so noise of the machine affects both. A case
is dtype:mode:mask:dim:length, such as `float32:forward+backward:documents-32:64:8192`. The masks are full,
causal, window-N, documents-N (of equal lengths) and decode-H-Q (Q queries of 8 heads over H key heads). The
calls have eight heads and torch's number of threads. The benchmark prints the medians, and the median of old
time / new time with its quartiles.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from statistics import median, quantiles
from typing import IO, Any, cast

ROUNDS, SAMPLE, HEADS = 11, 0.06, 8
CASES = tuple(
    f"{dtype}:{mode}:{mask}"
    for dtype in ("float32", "bfloat16")
    for mode in ("forward", "forward+backward")
    for mask in (
        "full:64:1024",
        "causal:128:1024",
        "window-256:64:4096",
        "documents-32:64:8192",
        "documents-256:64:8192",
    )
) + tuple(
    f"{dtype}:forward:decode-{heads}-{queries}:64:65536"
    for dtype in ("float32", "bfloat16")
    for heads, queries in ((8, 1), (8, 16), (1, 4))
)


def problem(case: str) -> Callable[[], object]:
    """Make the call of a case."""
    import torch

    from attnspan import causal, full, segments, window
    from attnspan.torch import attention

    kind, mode, name, dim, length = case.split(":")
    first, *rest = name.split("-")
    numbers, size = [int(x) for x in rest], int(length)
    queries, kv_heads = (numbers[1], numbers[0]) if first == "decode" else (size, HEADS)
    mask = {
        "full": full,
        "causal": causal,
        "decode": causal,
        "window": lambda: causal() & window(numbers[0]),
        "documents": lambda: causal() & segments(torch.arange(size)[None] // (size // numbers[0])),
    }[first]()
    dtype, backward = getattr(torch, kind), mode == "forward+backward"
    q = torch.randn(1, HEADS, queries, int(dim), dtype=dtype, requires_grad=backward)
    k, v = (torch.randn(1, kv_heads, size, int(dim), dtype=dtype, requires_grad=backward) for _ in range(2))
    prepared, gradient = mask.prepare(queries, size, like=q), torch.randn_like(q)

    def call() -> None:
        out = attention(q, k, v, mask=prepared)
        if backward:
            out.backward(gradient)
            q.grad = k.grad = v.grad = None

    return call


def work(library: str) -> None:
    """Read cases from standard input, and answer each one with the seconds of a call."""
    import attnspan

    spec = spec_from_file_location("attnspan._core", library)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["attnspan._core"] = cast(Any, attnspan)._core = module
    known: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        case = json.loads(line)
        if case not in known:
            known = {case: problem(case)}
            known[case]()
        calls, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < SAMPLE or calls == 0:
            known[case]()
            calls += 1
        print(spent / calls, flush=True)


def main() -> None:
    libraries, cases = sys.argv[1:3], sys.argv[3:] or CASES
    command = [sys.executable, __file__, "--work"]
    workers = [
        subprocess.Popen([*command, x], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for x in libraries
    ]

    def ask(worker: subprocess.Popen[str], case: str) -> float:
        print(json.dumps(case), file=cast(IO[str], worker.stdin), flush=True)
        return float(cast(IO[str], worker.stdout).readline())

    for case in cases:
        times: list[list[float]] = [[], []]
        for i in range(ROUNDS):
            for side in (0, 1) if i % 2 == 0 else (1, 0):
                times[side].append(ask(workers[side], case))
        ratios = [old / new for old, new in zip(*times, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        old, new = (f"{1e3 * median(x):9.2f} ms" for x in times)
        print(f"{case:<48}{old}{new}   {middle:.2f} ({low:.2f}-{high:.2f})", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        main()
