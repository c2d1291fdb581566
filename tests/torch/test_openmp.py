"""The kernel's loops run on torch's OpenMP runtime, whatever others are loaded and wherever they lie."""

import shutil
import subprocess
from pathlib import Path

import pytest
from covering import few
from programs import run_program

COMPILER = shutil.which("g++") or shutil.which("c++")

# Runs a team of one, and counts.
OTHER = """
static int calls = 0;
extern "C" __attribute__((visibility("default"))) int count() { return calls; }
extern "C" __attribute__((visibility("default"))) void GOMP_parallel(
    void (*body)(void*), void* data, unsigned, unsigned) {
  ++calls;
  body(data);
}
"""

PROGRAM = """
import ctypes, sys
first = sys.argv[2] == "first"
other = ctypes.CDLL(sys.argv[1]) if first else None
import torch
other = other or ctypes.CDLL(sys.argv[1])
from attnspan.kernels import cpu
from attnspan.torch import attention

x = torch.randn(1, 4, 512, 32)
attention(x, x, x)
assert cpu.threading() == "OpenMP of the process"
print(other.count())
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.compiled_module("its threads")
@pytest.mark.parametrize("order", few(["first", "last"], 1))
def test_another_runtime_in_a_folder_named_torch_is_left_alone(order: str, tmp_path: Path) -> None:
    library = tmp_path / "torch" / "libgomp-other.so"
    library.parent.mkdir()
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=OTHER, text=True, check=True
    )
    assert run_program("-W", "error", "-c", PROGRAM, str(library), order, timeout=120).split() == ["0"]
