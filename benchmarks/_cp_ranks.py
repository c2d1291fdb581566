"""Program of each rank in benchmarks/context_parallel.py: checks, then all contestants in turn."""

from __future__ import annotations

import gc
import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _cp_checks import errors_of, from_first, reference_of, sdpa_errors, why_wrong
from _cp_peers import contestants, our_waits_timed
from _cp_problem import TALLY, Contestant, Problem, Ready
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attnspan.kernels import cpu
from attnspan.parallel.torch.comm import counted_bytes
from attnspan_lab.bench.environment import describe_environment
from attnspan_lab.bench.processes import forget_peak, resident_memory, resident_peak, trim
from attnspan_lab.machine import Machine

#: Number of rows per rank in the check against float64.
CHECK_ROWS = 256
#: Values of each call on each rank: seconds in total, in the kernel, and of waiting for other ranks,
#: and processor seconds of all its threads.
SAMPLE = ("wall", "kernel", "waiting", "cpu")


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    q_len: int
    rounds: int
    ranks: int
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[int, ...]
    modes: tuple[str, ...]
    only: tuple[str, ...]
    calibrate: float  # seconds; with 0, "auto" minimizes bytes


def serve(rank: int, settings: Settings, store: str, results: str) -> None:
    """Run one rank. The first rank writes the results to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(minutes=20),
    )
    found = run(settings, init_device_mesh("cpu", (settings.ranks,), mesh_dim_names=("cp",)))
    if rank == 0:
        Path(results).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run(settings: Settings, mesh: Any) -> dict[str, Any]:
    """Run everything on all ranks. All ranks return the same results."""
    machines = {dtype: _machine(dtype, settings) for dtype in settings.dtypes}
    gc.freeze()  # Exclude existing objects from the collections before memory measurements.
    with our_waits_timed():
        runs = [
            _Setting(case, dtype, heads, dim, mode, mesh).run(_known(settings, machines[dtype]), settings)
            for dtype, case, heads, dim, mode in itertools.product(
                settings.dtypes, settings.cases, settings.heads, settings.head_dims, settings.modes
            )
        ]
    gc.unfreeze()
    return {
        "settings": asdict(settings),
        "environment": describe_environment(),
        "machines": {dtype: None if x is None else asdict(x) for dtype, x in machines.items()},
        "runs": runs,
    }


def _machine(dtype: str, settings: Settings) -> Machine | None:
    if not settings.calibrate:
        return None
    return Machine.calibrate(dtype=dtype, head_dim=settings.head_dims[0], seconds=settings.calibrate)


def _known(settings: Settings, machine: Machine | None) -> list[Contestant]:
    """Select the contestants. The run on one rank always takes part."""
    everyone = contestants(settings.ranks, machine)
    return [x for x in everyone if not settings.only or x.threads > 1 or x.name in settings.only]


@dataclass(frozen=True)
class _Entered:
    """A contestant that computed a problem correctly.

    Args:
        ready: The contestant, ready to be timed.
        errors: Errors of its results.
        got: Results of the first call, for all rows.
        seconds: Seconds of the preparation and of the first call, which may compile.
    """

    ready: Ready
    errors: dict[str, float]
    got: tuple[Tensor, ...]
    seconds: tuple[float, float]


@dataclass(frozen=True)
class _Setting:
    """One problem in one mode."""

    case: str
    dtype: str
    heads: tuple[int, int]
    head_dim: int
    mode: str
    mesh: Any

    def problem(self, q_len: int, of: int) -> Problem:
        return Problem.make(self.case, q_len, self.heads, self.head_dim, getattr(torch, self.dtype), of)

    def run(self, known: list[Contestant], settings: Settings) -> dict[str, Any]:
        """Check everyone, then call them in turn."""
        _say(self.mesh, f"{self.case}, {self.dtype}, heads {self.heads}, D {self.head_dim}, {self.mode}")
        whole = self.problem(settings.q_len, settings.q_len)
        small = self.problem(min(settings.q_len, CHECK_ROWS * settings.ranks), settings.q_len)
        exact = reference_of(small)
        bounds = sdpa_errors(small, exact)
        timed: list[tuple[Contestant, Ready]] = []
        entries: dict[str, dict[str, Any]] = {}
        refused: dict[str, str] = {}
        one_rank: tuple[Tensor, ...] | None = None
        for each in known:
            found = each.refuses(whole, settings.ranks) or self._admit(each, small, exact, bounds)
            if isinstance(found, _Entered):
                errors = found.errors
                # The results of one rank have the dtype's rounding error as well.
                found = self._admit(each, whole, one_rank, {name: 2 * x for name, x in bounds.items()})
            if isinstance(found, str):
                refused[each.name] = found
                continue
            one_rank = one_rank or found.got
            timed.append((each, found.ready))
            entries[each.name] = {"errors": errors, **_about(each, found), "ranks": []}
        for number in range(settings.rounds):
            for each, ready in timed:
                entries[each.name]["ranks"].append(_sample(each, ready))
            _say(self.mesh, f"  round {number + 1} of {settings.rounds}")
        return {
            **{name: value for name, value in vars(self).items() if name != "mesh"},
            "documents": None if whole.offsets is None else np.diff(whole.offsets).tolist(),
            "pairs": whole.pairs,
            "sdpa_errors": bounds,
            "contestants": entries,
            "refused": refused,
        }

    def _admit(
        self, each: Contestant, problem: Problem, want: tuple[Tensor, ...] | None, bounds: dict[str, float]
    ) -> _Entered | str:
        """Compute a problem with a contestant.

        Return the reason if it cannot, or if another library is wrong.

        Args:
            want: Expected results. With None, its own results are the reference.
        """
        ready, got, reason, times = None, (), None, [0.0, 0.0]
        dist.barrier()
        try:
            with _threads(each):
                start = time.perf_counter()
                ready = each.prepare(problem, self.mode, self.mesh)
                times[0] = time.perf_counter() - start
                got = ready.call() if ready.call else ()
                times[1] = time.perf_counter() - start - times[0]
        except Exception as error:  # Any failure of another library is a result.
            if not each.may_fail:
                raise
            reason = _root(error)
        # All ranks must agree on the contestants.
        reasons: list[str | None] = [None] * self.mesh.size()
        dist.all_gather_object(reasons, reason)
        if any(reasons) or ready is None:
            return next(x for x in reasons if x)
        want = from_first(got) if want is None else want
        errors = errors_of(got, want, ready.rows, self.mode)
        reason = why_wrong(errors, bounds)
        if reason is not None and not each.may_fail:
            raise AssertionError(f"{each.name}: {reason}")
        prepared, called = _every_rank(times).max(0).tolist()
        return reason or _Entered(ready, errors, want, (prepared, called))


def _about(each: Contestant, entered: _Entered) -> dict[str, Any]:
    """Collect a contestant's data besides its times. Calls it once."""
    TALLY.restart()
    with _threads(each), counted_bytes() as counts:
        growth = _growth(entered.ready)
    both = _every_rank([growth, sum(counts.received.values()) + TALLY.received])
    return {
        "errors_to_one_rank": entered.errors,
        "prepare_seconds": entered.seconds[0],
        "first_seconds": entered.seconds[1],
        "memory_growth": None if np.isnan(both[:, 0]).any() else int(both[:, 0].max()),
        "received_bytes": int(both[:, 1].max()),
        **entered.ready.about,
    }


def _root(error: BaseException) -> str:
    """Find the original error, which a compiler may wrap in several others."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _sample(each: Contestant, ready: Ready) -> list[list[float]]:
    """Make one call.

    Return the values of `SAMPLE` for each rank, or zeros for ranks that do not take part.
    """
    mine = [0.0] * len(SAMPLE)
    with _threads(each):
        dist.barrier()
        TALLY.restart()
        kernel, processor, start = _kernel_seconds(), time.process_time(), time.perf_counter()
        if ready.call is not None:
            ready.call()
            wall = time.perf_counter() - start
            mine = [wall, _kernel_seconds() - kernel, TALLY.waiting, time.process_time() - processor]
    every: list[list[float]] = _every_rank(mine).tolist()
    return every


def _kernel_seconds() -> float:
    return sum(direction["seconds"] for direction in cpu.counters().values())


def _call(ready: Ready) -> None:
    if ready.call is not None:
        ready.call()


def _growth(ready: Ready) -> float:
    """Measure a call's peak of resident memory above the memory before. NaN if unknown."""
    trim()
    dist.barrier()
    try:
        forget_peak()
    except OSError:
        _call(ready)
        return math.nan
    before = resident_memory()
    _call(ready)
    return resident_peak() - (before or 0)


@contextmanager
def _threads(each: Contestant) -> Iterator[None]:
    torch.set_num_threads(each.threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def _every_rank(values: list[float]) -> np.ndarray:
    """Gather the values of all ranks, (P, len(values)). Waits for the slowest rank."""
    mine = torch.tensor(values, dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).numpy()


def _say(mesh: Any, text: str) -> None:
    if mesh.get_local_rank() == 0:
        print(text, flush=True)
