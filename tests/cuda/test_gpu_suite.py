"""The GPU tests and scripts on a machine without a GPU: tests are skipped, and results are still checked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu-test runs them")
def test_they_skip_themselves() -> None:
    suite = str(TESTS / "gpu")
    command = [sys.executable, "-m", "pytest", "-c", f"{suite}/pytest.ini", "--rootdir", suite, "-q", suite]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" in done.stdout.splitlines()[-1]
    assert "passed" not in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_results_are_checked_as_on_a_gpu() -> None:
    script = TESTS.parent / "benchmarks" / "gpu_results.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(script), "--device", "cpu", "--length", "40", "--first", "3"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    ).stdout
    vendor, flex, triton, end = done.splitlines()
    assert "refused: backend='vendor'" in vendor
    assert " ok " in flex
    assert " ok " in triton
    assert end == "0 wrong"
