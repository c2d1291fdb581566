"""Comparison of a step on two ranks with the same step on one: rows, placements and compiled graphs."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnspan.testing import assert_same_as_one_rank
from attnspan_lab.doctor.compiler import CompilerLog
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, lines_of_error, place_here
from attnspan_lab.doctor.subject import Subject, load

__all__ = ["compare_ranks"]

_RANKS = 2
_SECONDS = 120.0


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each attention call: its line, and the shapes and placements of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Place | None, list[tuple[int, ...]], list[str]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(op)
        if ("attention" in name or "_softmax" in name) and "backward" not in name:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 1]
            # Compare q, k and v alone: ranks may share a replicated mask.
            placed = [str(x.placements) for x in given[:3] if isinstance(x, DTensor)]
            self.seen.append((place_here(), [tuple(x.shape) for x in given], placed))
        return op(*args, **(kwargs or {}))


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
        for process in processes:
            process.join(_SECONDS)
            process.kill()
        files = [Path(folder) / f"{rank}.pickle" for rank in range(_RANKS)]
        if not all(x.exists() for x in files):
            what = "The ranks did not finish: one rank waits for a collective that another never calls"
            yield Finding("hang", what, remedy="Call the same collectives in the same order on all ranks")
            return
        told = [pickle.loads(x.read_bytes()) for x in files]  # Written by this module.
    alike = list(_alike([x["calls"] for x in told], [x["graphs"] for x in told]))
    wrong = next((x for x in told if x["failed"]), None)
    if wrong is None:
        yield from alike
        return
    first, *rest = wrong["failed"].splitlines()
    for finding in alike:  # The findings that explain the failure come first.
        yield replace(finding, evidence=(*finding.evidence, f"the step fails: {first[:200]}"))
    where = tuple(x[0] for x in wrong["calls"] if x[0] is not None)[:1]
    if wrong["misused"]:
        what, cause = (
            f"The results of the step cannot be compared: {first[:300]}",
            "The step returns other tensors",
        )
        yield Finding("error", what, tuple(wrong["places"]), (), cause, first.rpartition(". ")[2])
    elif wrong["compared"]:
        what = f"Two ranks compute a different result than one: {first[:300]}"
        yield Finding("rank-rows", what, where, tuple(rest))
    elif not alike:
        what = f"The step raises on two ranks: {first[:300]}"
        yield Finding(
            "error",
            what,
            tuple(wrong["places"]),
            cause="The step may still run on one rank",
            evidence=tuple(rest),
        )


def _alike(calls: list[list[Any]], graphs: list[list[Any]]) -> Iterator[Finding]:
    """Yield findings on different graphs per rank, and on attention tensors with different placements."""
    differ = [pair for pair in zip_longest(*graphs) if pair[0] != pair[1]]
    if differ:
        places = tuple(dict.fromkeys(x[0] for x in differ[0] if x is not None and x[0] is not None))
        said = [f"a graph of {x[1]} operators" if x else "no graph" for x in differ[0]]
        evidence = tuple(f"rank {i}: {x}" for i, x in enumerate(said))
        yield Finding("rank-graphs", "Ranks compile different graphs", places, evidence)
    for (place, shapes, placed), (_, others, _) in zip(*calls, strict=False):
        at = () if place is None else (place,)
        if shapes != others:
            evidence = (f"rank 0: {shapes}", f"rank 1: {others}")
            yield Finding("rank-graphs", "Attention has different shapes on each rank", at, evidence)
            return
        if len(set(placed)) > 1:
            what = "q, k and v have different placements"
            yield Finding("rank-placement", what, at, tuple(placed))
            return


def _rank(rank: int, folder: str, target: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    told: dict[str, Any] = {
        "failed": "",
        "places": [],
        "compared": False,
        "misused": False,
        "calls": [],
        "graphs": [],
    }
    calls = _Calls()
    try:
        subject = load(target)
        mesh = init_device_mesh("cpu", (_RANKS,), mesh_dim_names=("cp",))
        step, batch = subject.expected["step"], subject.batches[0]
        with calls, torch.compiler.set_stance("force_eager"):
            step(batch, mesh)
        with CompilerLog() as log:  # torch compiles nothing while a dispatch mode is active.
            step(batch, mesh)
        told["graphs"] = [(x.place, x.operators) for x in log.graphs if x.operators]
        told["compared"] = True
        assert_same_as_one_rank(step, batch, mesh)
    except Exception as error:
        told["failed"] = (
            f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error)
        )
        own = type(error).__module__.startswith("attnspan.")
        told["misused"] = told["compared"] and own and not isinstance(error, AssertionError)
        told["places"] = lines_of_error(error)[:3]
    told["calls"] = calls.seen
    (Path(folder) / f"{rank}.tmp").write_bytes(pickle.dumps(told))
    (Path(folder) / f"{rank}.tmp").rename(Path(folder) / f"{rank}.pickle")
    dist.barrier()
    dist.destroy_process_group()
