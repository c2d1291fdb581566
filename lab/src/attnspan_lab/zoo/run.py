"""From architectures to results: a process for each, so that a crash or a hang costs one cell."""

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
from attnspan_lab.zoo.cells import Cell, Generation, Row, ZooResults
from attnspan_lab.zoo.measure import SOURCES, Settings

__all__ = ["run_zoo"]

_PAUSE = 0.05  # seconds between looks at the processes
_START = 300.0  # seconds to import libraries
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
    """Run architectures, each in a process of its own; what there is stays if it is interrupted.

    Args:
        architectures: In this order; those that ``start`` has are left out.
        settings: What is run of each.
        start: Results of an earlier run.
        path: Where results are written after every architecture.
        jobs: Processes at once; each has its part of the cores.
        limit: Seconds for one cell; then its process is ended, and another goes on after it. To start, it has
            five minutes.
        sources: Modules where a process finds the architectures.
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
    """One architecture, and the process that is at it; another one goes on where one crashed."""

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
        """Take what the process told; True where there is nothing left to run."""
        code = self._child.code
        for told in self._child.told():
            self._take(told)
        if self._current == "":
            return True
        if code is None:
            limit = _START if self._current == "start" else self.limit
            if time.monotonic() - self._since < limit:
                return False
            return self._go_on("time", f"not done after {limit:.0f} s")
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
        """Keep the failure as the cell's, and start a process for the cells after it."""
        kind, *rest = self._current.split(" ")
        if self._current in self.cells or self._current == "start":
            # Between cells, or before the first one: another process would end there again.
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
        """The row that was found."""
        self._child.close()
        model, seconds = self.architecture, time.monotonic() - self.began
        cells, generations = tuple(self.cells.values()), tuple(self.generations.values())
        return Row(model.name, model.library, model.kind, cells, generations, self.reason, seconds)
