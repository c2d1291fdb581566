"""Readings of a monitor at the boundaries of a step; each takes microseconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attnspan.kernels import cpu

__all__ = ["AttentionTotals", "CudaProbe", "HostProbe", "attention_totals", "compile_seconds"]

_COMPILE_TIMES = ("entire_frame_compile", "entire_backward_compile")


class AttentionTotals(NamedTuple):
    """Work of the attention operators since the process began, forward and backward: s, and visible FLOPs."""

    seconds: float
    flops: float

    def __sub__(self, earlier: AttentionTotals) -> AttentionTotals:
        return AttentionTotals(self.seconds - earlier.seconds, self.flops - earlier.flops)


def attention_totals() -> AttentionTotals | None:
    """Read the counters of the CPU kernel; None without the compiled module."""
    try:
        directions = cpu.counters().values()
    except ImportError:
        return None
    seconds, flops = (sum(direction[name] for direction in directions) for name in ("seconds", "flops"))
    return AttentionTotals(seconds, flops)


def compile_seconds() -> float:
    """Seconds that torch.compile has spent in this process so far, on forward and backward graphs."""
    # Looked up, not imported: a process that compiles nothing need not load the compiler.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0.0
    spent = dynamo.cumulative_time_spent_ns
    return float(sum(spent.get(name, 0) for name in _COMPILE_TIMES)) / 1e9


class HostProbe:
    """Marks moments, and reads what a step used, here of the cores.

    A mark of the host is known at once; that of an asynchronous device, only later. ``now`` reads
    (wall s, CPU s).
    """

    utilisation_source = "CPU time of the process over wall time and threads"

    def __init__(self, now: Callable[[], tuple[float, float]] | None = None) -> None:
        self._now = now or (lambda: (time.perf_counter(), time.process_time()))
        self._before = (0.0, 0.0)

    def mark(self) -> Any:
        """Mark this moment, without waiting for anything."""
        return time.perf_counter()

    def known(self, mark: Any) -> bool:
        """Whether the device has come past a mark; does not wait."""
        return mark is not None

    def wait(self, mark: Any) -> None:
        """Wait until the device has come past a mark."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Time between two known marks, s."""
        return float(stop - start)

    def start(self) -> None:
        """Forget what was used before this moment."""
        self._before = self._now()

    def utilisation(self, seconds: float, busy: float) -> float | None:
        """Busy share of the device, 0..1, in a step of ``seconds``, of which ``busy`` are within phases."""
        del seconds, busy
        before, self._before = self._before, self._now()
        wall = self._before[0] - before[0]
        return (self._before[1] - before[1]) / (wall * torch.get_num_threads()) if wall > 0 else None

    def device_memory(self) -> int | None:
        """Most bytes that were allocated on the accelerator so far; None on the CPU."""
        return None


class CudaProbe(HostProbe):
    """A CUDA device: events on its current stream, and NVML's utilisation, else the time within phases.

    NVML is read once in ``period`` steps: its own window is longer than a step.
    """

    def __init__(self, device: torch.device, period: int = 10) -> None:
        super().__init__()
        self._device, self._period, self._calls = device, period, 0
        self._share: float | None = None
        self.utilisation_source = "NVML"
        try:
            torch.cuda.utilization(device)
        except ModuleNotFoundError:
            self.utilisation_source = "device time between the first and the last event of each phase"

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def known(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return float(start.elapsed_time(stop)) / 1e3  # an event counts milliseconds

    def utilisation(self, seconds: float, busy: float) -> float | None:
        if self.utilisation_source != "NVML":
            return min(1.0, busy / seconds) if seconds > 0 else None
        if self._calls % self._period == 0:
            self._share = torch.cuda.utilization(self._device) / 100
        self._calls += 1
        return self._share

    def device_memory(self) -> int | None:
        # Not reset from step to step: the statistics belong to whoever trains.
        return torch.cuda.max_memory_allocated(self._device)
