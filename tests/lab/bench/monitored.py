"""A training that is watched: everything that a monitor reads, moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnspan_lab.bench.monitor import Monitor
from attnspan_lab.bench.monitor.probes import AttentionTotals, HostProbe


class World(HostProbe):
    """Everything that a monitor reads, moved by hand: clock, counters, compiler, CPU time.

    A mark is known once the device has `finished` what lies before it: at once, unless a test says otherwise.
    """

    def __init__(self) -> None:
        super().__init__(lambda: (self.now, self.cpu))
        self.now = self.cpu = self.compiling = 0.0
        self.totals = AttentionTotals(5.0, 100.0)
        self.finished = float("inf")
        self.waits: list[float] = []
        self.monitors: list[Monitor] = []

    def mark(self) -> float:
        return self.now

    def known(self, mark: float) -> bool:
        return mark <= self.finished

    def wait(self, mark: float) -> None:
        self.waits.append(mark)
        self.finished = max(self.finished, mark)

    def seconds(self, start: float, stop: float) -> float:
        assert max(start, stop) <= self.finished, (
            "asked for the time of a mark that the device has not reached"
        )
        return stop - start

    def work(self, seconds: float, flops: float = 0.0) -> None:
        """Let time pass, some of it in attention where there are FLOPs."""
        self.now += seconds
        self.cpu += seconds
        if flops:
            self.totals = AttentionTotals(self.totals.seconds + seconds, self.totals.flops + flops)

    def monitor(self, folder: Path, **options: Any) -> Monitor:
        monitor = Monitor(folder, attention=lambda: self.totals, probe=self, **options)
        self.monitors.append(monitor)
        return monitor

    def batches(self, waits: list[float]) -> Iterator[int]:
        for index, wait in enumerate(waits):
            self.now += wait  # waiting uses no core
            yield index


def take_step(world: World, monitor: Monitor, **options: Any) -> None:
    """A step of 10 s: 1 host, 3 forward, 4 backward, 2 optimizer; attention 1 s forward, 2 s backward."""
    with monitor.step(tokens=50, **options):
        world.work(1)
        with monitor.phase("forward"):
            world.work(2)
            world.work(1, flops=4)
        with monitor.phase("backward"):
            world.work(2)
            world.work(2, flops=10)
        with monitor.phase("optimizer"):
            world.work(2)
