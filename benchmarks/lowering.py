"""Time to lower `causal() & segments(ids)`: python benchmarks/lowering.py [--tokens N]

The minimum and median of 21 samples on one thread, for three cases: ids of documents (a few long runs), runs
of three tokens, and lowering in a compiled function, which reads no values.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch

from attnspan import causal, segments
from attnspan.base.arrays import Arrays, TorchArrays
from attnspan_lab.bench.statistics import Samples
from attnspan_lab.bench.timing import Budget, host_times

ROUNDS = 21


def packed(tokens: int, mean_length: int) -> np.ndarray:
    """Draw unsorted ids of documents with random lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * mean_length, 2 * tokens // mean_length + 2)
    return np.repeat(rng.permutation(len(lengths)), lengths)[:tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    print(f"{tokens} tokens, {ROUNDS} samples, milliseconds")
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
                call = partial(mask.spans, tokens, tokens)
                times = Samples(host_times({"lower": call}, Budget(seconds=10.0, rounds=ROUNDS))["lower"])
                row = f"{mean_length:<14}{arrays.name:<11}{values:<8}"
                print(f"{row}{1e3 * min(times.samples):8.2f}{1e3 * times.median:8.2f}")
            arrays.concrete = read  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
