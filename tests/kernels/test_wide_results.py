"""Results in float32 beside 16-bit inputs, for sums over several calls: 16-bit ones are their rounding."""

import pytest
import torch
from samples.problems import Case, make

from attnspan.kernels import cpu


@pytest.mark.compiled_module("the runner writes results in the dtype of the inputs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 150])
@pytest.mark.parametrize("nan", [False, True], ids=["finite", "exact rows"])
def test_16_bit_results_are_the_rounding_of_wide_ones(dtype: torch.dtype, q_len: int, nan: bool) -> None:
    sizes = {"batch": 2, "heads": 4, "q_len": q_len, "k_len": 200, "head_dim": 40, "v_dim": 24}
    options = ("softcap",) if q_len == 3 else ()
    problem = make(Case(options, "documents of 50", dtype, **sizes, scale=0.2))
    problem.bounds.clamp_(max=199)
    if nan:
        problem.v[:, :, 199] = torch.inf  # hidden from all rows, yet it sends its head the way of exact rows
    call = {"scale": 0.2, "num_threads": 2, "options": problem.options}
    inputs, found = tuple(problem.inputs.values()), {}
    for result in (dtype, torch.float32):
        # Filled with NaN, and strided: stored as (B, S, H, D).
        out, *gradients = (
            torch.full_like(x.transpose(1, 2).contiguous(), torch.nan, dtype=result).transpose(1, 2)
            for x in (problem.dout, *inputs)
        )
        lse = torch.empty(problem.dlse.shape)
        cpu.forward(*inputs, problem.bounds, out, lse, **call)
        given = (problem.dout, None, *inputs, out.to(dtype), lse, problem.bounds)
        cpu.backward(*given, *gradients, **call)
        found[result] = [out, *gradients]
    for narrow, wide in zip(found[dtype], found[torch.float32], strict=True):
        assert wide.dtype == torch.float32
        assert torch.equal(narrow, wide.to(dtype))
        assert not torch.equal(wide, wide.to(dtype).float())
