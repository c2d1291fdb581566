"""What else runs on the machine: a search beside it finds what is best beside it, and not in general."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["Neighbours", "busy_seconds"]


def busy_seconds() -> float | None:
    """Processor time that the whole machine has spent since its start, s; None where it does not say.

    Example:
        >>> found = busy_seconds()
        >>> found is None or found > 0
        True
    """
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _idle, _iowait, *rest = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


class Neighbours:
    """Processors that other processes use, since the object was made.

    Args:
        busy: Processor time of the whole machine so far, s.
        own: That of this process, s.
        clock: Wall time, s.

    Example:
        >>> Neighbours(busy=lambda: None).processors() is None
        True
    """

    def __init__(
        self,
        busy: Callable[[], float | None] = busy_seconds,
        own: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._busy, self._own, self._clock = busy, own, clock
        self._start = (busy(), own(), clock())

    def processors(self) -> float | None:
        """Mean number of processors; None where the machine does not say.

        Example:
            >>> busy, own, clock = iter([100.0, 130.0]), iter([10.0, 30.0]), iter([0.0, 20.0])
            >>> Neighbours(busy.__next__, own.__next__, clock.__next__).processors()
            0.5
        """
        busy, own, clock = self._start
        now, ours, wall = self._busy(), self._own() - own, self._clock() - clock
        if busy is None or now is None or wall <= 0:
            return None
        return max(0.0, now - busy - ours) / wall
