"""The kernel's loops run on torch's OpenMP runtime, whatever others are loaded and wherever they lie."""

import shutil
import subprocess
from pathlib import Path

import pytest
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
other = ctypes.CDLL(sys.argv[1], mode=ctypes.{mode})
import torch
from attnspan import full
from attnspan.kernels import cpu
from attnspan.torch import attention  # registers the operators

q, k, v = (torch.randn(1, 4, 512, 32) for _ in range(3))
bounds, found = full().prepare(512, 512, like=q).lowered.bounds, []
for threads in (3, 2):
    torch.set_num_threads(threads)
    attention(q, k, v)
    found.append(other.last())
    out, lse = torch.ops.attnspan.attention(q, k, v, bounds, 0.25)
    found.append(other.last())
    torch.ops.attnspan.attention_backward(out, None, q, k, v, bounds, out, lse, 0.25)
    found.append(other.last())
assert cpu.threading() == "OpenMP of the process"
print(other.count() > 0, *found)
"""


# What the whole process shares is found first; another runtime in a folder named torch is left alone.
@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.compiled_module("its threads")
@pytest.mark.parametrize(
    ("mode", "said"), [("RTLD_GLOBAL", "True 3 3 3 2 2 2\n"), ("RTLD_LOCAL", "False 0 0 0 0 0 0\n")]
)
def test_as_many_threads_as_torch_has(mode: str, said: str, tmp_path: Path) -> None:
    library = tmp_path / "torch" / "libgomp-other.so"
    library.parent.mkdir()
    command = [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", library]
    subprocess.run(command, input=OTHER, text=True, check=True)
    assert run_program("-W", "error", "-c", PROGRAM.format(mode=mode), str(library), timeout=120) == said
