"""Decoding beside a plain read of the same bytes, and beside SDPA, in turn: python benchmarks/decode.py

The share is what a decoding step reaches of the rate at which this machine reads as many bytes as K and V
have.
"""

import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnspan import causal
from attnspan.kernels import cpu
from attnspan.torch import attention

ROUNDS = 9
#: (query heads, key heads, queries, keys)
SHAPES = [
    (heads, kv_heads, q_len, k_len)
    for heads, kv_heads, k_len in ((8, 8, 65536), (32, 8, 65536), (8, 1, 262144))
    for q_len in (1, 4, 16)
]


def seconds(call) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(heads: int, kv_heads: int, q_len: int, k_len: int, dtype: torch.dtype) -> str:
    q = torch.randn(1, heads, q_len, 64, dtype=dtype)
    k, v = (torch.randn(1, kv_heads, k_len, 64, dtype=dtype) for _ in range(2))
    size, threads = 2 * k.numel() * k.element_size(), torch.get_num_threads()
    mask = causal().prepare(q_len, k_len, like=q)
    # Bottom-right alignment hides at most 15 of the keys from SDPA's full mask: nothing beside 65,536.
    calls = (
        lambda: attention(q, k, v, mask=mask),
        lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
    )
    ours, theirs, shares = [], [], []
    for call in calls:
        call()
    for _ in range(ROUNDS):
        ours.append(seconds(calls[0]))
        theirs.append(seconds(calls[1]))
        shares.append(size / ours[-1] / cpu.read_bandwidth(size, num_threads=threads, seconds=0.05))
    name = f"{str(dtype)[6:]:9}{heads:>3}/{kv_heads} heads  {q_len:>2} x {k_len:>6}"
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    low, middle, high = statistics.quantiles(shares, n=4)
    return (
        f"{name}  {size / 2**20:4.0f} MiB  {statistics.median(ours) * 1e3:7.2f} ms  "
        f"{middle:4.0%} of the read ({low:.0%}-{high:.0%})  {ratio:5.2f}x SDPA"
    )


def main() -> None:
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                print(measure(*shape, dtype), flush=True)


if __name__ == "__main__":
    main()
