"""Masks under which a row sees a small part of many keys.

Rows and keys are then worked on in parts that each pack what they see, which must not tread on each other.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_run import run
from samples.problems import Case, compare, make

from attnspan import causal, documents, global_keys, key_padding, library, window
from attnspan.kernels import cpu

LENGTH, HEADS, DIM = 1000, 4, 64
#: Relative to float64; what rounding the results to the dtype alone gives is about half of it.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
MASKS = {
    "window": causal() & window(99),
    "documents": causal() & documents(torch.arange(0, LENGTH + 130, 130).clamp(max=LENGTH)),
    "global and window": causal() & (global_keys(20) | window(60)),
    "a window for each head": library.per_head([window(40 * (h + 1), 25 * h) for h in range(HEADS)]),
    # Query heads that share a key head look at opposite ends.
    "opposite ends": library.per_head([global_keys(32), key_padding(32, "left")] * 2),
}


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MASKS)
def test_against_float64_on_any_number_of_threads(name: str, dtype: torch.dtype) -> None:
    problem = make(Case(heads=HEADS, q_len=LENGTH, k_len=LENGTH, mask="causal", dtype=dtype))
    lowered = MASKS[name].spans(LENGTH, LENGTH, heads=HEADS, like=problem.q).lowered
    problem = replace(problem, bounds=lowered.bounds, dlse=torch.zeros_like(problem.dlse))
    exact = problem.oracle()
    for threads in (1, 3):
        got = run(problem, threads=threads)
        compare({x: got[x] for x in ("out", "dq", "dk", "dv")}, exact, dict.fromkeys(exact, TOLERANCE[dtype]))


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
