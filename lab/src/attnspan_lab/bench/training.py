"""Whole training steps: each attention in turn, and several ranks compared with one.

A step lasts from the packed rows to the optimizer. It includes the creation of the mask or the plan.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from attnspan.errors import expect
from attnspan_lab.bench.cells import OURS, Timing
from attnspan_lab.bench.checkout import find_train
from attnspan_lab.bench.processes import forget_peak, fresh_process, resident_peak, threads_set, trim
from attnspan_lab.bench.results import RankTimes, TrainingCell
from attnspan_lab.bench.statistics import Samples, paired
from attnspan_lab.bench.timing import LEAST_ROUNDS, MeasurementError, orders
from attnspan_lab.files import from_plain, to_plain

find_train()
from train.config import CHOICES, TrainConfig  # noqa: E402
from train.data import PackedStream, Rows, make_batch, settle_strategy  # noqa: E402
from train.documents import load_data, load_vocabulary  # noqa: E402
from train.parallelize import Ranks, faster_dtype, open_ranks  # noqa: E402
from train.step import Stepper, StepResult  # noqa: E402

__all__ = ["RowStepper", "measure_ranks", "measure_training", "reference_config", "steps_peak"]

KINDS = CHOICES["attention"]

# Ratios with wider intervals are marked as noisy.
_NARROW = 0.04
_PEAK_STEPS = 3
# The first rank may work alone for longer than the usual timeout.
_PATIENCE = timedelta(days=1)


class RowStepper(Stepper):
    """A stepper that starts from packed rows. Its steps include the data loader's preparation."""

    def step(self, rows: Rows, index: int, observer: Any = None) -> StepResult:  # type: ignore[override]
        """Run `Stepper.step`, including the preparation."""
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
        """Split the rows of a step into micro-batches."""
        size = self.config.batch_size
        return [Rows(*(x[at : at + size] for x in rows)) for at in range(0, len(rows.tokens), size)]


def reference_config(**changes: Any) -> TrainConfig:
    """Return the job's default options with some changes."""
    return TrainConfig(**changes)


def measure_training(
    config: TrainConfig, rounds: int = 20, *, memory: bool = True, kinds: Sequence[str] = KINDS
) -> tuple[TrainingCell, ...]:
    """Time the reference job's step with several attentions, in turn, on the same batches.

    All start from the same weights and are compiled in the same way, before any step is timed.

    Args:
        config: The job. Its own attention is ignored. With dtype "auto", the faster dtype is used.
        rounds: Timed steps of each attention, 9 or more.
        memory: Also measure peak memory, with a separate process for each attention.
        kinds: Values of `TrainConfig.attention`. attnspan is always measured, as the first.

    Raises:
        OptionError: Too few rounds, or an unknown kind.
        DataError: The data cannot be read.
    """
    kinds = (OURS, *(kind for kind in kinds if kind != OURS))
    expect(rounds >= LEAST_ROUNDS, "rounds", "{} or more", rounds, "Take more steps", LEAST_ROUNDS)
    for kind in kinds:
        expect(kind in KINDS, "attention", f"one of {', '.join(KINDS)}", repr(kind), "Use one of these")
    with threads_set(config.threads):
        config = _settled(config)
        seconds = _step_times(config, rounds, kinds)
    return tuple(_cell(config, kind, seconds, memory) for kind in kinds)


def _settled(config: TrainConfig) -> TrainConfig:
    """Resolve options that are decided at start-up, so that all processes use the same values."""
    dtype = faster_dtype() if config.dtype == "auto" else config.dtype
    return replace(config, threads=torch.get_num_threads(), dtype=dtype)


def _job(config: TrainConfig) -> tuple[RowStepper, Iterator[Rows]]:
    vocabulary = load_vocabulary(config.tokenizer)
    return RowStepper(config, vocabulary.end + 1), _steps(config, load_data(config, vocabulary).train, 0)


def _steps(config: TrainConfig, corpus: Any, rank: int) -> Iterator[Rows]:
    """Yield the rows of each step, all micro-batches together."""
    stream = PackedStream(corpus, seed=config.seed, **config.row_shape(rank))
    while True:
        parts = [next(stream) for _ in range(config.accumulate)]
        yield Rows(*map(torch.cat, zip(*parts, strict=True)))


def _step_times(config: TrainConfig, rounds: int, kinds: Sequence[str]) -> dict[str, list[float]]:
    """Time each step of each attention, in balanced order, on the same batches and from the same weights."""
    first, rows = _job(replace(config, attention=kinds[0]))
    steppers = [first]
    for kind in kinds[1:]:
        with torch.random.fork_rng(devices=[]):
            steppers.append(RowStepper(replace(config, attention=kind), first.vocab_size))
        steppers[-1].model.load_state_dict(first.model.state_dict())
    batch = next(rows)
    for stepper in steppers:
        stepper.warm_up(batch)
        stepper.step(batch, config.steps - 1)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for order in orders(len(kinds), rounds):
        batch = next(rows)
        for index in order:
            seconds[kinds[index]].append(steppers[index].step(batch, config.steps - 1).seconds)
    return seconds


def _cell(config: TrainConfig, kind: str, seconds: dict[str, list[float]], with_memory: bool) -> TrainingCell:
    ratio = None if kind == OURS else paired(seconds[OURS], seconds[kind])
    tokens = config.batch_size * config.seq_len * config.accumulate
    note = (
        f"{config.layers} blocks of width {config.dim}, {config.heads} heads on {config.kv_heads}, "
        f"{config.batch_size} x {config.seq_len:,} tokens, {config.dtype}, ac {config.ac}, "
        f"{'compiled' if config.compile else 'eager'}, {config.threads} threads"
    )
    peak: int | None = None
    if with_memory:
        job = asdict(replace(config, attention=kind))
        try:
            peak = fresh_process(f"memory of {kind}", __name__, {"config": job}, remedy="Try --no-memory")
        except MeasurementError as error:
            note += f"; {error}"
    return TrainingCell(
        attention=kind,
        seconds=Timing(tuple(seconds[kind])),
        tokens_per_second=Samples(tuple(tokens / each for each in seconds[kind])),
        peak_memory=peak,
        ratio=ratio,
        noisy=ratio is not None and ratio.width > _NARROW,
        note=note,
    )


def steps_peak(config: TrainConfig) -> int:
    """Run steps in this process and return their peak of resident memory, without memory for compilation.

    Raises:
        OSError: The system does not report the peak.
    """
    torch.set_num_threads(config.threads)
    stepper, rows = _job(config)
    stepper.warm_up(next(rows))
    stepper.step(next(rows), config.steps - 1)
    trim()
    forget_peak()
    for _ in range(_PEAK_STEPS):
        stepper.step(next(rows), config.steps - 1)
    return resident_peak()


def _far(found: Sequence[float], expected: Sequence[float]) -> float:
    """Compute the largest relative difference.

    Example:
        >>> _far([2.0, 3.0], [2.0, 2.0])
        0.5
    """
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def measure_ranks(config: TrainConfig, rounds: int = 9) -> RankTimes:
    """Compare the ranks of a job on this machine with one rank. torchrun starts the ranks.

    Args:
        config: The job, on two ranks or more.
        rounds: Number of compared steps, and of timed steps, 2 or more.
    """
    for what, value in (("ranks", config.world), ("rounds", rounds)):
        expect(value >= 2, what, "2 or more", value, "Pass more")
    ranks = ("--standalone", "--nproc-per-node", str(config.world))
    threads = str(config.threads or max(1, torch.get_num_threads() // config.world))
    found = fresh_process(
        "ranks",
        __name__,
        {"config": asdict(config), "rounds": rounds},
        remedy="Check that python examples/train runs",
        launcher=("-m", "torch.distributed.run", *ranks),
        variables={"OMP_NUM_THREADS": threads},
    )
    return from_plain(RankTimes, found, "the times of the ranks")


def _compare_with_one(config: TrainConfig, ranks: Ranks, rounds: int) -> RankTimes | None:
    """Run a rank's part of `measure_ranks`. The first rank returns the times."""
    dtype = ranks.first(faster_dtype) if config.dtype == "auto" else config.dtype
    config = replace(config, dtype=dtype, threads=torch.get_num_threads())
    vocabulary = load_vocabulary(config.tokenizer)
    corpus, size = load_data(config, vocabulary).train, vocabulary.end + 1
    config = settle_strategy(config, corpus)
    waiting = dist.new_group(backend="gloo", timeout=_PATIENCE)
    alone = config.moved(cp=1, dp=1, fsdp=False, accumulate=1, threads=config.threads * config.world)
    ours, theirs, last = _steps(config, corpus, ranks.number), _steps(alone, corpus, 0), config.steps - 1
    steppers = {"all_ranks": RowStepper(config, size, ranks)}
    found = [steppers["all_ranks"].step(next(ours), i) for i in range(rounds)]
    if ranks.is_first:
        with threads_set(alone.threads):
            steppers["one_rank"] = RowStepper(alone, size)
            repeated = [steppers["one_rank"].step(next(theirs), i) for i in range(rounds)]
            steppers["sdpa"] = RowStepper(replace(alone, attention="sdpa"), size)
            steppers["sdpa"].step(next(_steps(alone, corpus, 0)), last)
    times: dict[str, list[float]] = {name: [] for name in ("all_ranks", "one_rank", "sdpa")}
    for order in orders(len(times), rounds):
        shared, whole = next(ours), next(theirs)
        for name in (list(times)[index] for index in order):
            dist.barrier(group=waiting)
            if name in steppers:
                rows = shared if name == "all_ranks" else whole
                with threads_set(steppers[name].config.threads):
                    times[name].append(steppers[name].step(rows, last).seconds)
    dist.barrier(group=waiting)
    if not ranks.is_first:
        return None
    losses, norms = (
        _far([getattr(x, name) for x in found], [getattr(x, name) for x in repeated])
        for name in ("loss", "grad_norm")
    )
    return RankTimes(config.world, losses, norms, **{name: tuple(x) for name, x in times.items()})


def _main(task: dict[str, Any]) -> None:
    config = TrainConfig(**task["config"])
    if "rounds" not in task:
        print(steps_peak(config))
        return
    with open_ranks(config) as ranks:
        found = _compare_with_one(config, ranks, task["rounds"])
    if found is not None:
        print(json.dumps(to_plain(found)))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
