"""From workloads and peers to cells: prepare, compare results, time in turn, keep what was found."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from attnspan.bench.cells import Cell, Run, Workload
from attnspan.bench.peers import PEERS, Job, Peer, Ready
from attnspan.bench.timing import Budget, Measured, MeasurementError, Meter, Subject, first_call, interleave
from attnspan.bench.workloads import minimal_bytes, total_flops, visible_pairs
from attnspan.errors import OptionError

__all__ = ["BOUNDS", "Options", "difference", "measure_cell", "peers_for", "peers_named"]

# Norm of the difference over the norm: far above what rounding does, far below a wrong mask or scale.
BOUNDS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class Options:
    """How cells are measured.

    Args:
        device: "cpu" or "cuda".
        budget: When a comparison may stop.
        meter: The clocks.
        memory: Measures the peak of a peer, in bytes; None leaves memory out.

    Example:
        >>> Options().device
        'cpu'
    """

    device: str = "cpu"
    budget: Budget = field(default_factory=Budget)
    meter: Meter = field(default_factory=Meter)
    memory: Callable[[Peer, Workload, str], int] | None = None


def peers_named(names: Sequence[str], peers: Sequence[Peer] = PEERS) -> tuple[Peer, ...]:
    """The peers that are asked for, attnspan first in any case.

    Args:
        names: Of peers; empty takes all.
        peers: To choose from, attnspan first.

    Raises:
        OptionError: A name is unknown.

    Example:
        >>> [peer.name for peer in peers_named(["jax"])]
        ['attnspan', 'jax']
    """
    known = {peer.name for peer in peers}
    for name in names:
        if name not in known:
            raise OptionError(
                "peers",
                expected=f"some of {', '.join(peer.name for peer in peers)}",
                got=repr(name),
                remedy="Name one of these",
            )
    return tuple(peer for index, peer in enumerate(peers) if index == 0 or not names or peer.name in names)


def peers_for(workload: Workload, names: Sequence[str], device: str) -> tuple[Peer, ...]:
    """The peers of a workload: those asked for, else all; on the grid torch's fused kernels alone.

    Args:
        workload: The grid has hundreds of cells, and its targets are against the fused kernels.
        names: Asked for.
        device: "cpu" or "cuda".

    Example:
        >>> from attnspan.bench.workloads import grid
        >>> [peer.name for peer in peers_for(grid()[0], [], "cpu")]
        ['attnspan', 'sdpa-flash']
    """
    if names or workload.family != "grid":
        return peers_named(names)
    fused = ["sdpa-flash"] if device == "cpu" else ["sdpa-flash", "sdpa-efficient", "sdpa-cudnn"]
    return peers_named(fused)


@dataclass
class _Entry:
    """A peer on its way to a run."""

    peer: Peer
    reason: str | None = None
    ready: Ready | None = None
    subject: Subject | None = None
    first_seconds: float = 0.0
    error: float | None = None
    memory: int | None = None
    memory_note: str = ""


def measure_cell(workload: Workload, mode: str, peers: Sequence[Peer], options: Options) -> Cell:
    """Measure one workload in one mode with every peer.

    A peer that refuses, fails or disagrees with attnspan is listed with the reason, without times.

    Args:
        workload: What to compute.
        mode: "forward" or "forward+backward".
        peers: attnspan first.
        options: How to measure.

    Raises:
        MeasurementError: A timed region ended before its work was done.

    Example:
        >>> work = Workload("four", "causal", 1, 2, 2, 4, 4, 8, 8, "float32", "causal")
        >>> options = Options(budget=Budget(seconds=0.05, sample_seconds=1e-4))
        >>> cell = measure_cell(work, "forward", peers_named(["sdpa-flash"]), options)
        >>> cell.ours.ran, cell.runs[1].peer, cell.runs[1].ratio.pairs >= 5
        (True, 'sdpa-flash', True)
    """
    job = Job.make(workload, mode, options.device)
    entries = [_Entry(peer) for peer in peers]
    expected: list[Tensor] = []
    for entry in entries:
        _prepare(entry, job, options, expected)
    basis = "execute" if options.device == "cpu" else "pipelined"
    timed = [entry for entry in entries if entry.subject is not None]
    measured = _time(entries, timed, options, basis)
    pairs = visible_pairs(workload)
    del job, expected
    _release(entries)
    for entry in entries:
        if entry.reason is None and options.memory is not None:
            _measure_memory(entry, workload, mode, options.memory)
    return Cell(
        workload,
        mode,
        pairs,
        total_flops(workload, mode, pairs),
        minimal_bytes(workload, mode),
        tuple(_run(entry, measured.get(entry.peer.name)) for entry in entries),
        device=options.device,
        basis=basis,
    )


def _one_line(error: Exception) -> str:
    """Kind and first line of an error, for a reason."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _prepare(entry: _Entry, job: Job, options: Options, expected: list[Tensor]) -> None:
    """Bring a peer to its first result and compare that; whatever goes wrong is its reason."""
    try:
        entry.reason = entry.peer.refuses(job)
        if entry.reason is not None:
            return
        entry.ready = ready = entry.peer.prepare(job)
        subject = Subject(entry.peer.name, ready.call, ready.device, ready.around)
        result, entry.first_seconds = first_call(subject, options.meter)
        found = [x.detach() for x in ready.to_torch(result)]
    except MeasurementError:
        raise
    except Exception as error:  # A peer's failure is a finding; it must not end the measurement.
        entry.reason = f"it failed: {_one_line(error)}"
        return
    if not expected:
        # attnspan is first; where it cannot do the job, the first peer that can takes its place.
        expected.extend(found)
    entry.error = difference(expected, found)
    bound = BOUNDS[job.workload.dtype]
    if not entry.error <= bound:
        entry.reason = (
            f"its result differs from attnspan's by {entry.error:.2g} of the norm, over {bound:.2g}"
        )
        return
    entry.subject = subject


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Largest relative error of a result's tensors: norm of the difference over the norm.

    Args:
        expected: Output, or output and gradients.
        found: The same of another peer.

    Returns:
        The error; infinite for another number of tensors or other shapes.

    Example:
        >>> import torch
        >>> difference([torch.ones(4)], [torch.full((4,), 1.5)])
        0.5
    """
    if len(expected) != len(found) or any(a.shape != b.shape for a, b in zip(expected, found, strict=True)):
        return float("inf")
    errors = [_relative_error(a.float().cpu(), b.float().cpu()) for a, b in zip(expected, found, strict=True)]
    # max() would lose a NaN that does not come first.
    return next((error for error in errors if math.isnan(error)), max(errors, default=0.0))


def _relative_error(expected: Tensor, found: Tensor) -> float:
    norm, error = float(expected.norm()), float((found - expected).norm())
    return error / norm if norm else error


def _measure_memory(
    entry: _Entry, workload: Workload, mode: str, memory: Callable[[Peer, Workload, str], int]
) -> None:
    try:
        entry.memory = memory(entry.peer, workload, mode)
    except Exception as error:  # The times are there; that the memory is not is said beside them.
        entry.memory_note = f"memory: {_one_line(error)}"


def _time(
    entries: Iterable[_Entry], timed: list[_Entry], options: Options, basis: str
) -> dict[str, Measured]:
    subjects = [entry.subject for entry in timed if entry.subject is not None]
    if not subjects:
        return {}
    found = interleave(subjects, options.budget, options.meter, basis=basis)
    ours_ran = next(iter(entries)).subject is not None
    # Without ours there is no ratio: the first peer's place as a partner means nothing.
    return {m.name: m if ours_ran else replace(m, ratio=None) for m in found}


def _release(entries: Iterable[_Entry]) -> None:
    """Free inputs and results before memory is measured in other processes."""
    for entry in entries:
        if entry.ready is not None:
            entry.ready = replace(entry.ready, call=_gone)
        entry.subject = None
    gc.collect()


def _gone() -> Any:
    raise AssertionError("a released call was made")


def _run(entry: _Entry, measured: Measured | None) -> Run:
    if entry.reason is not None or measured is None or entry.ready is None:
        return Run(entry.peer.name, reason=entry.reason, error=entry.error)
    ready, warm = entry.ready, measured.execute.median
    compiling = ready.compile_seconds
    return Run(
        entry.peer.name,
        trace_seconds=ready.trace_seconds,
        compile_seconds=max(0.0, entry.first_seconds - warm) if compiling is None else compiling,
        execute=measured.execute,
        pipelined=measured.pipelined,
        dispatch=measured.dispatch,
        peak_memory=entry.memory,
        utilisation=measured.utilisation,
        energy_joules=measured.energy_joules,
        ratio=measured.ratio,
        noisy=measured.noisy,
        error=entry.error,
        note="; ".join(text for text in (ready.note, entry.memory_note) if text),
    )
