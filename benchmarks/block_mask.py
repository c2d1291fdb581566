"""FlexAttention block masks from spans and from `create_block_mask`, on CPU: python benchmarks/block_mask.py

Causal documents of 16,384 tokens, or of the given lengths. Times alternate. Blocks are compared bit for bit,
also with the blocks from a compiled program.
"""

import sys
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from attnspan import causal, documents
from attnspan.kernels.flex import block_mask

KINDS = ("kv", "full_kv", "q", "full_q")


def tensors(mask: Any) -> list[Tensor]:
    return [getattr(mask, f"{kind}_{what}") for kind in KINDS for what in ("num_blocks", "indices")]


def main(length: int = 16384) -> None:
    ends = torch.linspace(0, length, 9).int()
    ids = torch.searchsorted(ends, torch.arange(length), right=True)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del b, h
        return (q >= k) & (ids[q] == ids[k])

    def theirs() -> list[Tensor]:
        return tensors(create_block_mask(mask_mod, None, None, length, length, device="cpu"))

    def ours() -> list[Tensor]:
        """Build blocks from offsets, including the lowering of the mask."""
        bounds = (causal() & documents(ends)).spans(length, length).lowered.bounds
        return tensors(block_mask(torch.tensor(bounds), length))

    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for name, found in (("eager", ours()), ("compiled", compiled())):
        same = all(torch.equal(a, b) for a, b in zip(found, theirs(), strict=True))
        print(f"blocks from spans, {name}: {'equal bit for bit' if same else 'DIFFERENT'}")
    times: dict[str, list[float]] = {"create_block_mask": [], "ours": []}
    for _ in range(7):
        for name, call in (("create_block_mask", theirs), *[("ours", ours)] * 5):
            start = perf_counter()
            call()
            times[name].append(perf_counter() - start)
    for name, samples in times.items():
        middle, low, high = (1e3 * f(samples) for f in (median, min, max))
        print(f"{name}: {middle:.2f} ms, {low:.2f} to {high:.2f}, {len(samples)} samples")
    print(f"ratio {median(times['create_block_mask']) / median(times['ours']):.0f}, S={length:,}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
