"""The examples of docs/parallel.md, as every rank of a world runs them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnspan import causal, key_padding, segments, window
from attnspan.parallel import ContextParallel
from attnspan.torch import attention


def run_blocks(blocks: list[str]) -> tuple[int, list[int], dict[str, float]]:
    """Run pieces of Python one after the other, in one namespace.

    Returns:
        The rows that a rank holds, the shape of the last output, and how far the outputs of examples are from
        what one process gives, relative to its norm.
    """
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "docs/parallel.md", "exec"), names)
    return names["n"], list(names["out"].shape), distances(names)


def distances(names: dict[str, Any]) -> dict[str, float]:
    """Examples whose rows are dealt by one plan and attended by another, beside one process."""
    whole = torch.from_numpy(names["whole"])
    heads, kv_heads = names["Hq"], names["Hkv"]
    q, k, v = whole.split([heads, kv_heads, kv_heads], 2)
    encoded = torch.from_numpy(names["encoded"]).split([kv_heads, kv_heads], 2)
    packed = np.stack([np.arange(names["S"]) // length for length in (200, 90)])
    lengths = torch.tensor([300, 211])

    def off(plan: ContextParallel, out: Tensor, *one: Any) -> float:
        expected = attention(*one[:3], mask=one[3], layout="bshd")
        return float((plan.unshard(out) - expected).norm() / expected.norm())

    nearby = causal() & window(128)
    dealt_anew = names["everything"].with_mask(nearby)
    x = names["everything"].shard(whole).split([heads, kv_heads, kv_heads], 2)
    wrong = attention(*x, mask=dealt_anew, layout="bshd")
    return {
        "loader": off(names["loaded"], names["loaded_out"], q, k, v, causal() & segments(packed)),
        "all before": off(names["everything"], names["global_out"], q, k, v, causal()),
        "window": off(names["local"], names["local_out"], q, k, v, nearby),
        "window, dealt anew": off(names["everything"], wrong, q, k, v, nearby),
        "cross": off(names["cross_cp"], names["cross_out"], q, *encoded, key_padding(lengths)),
    }
