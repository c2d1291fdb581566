"""Readings of a monitor at the boundaries of a step. Each one takes microseconds."""

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
    """Totals of the attention operators in this process: seconds and visible FLOPs, forward and backward."""

    seconds: float
    flops: float

    def __sub__(self, earlier: AttentionTotals) -> AttentionTotals:
        return AttentionTotals(self.seconds - earlier.seconds, self.flops - earlier.flops)


def attention_totals() -> AttentionTotals | None:
    """Read the counters of the CPU kernel. Return None without the compiled module."""
    try:
        directions = cpu.counters().values()
    except ImportError:
        return None
    seconds, flops = (sum(direction[name] for direction in directions) for name in ("seconds", "flops"))
    return AttentionTotals(seconds, flops)


def compile_seconds() -> float:
    """Return the seconds of torch.compile in this process, for forward and backward graphs."""
    # Look the module up instead of importing it: most processes need not load the compiler.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0.0
    spent = dynamo.cumulative_time_spent_ns
    return float(sum(spent.get(name, 0) for name in _COMPILE_TIMES)) / 1e9


class HostProbe:
    """Marks moments, and reads the resources of a step. This base class measures the CPU.

    A mark on the CPU is known immediately. A mark on an asynchronous device is known later. ``now`` reads
    (wall seconds, CPU seconds).
    """

    utilisation_source = "CPU time of the process over wall time and threads"

    def __init__(self, now: Callable[[], tuple[float, float]] | None = None) -> None:
        self._now = now or (lambda: (time.perf_counter(), time.process_time()))
        self._before = (0.0, 0.0)

    def mark(self) -> Any:
        """Mark this moment, without waiting."""
        return time.perf_counter()

    def known(self, mark: Any) -> bool:
        """Whether the device has passed a mark. This method does not wait."""
        return mark is not None

    def wait(self, mark: Any) -> None:
        """Wait until the device has passed a mark."""

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two known marks."""
        return float(stop - start)

    def start(self) -> None:
        """Reset the readings at this moment."""
        self._before = self._now()

    def utilisation(self, seconds: float, busy: float) -> float | None:
        """Return the device's busy share of a step, from 0 to 1. ``busy`` are the seconds within phases."""
        del seconds, busy
        before, self._before = self._before, self._now()
        wall = self._before[0] - before[0]
        return (self._before[1] - before[1]) / (wall * torch.get_num_threads()) if wall > 0 else None

    def device_memory(self) -> int | None:
        """Return the peak of allocated bytes on the accelerator, or None on the CPU."""
        return None


class CudaProbe(HostProbe):
    """Probe of a CUDA device: events on its current stream, and NVML's utilisation.

    Without NVML, the time within phases counts as busy. NVML is read once in ``period`` steps, because its
    window is longer than a step.
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
        return float(start.elapsed_time(stop)) / 1e3  # events measure milliseconds

    def utilisation(self, seconds: float, busy: float) -> float | None:
        if self.utilisation_source != "NVML":
            return min(1.0, busy / seconds) if seconds > 0 else None
        if self._calls % self._period == 0:
            self._share = torch.cuda.utilization(self._device) / 100
        self._calls += 1
        return self._share

    def device_memory(self) -> int | None:
        # The peak is not reset at each step, because the training program may read these statistics.
        return torch.cuda.max_memory_allocated(self._device)
