"""Factories that are no subjects: they raise, return junk, hang, crash, fork, or want a GPU."""

import os
import signal
import time
from typing import Any

import patients
import torch


def raises() -> Any:
    raise KeyError("weights.bin")


def returns_junk() -> Any:
    return "a model"


def has_no_batch() -> Any:
    return torch.nn.Linear(2, 2), []


def hangs() -> Any:
    time.sleep(1000)  # here


def crashes() -> Any:
    os.abort()  # here


def is_killed() -> Any:
    """End as if the system had no memory left and killed the process: no traceback is written."""
    end = time.monotonic() + 0.5
    while True:
        os.kill(os.getpid(), signal.SIGKILL) if time.monotonic() > end else time.sleep(0.01)  # here


def exits() -> Any:
    raise SystemExit("no licence")


def forks() -> Any:
    os.fork()
    return patients.well_fused()


def wants_a_gpu() -> Any:
    return torch.nn.Linear(2, 2).to("cuda"), [torch.ones(1, 2)]


class _Raising(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x  # here


def raises_in_forward() -> Any:
    return _Raising(), [torch.ones(2, 3)]
