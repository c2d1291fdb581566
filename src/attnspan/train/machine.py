"""What this machine can do: measured, not quoted."""

from __future__ import annotations

import resource
import sys
import time

import torch

__all__ = ["faster_dtype", "matmul_ceiling", "peak_memory"]

_SIZES = (128, 1024)
_BURST_SECONDS = 0.3


def matmul_ceiling(dtype: torch.dtype, seconds: float = _BURST_SECONDS) -> float:
    """FLOP/s of the best of a short burst of square matrix products, the ceiling that MFU refers to.

    Args:
        dtype: Element type of the factors.
        seconds: Length of the burst, s.

    Returns:
        FLOP/s with torch's current number of threads.

    Example:
        >>> matmul_ceiling(torch.float32, seconds=0.01) > 0
        True
    """
    best = 0.0
    for size in _SIZES:
        flops = 2.0 * size**3
        if best and flops / best > seconds:
            break  # a CPU that emulates the dtype would take seconds for each product
        factor = torch.randn(size, size).to(dtype)
        factor @ factor  # first call: allocation and the library's own set-up
        end = time.perf_counter() + seconds / len(_SIZES)
        while True:
            start = time.perf_counter()
            factor @ factor
            stop = time.perf_counter()
            best = max(best, flops / (stop - start))
            if stop > end:
                break
    return best


def faster_dtype() -> str:
    """The training dtype that pays here: bfloat16 where its products are at least 1.5 times as fast.

    A CPU without bfloat16 dot products emulates them and is slower; the margin pays for autocast's casts.

    Example:
        >>> faster_dtype() in ("float32", "bfloat16")
        True
    """
    gain = matmul_ceiling(torch.bfloat16) / matmul_ceiling(torch.float32)
    return "bfloat16" if gain >= 1.5 else "float32"


def peak_memory() -> int:
    """Largest resident size of this process so far, bytes.

    Example:
        >>> peak_memory() > 2**20
        True
    """
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
