"""Time of lowering `causal() & segments(ids)`: python benchmarks/lowering.py [--tokens N]

The minimum and median of 20 calls on one thread, for ids as documents have them (a few long runs), for
runs of three tokens, and as a compiled function lowers them (no value read).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from attnspan import Spans, causal, segments
from attnspan.arrays import Arrays, TorchArrays

CALLS = 20


def milliseconds(call: Callable[[], Spans]) -> list[float]:
    """Sorted times of `CALLS` calls, after one to warm up."""
    call()
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)


def packed(tokens: int, mean_length: int) -> np.ndarray:
    """Unsorted ids of documents of random length."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * mean_length, 2 * tokens // mean_length + 2)
    return np.repeat(rng.permutation(len(lengths)), lengths)[:tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    print(f"{tokens} tokens, {CALLS} calls, milliseconds")
    print(f"{'documents of':<14}{'framework':<11}{'values':<8}{'min':>8}{'median':>8}")
    for mean_length in (512, 3):
        ids = packed(tokens, mean_length)
        for arrays, mask in (
            (Arrays, causal() & segments(ids)),
            (TorchArrays, causal() & segments(torch.from_numpy(ids))),
        ):
            read = arrays.concrete
            for values, concrete in (("read", read), ("unread", lambda _self, _x: False)):
                arrays.concrete = concrete  # type: ignore[method-assign]
                times = milliseconds(lambda mask=mask: mask.spans(tokens, tokens))  # type: ignore[misc]
                row = f"{mean_length:<14}{arrays.name:<11}{values:<8}"
                print(f"{row}{times[0]:8.2f}{statistics.median(times):8.2f}")
            arrays.concrete = read  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
