"""Forward has the same bits on any number of threads, at every instruction-set level of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnspan.kernels import cpu

PROGRAM = Path(__file__).with_name("equal_bits.py")


@pytest.mark.slow
@pytest.mark.compiled_module("other processes load it")
@pytest.mark.parametrize("level", cpu.isa_levels())
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
