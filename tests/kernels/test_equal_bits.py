"""Forward has the same bits on any number of threads, at every instruction-set level of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from covering import everything
from kernel_cases import Case, make

from attnspan.kernels import cpu

PROGRAM = Path(__file__).with_name("equal_bits.py")


@pytest.mark.slow
@pytest.mark.compiled_module("other processes load it")
@pytest.mark.parametrize("level", cpu.isa_levels() if everything() else sorted({"portable", cpu.isa()}))
def test_forward_has_the_same_bits_on_any_number_of_threads(level: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=os.environ | {"ATTNSPAN_ISA": level},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ran = done.stdout.split()
    assert ran[0] == level
    assert int(ran[1]) >= 180


@pytest.mark.parametrize("q_len", [3, 200])
def test_a_configuration_of_threads_changes_no_bit(q_len: int) -> None:
    arrays = make(Case(kv_heads=1, q_len=q_len, k_len=4096, head_dim=16, v_dim=16, mask="full", threads=5))
    arrays.k[0, 0, 4000] *= 40
    results = []
    for threads in (0, 1, 3):
        out, lse = torch.empty(1, 1, q_len, 16), torch.empty(1, 1, q_len)
        call = {"scale": 0.125, "num_threads": 5, "config": {"block_q": 0, "block_k": 0, "threads": threads}}
        cpu.forward(arrays.q, arrays.k, arrays.v, arrays.bounds, out, lse, **call)
        results.append((out, lse))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
