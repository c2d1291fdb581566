"""The kernel's loops run on torch's OpenMP runtime, whatever others are loaded and wherever they lie."""

import shutil
import subprocess
from pathlib import Path

import pytest
from covering import few
from programs import run_program

COMPILER = shutil.which("g++") or shutil.which("c++")

# Runs a team of one, and counts; says how many threads were wanted last.
OTHER = """
static int calls = 0, wanted = 0;
extern "C" __attribute__((visibility("default"))) int count() { return calls; }
extern "C" __attribute__((visibility("default"))) int last() { return wanted; }
extern "C" __attribute__((visibility("default"))) void GOMP_parallel(
    void (*body)(void*), void* data, unsigned threads, unsigned) {
  ++calls, wanted = threads;
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


# What the whole process shares is found first.
OPERATORS = """
import ctypes, sys
other = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import torch
from attnspan import full
from attnspan.torch import attention  # registers the operators

q, k, v = (torch.randn(1, 4, 512, 32) for _ in range(3))
bounds, found = full().prepare(512, 512, like=q).lowered.bounds, []
for threads in (3, 2):
    torch.set_num_threads(threads)
    out, lse = torch.ops.attnspan.attention(q, k, v, bounds, 0.25)
    found.append(other.last())
    torch.ops.attnspan.attention_backward(out, None, q, k, v, bounds, out, lse, 0.25)
    found.append(other.last())
print(*found)
"""


def _other(path: Path) -> Path:
    command = [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", path]
    path.parent.mkdir()
    subprocess.run(command, input=OTHER, text=True, check=True)
    return path


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.compiled_module("its threads")
def test_the_operators_use_as_many_threads_as_torch(tmp_path: Path) -> None:
    library = _other(tmp_path / "torch" / "libother.so")
    assert run_program("-W", "error", "-c", OPERATORS, str(library), timeout=120) == "3 3 2 2\n"


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.compiled_module("its threads")
@pytest.mark.parametrize("order", few(["first", "last"], 1))
def test_another_runtime_in_a_folder_named_torch_is_left_alone(order: str, tmp_path: Path) -> None:
    library = _other(tmp_path / "torch" / "libgomp-other.so")
    assert run_program("-W", "error", "-c", PROGRAM, str(library), order, timeout=120).split() == ["0"]
