"""The tests of `make gpu-test` are found, and skip themselves, where there is no GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu-test runs them")
def test_they_skip_themselves() -> None:
    suite = str(TESTS / "gpu")
    command = [sys.executable, "-m", "pytest", "-c", f"{suite}/pytest.ini", "--rootdir", suite, "-q", suite]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert "skipped" in done.stdout.splitlines()[-1]
    assert "passed" not in done.stdout.splitlines()[-1]
