"""Whole training steps: the reference job with each of its kinds of attention."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch

from attnspan.errors import expect
from attnspan.tools.bench.cells import OURS, Timing
from attnspan.tools.bench.resident import forget_peak, resident_peak, trim
from attnspan.tools.bench.results import TrainingCell
from attnspan.tools.bench.statistics import Samples, paired
from attnspan.tools.bench.timing import LEAST_ROUNDS, orders
from attnspan.tools.bench.training_comparison import RowStepper as Stepper
from attnspan.train.config import CHOICES, TrainConfig
from attnspan.train.data import PackedStream
from attnspan.train.documents import load_data, load_vocabulary
from attnspan.train.parallelize import faster_dtype

__all__ = ["measure_training", "steps_peak", "training_peak"]

KINDS = CHOICES["attention"]

# An interval wider than this leaves open which side is faster by how much.
_NARROW = 0.04
_PEAK_STEPS = 3


def measure_training(
    config: TrainConfig, rounds: int = 20, *, memory: bool = True, kinds: Sequence[str] = KINDS
) -> tuple[TrainingCell, ...]:
    """Time the reference job's step with several kinds of attention, in turn, on the same batches.

    All start from the same weights and are compiled alike, before any step is timed. A step is everything
    from the preparation of the mask to the optimizer.

    Args:
        config: The job; its own kind of attention does not matter. With dtype "auto" the faster one is taken.
        rounds: Timed steps of each kind, 9 or more.
        memory: Measure peak memory too, each kind in a process of its own.
        kinds: Values of `TrainConfig.attention`; attnspan is measured in any case, as the first.

    Returns:
        A cell for each kind, attnspan's first.

    Raises:
        OptionError: Too few rounds, or an unknown kind.
        DataError: The data cannot be read.
    """
    kinds = (OURS, *(kind for kind in kinds if kind != OURS))
    expect(rounds >= LEAST_ROUNDS, "rounds", "{} or more", rounds, "Take more steps", LEAST_ROUNDS)
    for kind in kinds:
        expect(kind in KINDS, "attention", f"one of {', '.join(KINDS)}", repr(kind), "Name one of these")
    threads = torch.get_num_threads()
    try:
        config = _settled(config)
        seconds = _step_times(config, rounds, kinds)
    finally:
        torch.set_num_threads(threads)
    return tuple(_cell(config, kind, seconds, memory) for kind in kinds)


def _settled(config: TrainConfig) -> TrainConfig:
    """The options with what is decided at start-up, so that all processes do the same."""
    if config.threads:
        torch.set_num_threads(config.threads)
    dtype = faster_dtype() if config.dtype == "auto" else config.dtype
    return replace(config, threads=torch.get_num_threads(), dtype=dtype)


def _job(config: TrainConfig) -> tuple[Stepper, PackedStream]:
    vocabulary = load_vocabulary(config.tokenizer)
    data = load_data(config, vocabulary)
    stream = PackedStream(data.train, seq_len=config.seq_len, batch_size=config.batch_size, seed=config.seed)
    return Stepper(config, vocabulary.end + 1), stream


def _step_times(config: TrainConfig, rounds: int, kinds: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each step of each kind, in balanced order on the same batches, from the same weights."""
    first, stream = _job(replace(config, attention=kinds[0]))
    steppers = [first]
    for kind in kinds[1:]:
        with torch.random.fork_rng(devices=[]):
            steppers.append(Stepper(replace(config, attention=kind), first.vocab_size))
        steppers[-1].model.load_state_dict(first.model.state_dict())
    batch = next(stream)
    for stepper in steppers:
        stepper.warm_up(batch)
        stepper.step(batch, config.steps - 1)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for order in orders(len(kinds), rounds):
        batch = next(stream)
        for index in order:
            seconds[kinds[index]].append(steppers[index].step(batch, config.steps - 1).seconds)
    return seconds


def _cell(config: TrainConfig, kind: str, seconds: dict[str, list[float]], with_memory: bool) -> TrainingCell:
    peak, trouble = training_peak(replace(config, attention=kind)) if with_memory else (None, "")
    ratio = None if kind == OURS else paired(seconds[OURS], seconds[kind])
    tokens = config.batch_size * config.seq_len
    return TrainingCell(
        attention=kind,
        seconds=Timing(tuple(seconds[kind])),
        tokens_per_second=Samples(tuple(tokens / each for each in seconds[kind])),
        peak_memory=peak,
        ratio=ratio,
        noisy=ratio is not None and ratio.width > _NARROW,
        note="; ".join(filter(None, (_describe(config), trouble))),
    )


def _describe(config: TrainConfig) -> str:
    return (
        f"{config.layers} blocks of width {config.dim}, {config.heads} heads on {config.kv_heads}, "
        f"{config.batch_size} x {config.seq_len:,} tokens, {config.dtype}, ac {config.ac}, "
        f"{'compiled' if config.compile else 'eager'}, {config.threads} threads"
    )


def training_peak(config: TrainConfig) -> tuple[int | None, str]:
    """Peak memory of training steps in a fresh process: (bytes, ""), or (None, why there is no figure).

    Args:
        config: The job, with dtype and threads settled.
    """
    code = "import sys; from attnspan.tools.bench.training import steps_peak; steps_peak(sys.argv[1])"
    command = [sys.executable, "-c", code, json.dumps(asdict(config))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return None, f"no peak memory: {last}"
    return int(done.stdout.split()[-1]), ""


def steps_peak(options: str) -> None:
    """Take some steps in this process and print the largest resident size during them, bytes.

    What compiling needed before is not in it.

    Args:
        options: Fields of the configuration, as JSON.

    Raises:
        OSError: The system does not tell a process its peak.
    """
    config = TrainConfig(**json.loads(options))
    torch.set_num_threads(config.threads)
    stepper, stream = _job(config)
    stepper.warm_up(next(stream))
    stepper.step(next(stream), config.steps - 1)
    trim()
    forget_peak()
    for _ in range(_PEAK_STEPS):
        stepper.step(next(stream), config.steps - 1)
    print(resident_peak())
