"""A run: its folder, options, data, model and checkpoints. This module starts or resumes one."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attnspan.errors import OptionError
from attnspan_lab.files import write_json, write_whole
from train.checkpoint import CheckpointStore
from train.config import CheckpointError, ConfigError, DataError, TrainConfig
from train.data import Batches, settle_strategy
from train.documents import Data, Vocabulary, load_data, load_vocabulary
from train.parallelize import Ranks, faster_dtype
from train.step import Stepper
from train.stop import Stop

__all__ = ["Run", "open_run"]

_JOB = "job"  # File with the torchrun job that opened the run last.


@dataclass
class Run:
    """State that lives as long as a run."""

    config: TrainConfig  # with the values that are decided at start-up
    folder: Path
    vocabulary: Vocabulary
    data: Data
    stepper: Stepper
    store: CheckpointStore
    ranks: Ranks
    stop: Stop
    done: int = 0  # number of steps taken
    place: dict[str, int] | None = None  # position in the data; None is the beginning
    start_score: float = float("nan")  # held-out bits per byte before training
    doing: str = "compiling"  # current common action of the ranks, for messages

    @property
    def named(self) -> str:
        """The options that name this run."""
        runs, name = shlex.quote(str(self.folder.parent)), shlex.quote(self.folder.name)
        return f"--name {name}" if runs == "runs" else f"--runs-dir {runs} --name {name}"

    def batches(self, steps: int) -> Batches:
        """Load the batches of the next steps."""
        return Batches(self.config, self.data.train, self.ranks.number, steps, self.place)

    def write_config(self) -> None:
        """Write the options of the run."""
        write_json(self.folder / "config.json", self.config, indent=2)

    def save(self) -> None:
        """Start to write a checkpoint of the current state."""
        progress = {"place": self.place, "digests": self.data.digests, "start_score": self.start_score}
        self.store.save(self.done, self.stepper.tensors(), progress)

    def load(self, step: int | None) -> None:
        """Return to a checkpoint, by default the latest.

        A checkpoint with other data raises a CheckpointError.
        """
        self.done, progress = self.store.load(self.stepper.tensors(), step)
        self.ranks.first(lambda: self._go_back(progress["digests"]))
        self.place, self.start_score = progress["place"], progress["start_score"]

    def _go_back(self, digests: dict[str, str]) -> None:
        steps, remedy = self.config.steps, "Pass a larger --steps, or go back with --from-step"
        wanted = f"--steps of at least {self.done}, the number of steps already taken"
        ConfigError.unless(steps == 0 or steps >= self.done, wanted, steps, remedy)
        remedy = "Restore the original data and tokenizer, or start a new run with another --name"
        self.data.check(digests, f"that {self.folder} was trained with", remedy, CheckpointError)
        self.store.go_back(self.done)


def open_run(config: TrainConfig, folder: Path, ranks: Ranks, resume: bool, from_step: int | None) -> Run:
    """Read the data, build the model, load a checkpoint, and decide all options that are still open."""
    torch.set_num_threads(config.threads or ranks.first(torch.get_num_threads))
    dtype = ranks.first(lambda: faster_dtype(ranks.device)) if config.dtype == "auto" else config.dtype
    config = replace(config, threads=torch.get_num_threads(), dtype=dtype)
    store = CheckpointStore(folder / "checkpoints", ranks)
    if ranks.first(lambda: _opened_before(folder)):
        resume, from_step = ranks.first(lambda: bool(store.steps())), None
    got, remedy = f"{folder}, which holds one", "Pass --resume, or another --name"
    ranks.first(lambda: ConfigError.unless(resume or not store.steps(), "a new run", got, remedy))
    vocabulary = ranks.together(lambda: load_vocabulary(config.tokenizer))
    data = ranks.together(lambda: load_data(config, vocabulary))
    same, remedy = ranks.first(lambda: data.digests), "Use the same files on all ranks with --data"
    ranks.together(lambda: data.check(same, "on all ranks", remedy, DataError))
    config = settle_strategy(config, data.train)
    stepper = Stepper(config, vocabulary.end + 1, ranks)
    run = Run(config, folder, vocabulary, data, stepper, store, ranks, Stop(ranks))
    if resume:
        run.load(from_step)
    # Create the folder only now, so that unreadable data leave no empty folder.
    ranks.first(lambda: _make_folders(run))
    return run


def _opened_before(folder: Path) -> bool:
    """Whether this job opened the run before torchrun restarted it. Otherwise the run is not its own."""
    mark, job = folder / _JOB, os.environ.get("TORCHELASTIC_RUN_ID")
    ours = job is not None and mark.is_file() and mark.read_text() == job
    if ours and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        mark.unlink()  # The file may come from an earlier job with the same name: --rdzv-id may repeat.
        return False
    return ours


def _make_folders(run: Run) -> None:
    try:
        run.write_config()
        if (job := os.environ.get("TORCHELASTIC_RUN_ID")) is not None:
            write_whole(run.folder / _JOB, job)
        if run.config.profile:
            Path(run.config.profile).mkdir(parents=True, exist_ok=True)
    except (OSError, OptionError) as error:
        wanted, remedy = "folders that can be written", "Choose other folders with --runs-dir and --profile"
        raise ConfigError(wanted, error, remedy) from None
