"""Runs of the training job as each rank of a world does them, and what came of them."""

from __future__ import annotations

import errno
import io
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from dying_rank import Dying
from rich.console import Console
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from attnspan.train import run
from attnspan.train.config import TrainConfig
from attnspan.train.errors import JobError
from attnspan.train.job import Run
from attnspan.train.ranks import open_ranks


def train(config: TrainConfig, folder: Path, **options: Any) -> Any:
    """(what was printed, the summary) of a run."""
    console = Console(file=io.StringIO(), width=200)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    options = {"against_sdpa": False, "against_one_rank": False} | options
    with patch.object(run, "matmul_ceiling", lambda _: 1e10):  # Else 0.3 s of products on each rank.
        summary = run.train(config, folder, console=console, **options)
    return console.file.getvalue(), summary  # type: ignore[attr-defined]


def compiled(config: TrainConfig, folder: Path, backend: str) -> Any:
    """A run whose blocks one of torch's backends compiles."""
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        return train(config, folder)


def resume(config: TrainConfig, folder: Path) -> Any:
    """Go on with a run on the ranks of the configuration."""
    return train(config, folder, resume=True)


def weights(config: TrainConfig, folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a run's latest checkpoint, read by these ranks."""
    with open_ranks(config) as ranks:
        held = Run.open(config, folder, ranks)
        held.load(None)
        options = StateDictOptions(full_state_dict=True)
        return get_model_state_dict(held.stepper.model, options=options)


def dying(config: TrainConfig, folder: Path, step: int, signal: int) -> str:
    """A run whose last rank gets a signal in the middle of a step; what the others say."""
    dies = dist.get_rank() == config.world - 1
    try:
        train(config, folder, observe=(lambda _: nullcontext(Dying(step, signal))) if dies else None)
    except JobError as error:
        return str(error)
    return ""


def data_of_its_own(config: TrainConfig, folder: Path, others: list[str]) -> None:
    """Train where each rank finds other documents."""
    data = others[dist.get_rank()]
    train(TrainConfig(**(vars(config) | {"data": data})), folder)


def train_with(config: TrainConfig, folder: Path, options: dict[str, Any]) -> Any:
    """A run with other options of `train`."""
    return train(config, folder, **options)


def without_room(config: TrainConfig, folder: Path) -> None:
    """A run whose second rank finds the disk full."""
    original = FileSystemWriter.write_data

    def full(self: FileSystemWriter, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, *args)

    FileSystemWriter.write_data = full  # type: ignore[method-assign]
    try:
        train(config, folder)
    finally:
        FileSystemWriter.write_data = original  # type: ignore[method-assign]
