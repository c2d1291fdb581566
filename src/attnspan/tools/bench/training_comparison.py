"""Training steps compared: attnspan with torch's attention, and several ranks with one.

A step lasts from the packed rows to the optimizer: the mask or the plan is made in it, whatever attends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from attnspan.errors import OptionError
from attnspan.files import from_plain, read_json, write_json
from attnspan.train.config import TrainConfig
from attnspan.train.data import PackedStream, Rows, make_batch, settle_strategy
from attnspan.train.documents import load_data, load_vocabulary
from attnspan.train.parallelize import Ranks, faster_dtype, open_ranks
from attnspan.train.step import Stepper, StepResult

__all__ = ["Parity", "RankTimes", "RowStepper", "Share", "attention_share", "measure_ranks"]

_FLASH = "aten::_scaled_dot_product_flash_attention"
_SDPA = {f"{_FLASH}{which}" for which in ("", "_backward", "_for_cpu", "_for_cpu_backward")}
_OWN = {f"attnspan::{name}" for name in ("forward", "backward", "sharded_forward", "sharded_backward")}

#: The first rank may work alone for longer than ranks otherwise wait.
_PATIENCE = timedelta(days=1)


class RowStepper(Stepper):
    """A stepper that is given packed rows: what a data loader would prepare is part of its steps."""

    def step(self, rows: Rows, index: int, observer: Any = None) -> StepResult:  # type: ignore[override]
        """`Stepper.step`, with the preparation in its time."""
        del observer
        start = time.perf_counter()
        batch = make_batch(self.config, self._parts(rows), self.ranks.number)
        prepared = time.perf_counter() - start
        result = super().step(batch, index)
        return result._replace(seconds=prepared + result.seconds)

    def warm_up(self, rows: Rows) -> float:  # type: ignore[override]
        """`Stepper.warm_up`."""
        return super().warm_up(make_batch(self.config, self._parts(rows), self.ranks.number))

    def _parts(self, rows: Rows) -> list[Rows]:
        """Micro-batches of the rows of a step."""
        size = self.config.batch_size
        return [Rows(*(x[at : at + size] for x in rows)) for at in range(0, len(rows.tokens), size)]


@dataclass(frozen=True)
class Share:
    """Time inside the attention operators, forward and backward, over a few profiled steps."""

    share: float  # of the wall time of the steps, 0..1
    seconds: float  # inside the operators
    flops: float  # what they computed in that time, visible pairs only


def attention_share(stepper: RowStepper, batches: Sequence[Rows]) -> Share:
    """Profile training steps of one rank, which change its weights, and add up the time of attention."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Its chatter on stderr; read at its first use.
    names = _OWN if stepper.config.attention == "attnspan" else _SDPA
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as watch:
        results = [stepper.step(batch, stepper.config.steps - 1) for batch in batches]
    # Operators nest (the public one calls the kernel), so each counts its own time only.
    spent = sum(event.self_cpu_time_total for event in watch.key_averages() if event.key in names) / 1e6
    wall = sum(result.seconds for result in results)
    return Share(spent / wall, spent, sum(result.flops.attention for result in results))


@dataclass(frozen=True)
class Parity:
    """How far the first steps of several ranks are from the same steps on one: largest relative differences.

    Example:
        >>> Parity.of([(2.0, 1.0), (1.0, 1.0)], [(2.0, 1.0), (2.0, 1.0)])
        Parity(steps=2, loss=0.5, grad_norm=0.0)
    """

    steps: int
    loss: float
    grad_norm: float

    @classmethod
    def of(cls, found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> Parity:
        """Compare (loss, norm of the gradient) of steps."""
        pairs = list(zip(found, expected, strict=True))
        losses, norms = ([abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs] for i in range(2))
        return cls(len(found), max(losses), max(norms))


@dataclass(frozen=True)
class RankTimes:
    """Seconds of the same steps, taken in turn: by all ranks, and by one with the threads of all."""

    parity: Parity
    all_ranks: list[float]
    one_rank: list[float]
    sdpa: list[float]  # of one rank, under a dense mask

    @property
    def speedup(self) -> float:
        """Median step of one rank over that of all: above 1, the ranks are faster."""
        return median(self.one_rank) / median(self.all_ranks)

    @property
    def ratio(self) -> float:
        """Median step of SDPA over that of all ranks."""
        return median(self.sdpa) / median(self.all_ranks)

    @property
    def spread(self) -> tuple[float, float]:
        """Quartiles of the ratios of neighbouring steps, SDPA's over those of all ranks."""
        low, _, high = quantiles([b / a for a, b in zip(self.all_ranks, self.sdpa, strict=True)], n=4)
        return low, high


def measure_ranks(config: TrainConfig, rounds: int = 5) -> RankTimes:
    """Compare the ranks of a job on this machine with one rank; starts them through torchrun.

    Args:
        config: The job, on two ranks or more.
        rounds: Steps that are compared, and steps that are timed, 2 or more.
    """
    for what, value in (("ranks", config.world), ("rounds", rounds)):
        if value < 2:
            raise OptionError(what, expected="2 or more", got=str(value), remedy="Pass more")
    with tempfile.TemporaryDirectory() as folder:
        answer, ranks = Path(folder) / "times.json", ["--nproc-per-node", str(config.world)]
        module = [
            "-m",
            "attnspan.tools.bench.training_comparison",
            json.dumps(asdict(config)),
            str(rounds),
            str(answer),
        ]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks, *module]
        threads = str(config.threads or max(1, torch.get_num_threads() // config.world))
        environment = os.environ | {"OMP_NUM_THREADS": threads}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
            raise OptionError(
                "ranks", expected="ranks that train", got=last, remedy="Try attnspan train first"
            )
        return from_plain(RankTimes, read_json(answer), str(answer))


def _compare_with_one(config: TrainConfig, ranks: Ranks, rounds: int) -> RankTimes | None:
    """What every rank does for `measure_ranks`; the times on the first one."""
    dtype = ranks.first(faster_dtype) if config.dtype == "auto" else config.dtype
    config = replace(config, dtype=dtype, threads=torch.get_num_threads())
    vocabulary = load_vocabulary(config.tokenizer)
    corpus, size = load_data(config, vocabulary).train, vocabulary.end + 1
    config = settle_strategy(config, corpus)
    waiting = dist.new_group(backend="gloo", timeout=_PATIENCE)
    alone = config.moved(cp=1, dp=1, fsdp=False, accumulate=1, threads=config.threads * config.world)
    ours, theirs, last = _steps(config, corpus, ranks.number), _steps(alone, corpus, 0), config.steps - 1
    every = RowStepper(config, size, ranks)
    found = [(result.loss, result.grad_norm) for result in (every.step(next(ours), i) for i in range(rounds))]
    rivals: dict[str, RowStepper] = {}
    times: dict[str, list[float]] = {"all_ranks": [], "one_rank": [], "sdpa": []}
    if ranks.is_first:
        with _threads(alone.threads):
            rivals = {"one_rank": RowStepper(alone, size)}
            repeated = [rivals["one_rank"].step(next(theirs), i) for i in range(rounds)]
            parity = Parity.of(found, [(result.loss, result.grad_norm) for result in repeated])
            rivals["sdpa"] = RowStepper(replace(alone, attention="sdpa"), size)
            rivals["sdpa"].step(next(_steps(alone, corpus, 0)), last)
    for _ in range(rounds):
        dist.barrier(group=waiting)
        times["all_ranks"].append(every.step(next(ours), last).seconds)
        rows = next(theirs)
        for name, rival in rivals.items():
            with _threads(alone.threads):
                times[name].append(rival.step(rows, last).seconds)
    dist.barrier(group=waiting)
    return RankTimes(parity, **times) if ranks.is_first else None


def _steps(config: TrainConfig, corpus: Any, rank: int) -> Iterator[Rows]:
    """The rows of each step, those of all its micro-batches together."""
    shape = config.row_shape(rank)
    stream = PackedStream(corpus, seed=config.seed, **shape)
    while True:
        parts = [next(stream) for _ in range(config.accumulate)]
        yield Rows(*map(torch.cat, zip(*parts, strict=True)))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _main(options: str, rounds: str, answer: str) -> None:
    config = TrainConfig(**json.loads(options))
    with open_ranks(config) as ranks:
        found = _compare_with_one(config, ranks, int(rounds))
        if found is not None:
            write_json(Path(answer), found)


if __name__ == "__main__":
    _main(*sys.argv[1:])
