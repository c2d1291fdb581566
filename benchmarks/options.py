"""Cost of each attention option over a plain call: python benchmarks/options.py [FILE]

Causal prefill of 2,048 tokens with 8 heads, forward and with backward. Calls alternate. The cost is the
median over rounds of option time / plain time - 1. Raw samples go to FILE (JSON).
"""

import sys
from functools import partial
from pathlib import Path

import torch

from attnspan import alibi, alibi_slopes, causal, dense_bias, relative, t5_buckets
from attnspan.torch import attention
from attnspan_lab.bench.statistics import Samples, paired
from attnspan_lab.bench.timing import Budget, host_times
from attnspan_lab.files import write_json

HEADS, LENGTH, BUDGET = 8, 2048, Budget(seconds=2.0, rounds=15)
TARGETS = {"softcap": 15, "sinks": 15, "alibi": 15, "dense bias": 60, "dropout": 60}  # percent
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def options(dtype: torch.dtype) -> dict[str, dict[str, object]]:
    """Make the keyword arguments of each option. Parameters require gradients."""

    def learned(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, dtype=kind).requires_grad_()

    return {
        "plain": {},
        "softcap": {"softcap": 50.0},
        "softcap 20": {"softcap": 20.0},
        "sinks": {"sinks": learned(HEADS)},
        "alibi": {"bias": alibi(torch.from_numpy(alibi_slopes(HEADS)).requires_grad_())},
        "T5 bias": {"bias": relative(learned(HEADS, 32), t5_buckets(32, 128, bidirectional=False))},
        "dense bias": {
            "bias": dense_bias(learned(1, HEADS, LENGTH, LENGTH, kind=dtype))
        },  # SDPA's form of the mask
        "dense bias, one for all heads": {"bias": dense_bias(learned(1, 1, LENGTH, LENGTH, kind=dtype))},
        "dropout": {"dropout_p": 0.1, "dropout_seed": torch.tensor(1)},
    }


def step(inputs: list[torch.Tensor], mask: object, backward: bool, **given: object) -> None:
    with torch.set_grad_enabled(backward):
        out = attention(*inputs, mask=mask, **given)
        if backward:
            out.backward(torch.ones_like(out))


def measure(dtype: torch.dtype, dim: int, backward: bool) -> dict[str, tuple[float, ...]]:
    """Measure the seconds of each option, once per round."""
    inputs = [torch.randn(1, HEADS, LENGTH, dim, dtype=dtype, requires_grad=True) for _ in range(3)]
    mask = causal().prepare(LENGTH, LENGTH, like=inputs[0])
    calls = {name: partial(step, inputs, mask, backward, **given) for name, given in options(dtype).items()}
    return host_times(calls, BUDGET)


def main() -> None:
    kept = []
    for backward in (False, True):
        for dtype in DTYPES:
            for dim in (64, 128):
                times = measure(dtype, dim, backward)
                way = "forward+backward" if backward else "forward"
                kept.append({"dtype": str(dtype)[6:], "dim": dim, "mode": way, "seconds": times})
                plain = Samples(times["plain"]).median
                print(f"{str(dtype)[6:]} D{dim} {way}: plain {plain * 1e3:.2f} ms")
                for name, own in times.items():
                    ratio = paired(times["plain"], own)
                    low, middle, high = (100 * (x - 1) for x in (ratio.low, ratio.median, ratio.high))
                    target = f"  (at most {TARGETS[name]} %)" if name in TARGETS and not backward else ""
                    if name != "plain":
                        print(f"  {name:30}{middle:+6.0f} %  [{low:+.0f}, {high:+.0f}]{target}", flush=True)
    if len(sys.argv) > 1:
        write_json(Path(sys.argv[1]), kept)


if __name__ == "__main__":
    main()
