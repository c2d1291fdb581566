"""A back end on a machine whose time is made up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attnspan.bench.timing import Meter
from attnspan.tune.cases import Case
from attnspan.tune.neighbours import Neighbours
from attnspan.tune.target import Bench


class FakeTarget:
    """Calls of 10 ms; block 2 takes 5 ms, block 3 is illegal, float16 cannot be run at all."""

    name, isa, device = "fake", "any", "a fake machine"
    default: Mapping[str, int] = {"block": 0}

    def __init__(self) -> None:
        self.now = 0.0
        self.opened: list[Case] = []
        self.interrupt_at: Case | None = None
        self.others = 0.0  # processors
        self.candidates = 4

    @property
    def meter(self) -> Meter:
        return Meter(clock=self.clock, cpu_clock=self.clock)

    def clock(self) -> float:
        return self.now

    def watch(self) -> Neighbours:
        return Neighbours(lambda: self.now * (1 + self.others), self.clock, self.clock)

    def refuses(self, case: Case) -> str | None:
        return "it takes no float16" if case.dtype == "float16" else None

    def configs(self, _case: Case) -> Sequence[Mapping[str, int]]:
        return [{"block": block} for block in range(self.candidates)]

    def open(self, case: Case) -> Bench:
        if case == self.interrupt_at:
            raise KeyboardInterrupt
        if case.head_dim == 13:
            raise MemoryError("13 is too much")
        self.opened.append(case)
        return Bench(self._make_call, lambda _: None)

    def _make_call(self, config: Mapping[str, int]) -> Callable[[], None]:
        if config["block"] == 3:
            raise ValueError("block 3 is illegal")

        def call() -> None:
            self.now += 0.005 if config["block"] == 2 else 0.01

        return call
