"""Clocks that move only when told, and a device whose work goes on after a call has returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.timing import Meter, Subject


@dataclass
class World:
    """A clock, and the calls that moved it."""

    now: float = 0.0
    busy: float = 0.0
    calls: list[str] = field(default_factory=list)

    def subject(self, name: str, seconds: Sequence[float], cores: float = 1.0) -> Subject:
        """A call that takes the given times in turn, over and over."""
        turn = iter(range(10**9))

        def call() -> float:
            step = seconds[next(turn) % len(seconds)]
            self.now += step
            self.busy += step * cores
            self.calls.append(name)
            return step

        return Subject(name, call, Device())

    def meter(self, threads: int = 1) -> Meter:
        return Meter(lambda: self.now, lambda: self.busy, threads)


@dataclass
class VirtualDevice:
    """A queue whose work goes on after a call has returned.

    Args:
        world: Whose clock moves while a wait lasts.
        work: Seconds of each call.
        round_trip: Seconds that a wait takes besides.
        waits: Whether `synchronize` waits at all; one that does not is what users forget.
    """

    world: World
    work: float
    round_trip: float = 0.0
    waits: bool = True
    pending: int = 0
    name = "virtual"
    is_asynchronous = True
    is_ordered = True

    def submit(self) -> str:
        self.pending += 1
        return "a result to come"

    def synchronize(self, result: Any) -> None:
        del result
        if self.waits:
            self.world.now += self.pending * self.work + self.round_trip
            self.pending = 0

    def is_idle(self, result: Any) -> bool:
        del result
        return self.pending == 0

    def timer(self) -> None:
        return None

    def subject(self, name: str) -> Subject:
        return Subject(name, self.submit, self)


@dataclass
class FakeProbe:
    """Ceilings that cost no time, and what was asked for."""

    asked: list[tuple[object, ...]] = field(default_factory=list)

    def peak_kinds(self) -> list[str]:
        return ["amx_bf16", "fma_f32", "dot_bf16"]

    def peak(self, kind: str, *, num_threads: int, seconds: float) -> float:
        self.asked.append((kind, num_threads, seconds))
        return {"fma_f32": 1e12, "dot_bf16": 2e12, "amx_bf16": 1.6e13}[kind] * num_threads

    def read_bandwidth(self, size: int, *, num_threads: int, seconds: float) -> float:
        self.asked.append((size, num_threads, seconds))
        return 1e10
