"""Configurations of the CPU kernel: whatever its blocks and threads, the result differs by rounding alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from kernel_run import check_run, run
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
    for configs in random_configs(case, 6):
        check_run(case, run(problem, *configs))


def random_configs(case: Case, count: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Pairs of a configuration of forward and one of backward, other ones for each case and dtype."""
    heads, dtype = case.heads, str(case.dtype).removeprefix("torch.")
    sizes = (case.q_len, case.k_len, case.head_dim, case.v_dim, case.runs)
    problem = Problem(case.batch, heads, case.kv_heads, *sizes, dtype, "cpu")
    choice = random.Random(str(case))
    spaces = [cpu.configs(problem, direction) for direction in ("forward", "backward")]
    assert all(len(space) > 2 for space in spaces)
    return [(choice.choice(spaces[0]), choice.choice(spaces[1])) for _ in range(count)]
