"""Runner of a benchmark: prepares workloads with all peers, compares results, and times them in turn."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnspan.errors import expect
from attnspan_lab.bench.ceilings import Probe, measure_ceilings
from attnspan_lab.bench.cells import Cell, Run, Workload
from attnspan_lab.bench.devices import cache_evictor
from attnspan_lab.bench.environment import describe_environment
from attnspan_lab.bench.memory import cuda_peak, high_water_refusal, process_peak
from attnspan_lab.bench.peers import Job, Peer, Ready, peers_named
from attnspan_lab.bench.processes import threads_set
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.timing import (
    Budget,
    MeasurementError,
    Meter,
    Subject,
    first_call,
    interleave,
)
from attnspan_lab.bench.workloads import minimal_bytes, total_flops, visible_pairs

__all__ = ["BOUNDS", "Plan", "difference", "measure_cell", "peers_for", "run_plan"]

# Limits on the norm of the difference over the norm: far above rounding, far below a wrong mask or scale.
BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}

# In a decoding step, all keys but the last ones come from memory, because other layers ran since.
COLD_FAMILIES = ("decode",)


PeakOf = Callable[[Peer, Workload, str], int]


@dataclass(frozen=True)
class Plan:
    """Plan of a measurement.

    Args:
        workloads: Workloads, in order.
        modes: "forward", "forward+backward", or both.
        peers: Names of peers. Empty: the default peers of each workload.
        device: "cpu" or "cuda".
        threads: Number of CPU threads. None keeps torch's number.
        budget: Budget of samples.
        memory: Whether to measure peak memory as well.
        probe: Native microbenchmarks for the ceilings of the CPU, or None.
        cold: Whether to empty the caches before each sample. None empties them only for decoding.
    """

    workloads: tuple[Workload, ...]
    modes: tuple[str, ...]
    peers: tuple[str, ...] = ()
    device: str = "cpu"
    threads: int | None = None
    budget: Budget = field(default_factory=Budget)
    memory: bool = False
    probe: Probe | None = None
    cold: bool | None = None

    def __post_init__(self) -> None:
        threads = self.threads
        expect(threads is None or threads > 0, "threads", "1 or more", str(threads), "Pass more")

    @property
    def total(self) -> int:
        """Number of cells."""
        return len(self.workloads) * len(self.modes)

    def is_cold(self, workload: Workload) -> bool:
        """Whether the caches are emptied before each sample of a workload."""
        return workload.family in COLD_FAMILIES if self.cold is None else self.cold


def peers_for(workload: Workload, mode: str, names: Sequence[str], device: str) -> tuple[Peer, ...]:
    """Select the peers of a workload: the named peers, or else all. On the grid: torch's fused kernels.

    On CPU, forward cells of the grid also run OpenVINO if it is installed.
    """
    if names or workload.family != "grid":
        return peers_named(names)
    if device != "cpu":
        return peers_named(["sdpa-flash", "sdpa-efficient", "sdpa-cudnn"])
    joins = mode == "forward" and find_spec("openvino") is not None
    return peers_named(["sdpa-flash", "openvino"] if joins else ["sdpa-flash"])


def run_plan(
    plan: Plan,
    *,
    path: Path | None = None,
    before: Callable[[Workload, str], None] = lambda *_: None,
    after: Callable[[Cell], None] = lambda _: None,
) -> Results:
    """Measure every cell of a plan. Ctrl-C stops the run and keeps the finished cells.

    Args:
        plan: The plan.
        path: Results file, which is rewritten after every cell. None writes no file.
        before: Called before each cell.
        after: Called after each cell.

    Returns:
        The results. ``complete`` is False after an interrupt.

    Example:
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> plan = Plan((work,), ("forward",), ("sdpa-flash",), budget=Budget(0.02, sample_seconds=1e-4))
        >>> run_plan(plan).complete
        True
    """
    with threads_set(plan.threads):
        meter = Meter(threads=torch.get_num_threads())
        environment = describe_environment(plan.device) | {"samples": plan.budget.rounds}
        memory: PeakOf | None = None
        if plan.memory:
            memory, environment["memory"] = _peak_of(plan.device, meter.threads)
        evict = cache_evictor(plan.device) if any(map(plan.is_cold, plan.workloads)) else None
        results = Results(environment=environment, complete=False)
        try:
            seconds = min(1.0, plan.budget.seconds)
            ceilings = measure_ceilings(plan.device, probe=plan.probe, threads=meter.threads, seconds=seconds)
            results = replace(results, ceilings=ceilings)
            for workload, mode in ((workload, mode) for workload in plan.workloads for mode in plan.modes):
                before(workload, mode)
                cell = measure_cell(
                    workload,
                    mode,
                    peers_for(workload, mode, plan.peers, plan.device),
                    plan.budget,
                    device=plan.device,
                    meter=meter,
                    memory=memory,
                    evict=evict if plan.is_cold(workload) else None,
                )
                results = replace(results, cells=(*results.cells, cell))
                if path is not None:
                    results.save(path)
                after(cell)
            results = replace(results, complete=True)
        except KeyboardInterrupt:
            pass  # The finished cells are complete. `complete` tells that more were planned.
    # Results without a cell must not replace an older file.
    if path is not None and results.cells:
        results.save(path)
    return results


def _peak_of(device: str, threads: int) -> tuple[PeakOf | None, str]:
    """Return the method to measure memory and its description, or None and the reason."""
    if device == "cuda":
        return cuda_peak, "the allocator's peak, above the inputs"
    refusal = high_water_refusal()
    if refusal is not None:
        return None, refusal

    def memory(peer: Peer, workload: Workload, mode: str) -> int:
        return process_peak(peer.name, workload, mode, threads)

    return memory, "peak resident size of a fresh process, above the inputs"


@dataclass
class _Entry:
    """A peer while its run is prepared."""

    peer: Peer
    reason: str | None = None
    ready: Ready | None = None
    subject: Subject | None = None
    first_seconds: float = 0.0
    error: float | None = None

    def run(self, timed: Run | None, has_ratio: bool) -> Run:
        if timed is None or timed.execute is None or self.ready is None:
            return Run(self.peer.name, reason=self.reason, error=self.error)
        compiling = self.ready.compile_seconds
        if compiling is None:
            compiling = max(0.0, self.first_seconds - timed.execute.median)
        return replace(
            timed,
            trace_seconds=self.ready.trace_seconds,
            compile_seconds=compiling,
            ratio=timed.ratio if has_ratio else None,
            error=self.error,
            note=self.ready.note,
        )


def measure_cell(
    workload: Workload,
    mode: str,
    peers: Sequence[Peer],
    budget: Budget,
    *,
    device: str = "cpu",
    meter: Meter | None = None,
    memory: PeakOf | None = None,
    evict: Callable[[], object] | None = None,
) -> Cell:
    """Measure one workload in one mode with every peer.

    A peer that cannot run, fails or disagrees with attnspan is listed with the reason and without times.

    Args:
        workload: The attention problem.
        mode: "forward" or "forward+backward".
        peers: The peers, attnspan first.
        budget: Budget of samples.
        device: "cpu" or "cuda".
        meter: The clocks.
        memory: Measures the peak memory of a peer, in bytes. None does not measure memory.
        evict: Empties the caches before each sample. None keeps them warm.

    Raises:
        MeasurementError: A timed region ended before its work was done.
    """
    meter, entries = meter or Meter(), [_Entry(peer) for peer in peers]
    try:
        job = Job.make(workload, mode, device)
    except (RuntimeError, MemoryError) as error:
        reason = f"not enough memory for the inputs: {_one_line(error)}"
        refused = tuple(Run(peer.name, reason=reason) for peer in peers)
        return Cell(workload, mode, 0, 0.0, 0.0, refused, device)
    expected: dict[str, list[Tensor]] = {}
    for entry in entries:
        _prepare(entry, job, meter, expected)
    basis = "execute" if device == "cpu" or evict else "pipelined"
    timed = _timed(entries, partial(interleave, budget=budget, meter=meter, basis=basis, evict=evict))
    pairs = visible_pairs(workload)
    # If attnspan did not run, ratios to the first peer would have no meaning.
    has_ratio = entries[0].subject is not None
    runs = [entry.run(timed.get(entry.peer.name), has_ratio) for entry in entries]
    # Free inputs and results before other processes measure memory.
    del job, expected, entries
    gc.collect()
    if memory is not None:
        runs = [_with_peak(*found, workload, mode, memory) for found in zip(runs, peers, strict=True)]
    flops, moved = total_flops(workload, mode, pairs), minimal_bytes(workload, mode)
    return Cell(workload, mode, pairs, flops, moved, tuple(runs), device, basis, evict is not None)


def _timed(entries: Sequence[_Entry], time: Callable[[list[Subject]], tuple[Run, ...]]) -> dict[str, Run]:
    """Time all prepared peers. If a call raises, the error becomes the peer's reason."""
    running: list[_Entry] = []

    def watched(entry: _Entry, subject: Subject) -> Subject:
        def around() -> AbstractContextManager[Any]:
            running[:] = [entry]
            return subject.around()

        return replace(subject, around=around)

    while subjects := [watched(entry, entry.subject) for entry in entries if entry.subject is not None]:
        try:
            found = time(subjects)
        except MeasurementError:
            raise
        except Exception as error:  # As in `_prepare`. The other peers are timed again without this one.
            (failed,) = running
            failed.subject, failed.reason = None, f"the timed call failed: {_one_line(error)}"
        else:
            return {run.peer: run for run in found}
    return {}


def _one_line(error: Exception) -> str:
    """Format the type and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _prepare(entry: _Entry, job: Job, meter: Meter, expected: dict[str, list[Tensor]]) -> None:
    """Compute a peer's first result and compare it. Any failure becomes the peer's reason.

    ``expected`` holds the result of the first peer with a result. This is attnspan if it can run the job.
    """
    try:
        entry.reason = entry.peer.refuses(job)
        if entry.reason is not None:
            return
        entry.ready = ready = entry.peer.prepare(job)
        subject = Subject(entry.peer.name, ready.call, ready.device, ready.around)
        result, entry.first_seconds = first_call(subject, meter)
        found = [x.detach() for x in ready.to_torch(result)]
    except MeasurementError:
        raise
    except Exception as error:  # A peer's failure is a result and must not end the benchmark.
        entry.reason = f"it failed: {_one_line(error)}"
        return
    first = next(iter(expected), entry.peer.name)
    entry.error, bound = difference(expected.get(first, found), found), BOUNDS[job.workload.dtype]
    if entry.error <= bound:
        expected[first] = expected.get(first, found)
        entry.subject = subject
    elif first == entry.peer.name:
        entry.reason = "its result contains infinity or NaN"
    else:
        limits = f"{entry.error:.2g} of the norm, over {bound:.2g}"
        entry.reason = f"its result differs from {first} by {limits}"


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Compute the largest relative error of a result's tensors: norm of the difference over the norm.

    Returns:
        The error. It is infinite if the number of tensors or a shape differs.

    Example:
        >>> difference([torch.ones(4)], [torch.full((4,), 1.5)])
        0.5
    """
    if len(expected) != len(found) or any(a.shape != b.shape for a, b in zip(expected, found, strict=True)):
        return float("inf")
    errors = [_relative_error(a.float().cpu(), b.float().cpu()) for a, b in zip(expected, found, strict=True)]
    # max() ignores a NaN that does not come first.
    return next((error for error in errors if math.isnan(error)), max(errors, default=0.0))


def _relative_error(expected: Tensor, found: Tensor) -> float:
    norm, error = float(expected.norm()), float((found - expected).norm())
    return error / norm if norm else error


def _with_peak(run: Run, peer: Peer, workload: Workload, mode: str, memory: PeakOf) -> Run:
    if run.reason is not None:
        return run
    try:
        return replace(run, peak_memory=memory(peer, workload, mode))
    except Exception as error:  # Keep the times, and note that the memory is missing.
        return replace(run, note="; ".join(filter(None, (run.note, f"memory: {_one_line(error)}"))))
