"""Every instruction-set level that this machine can run passes the tests of the kernel."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from covering import everything
from programs import run_program

from attnspan.kernels import cpu

TESTS = [
    str(Path(__file__).with_name(name))
    for name in ("test_cpu.py", "test_large_scores.py", "test_same_bits.py")
]
#: In the ordinary run the lowest level alone: every option, numbers of any size, the same bits.
SOME = ("options_against and float32", "end_of_floats", "packed_or_alone", "chunks", "threads_under", "lone")
SOME += ("one_key", "small and not 1000", "flash_kernel and 1500 and fp32")
SHORT = () if everything() else ("-k", " or ".join(SOME))
OTHERS = [level for level in cpu.isa_levels() if level != cpu.isa()]
LEVELS = OTHERS if everything() else OTHERS[:1]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_level(level: str) -> None:
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *SHORT, *TESTS)
    assert " passed" in run_program(*command, timeout=3600, ATTNSPAN_ISA=level)


@pytest.mark.parametrize("name", ["avx1024", "AVX2"])
def test_an_unknown_level_is_refused_by_name(name: str) -> None:
    code = "from attnspan.kernels import cpu; cpu.isa()"
    environment = os.environ | {"ATTNSPAN_ISA": name}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "ATTNSPAN_ISA" in done.stderr
    assert "isa_levels" in done.stderr
