"""Time to compute the block ranges of 131,072 queries with two spans: python benchmarks/gpu_ranges.py

The target is 20 microseconds. The result is the median of CUDA events over 200 calls, after 20 warm-up calls.
"""

from statistics import median, quantiles

import torch

from attnspan import causal, global_keys, window
from attnspan.experimental.triton._launch import row_ranges

ROWS = 1 << 17


def main() -> None:
    mask = causal() & (window(1024) | global_keys(64))
    bounds = mask.spans(ROWS, ROWS, like=torch.empty(1, device="cuda")).lowered.bounds.contiguous()
    times = []
    for i in range(220):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        ranges, _, _ = row_ranges(bounds, ROWS, kv_heads=1, group=1, block=128)
        stop.record()
        stop.synchronize()
        times += [1e3 * start.elapsed_time(stop)] if i >= 20 else []
    low, _, high = quantiles(times, n=4)
    print(f"R={bounds.shape[3]}, {ROWS:,} rows, ranges of {ranges.numel() * 4:,} bytes")
    print(f"{median(times):.1f} us, quartiles {low:.1f} to {high:.1f}")


if __name__ == "__main__":
    main()
