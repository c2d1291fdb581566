"""Decoding next to a plain read of the same bytes, and next to SDPA, in turn: python benchmarks/decode.py

The share is what a decoding step reaches of the rate at which this machine reads as many bytes as K and V
have.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnspan import causal
from attnspan.kernels import cpu
from attnspan.tools.bench.devices import Device, cache_evictor
from attnspan.tools.bench.statistics import Samples
from attnspan.tools.bench.timing import Budget, Subject, interleave
from attnspan.torch import attention

BUDGET = Budget(seconds=2.0)
EVICT = cache_evictor("cpu")
#: (query heads, key heads, queries, keys)
SHAPES = [
    (heads, kv_heads, q_len, k_len)
    for heads, kv_heads, k_len in ((8, 8, 65536), (32, 8, 65536), (8, 1, 262144))
    for q_len in (1, 4, 16)
]


def measure(heads: int, kv_heads: int, q_len: int, k_len: int, dtype: torch.dtype) -> str:
    q = torch.randn(1, heads, q_len, 64, dtype=dtype)
    k, v = (torch.randn(1, kv_heads, k_len, 64, dtype=dtype) for _ in range(2))
    size, threads = 2 * k.numel() * k.element_size(), torch.get_num_threads()
    mask = causal().prepare(q_len, k_len, like=q)
    # Bottom-right alignment hides at most 15 of the keys from SDPA's full mask: nothing next to 65,536.
    calls = {
        "attnspan": lambda: attention(q, k, v, mask=mask),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "read": lambda: cpu.read_bandwidth(size, num_threads=threads, seconds=0.05),
    }
    reads: list[float] = []
    subjects = [Subject(name, calls[name], Device()) for name in ("attnspan", "sdpa")]
    # The caches are emptied before each sample, and the read is measured at the same moments.
    ours, theirs = interleave(subjects, BUDGET, evict=lambda: (reads.append(calls["read"]()), EVICT()))
    rate = Samples(tuple(reads)).median
    assert ours.execute is not None
    assert theirs.ratio is not None
    low, middle, high = (size / x / rate for x in reversed(ours.execute.quartiles))
    name = f"{str(dtype)[6:]:9}{heads:>3}/{kv_heads} heads  {q_len:>2} x {k_len:>6}"
    return (
        f"{name}  {size / 2**20:4.0f} MiB  {ours.execute.median * 1e3:7.2f} ms  "
        f"{middle:4.0%} of the read ({low:.0%}-{high:.0%})  {theirs.ratio.median:5.2f}x SDPA"
    )


def main() -> None:
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                print(measure(*shape, dtype), flush=True)


if __name__ == "__main__":
    main()
