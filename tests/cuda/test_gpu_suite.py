"""The GPU scripts on a machine without a GPU: results are still checked."""

from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_results.py"


@pytest.mark.slow
def test_results_are_checked_as_on_a_gpu() -> None:
    sizes = ("--device", "cpu", "--length", "40", "--first", "3")
    vendor, flex, triton, end = run_program(str(SCRIPT), *sizes, TRITON_INTERPRET="1").splitlines()
    assert "refused: backend='vendor'" in vendor
    assert " ok " in flex
    assert " ok " in triton
    assert end == "0 wrong"
