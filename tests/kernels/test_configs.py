"""What a call of the CPU kernel may choose, blocks, threads and the dtype of results; and its memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from covering import everything
from kernel_run import check_run, run
from programs import run_program
from samples.problems import Case, make

from attnspan.call import Problem
from attnspan.kernels import cpu

CASES = [
    Case(q_len=300, k_len=520, mask="causal"),
    Case(q_len=130, k_len=1100, runs=3, heads=2, kv_heads=1),
    Case(q_len=400, k_len=400, mask="documents of 50", head_dim=128, v_dim=96, heads=1, kv_heads=1),
    Case(q_len=3, k_len=700, heads=8),
    Case(("dropout",), q_len=100, k_len=520, mask="full"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_configuration_changes_nothing_but_rounding(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    problem = make(case)
    dtype_name = str(dtype).removeprefix("torch.")
    sizes = (case.q_len, case.k_len, case.head_dim, case.v_dim, case.runs)
    described = Problem(case.batch, case.heads, case.kv_heads, *sizes, dtype_name, "cpu")
    spaces = [cpu.configs(described, direction) for direction in ("forward", "backward")]
    assert all(len(space) > 2 for space in spaces)
    choice = random.Random(str(case))  # others for each case and dtype
    for _ in range(6 if everything() else 3):
        check_run(case, run(problem, *map(choice.choice, spaces)))


# Sums over several calls ask for results in float32 beside 16-bit inputs.


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


# By how many MiB gradients raise the peak of the process; 32,768 rows see a window, arrays are 8 MiB each.
PROGRAM = """
import resource
import torch
from attnspan import causal, window
from attnspan.torch import attention

torch.set_num_threads(2)
q, k, v = (torch.randn(1, 1, 32768, 64, requires_grad=True) for _ in range(3))
out = attention(q, k, v, mask=causal() & window(64))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out.backward(torch.ones_like(out))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.compiled_module("its scratch")
def test_gradients_of_a_long_window_take_memory_for_what_it_sees() -> None:
    """Each 768 keys sum a dQ of their own: of the rows that see them, not of all (8 MiB, 43 times)."""
    grown = int(run_program("-c", PROGRAM, timeout=120))
    assert grown < 128, f"{grown} MiB"
