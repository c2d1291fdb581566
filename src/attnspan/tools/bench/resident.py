"""Resident memory of this process, now and at its peak, from Linux's /proc."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

__all__ = ["forget_peak", "resident_memory", "resident_peak", "trim"]

_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def resident_memory() -> int | None:
    """Resident bytes now; None on a system without /proc."""
    try:
        pages = int(_STATM.read_bytes().split()[1])
    except FileNotFoundError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def trim() -> None:
    """Give freed memory back to the system, so that it is not counted."""
    gc.collect()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def forget_peak() -> None:
    """Let the peak of resident memory begin anew at what is resident now.

    Raises:
        OSError: The system does not let a process do that.
    """
    _RESET.write_text("5")


def resident_peak() -> int:
    """Most resident bytes since the process began, or since `forget_peak`.

    Raises:
        OSError: The system does not tell.
    """
    # Not getrusage: its figure outlives the reset on some kernels.
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024
