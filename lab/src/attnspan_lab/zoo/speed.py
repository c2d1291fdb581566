"""Comparison of larger models' compiled training steps with attnspan and with SDPA: time and memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnspan.errors import expect
from attnspan_lab.bench.cells import OURS, Timing
from attnspan_lab.bench.devices import Device
from attnspan_lab.bench.environment import describe_environment
from attnspan_lab.bench.processes import forget_peak, fresh_process, resident_memory, resident_peak, trim
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.bench.timing import LEAST_ROUNDS, Budget, MeasurementError, Meter, Subject, interleave
from attnspan_lab.files import from_plain, to_plain
from attnspan_lab.zoo.architecture import LAYOUTS, Architecture
from attnspan_lab.zoo.measure import SOURCES, architecture_of
from attnspan_lab.zoo.results import Speed, ZooResults
from attnspan_lab.zoo.step import objective, results_of
from attnspan_lab.zoo.verdicts import compared_layout

__all__ = ["PEERS", "SpeedSettings", "measure_speed"]

#: Compared implementations. Ratios are relative to the first.
PEERS = (OURS, "sdpa")
_WARM = 2  # warm-up steps: the first compiles, the second allocates permanent memory


@dataclass(frozen=True)
class SpeedSettings:
    """Settings of the timed steps.

    Args:
        layouts: Allowed layouts. The one with the hardest mask that an architecture has is used.
        backend: Backend of torch.compile.
        tokens: Tokens per row in the timed steps.
        memory_tokens: Tokens per row in the step whose memory is measured.
        rounds: Samples of each implementation, 9 or more.
        seconds: Time for each implementation. Slow steps get fewer samples, but at least 9.
        limit: Time limit of a process, in seconds.
    """

    layouts: tuple[str, ...] = LAYOUTS
    backend: str = "inductor"
    tokens: int = 2048
    memory_tokens: int = 8192
    rounds: int = 15
    seconds: float = 60.0
    limit: float = 3600.0


def measure_speed(
    architectures: Sequence[Architecture],
    settings: SpeedSettings,
    *,
    start: ZooResults | None = None,
    path: Path | None = None,
    sources: Mapping[str, str] = SOURCES,
    after: Callable[[Speed], None] = lambda _: None,
) -> ZooResults:
    """Measure the architectures with the size "bench", one after the other.

    Args:
        architectures: Architectures, in order. Architectures that ``start`` has measured are left out.
        settings: Settings of the measurement.
        start: Results of an earlier run, which are kept.
        path: File that results are written to after every architecture.
        sources: Modules that define the architectures.
        after: Called with the result of each architecture.

    Raises:
        OptionError: ``start`` was measured on another processor.
    """
    start, here = start or ZooResults(), describe_environment()
    same = not start.speed or start.speed_environment.get("cpu") == here["cpu"]
    remedy = "Write the results of this processor into another file"
    wanted, got = "steps timed on this processor, {}", "steps of another processor"
    expect(same, "start", wanted, got, remedy, here["cpu"])
    results = replace(start, complete=False, speed_environment=here)
    known = {(x.library, x.name) for x in results.speed}
    try:
        for architecture in architectures:
            if "bench" in architecture.sizes and (architecture.library, architecture.name) not in known:
                found = _measured(architecture, settings, sources)
                results = replace(results, speed=(*results.speed, found))
                if path is not None:
                    results.save(path)
                after(found)
        results = replace(results, complete=True)
    except KeyboardInterrupt:
        pass
    if path is not None:
        results.save(path)
    return results


def _measured(architecture: Architecture, settings: SpeedSettings, sources: Mapping[str, str]) -> Speed:
    there = [x for x in settings.layouts if architecture.batch(x, settings.tokens, "bench") is not None]
    layout = compared_layout(there)
    found = Speed(
        architecture.name,
        architecture.library,
        layout or "",
        settings.tokens,
        memory_tokens=settings.memory_tokens,
    )
    if layout is None:
        return replace(found, reasons={"time": "the architecture has none of the layouts"})
    task = {"name": found.name, "library": found.library, "sources": dict(sources), "layout": layout}
    task |= {"settings": asdict(settings)}

    def ask(what: str, **more: Any) -> Any:
        try:
            remedy = "Run the architecture alone with --only"
            return fresh_process(what, __name__, task | more, remedy=remedy, timeout=settings.limit)
        except MeasurementError as error:
            found.reasons[what] = str(error)
            return None

    times = ask("time")
    if times is not None:
        seconds = {name: from_plain(Timing, x, name) for name, x in times["seconds"].items()}
        ratio = from_plain(Interval, times["ratio"], "ratio")
        found = replace(found, seconds=seconds, ratio=ratio, noisy=times["noisy"])
    for name in PEERS:
        peak = ask(f"memory of {name}", implementation=name)
        if peak is not None:
            found.peaks[name] = int(peak)
    return found


def _step(architecture: Architecture, implementation: str, task: dict[str, Any], tokens: int) -> Any:
    """Make a compiled step of forward and backward, and its model."""
    model = architecture.make(implementation, "bench")
    batch = architecture.batch(task["layout"], tokens, "bench")
    assert batch is not None, "the layout was chosen among those that there are"
    if (
        task["layout"] == "packed"
    ):  # One packed row has several documents. Padding needs rows of unequal lengths.
        batch = {name: x[:1] if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    call = torch.compile(model, backend=task["settings"]["backend"])

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out = call(**batch)
        _loss(out, batch).backward()  # type: ignore[no-untyped-call]

    return step, model


def _loss(out: Any, batch: dict[str, Any]) -> torch.Tensor:
    loss = out.get("loss") if isinstance(out, dict) else None
    return objective(results_of(out, batch)) if loss is None else loss


def _times(architecture: Architecture, task: dict[str, Any]) -> dict[str, Any]:
    settings = task["settings"]
    subjects = []
    for name in PEERS:
        step, _ = _step(architecture, name, task, settings["tokens"])
        for _ in range(_WARM):
            step()
        subjects.append(Subject(name, step, Device()))
    budget = Budget(settings["seconds"], max(settings["rounds"], LEAST_ROUNDS))
    ours, theirs = interleave(subjects, budget, Meter(threads=torch.get_num_threads()))
    seconds = {run.peer: run.execute for run in (ours, theirs)}
    return {"seconds": seconds, "ratio": theirs.ratio, "noisy": theirs.noisy}


def _peak(architecture: Architecture, task: dict[str, Any]) -> int:
    """Measure the peak of resident bytes in a step, above the bytes before it (weights and compiled code)."""
    step, model = _step(architecture, task["implementation"], task, task["settings"]["memory_tokens"])
    step()  # This step compiles. A second warm-up step would not change the measurement.
    _forget_gradients(model)
    before = resident_memory()
    assert before is not None, "a system with /proc"
    forget_peak()
    step()
    return max(0, resident_peak() - before)


def _forget_gradients(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)
    trim()


def _main(task: dict[str, Any]) -> None:
    architecture = architecture_of(task)
    found = _peak(architecture, task) if "implementation" in task else _times(architecture, task)
    print(json.dumps(to_plain(found)))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
