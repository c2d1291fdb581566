"""Two ways to mark a moment of a step: the host's clock, and CUDA events, which need no synchronisation."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock"]


class Clock(Protocol):
    """Marks moments. On an asynchronous device the time of a mark is known only later."""

    def mark(self) -> Any:
        """Mark this moment, without waiting for anything."""
        ...

    def known(self, mark: Any) -> bool:
        """Whether the device has come past a mark; does not wait.

        Args:
            mark: From `mark`.
        """
        ...

    def wait(self, mark: Any) -> None:
        """Wait until the device has come past a mark.

        Args:
            mark: From `mark`.
        """
        ...

    def seconds(self, start: Any, stop: Any) -> float:
        """Time between two known marks, s.

        Args:
            start: The earlier mark.
            stop: The later mark.
        """
        ...


class HostClock:
    """Marks are the host's monotonic time, known at once.

    Example:
        >>> clock = HostClock()
        >>> start = clock.mark()
        >>> clock.known(start), clock.seconds(start, clock.mark()) >= 0
        (True, True)
    """

    def mark(self) -> float:
        return time.perf_counter()

    def known(self, mark: float) -> bool:
        del mark
        return True

    def wait(self, mark: float) -> None:
        del mark

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


class CudaClock:
    """Marks are events on the current stream of a CUDA device.

    Args:
        device: The device; its current stream at each mark is the one that is timed.

    Example:
        >>> CudaClock(torch.device("cuda", 0)).device.index
        0
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def known(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return float(start.elapsed_time(stop)) / 1e3  # an event counts milliseconds
