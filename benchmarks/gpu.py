"""GPU workloads for `attnspan bench --workloads`: python benchmarks/gpu.py > benchmarks/gpu.json

bfloat16, 16 heads: full, causal, windows and documents of 2,048 to 65,536 tokens with head dims 64 and 128,
eight query heads per key head, decoding, and the shape of the 2025 report. The workloads of
`gpu_15_minutes.sh` have the names `quick-plain-*` and `quick-masks-*`, with 32 heads and head dim 128.
"""

import json
from collections.abc import Iterator
from typing import Any

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
MASKS = {
    "full": "full",
    "causal": "causal",
    "window": "window(1024)",
    "documents": "causal & packed(16)",
}


def work(name: str, family: str, mask: str, q_len: int, k_len: int, heads: tuple[int, int], dim: int) -> Any:
    sizes = {"batch": 1, "q_heads": heads[0], "kv_heads": heads[1], "q_len": q_len, "k_len": k_len}
    dims = {"head_dim": dim, "v_dim": dim, "dtype": "bfloat16", "mask": mask}
    return {"name": name, "family": family, **sizes, **dims}


def workloads() -> Iterator[dict[str, Any]]:
    for dim in (64, 128):
        for kind, mask in MASKS.items():
            for length in LENGTHS:
                yield work(f"gpu-{kind}-d{dim}-s{length}", kind, mask, length, length, (16, 16), dim)
        for length in LENGTHS[:4]:
            yield work(f"gpu-gqa-d{dim}-s{length}", "gqa", "causal", length, length, (32, 4), dim)
        for length in (8192, 65536):
            yield work(f"gpu-decode-d{dim}-s{length}", "decode", "causal", 1, length, (32, 4), dim)
    for kind, length in (("full", 4096), ("causal", 4096), ("full", 16384), ("causal", 16384)):
        yield work(f"quick-plain-{kind}-s{length}", kind, kind, length, length, (32, 32), 128)
    for kind, mask in (("documents", "causal & packed(32)"), ("window", "window(1024)")):
        yield work(f"quick-masks-{kind}", kind, mask, 16384, 16384, (32, 32), 128)
    yield work("gpu-report-shape", "report", "full", 16384, 16384, (5, 5), 128)


if __name__ == "__main__":
    print(json.dumps(list(workloads()), indent=1))
