"""Masks under which a row sees a small part of many keys.

Rows and keys are then worked on in parts that each pack what they see, which must not tread on each other.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases import Case, check, make
from torch import Tensor

from attnspan.kernels import cpu

LENGTH, HEADS, KV_HEADS, DIM = 1500, 4, 2, 64
#: Relative to float64; what rounding the results to the dtype alone gives is about half of it.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}


def _spans(lo: Tensor, hi: Tensor) -> Tensor:
    return torch.stack([lo, hi], -1).clamp(0, LENGTH).int()


def _bounds(name: str) -> Tensor:
    """Bounds of shape (B|1, H|1, S, R, 2)."""
    row = torch.arange(LENGTH)
    if name == "window":
        return _spans(row - 99, row + 1).view(1, 1, LENGTH, 1, 2)
    if name == "documents":
        return _spans(row // 130 * 130, row + 1).view(1, 1, LENGTH, 1, 2)
    if name == "global and window":
        near = _spans((row - 60).clamp(min=20), (row + 1).clamp(min=20))
        return torch.stack([_spans(0 * row, (row + 1).clamp(max=20)), near], 1).view(1, 1, LENGTH, 2, 2)
    if name == "a window for each head":
        heads = [_spans(row - 40 * (h + 1), row + 25 * h) for h in range(HEADS)]
        return torch.stack(heads).view(1, HEADS, LENGTH, 1, 2)
    # Query heads that share a key head look at opposite ends.
    ends = [(0, 32), (LENGTH - 32, LENGTH)]
    heads = [_spans(0 * row + ends[h % 2][0], 0 * row + ends[h % 2][1]) for h in range(HEADS)]
    return torch.stack(heads).view(1, HEADS, LENGTH, 1, 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "name", ["window", "documents", "global and window", "a window for each head", "opposite ends"]
)
def test_against_float64_on_any_number_of_threads(name: str, dtype: torch.dtype) -> None:
    case = Case(kv_heads=KV_HEADS, group=HEADS // KV_HEADS, q_len=LENGTH, k_len=LENGTH, dtype=dtype)
    arrays = make(case)
    arrays.bounds, arrays.dlse[:] = _bounds(name), 0.0
    exact = arrays.oracle()
    for threads in (1, 2, 3):
        got = replace(arrays, case=replace(case, threads=threads)).run()
        check({x: got[x] for x in ("out", "dq", "dk", "dv")}, exact, dict.fromkeys(exact, TOLERANCE[dtype]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("q_len", [1, 4, 16, 32])
def test_many_unlikely_keys_outweigh_nothing(dtype: torch.dtype, q_len: int) -> None:
    """One key takes almost all the probability and has value 0: what is left is the tail of 16,383 others."""
    q, k, v = torch.zeros(1, 1, q_len, DIM), torch.zeros(1, 1, 16384, DIM), torch.ones(1, 1, 16384, DIM)
    q[..., 0], k[0, 0, 5, 0], v[0, 0, 5] = 1, 17.5, 0
    bounds = torch.tensor([0, 16384], dtype=torch.int32).expand(1, 1, q_len, 1, 2).contiguous()
    out, lse = torch.empty(1, 1, q_len, DIM, dtype=dtype), torch.empty(1, 1, q_len)
    cpu.forward(q.to(dtype), k.to(dtype), v.to(dtype), bounds, out, lse, scale=1.0, num_threads=2)
    tail = 16383 / (16383 + np.exp(17.5))
    # float32 adds 16,383 equal terms in a row; results of the others are rounded to 2**-9 and 2**-11.
    assert torch.all((out.double() / tail - 1).abs() <= {torch.float32: 2e-4}.get(dtype, 4e-3))


@pytest.mark.parametrize("q_len", [4, 16, 17])
def test_large_values_do_not_overflow_on_the_way(q_len: int) -> None:
    q, k = torch.zeros(1, 1, q_len, DIM), torch.zeros(1, 1, 256, DIM)
    q[..., 0], k[0, 0, 64:, 0] = 1, 4.5  # the maximum rises after the first block of keys
    v = torch.full((1, 1, 256, DIM), 1e36)
    bounds = torch.tensor([0, 256], dtype=torch.int32).expand(1, 1, q_len, 1, 2).contiguous()
    out, lse = torch.empty(1, 1, q_len, DIM), torch.empty(1, 1, q_len)
    cpu.forward(q, k, v, bounds, out, lse, scale=1.0, num_threads=1)
    assert torch.all((out / 1e36 - 1).abs() <= 1e-5)
