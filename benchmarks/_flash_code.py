"""FlashAttention 2 for sm_90, from torch's CUDA build."""

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from triton_compiled import TOOLS

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
#: Flags of a call without dropout, window, slopes and softcap, with lengths of whole blocks.
PLAIN = {
    "forward_kernel": ("flash_fwd_kernel", "00001100"),
    "backward_kernel": ("flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "0000110"),
}


def _cuobjdump(*options: str, folder: str | None = None) -> str:
    command = [str(TOOLS / "cuobjdump"), *options, str(LIBRARY)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout


@cache
def _listed() -> list[tuple[str, list[str]]]:
    """List each sm_90 program in the library, with the names of its kernels."""
    programs = [x for x in re.findall(r"\S+\.cubin", _cuobjdump("-lelf")) if re.search(r"\.sm_90a?\.", x)]
    parts = _cuobjdump("--dump-resource-usage", "-arch", "sm_90").split("Fatbin elf code:")[1:]
    kernels = [re.findall(r"Function (\w+):", part) for part in parts]
    return list(zip(programs, kernels, strict=True))


def binary(kernel: str, dim: int) -> tuple[bytes, str, dict[str, int]]:
    """Find the program with a kernel of `PLAIN`, the kernel's name, and its block sizes.

    If several match, the result has the largest blocks, because an H100 has enough shared memory for them.
    """
    name, flags = PLAIN[kernel]
    found = []
    for program, names in _listed():
        for full in names:
            numbers = re.findall(r"L[bi](\d+)E", full)
            plain = name in full and "bfloat16" in full and "".join(numbers).endswith(flags)
            if plain and numbers[0] == str(dim):
                found.append((tuple(map(int, numbers[1:4])), program, full))
    if not found:
        raise LookupError(f"{name} of head dim {dim} is not in {LIBRARY}")
    (m, n, warps), program, full = max(found, key=lambda x: x[0][0] * x[0][1])
    with tempfile.TemporaryDirectory() as folder:
        _cuobjdump("-xelf", program, folder=folder)
        cubin = (Path(folder) / program).read_bytes()
    return cubin, full, {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps}
