"""Runner of the zoo. Each architecture has its own process, so a crash or a hang costs only one cell."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from attnspan_lab.bench.environment import describe_environment
from attnspan_lab.children import Child, why_ended
from attnspan_lab.files import from_plain, to_plain
from attnspan_lab.zoo.architecture import Architecture
from attnspan_lab.zoo.measure import SOURCES
from attnspan_lab.zoo.plan import Settings
from attnspan_lab.zoo.results import Cell, Generation, Row, ZooResults

__all__ = ["run_zoo"]

_PAUSE = 0.05  # seconds between checks of the processes
_START = 300.0  # time limit to import libraries, in seconds
_MODULE = "attnspan_lab.zoo.measure"


def run_zoo(
    architectures: Sequence[Architecture],
    settings: Settings,
    *,
    start: ZooResults | None = None,
    path: Path | None = None,
    jobs: int = 1,
    limit: float = 300.0,
    sources: Mapping[str, str] = SOURCES,
    after: Callable[[Row], None] = lambda _: None,
) -> ZooResults:
    """Run architectures, each in its own process. After an interrupt, finished results are kept.

    Args:
        architectures: Architectures, in order. Architectures in ``start`` are left out.
        settings: Settings of each architecture's run.
        start: Results of an earlier run.
        path: File that results are written to after every architecture.
        jobs: Number of parallel processes. Each one gets its share of the cores.
        limit: Time limit of one cell, in seconds. Then its process ends, and another process continues after
            the cell. The start of a process has five minutes.
        sources: Modules that define the architectures.
        after: Called with each row.
    """
    results = replace(start or ZooResults(), complete=False)
    results = replace(results, environment=describe_environment(), settings=to_plain(settings))
    known = {(row.library, row.name) for row in results.rows}
    waiting = [x for x in architectures if (x.library, x.name) not in known]
    running: list[_Process] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Process(waiting.pop(0), settings, sources, jobs, limit))
            time.sleep(_PAUSE)
            for process in [x for x in running if x.is_over()]:
                running.remove(process)
                results = replace(results, rows=(*results.rows, process.row()))
                if path is not None:
                    results.save(path)
                after(results.rows[-1])
        results = replace(results, complete=True)
    except KeyboardInterrupt:
        pass
    finally:
        for process in running:
            process.end()
    if path is not None:
        results.save(path)
    return results


@dataclass
class _Process:
    """One architecture and its process. After a crash, a new process continues with the next cell."""

    architecture: Architecture
    settings: Settings
    sources: Mapping[str, str]
    jobs: int
    limit: float
    cells: dict[str, Cell] = field(default_factory=dict)
    generations: dict[str, Generation] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    reason: str = ""

    def __post_init__(self) -> None:
        self._launch()

    def _launch(self) -> None:
        task = {
            "name": self.architecture.name,
            "library": self.architecture.library,
            "sources": dict(self.sources),
            "settings": asdict(self.settings),
            "done": [*self.cells, *(f"generate {x}" for x in self.generations)],
        }
        threads = max(1, len(os.sched_getaffinity(0)) // self.jobs)
        self._child = Child(_MODULE, task, {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"})
        self._current, self._since = "start", time.monotonic()

    def is_over(self) -> bool:
        """Collect the process's results. Return True if nothing is left to run."""
        code = self._child.code
        for told in self._child.told():
            self._take(told)
        if self._current == "":
            return True
        if code is None:
            limit = _START if self._current == "start" else self.limit
            if time.monotonic() - self._since < limit:
                return False
            return self._go_on("time", f"not finished after {limit:.0f} s")
        return self._go_on("crash", f"the process ended with {why_ended(code, self._child.errors)}")

    def _take(self, told: dict[str, Any]) -> None:
        self._since = time.monotonic()
        if "begin" in told:
            self._current = told["begin"]
        elif "cell" in told:
            cell = from_plain(Cell, told["cell"], "cell")
            self.cells[cell.label] = cell
        elif "generation" in told:
            made = from_plain(Generation, told["generation"], "generation")
            self.generations[made.cache] = made
        else:
            self._current = ""

    def _go_on(self, failed: str, reason: str) -> bool:
        """Store the failure as the cell's result, and start a process for the cells after it."""
        kind, *rest = self._current.split(" ")
        if self._current in self.cells or self._current == "start":
            # The process failed between cells or before the first one. Another process would fail there
            # again.
            self.reason = reason
            return True
        if kind == "generate":
            self.generations[rest[0]] = Generation(rest[0], equal=False, reason=reason)
        else:
            mode, layout = rest
            self.cells[self._current] = Cell(kind, mode, layout, failed=failed, reason=reason)
        self._child.close()
        self._launch()
        return False

    def end(self) -> None:
        """End the process."""
        self._child.close()

    def row(self) -> Row:
        """Build the row of results."""
        self._child.close()
        model, seconds = self.architecture, time.monotonic() - self.began
        cells, generations = tuple(self.cells.values()), tuple(self.generations.values())
        return Row(model.name, model.library, model.kind, cells, generations, self.reason, seconds)
