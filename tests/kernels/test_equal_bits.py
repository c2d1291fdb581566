"""Forward has the same bits on any number of threads, at every instruction-set level of this machine."""

from pathlib import Path

import pytest
import torch
from covering import everything
from kernel_run import forward
from programs import run_program
from samples.problems import Case, make

from attnspan.kernels import cpu

PROGRAM = Path(__file__).with_name("equal_bits.py")


@pytest.mark.slow
@pytest.mark.compiled_module("other processes load it")
@pytest.mark.parametrize("level", cpu.isa_levels() if everything() else sorted({"portable", cpu.isa()}))
def test_forward_has_the_same_bits_on_any_number_of_threads(level: str) -> None:
    ran = run_program(str(PROGRAM), ATTNSPAN_ISA=level).split()
    assert ran[0] == level
    assert int(ran[1]) >= 180


@pytest.mark.parametrize("q_len", [3, 200])
def test_a_configuration_of_threads_changes_no_bit(q_len: int) -> None:
    case = Case(heads=1, kv_heads=1, q_len=q_len, k_len=4096, head_dim=16, v_dim=16, mask="full")
    problem = make(case)
    problem.k[0, 0, 4000] *= 40
    first, *others = (
        forward(problem, 5, config={"block_q": 0, "block_k": 0, "threads": threads}) for threads in (0, 1, 3)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(other, first, strict=True))
