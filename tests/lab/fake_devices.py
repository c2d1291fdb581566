"""Clocks that move only when told, and a device whose work goes on after a call has returned."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.timing import Meter, Subject


@dataclass
class World:
    """A clock, and the calls that moved it."""

    now: float = 0.0
    busy: float = 0.0
    calls: list[Any] = field(default_factory=list)

    def subject(self, name, seconds, cores=1.0):
        """A call that takes the given times in turn, over and over."""
        turn = cycle(seconds)

        def call():
            self.now += (step := next(turn))
            self.busy += step * cores
            self.calls.append(name)

        return Subject(name, call, Device())

    def meter(self, threads=1):
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
    work: float = 0.0
    round_trip: float = 0.0
    waits: bool = True
    pending: float = 0.0
    name = "virtual"
    is_asynchronous = True
    is_ordered = True

    def submit(self, work=None):
        self.pending += self.work if work is None else work
        return "a result to come"

    def synchronize(self, _result):
        if self.waits:
            self.world.now += self.pending + self.round_trip
            self.pending = 0.0

    def is_idle(self, _result):
        return self.pending == 0

    def timer(self):
        return None

    def subject(self, name):
        return Subject(name, self.submit, self)


@dataclass
class FakeProbe:
    """Ceilings that cost no time, and what was asked for."""

    asked: list[tuple[object, ...]] = field(default_factory=list)

    def peak_kinds(self):
        return ["amx_bf16", "fma_f32", "dot_bf16"]

    def peak(self, kind, *, num_threads, seconds):
        self.asked.append((kind, num_threads, seconds))
        return {"fma_f32": 1e12, "dot_bf16": 2e12, "amx_bf16": 1.6e13}[kind] * num_threads

    def read_bandwidth(self, size, *, num_threads, seconds):
        self.asked.append((size, num_threads, seconds))
        return 1e10
