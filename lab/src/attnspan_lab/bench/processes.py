"""Resident memory of this process, from Linux's /proc, and figures that need a process of their own."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnspan_lab.bench.timing import MeasurementError

__all__ = ["forget_peak", "fresh_process", "resident_memory", "resident_peak", "threads_set", "trim"]

_STATM, _STATUS = Path("/proc/self/statm"), Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def fresh_process(
    what: str,
    module: str,
    task: Any,
    *,
    remedy: str,
    launcher: Sequence[str] = (),
    timeout: float | None = None,
    variables: dict[str, str] | None = None,
) -> Any:
    """Run a module on a task and return what it prints in its last line; both are JSON.

    Args:
        what: Name of the figure in errors.
        module: It gets the task as its only argument.
        task: Plain data.
        remedy: What to try where the process fails.
        launcher: Options of Python that come before the module, such as another module that starts it.
        timeout: Seconds after which the process is ended.
        variables: Of its environment, in addition to those of this process.

    Raises:
        MeasurementError: The process failed.
    """
    command = [sys.executable, *launcher, "-m", module, json.dumps(task)]
    environment = os.environ | (variables or {})
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        got = f"none after {timeout} s"
    else:
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        got = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    raise MeasurementError(what, expected="a process that ends with a figure", got=got, remedy=remedy)


@contextmanager
def threads_set(number: int | None) -> Iterator[None]:
    """Give torch so many threads; None leaves its own number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
