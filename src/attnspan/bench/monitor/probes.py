"""What a monitor reads at the boundaries of a step; each reading takes microseconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from attnspan.kernels import cpu

__all__ = [
    "AttentionTotals",
    "CpuProbe",
    "CudaProbe",
    "Probe",
    "attention_totals",
    "compile_seconds",
]

_COMPILE_TIMES = ("entire_frame_compile", "entire_backward_compile")


class AttentionTotals(NamedTuple):
    """Work of the attention operators since the process began, forward and backward together.

    Args:
        seconds: Wall time inside them, s.
        flops: Over visible pairs.

    Example:
        >>> AttentionTotals(3.0, 5e9) - AttentionTotals(1.0, 1e9)
        AttentionTotals(seconds=2.0, flops=4000000000.0)
    """

    seconds: float
    flops: float

    def __sub__(self, earlier: AttentionTotals) -> AttentionTotals:
        return AttentionTotals(self.seconds - earlier.seconds, self.flops - earlier.flops)


def attention_totals() -> AttentionTotals | None:
    """Read the counters of the CPU kernel; None without the compiled module.

    Example:
        >>> before = attention_totals()
        >>> before is None or (attention_totals() - before).flops == 0
        True
    """
    try:
        directions = cpu.counters().values()
    except ImportError:
        return None
    return AttentionTotals(
        sum(direction["seconds"] for direction in directions),
        sum(direction["flops"] for direction in directions),
    )


def compile_seconds() -> float:
    """Seconds that torch.compile has spent in this process so far, on forward and backward graphs.

    Example:
        >>> compile_seconds() >= 0
        True
    """
    # Looked up, not imported: a process that compiles nothing need not load the compiler.
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0.0
    spent = dynamo.cumulative_time_spent_ns
    return float(sum(spent.get(name, 0) for name in _COMPILE_TIMES)) / 1e9


class Probe(Protocol):
    """What is read of a device at the end of each step."""

    utilisation_source: str

    def start(self) -> None:
        """Forget what was before this moment."""
        ...

    def utilisation(self, seconds: float, busy: float) -> float | None:
        """Busy share of the device since the last call or the start, 0..1; None when not known.

        Args:
            seconds: Length of the step, s.
            busy: Part of it that lies within phases, s.
        """
        ...

    def device_memory(self) -> int | None:
        """Most bytes that were allocated on the accelerator so far; None on the CPU."""
        ...


class CpuProbe:
    """The cores: CPU time of this process over wall time and threads.

    Args:
        now: Source of (wall seconds, CPU seconds).

    Example:
        >>> times = iter([(0.0, 0.0), (2.0, 2.0 * torch.get_num_threads())])
        >>> probe = CpuProbe(lambda: next(times))
        >>> probe.start()
        >>> probe.utilisation(2.0, 1.0)
        1.0
    """

    utilisation_source = "CPU time of the process over wall time and threads"

    def __init__(self, now: Callable[[], tuple[float, float]] | None = None) -> None:
        self._now = now or (lambda: (time.perf_counter(), time.process_time()))
        self._before = (0.0, 0.0)

    def start(self) -> None:
        self._before = self._now()

    def utilisation(self, seconds: float, busy: float) -> float | None:
        del seconds, busy
        before, self._before = self._before, self._now()
        wall = self._before[0] - before[0]
        return (self._before[1] - before[1]) / (wall * torch.get_num_threads()) if wall > 0 else None

    def device_memory(self) -> int | None:
        return None


class CudaProbe:
    """A CUDA device: NVML's utilisation where its Python module is installed, else time within phases.

    Args:
        device: The device.
        period: Steps between two readings of NVML, whose own window is longer than a step.
    """

    def __init__(self, device: torch.device, period: int = 10) -> None:
        self._device, self._period, self._calls = device, period, 0
        self._share: float | None = None
        try:
            torch.cuda.utilization(device)
        except ModuleNotFoundError:
            self._nvml = False
            self.utilisation_source = "device time between the first and the last event of each phase"
        else:
            self._nvml = True
            self.utilisation_source = "NVML"

    def start(self) -> None:
        self._calls = 0

    def utilisation(self, seconds: float, busy: float) -> float | None:
        if not self._nvml:
            return min(1.0, busy / seconds) if seconds > 0 else None
        if self._calls % self._period == 0:
            self._share = torch.cuda.utilization(self._device) / 100
        self._calls += 1
        return self._share

    def device_memory(self) -> int | None:
        # Not reset from step to step: the statistics belong to whoever trains.
        return torch.cuda.max_memory_allocated(self._device)
