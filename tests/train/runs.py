"""Runs of the training job, and their results.

``runs.py CONFIG FOLDER HOW`` is a rank of a run whose last rank gets a signal in the middle of a step. HOW is
{number of the restart: {"step": ..., "signals": ...}} as JSON.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console

from attnspan.kernels import cpu
from attnspan_lab.cli import run
from train import stop
from train import train as training
from train.command import command
from train.config import JobError, TrainConfig
from train.step import Stepper, Unobserved

_peak = cpu.peak
#: Each run would measure the peak of its cores for a second.
briefly = patch.object(cpu, "peak", lambda kind, **given: _peak(kind, **(given | {"seconds": 0.002})))


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
    """Sends itself signals when backward of a step begins."""

    def __init__(self, step: int, *signals: int) -> None:
        self.at, self.now, self.signals = step, 0, signals

    def step(self, *, number: int | None = None, tokens: int = 0) -> AbstractContextManager[object]:
        self.now = number or 0
        return nullcontext(tokens)

    def phase(self, name: str) -> AbstractContextManager[object]:
        if name == "backward" and self.now == self.at:
            for each in self.signals:
                os.kill(os.getpid(), each)
                time.sleep(0.01)  # Two that wait together are heard as one.
        return nullcontext()


def dies(step: int, *signals: int) -> Any:
    """Make the argument ``observe`` of a run that gets signals."""
    return lambda _: nullcontext(Dying(step, *signals))


def train(config: TrainConfig, folder: Path, **options: Any) -> Any:
    """Train. Return the printed text and the summary."""
    console = Console(file=io.StringIO(), width=200)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    with briefly:
        summary = training.train(config, folder, **({"console": console, "sample": 4} | options))
    return console.file.getvalue(), summary  # type: ignore[attr-defined]


def train_apart(*arguments: Any, **options: Any) -> None:
    """Train in a forked process, whose own processes would otherwise load torch again."""
    multiprocessing.set_start_method("fork", force=True)
    train(*arguments, **options)


def interrupted(folder: Path, arguments: list[str], count: int) -> None:
    """Run the command in a process group that gets Ctrl-C so many times within the third step."""
    multiprocessing.set_start_method("fork", force=True)
    os.setpgid(0, 0)
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), number)
    sys.argv, sys.stdout = ["train", *arguments], os.fdopen(1, "w")
    step = Stepper.step

    def signalled(self: Stepper, batch: Any, index: int, *rest: Any) -> Any:
        for _ in range(count * (index == 2)):
            os.killpg(0, signal.SIGINT)
            time.sleep(0.05)
        return step(self, batch, index, *rest)

    app = typer.Typer(add_completion=False)
    app.command()(command())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with briefly, patch.object(Stepper, "step", signalled), patch.object(stop, "_SAME_SECONDS", 0.0):
        run(app)


if __name__ == "__main__":
    config, how = TrainConfig(**json.loads(sys.argv[1])), json.loads(sys.argv[3])
    death = how.get(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] != str(config.world - 1):
        death = None
    try:
        training.train(config, Path(sys.argv[2]), sample=0, observe=dies(*death) if death else None)
    except JobError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)
