"""Decoding, compared with a lower bound of this machine and with SDPA: python benchmarks/decode.py

The lower bound is the larger of two times. The first is the time to read K and V with a pure read loop, which
alternates with the calls. The second is the time of the products at the best rate of the dtype's instructions
on registers. The benchmark is for machines with one last-level cache.
"""

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnspan import causal
from attnspan.kernels import cpu
from attnspan.torch import attention
from attnspan_lab.bench.devices import Device, last_level_bytes
from attnspan_lab.bench.statistics import Samples
from attnspan_lab.bench.timing import Budget, Subject, interleave

BUDGET = Budget(seconds=float(sys.argv[1]) if sys.argv[1:] else 2.0)
DIM = 64
#: Bytes to read for the memory's speed: the last cache would hold a part of a smaller buffer.
READ = max(1 << 28, 4 * last_level_bytes())
#: (query heads, key heads, keys, queries)
SHAPES = [
    (heads, kv_heads, k_len, q_len)
    for heads, kv_heads in ((8, 8), (32, 8), (8, 1))
    for k_len in (4096, 16384, 65536)
    for q_len in (1, 4, 16)
]


def measure(heads: int, kv_heads: int, k_len: int, q_len: int, dtype: torch.dtype) -> str:
    q = torch.randn(1, heads, q_len, DIM, dtype=dtype)
    k, v = (torch.randn(1, kv_heads, k_len, DIM, dtype=dtype) for _ in range(2))
    size, threads = 2 * k.numel() * k.element_size(), torch.get_num_threads()
    kinds = {"fma_f32", "amx_f32"} if dtype == torch.float32 else {"fma_f32", "dot_bf16", "amx_bf16"}
    kinds &= set(cpu.peak_kinds())
    mask = causal().prepare(q_len, k_len, like=q)
    reads: list[float] = []
    peaks: list[float] = []

    def read_once() -> None:
        reads.append(cpu.read_bandwidth(READ, num_threads=threads, seconds=0))

    # Reading this much evicts the problem from the caches, and leaves nothing to write back.
    def before() -> None:
        peaks.append(max(cpu.peak(kind, num_threads=threads, seconds=0.02) for kind in kinds))
        cpu.read_bandwidth(READ, num_threads=threads, seconds=0)

    # SDPA's full mask shows at most 15 more keys than bottom-right alignment, which is negligible for 4,096.
    subjects = [
        Subject("attnspan", lambda: attention(q, k, v, mask=mask), Device()),
        Subject("sdpa", lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True), Device()),
        Subject("read", read_once, Device()),
    ]
    ours, theirs, _ = interleave(subjects, BUDGET, evict=before)
    read = size / Samples(tuple(reads)).median
    products = 4 * heads * q_len * k_len * DIM / Samples(tuple(peaks)).median
    assert ours.execute is not None
    assert theirs.ratio is not None
    low, middle, high = (max(read, products) / x for x in reversed(ours.execute.quartiles))
    name = f"{str(dtype)[6:]:9}{heads:>3}/{kv_heads} heads  {q_len:>2} x {k_len:>6}"
    bound = "read" if read >= products else "products"
    return (
        f"{name}  {size / 2**20:4.0f} MiB  {ours.execute.median * 1e3:7.2f} ms  "
        f"{middle:4.0%} of the {bound} ({low:.0%}-{high:.0%})  {theirs.ratio.median:5.2f}x SDPA"
    )


def main() -> None:
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                print(measure(*shape, dtype), flush=True)


if __name__ == "__main__":
    main()
