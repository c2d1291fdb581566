"""Runs of the training job as each rank of a world does them, and what came of them."""

from __future__ import annotations

import errno
import io
import json
import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from train import parallelize
from train import train as training
from train.config import JobError, TrainConfig
from train.parallelize import open_ranks
from train.step import Unobserved


def figures(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of all whole lines, exact: JSON keeps every bit of a float."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def scores(folder: Path) -> tuple[float, float]:
    """Held-out bits per byte at the start and at the end."""
    summary = json.loads((folder / "summary.json").read_text())
    return summary["bits_per_byte_start"], summary["bits_per_byte_end"]


class Dying(Unobserved):
    """Sends itself a signal when backward of a step begins."""

    def __init__(self, step: int, signal: int) -> None:
        self.at, self.signal, self.now = step, signal, 0

    def step(self, *, number: int | None = None, tokens: int = 0) -> AbstractContextManager[object]:
        del tokens
        self.now = number or 0
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[object]:
        if name == "backward" and self.now == self.at:
            os.kill(os.getpid(), self.signal)
        return nullcontext()


def train(config: TrainConfig, folder: Path, **options: Any) -> Any:
    """(what was printed, the summary) of a run."""
    console = Console(file=io.StringIO(), width=200)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    summary = training.train(config, folder, console=console, **({"sample": 4} | options))
    return console.file.getvalue(), summary  # type: ignore[attr-defined]


def compiled(config: TrainConfig, folder: Path, backend: str) -> Any:
    """A run whose blocks one of torch's backends compiles."""
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        return train(config, folder)


def resume(config: TrainConfig, folder: Path, from_step: int | None = None) -> Any:
    """Go on with a run on the ranks of the configuration."""
    return train(config, folder, resume=True, from_step=from_step)


def weights(config: TrainConfig, folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a run's latest checkpoint."""
    with open_ranks(config) as ranks:
        run = training._open(config, folder, ranks, True, None)
        return get_model_state_dict(run.stepper.model, options=StateDictOptions(full_state_dict=True))


def dying(config: TrainConfig, folder: Path, step: int, signal: int) -> str:
    """A run whose last rank gets a signal in the middle of a step; what the others say."""
    dies = dist.get_rank() == config.world - 1
    with patch.object(parallelize, "_ROLL_CALL_SECONDS", 2.0):
        try:
            train(config, folder, observe=(lambda _: nullcontext(Dying(step, signal))) if dies else None)
        except JobError as error:
            return str(error)
    return ""


def data_of_its_own(config: TrainConfig, folder: Path, others: list[str]) -> None:
    """Train where each rank finds other documents."""
    train(TrainConfig(**(vars(config) | {"data": others[dist.get_rank()]})), folder)


def shared_error(config: TrainConfig, folder: Path) -> None:
    """A run that fails with one error, which the first rank says for all."""
    try:
        train(config, folder)
    except JobError as error:
        raise RuntimeError(f"{'shared' if error.shared else 'each'}: {error}") from None


def without_room(config: TrainConfig, folder: Path) -> None:
    """A run whose second rank finds the disk full."""
    original = FileSystemWriter.write_data

    def full(self: FileSystemWriter, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, *args)

    with patch.object(FileSystemWriter, "write_data", full):
        train(config, folder)
