"""Measurements in separate processes, and this process's resident memory from Linux's /proc."""

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
    """Run a module on a task, and parse the last line of its output. Task and output are JSON.

    Args:
        what: Name of the measurement, for errors.
        module: Module to run. Its only argument is the task.
        task: Plain data.
        remedy: Suggestion if the process fails, for errors.
        launcher: Arguments of Python before the module, for example a module that launches it.
        timeout: Time limit in seconds.
        variables: Environment variables, in addition to the variables of this process.

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
    raise MeasurementError(what, expected="a process that prints its result", got=got, remedy=remedy)


@contextmanager
def threads_set(number: int | None) -> Iterator[None]:
    """Set torch's number of threads. None keeps the current number."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def resident_memory() -> int | None:
    """Return the resident bytes, or None on a system without /proc."""
    try:
        pages = int(_STATM.read_bytes().split()[1])
    except FileNotFoundError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def trim() -> None:
    """Return freed memory to the system, so that it does not count."""
    gc.collect()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def forget_peak() -> None:
    """Reset the peak of resident memory to the current value.

    Raises:
        OSError: The system does not allow the reset.
    """
    _RESET.write_text("5")


def resident_peak() -> int:
    """Return the peak of resident bytes since the start of the process or since `forget_peak`.

    Raises:
        OSError: The system does not report the peak.
    """
    # getrusage does not work here: on some kernels its value is not reset.
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024
