"""What this machine can do: measured, not quoted."""

from __future__ import annotations

import resource
import sys
import time

import torch

__all__ = ["faster_dtype", "matmul_ceiling", "peak_memory"]

_SIZE = 1024
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
    factor = torch.randn(_SIZE, _SIZE).to(dtype)
    factor @ factor  # first call: allocation and the library's own set-up
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        factor @ factor
        stop = time.perf_counter()
        best = min(best, stop - start)
        if stop > end:
            return 2.0 * _SIZE**3 / best


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
