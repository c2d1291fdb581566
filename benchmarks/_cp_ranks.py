"""What every rank of benchmarks/context_parallel.py runs: checks first, then all contestants in turn."""

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
import torch.nn.functional as F
from _cp_peers import contestants, our_waits_timed
from _cp_problem import BOTH, TALLY, Contestant, Problem, Ready
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attnspan import reference
from attnspan.bench.environment import describe_environment
from attnspan.bench.resident import forget_peak, resident_memory, resident_peak, trim
from attnspan.kernels import cpu
from attnspan.parallel import Machine
from attnspan.parallel._collectives import counted_bytes

#: Rows of a rank in the check against float64.
CHECK_ROWS = 256
#: Times the error of torch's own attention in the same dtype that a result may have.
SLACK = 4.0
NAMES = ("out", "dq", "dk", "dv")
#: What is kept of each call of each rank: its seconds, those in the kernel, those of waiting for others,
#: and processor seconds of all its threads.
SAMPLE = ("wall", "kernel", "waiting", "cpu")


@dataclass(frozen=True)
class Settings:
    """What to run."""

    q_len: int
    rounds: int
    ranks: int
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[int, ...]
    modes: tuple[str, ...]
    only: tuple[str, ...]
    calibrate: float  # seconds; 0: "auto" goes by assumed figures


def serve(rank: int, settings: Settings, store: str, results: str) -> None:
    """The life of a rank; the first one writes what was found to a file."""
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
    """Everything, on each of the ranks; all return the same."""
    machines = {dtype: _machine(dtype, settings) for dtype in settings.dtypes}
    gc.freeze()  # What is there now is not garbage, and need not be searched before each look at memory.
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
    """Who is to take part; the run on one rank always does."""
    everyone = contestants(settings.ranks, machine)
    return [x for x in everyone if not settings.only or x.threads > 1 or x.name in settings.only]


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
        want = _reference(small)
        bounds = _sdpa_errors(small, want)
        entries: dict[str, dict[str, Any]] = {}
        refused: dict[str, str] = {}
        for each in known:
            reason, errors = each.refuses(whole, settings.ranks), None
            if reason is None:
                reason, errors = self._check(each, small, want, bounds)
            if reason is None:
                entries[each.name] = {"errors": errors}
            else:
                refused[each.name] = reason
        taking_part = [each for each in known if each.name in entries]
        ready = self._prepare(taking_part, whole, entries)
        self._warm_up(taking_part, ready, entries, bounds)
        for number in range(settings.rounds):
            self._round(taking_part, ready, entries)
            _say(self.mesh, f"  round {number + 1} of {settings.rounds}")
        return {
            "case": self.case,
            "documents": None if whole.offsets is None else np.diff(whole.offsets).tolist(),
            "dtype": self.dtype,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "mode": self.mode,
            "pairs": whole.pairs,
            "sdpa_errors": bounds,
            "contestants": entries,
            "refused": refused,
        }

    def _check(
        self, each: Contestant, small: Problem, want: tuple[Tensor, ...], bounds: dict[str, float]
    ) -> tuple[str | None, dict[str, float]]:
        """Why it cannot take part, or its errors, which must be those of its dtype."""
        reason, errors = None, {}
        try:
            ready = each.prepare(small, self.mode, self.mesh)
            got = () if ready.call is None else ready.call()
        except Exception as error:  # Another library's, whatever it is, is what we are to report.
            if not each.may_fail:
                raise
            reason = _root(error)
        # All ranks must agree on who takes part.
        reasons: list[str | None] = [None] * self.mesh.size()
        dist.all_gather_object(reasons, reason)
        reason = next((x for x in reasons if x is not None), None)
        if reason is None:
            errors = _errors(got, want, ready.rows, self.mode)
            _judge(each.name, errors, bounds)
        return reason, errors

    def _prepare(
        self, known: list[Contestant], whole: Problem, entries: dict[str, dict[str, Any]]
    ) -> dict[str, Ready]:
        ready = {}
        for each in known:
            dist.barrier()
            start = time.perf_counter()
            with _threads(each):
                ready[each.name] = each.prepare(whole, self.mode, self.mesh)
            seconds = _every_rank([time.perf_counter() - start])[:, 0].max()
            entries[each.name] |= {"prepare_seconds": float(seconds), "ranks": [], **ready[each.name].about}
        return ready

    def _warm_up(
        self,
        known: list[Contestant],
        ready: dict[str, Ready],
        entries: dict[str, dict[str, Any]],
        bounds: dict[str, float],
    ) -> None:
        """One call of each, which may compile, compared with one rank; and one whose memory is watched."""
        want: tuple[Tensor, ...] = ()
        for each in known:
            entry = entries[each.name]
            start = time.perf_counter()
            with _threads(each):
                got = _call(ready[each.name])
            entry["first_seconds"] = float(_every_rank([time.perf_counter() - start])[:, 0].max())
            if each is known[0]:
                want = _from_first(got)
            entry["errors_to_one_rank"] = errors = _errors(got, want, ready[each.name].rows, self.mode)
            # Both are off by the error of the dtype.
            _judge(each.name, errors, {name: 2 * bound for name, bound in bounds.items()})
            del got
            TALLY.restart()
            with _threads(each), counted_bytes() as counts:
                growth = _growth(ready[each.name])
            both = _every_rank([growth, counts.total_received + TALLY.received])
            entry["memory_growth"] = None if np.isnan(both[:, 0]).any() else int(both[:, 0].max())
            entry["received_bytes"] = int(both[:, 1].max())

    def _round(
        self, known: list[Contestant], ready: dict[str, Ready], entries: dict[str, dict[str, Any]]
    ) -> None:
        for each in known:
            with _threads(each):
                dist.barrier()
                entries[each.name]["ranks"].append(_every_rank(_sample(ready[each.name])).tolist())


def _root(error: BaseException) -> str:
    """What an error began with: a compiler wraps the library's own in several others."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _sample(ready: Ready) -> list[float]:
    """One call, in the order of `SAMPLE`; zeros for a rank that has no part in it."""
    TALLY.restart()
    kernel, threads_time, start = _kernel_seconds(), time.process_time(), time.perf_counter()
    if ready.call is None:
        return [0.0] * len(SAMPLE)
    ready.call()
    wall = time.perf_counter() - start
    return [wall, _kernel_seconds() - kernel, TALLY.waiting, time.process_time() - threads_time]


def _kernel_seconds() -> float:
    return sum(direction["seconds"] for direction in cpu.counters().values())


def _call(ready: Ready) -> tuple[Tensor, ...]:
    return () if ready.call is None else ready.call()


def _growth(ready: Ready) -> float:
    """By how much a call's peak of resident memory exceeds what was resident before; NaN: unknown."""
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
    """The figures of all ranks, (P, len(values)); waits for the slowest."""
    mine = torch.tensor(values, dtype=torch.float64)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.stack(every).numpy()


def _reference(problem: Problem) -> tuple[Tensor, ...]:
    """out, dq, dk and dv of all rows in float64, (1, H, S, D)."""
    q, k, v, dout = (x.double().numpy() for x in problem.take(slice(None)))
    scale = problem.q.shape[3] ** -0.5
    out, _ = reference.forward(q, k, v, problem.bounds, scale)
    grads = reference.backward(dout, None, q, k, v, problem.bounds, scale)
    return tuple(torch.from_numpy(np.asarray(x)) for x in (out, *grads))


def _sdpa_errors(problem: Problem, want: tuple[Tensor, ...]) -> dict[str, float]:
    """Errors of torch's own attention on the same inputs, by which those of others are judged."""
    q, k, v, dout = problem.take(slice(None))
    lo, hi = torch.from_numpy(problem.bounds[0, 0]).unbind(-1)
    at = torch.arange(problem.q_len)
    visible = ((at >= lo[..., None]) & (at < hi[..., None])).any(1)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=visible, enable_gqa=grouped)
    got = (out.detach(), *torch.autograd.grad(out, leaves, dout))
    return {
        name: float((x.double() - y).norm() / y.norm()) for name, x, y in zip(NAMES, got, want, strict=True)
    }


def _errors(got: tuple[Tensor, ...], want: tuple[Tensor, ...], rows: Tensor, mode: str) -> dict[str, float]:
    """Relative errors in norm, over the rows of all ranks, which must be all rows."""
    valid = rows >= 0
    count = len(NAMES) if mode == BOTH else 1
    sums = np.zeros((count, 3))
    for i, (x, y) in enumerate(zip(got, want[:count], strict=True) if got else ()):
        mine, wanted = x[:, :, valid].double(), y[:, :, rows[valid]].double()
        sums[i] = float((mine - wanted).square().sum()), float(wanted.square().sum()), int(valid.sum())
    total = torch.from_numpy(sums)
    dist.all_reduce(total)
    if any(int(x) != want[0].shape[2] for x in total[:, 2]):
        raise AssertionError(f"the ranks' rows are {total[:, 2].tolist()}, not {want[0].shape[2]}")
    return {
        name: math.sqrt(diff / norm) for name, (diff, norm, _) in zip(NAMES, total.tolist(), strict=False)
    }


def _judge(name: str, errors: dict[str, float], bounds: dict[str, float]) -> None:
    for what, error in errors.items():
        # Not "error > bound", which no NaN is.
        if not error <= SLACK * bounds[what]:
            raise AssertionError(
                f"{name}: {what} is off by {error:.2g}, and torch's own attention by {bounds[what]:.2g}"
            )


def _from_first(got: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of rank 0, on all ranks."""
    held: list[Any] = [[(tuple(x.shape), x.dtype) for x in got]]
    dist.broadcast_object_list(held, src=0)
    whole = got or tuple(torch.empty(shape, dtype=dtype) for shape, dtype in held[0])
    whole = tuple(x.contiguous() for x in whole)
    for x in whole:
        dist.broadcast(x, src=0)
    return whole


def _say(mesh: Any, text: str) -> None:
    if mesh.get_local_rank() == 0:
        print(text, flush=True)
