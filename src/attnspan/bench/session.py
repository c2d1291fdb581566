"""A whole run of the benchmark: many cells, kept on disk as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from attnspan.bench.ceilings import Probe, measure_ceilings
from attnspan.bench.cells import Cell, Workload
from attnspan.bench.energy import energy_counter
from attnspan.bench.environment import describe_environment
from attnspan.bench.memory import cuda_peak, high_water_refusal, process_peak
from attnspan.bench.peers import Peer
from attnspan.bench.results import Results
from attnspan.bench.runner import Options, measure_cell, peers_for
from attnspan.bench.timing import Budget, Meter
from attnspan.errors import OptionError

__all__ = ["Plan", "run_session", "threads_set"]


@dataclass(frozen=True)
class Plan:
    """What to measure, and how.

    Args:
        workloads: In this order.
        modes: "forward", "forward+backward", or both.
        peers: Names; empty takes each workload's own.
        device: "cpu" or "cuda".
        threads: CPU threads; None leaves torch's number.
        budget: When a comparison may stop.
        memory: Whether peak memory is measured too.
        probe: Native microbenchmarks for the ceilings of the CPU, or None.

    Example:
        >>> Plan((), ("forward",)).total
        0
    """

    workloads: tuple[Workload, ...]
    modes: tuple[str, ...]
    peers: tuple[str, ...] = ()
    device: str = "cpu"
    threads: int | None = None
    budget: Budget = field(default_factory=Budget)
    memory: bool = False
    probe: Probe | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise OptionError("threads", expected="1 or more", got=str(self.threads), remedy="Pass more")

    @property
    def total(self) -> int:
        """Number of cells."""
        return len(self.workloads) * len(self.modes)

    def cells(self) -> Iterable[tuple[Workload, str]]:
        """Each workload in each mode."""
        return ((workload, mode) for workload in self.workloads for mode in self.modes)


def run_session(
    plan: Plan,
    *,
    path: Path | None = None,
    before: Callable[[Workload, str], None] | None = None,
    after: Callable[[Cell], None] | None = None,
) -> Results:
    """Measure every cell of a plan. An interrupt (Ctrl-C) ends it and keeps what is there.

    Args:
        plan: What to measure.
        path: JSON file, written anew after every cell; None writes none.
        before: Told of each cell that begins.
        after: Told of each cell that is done.

    Returns:
        The results; ``complete`` is False after an interrupt.

    Example:
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> plan = Plan((work,), ("forward",), ("sdpa-flash",), budget=Budget(0.02, sample_seconds=1e-4))
        >>> run_session(plan).complete
        True
    """
    with threads_set(plan.threads):
        joules, energy_source = energy_counter(plan.device)
        meter = Meter(joules=joules, threads=torch.get_num_threads())
        options = Options(plan.device, plan.budget, meter)
        environment = describe_environment(plan.device) | {"energy": energy_source}
        if plan.memory:
            options, environment["memory"] = _with_memory(options, meter.threads)
        results = Results(environment=environment, complete=False)
        try:
            ceilings = measure_ceilings(
                plan.device, probe=plan.probe, threads=meter.threads, seconds=min(1.0, plan.budget.seconds)
            )
            results = replace(results, ceilings=ceilings)
            for workload, mode in plan.cells():
                if before is not None:
                    before(workload, mode)
                peers = peers_for(workload, plan.peers, plan.device)
                cell = measure_cell(workload, mode, peers, options)
                results = replace(results, cells=(*results.cells, cell))
                if path is not None:
                    results.save(path)
                if after is not None:
                    after(cell)
            results = replace(results, complete=True)
        except KeyboardInterrupt:
            pass  # What was measured is whole; `complete` says that more was planned.
    if path is not None:
        results.save(path)
    return results


@contextmanager
def threads_set(number: int | None) -> Iterator[None]:
    """A context with another number of torch's threads.

    Args:
        number: Of threads; None leaves them.

    Example:
        >>> with threads_set(1):
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _with_memory(options: Options, threads: int) -> tuple[Options, str]:
    """The options with a way to measure memory where there is one, and how or why not."""
    if options.device == "cuda":
        return replace(options, memory=cuda_peak), "the allocator's peak, above the inputs"
    refusal = high_water_refusal()
    if refusal is not None:
        return options, refusal

    def memory(peer: Peer, workload: Workload, mode: str) -> int:
        return process_peak(peer.name, workload, mode, threads)

    return replace(options, memory=memory), "peak resident size of a fresh process, above the inputs"
