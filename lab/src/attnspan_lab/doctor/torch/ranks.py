"""Comparison of a step on two ranks with the same step on one: rows, placements and compiled graphs."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnspan.testing import assert_same_as_one_rank
from attnspan_lab.children import why_ended
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at, lines_of_error, place_here
from attnspan_lab.doctor.torch.recording.compiler_log import CompilerLog
from attnspan_lab.doctor.torch.subject import Subject, load
from attnspan_lab.doctor.words import counted, whole_sentences

__all__ = ["compare_ranks"]

_RANKS = 2
_SECONDS = 120.0
_GRACE = 3.0  # seconds that other ranks have after one has failed
_UNEQUAL = (
    "The ranks hold parts of different sizes. Compiled code then differs from rank to rank, and collectives "
    "that need equal sizes fail",
    "Cut the sequence and the heads into equal parts. If they cannot be cut so, pad the sequence",
)


class _Call(NamedTuple):
    """One attention call: its line, and the shapes and placements of its tensors."""

    place: Place | None
    shapes: list[tuple[int, ...]]
    placements: list[str]


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each attention call."""

    def __init__(self, seen: list[_Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(op)
        if ("attention" in name or "_softmax" in name) and "backward" not in name:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 1]
            # Compare q, k and v alone: ranks may share a replicated mask.
            placed = [str(x.placements) for x in given[:3] if isinstance(x, DTensor)]
            self.seen.append(_Call(place_here(), [tuple(x.shape) for x in given], placed))
        return op(*args, **(kwargs or {}))


@dataclass
class _Told:
    """Record of one rank.

    Attributes:
        calls: Its attention calls.
        graphs: Line and number of operators of each compiled graph.
        compared: Whether its step ran, so that an error comes from the comparison.
        failed: The error of the step or of the comparison.
        misused: The step returns something that cannot be compared.
        places: Lines of the error.
    """

    calls: list[_Call] = field(default_factory=list)
    graphs: list[tuple[Place | None, int]] = field(default_factory=list)
    compared: bool = False
    failed: str = ""
    misused: bool = False
    places: tuple[Place, ...] = ()


def compare_ranks(subject: Subject) -> Iterator[Finding]:
    """Yield differences between ranks, and between two ranks and one. Each rank loads the factory."""
    with tempfile.TemporaryDirectory(prefix="attnspan-ranks-") as folder:
        context = get_context("forkserver")
        processes = [
            context.Process(target=_rank, args=(x, folder, subject.target), daemon=True)
            for x in range(_RANKS)
        ]
        for process in processes:
            process.start()
        codes = _codes(processes)
        told, early = (_read(Path(folder), name) for name in ("told", "early"))
        if len(told) < _RANKS:
            if len(early) == _RANKS:
                yield from _unlike([*early.values()])
            yield _unfinished([x in told for x in range(_RANKS)], codes)
            return
    unlike = list(_unlike([*told.values()]))
    wrong = next((x for x in told.values() if x.failed), None)
    if wrong is None:
        yield from unlike
        return
    first, *rest = wrong.failed.splitlines()
    first = whole_sentences(first, 300)
    for finding in unlike:  # The findings that explain the failure come first.
        yield replace(finding, evidence=(*finding.evidence, f"the step fails: {first}"))
    if wrong.misused:
        what, cause = (
            f"The results of the step cannot be compared: {first}",
            "The step returns other tensors",
        )
        yield Finding("error", what, wrong.places, (), cause, first.rpartition(". ")[2])
    elif wrong.compared:
        said, *more = first.split(". ")  # The text of `assert_same_as_one_rank` has its own usual causes.
        what = f"Two ranks compute a different result than one: {said[:300]}"
        evidence = (*filter(None, (". ".join(more),)), *rest)
        yield Finding("rank-rows", what, at(*(x.place for x in wrong.calls))[:1], evidence)
    else:
        what, cause = (
            f"The step raises on two ranks: {first}",
            "The step may still run on one rank",
        )
        yield Finding("error", what, wrong.places, tuple(rest), cause)


def _codes(processes: list[Any]) -> list[int | None]:
    """Wait for all ranks, and end those that still run. None is the exit code of a rank that still ran."""
    end, failed = time.monotonic() + _SECONDS, False
    while any(x.is_alive() for x in processes) and time.monotonic() < end:
        if any(x.exitcode for x in processes) and not failed:  # The other rank may wait for this one forever.
            end, failed = min(end, time.monotonic() + _GRACE), True
        time.sleep(0.05)
    codes = [x.exitcode for x in processes]
    for process in processes:
        process.kill()
    return codes


def _read(folder: Path, name: str) -> dict[int, _Told]:
    """Read what the ranks wrote, by rank."""
    files = {rank: folder / f"{rank}.{name}" for rank in range(_RANKS)}
    return {rank: pickle.loads(x.read_bytes()) for rank, x in files.items() if x.exists()}


def _write(folder: str, rank: int, name: str, told: _Told) -> None:
    path = Path(folder) / f"{rank}.tmp"
    path.write_bytes(pickle.dumps(told))
    path.rename(path.with_suffix(f".{name}"))


def _unfinished(done: list[bool], codes: list[int | None]) -> Finding:
    """Say which ranks ended early, and which ones still ran, perhaps because they wait for these."""
    ended = {i: x for i, x in enumerate(codes) if x is not None and not done[i]}
    evidence = [f"rank {i}: {why_ended(x, '').rstrip(', ')}" for i, x in ended.items()]
    evidence += [f"rank {i}: still running" for i, x in enumerate(codes) if x is None]
    if ended:
        what, cause = "A rank ended before its step did", "Its code ended the process, or native code crashed"
        remedy = "Run the step on this rank alone, under a debugger if a signal ended it"
        return Finding("crash", what, (), tuple(evidence), cause, remedy)
    cause = "A rank waits for a collective that another rank does not call, or the step is too large"
    remedy = "Call the same collectives in the same order on all ranks. If they do, use a smaller step"
    what = f"The ranks did not finish in {_SECONDS:.0f} s"
    return Finding("hang", what, (), tuple(evidence), cause, remedy)


def _unlike(told: list[_Told]) -> Iterator[Finding]:
    """Yield findings on different graphs per rank, and on attention tensors with different placements."""
    differ = next((x for x in zip_longest(*(x.graphs for x in told)) if x[0] != x[1]), None)
    if differ is not None:
        said = [f"a graph of {counted(x[1], 'operator')}" if x else "no graph" for x in differ]
        evidence = tuple(f"rank {i}: {x}" for i, x in enumerate(said))
        places = at(*(x[0] for x in differ if x is not None))
        yield Finding("rank-graphs", "Ranks compile different graphs", places, evidence)
    for first, second in zip(*(x.calls for x in told), strict=False):
        if first.shapes != second.shapes:
            evidence = (f"rank 0: {first.shapes}", f"rank 1: {second.shapes}")
            what = "Attention has different shapes on each rank"
            yield Finding("rank-graphs", what, at(first.place), evidence, *_UNEQUAL)
            return
        if len(set(first.placements)) > 1:
            what = "q, k and v have different placements"
            yield Finding("rank-placement", what, at(first.place), tuple(first.placements))
            return


def _rank(rank: int, folder: str, target: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    told = _Told()
    try:
        subject = load(target)
        mesh = init_device_mesh("cpu", (_RANKS,), mesh_dim_names=("cp",))
        step, batch = subject.expected["step"], subject.batches[0]
        with _Calls(told.calls), torch.compiler.set_stance("force_eager"):
            step(batch, mesh)
        with CompilerLog() as log:  # torch compiles nothing while a dispatch mode is active.
            step(batch, mesh)
        told.graphs = [(x.place, x.operators) for x in log.graphs if x.operators]
        told.compared = True
        _write(folder, rank, "early", told)  # The comparison may end the process.
        assert_same_as_one_rank(step, batch, mesh)
    except Exception as error:
        differs = isinstance(error, AssertionError)
        told.failed = str(error) if differs else f"{type(error).__name__}: {error}"
        told.misused = told.compared and not differs and type(error).__module__.startswith("attnspan.")
        told.places = tuple(lines_of_error(error)[:3])
    _write(folder, rank, "told", told)
    dist.barrier()
    dist.destroy_process_group()
