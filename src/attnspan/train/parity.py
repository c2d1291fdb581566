"""The same training on one rank: several ranks must compute what one computes, and are to be faster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from attnspan.train.config import TrainConfig
from attnspan.train.job import Run
from attnspan.train.measure import Comparison
from attnspan.train.packing import PackedStream
from attnspan.train.step import Stepper

__all__ = ["Parity", "alone", "check_parity", "compare_ranks", "one_rank"]


@dataclass(frozen=True)
class Parity:
    """How far the first steps of several ranks are from the same steps on one.

    Args:
        steps: How many were repeated.
        loss: Largest difference of their losses, relative to those of one rank.
        grad_norm: The same of the norms of their gradients.

    Example:
        >>> rows = [{"step": 1, "loss": 2.0, "grad_norm": 1.0}, {"step": 2, "loss": 1.0, "grad_norm": 1.0}]
        >>> Parity.of(rows, [(2.0, 1.0), (2.0, 1.0)])
        Parity(steps=2, loss=0.5, grad_norm=0.0)
    """

    steps: int
    loss: float
    grad_norm: float

    @classmethod
    def of(cls, rows: list[dict[str, float]], expected: list[tuple[float, float]]) -> Parity:
        """Compare.

        Args:
            rows: Figures of steps of several ranks.
            expected: (loss, norm of the gradient) of the same steps on one rank.
        """
        losses = [abs(row["loss"] - loss) / abs(loss) for row, (loss, _) in zip(rows, expected, strict=True)]
        norms = [abs(row["grad_norm"] - norm) / norm for row, (_, norm) in zip(rows, expected, strict=True)]
        return cls(len(rows), max(losses), max(norms))


def alone(config: TrainConfig, *, one_machine: bool) -> TrainConfig:
    """The same training on one rank, which gets the threads of all those that share its machine.

    Args:
        config: That of several ranks.
        one_machine: Whether they share one machine.

    Example:
        >>> alone(TrainConfig(cp=2, dp=2, batch_size=3, threads=1), one_machine=True).batch_size
        6
    """
    threads = config.threads * config.world if one_machine else config.threads
    return config.on_ranks(cp=1, dp=1, fsdp=False, threads=threads)


def one_rank(run: Run) -> Stepper:
    """A model of one rank for the job of several, with the weights that theirs had at first.

    Args:
        run: The run of several ranks.
    """
    config = alone(run.config, one_machine=run.ranks.on_one_machine)
    with torch.random.fork_rng(devices=[]):
        return Stepper(config, run.stepper.vocab_size)


def check_parity(run: Run, one: Stepper, steps: int) -> Parity | None:
    """Repeat the first steps of a run on this rank alone.

    Args:
        run: The run of several ranks; its log has what they computed.
        one: A model of one rank (`alone`), not trained yet; it takes the steps.
        steps: How many at most.

    Returns:
        The differences, or None when the log does not have these steps.
    """
    rows = list(islice(_logged(run.folder / "metrics.jsonl"), steps))
    if not rows or [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        return None
    stream = _stream(run, one.config)
    with _threads(one.config.threads):
        results = [one.step(next(stream), index) for index in range(len(rows))]
    return Parity.of(rows, [(result.loss, result.grad_norm) for result in results])


def compare_ranks(run: Run, one: Stepper | None, rounds: int) -> Comparison:
    """Time the same steps in turn: by all ranks, by one with attnspan, by one with SDPA under a dense mask.

    One rank gets the threads of all, which wait meanwhile. All start from the same weights; those of the run
    change.

    Args:
        run: The run of several ranks on one machine, with attnspan.
        one: On the first rank: a model of one rank with attnspan.
        rounds: Steps of each, 2 or more.

    Returns:
        The times; those of one rank and of SDPA on the first rank only.
    """
    run.ranks.wait_for_first()  # It may have repeated steps alone (`check_parity`).
    weights = _weights(run.stepper)
    index = run.config.steps - 1
    seconds: dict[str, list[float]] = {"attnspan": [], "one": [], "sdpa": []}
    rivals: dict[str, Stepper] = {}
    if one is not None:
        with torch.random.fork_rng(devices=[]):
            rivals = {"one": one, "sdpa": Stepper(replace(one.config, attention="sdpa"), one.vocab_size)}
        stream = _stream(run, one.config)
        stream.load_state_dict(run.stream.state_dict())
        with _threads(one.config.threads):
            batch = next(stream)
            for rival in rivals.values():
                rival.model.load_state_dict(weights)
                rival.warm_up(batch)
                rival.step(batch, index)
    run.ranks.wait_for_first()
    run.stepper.step(next(run.stream), index)
    for _ in range(rounds):
        run.ranks.wait_for_first()
        seconds["attnspan"].append(run.stepper.step(next(run.stream), index).seconds)
        if one is not None:
            batch = next(stream)
            with _threads(one.config.threads):
                for name, rival in rivals.items():
                    seconds[name].append(rival.step(batch, index).seconds)
    return Comparison(seconds["attnspan"], seconds["sdpa"], seconds["one"])


def _weights(stepper: Stepper) -> dict[str, Any]:
    """All weights, on the first rank."""
    return get_model_state_dict(
        stepper.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )


def _stream(run: Run, config: TrainConfig) -> PackedStream:
    shape = {"seq_len": config.seq_len, "batch_size": config.batch_size}
    return PackedStream(run.data.train, **shape, seed=config.seed)


def _logged(path: Path) -> Iterator[dict[str, float]]:
    with path.open() as lines:
        yield from map(json.loads, lines)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
