"""The command: parses the options, starts several ranks if requested, and runs the training."""

from __future__ import annotations

import inspect
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from attnspan_lab.bench.monitor import Monitor
from attnspan_lab.console import option, options_of
from attnspan_lab.report import write_page
from train.config import MOVABLE, CheckpointError, ConfigError, JobError, TrainConfig

if TYPE_CHECKING:
    import torch

__all__ = ["command"]

_own = partial(option, "Options")


@dataclass(frozen=True)
class _Request:
    """Options of the command that are not part of the run's configuration."""

    name: str | None = _own("name of the run (default: the time)", default=None)
    runs_dir: Path = _own("folder of all runs", default=Path("runs"))  # noqa: RUF009  # immutable
    resume: bool = _own("resume the run --name, or the last run", "--resume", default=False)
    from_step: int | None = _own("with --resume: step of an older checkpoint", default=None)
    sample: int = _own("bytes of text to sample from the model at the end", default=200)
    monitor: bool = _own("record the time of each step by phase", default=True)

    def __post_init__(self) -> None:
        whole, remedy = self.from_step is None or self.resume, "Add --resume, or leave --from-step out"
        ConfigError.unless(whole, "--from-step with --resume", "it alone", remedy)
        ConfigError.unless(self.sample >= 0, "--sample of 0 or more", self.sample, "Pass a larger number")

    def folder(self) -> Path:
        """Return the folder of the run."""
        named = self.name is not None or not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        remedy = "Pass a name for the run, so that restarted ranks find it"
        ConfigError.unless(named, "--name with torchrun --max-restarts", "none", remedy)
        if self.name is not None or not self.resume:
            return self.runs_dir / (self.name or time.strftime("%Y%m%d-%H%M%S"))
        found = sorted(self.runs_dir.glob("*/checkpoints/step-*"), key=lambda path: path.stat().st_mtime)
        wanted = f"a run with a checkpoint in {self.runs_dir}"
        CheckpointError.unless(found, wanted, "none", "Start a run without --resume")
        return found[-1].parents[1]


def command() -> Callable[..., None]:
    """Make the command: a function with an option for each field of `_Request` and of `TrainConfig`."""

    def train(context: typer.Context, **options: Any) -> None:
        from train.parallelize import is_rank

        sources = {name: context.get_parameter_source(name) for name in options}
        given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
        request = _Request(**{field.name: options.pop(field.name) for field in fields(_Request)})
        config, folder = TrainConfig(**options), request.folder()
        if request.resume:
            config = _stored(folder, config, given & options.keys())
        if not is_rank() and (config.world > 1 or config.fsdp):
            _start_ranks(config, folder)
        else:
            _run(config, folder, request)

    [context, _] = inspect.signature(train, eval_str=True).parameters.values()
    options = options_of(_Request) + options_of(TrainConfig)
    train.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
    return train


def _run(config: TrainConfig, folder: Path, request: _Request) -> None:
    """Run one rank, or a job of one process."""
    from train.parallelize import open_ranks
    from train.stop import Stopped
    from train.train import train

    stopped: Stopped | None = None
    how: Any = {"resume": request.resume, "from_step": request.from_step, "sample": request.sample}
    with open_ranks(config) as ranks:
        try:
            folder = ranks.first(lambda: folder)
            watched = request.monitor and ranks.is_first
            observe = partial(_monitored, folder, ranks.device) if watched else None
            train(config, folder, ranks=ranks, observe=observe, **how)
        except Stopped as end:
            stopped = end  # All ranks exit together, as at the end of a run.
        except KeyboardInterrupt:
            # Exit immediately, without waiting for workers, the checkpoint's thread and other ranks.
            sys.stdout.flush()
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(128 + signal.SIGINT)
        except JobError as error:
            cause: BaseException | None = error
            while cause is not None:  # A process group that a frame holds at exit would abort the process.
                traceback.clear_frames(cause.__traceback__)
                cause = cause.__cause__ or cause.__context__
            if not error.shared or ranks.is_first:
                raise
            raise SystemExit(2) from None  # The first rank reports the error for all ranks.
    if stopped:
        raise stopped


@contextmanager
def _monitored(folder: Path, device: torch.device, ceiling: float | None) -> Iterator[Monitor]:
    """Watch the steps, and write the run's page at the end, even if the run was interrupted."""
    monitor = Monitor(folder, ceiling=ceiling, device=device)
    try:
        with monitor:
            yield monitor
    finally:
        # A run that is resumed at its end takes no step and keeps its page.
        if monitor.results().monitor:
            page = folder / "monitor.html"
            write_page(monitor.results(), page)
            print(f"monitor: {page}, overhead {monitor.overhead:.2%} of the time of the steps")


def _stored(folder: Path, config: TrainConfig, given: set[str]) -> TrainConfig:
    """Load the configuration of a run, with the movable options of this command. Other options must agree."""
    path, remedy = folder / "config.json", "Pass the run's name with --name, or start it without --resume"
    CheckpointError.unless(path.is_file(), f"a run to resume in {folder}", "nothing there", remedy)
    stored, remedy = TrainConfig.load(path), "Leave the option out, or start a new run"
    for name in sorted(given - set(MOVABLE)):
        flag, before, now = "--" + name.replace("_", "-"), getattr(stored, name), getattr(config, name)
        wanted = f"{flag} {before}, as {folder} was started"
        ConfigError.unless(now == before, wanted, f"{flag} {now}", remedy)
    return stored.moved(**{name: getattr(config, name) for name in given if name in MOVABLE})


def _start_ranks(config: TrainConfig, folder: Path) -> None:
    """Start this command once per rank with torchrun's own code, as ``torchrun --standalone`` does."""
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Silence its log: failed ranks and signals are reported once, below or by the rank.
    for package in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(package).setLevel(logging.CRITICAL)
    share = max(1, torch.get_num_threads() // config.world)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads or share))
    arguments = ["--standalone", "--nproc-per-node", str(config.world)]
    # When ranks are stopped, they get the timeout of a collective to finish the step and to save.
    arguments += ["--shutdown-timeout", str(math.ceil(config.timeout))]
    arguments += [str(Path(__file__).parent), *sys.argv[1:]]
    # Fix the name here: ranks that read the clock could disagree.
    arguments += ["--runs-dir", str(folder.parent), "--name", folder.name]
    try:
        torchrun.run(torchrun.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        # Otherwise the rank itself has reported the error or the signal.
        if code not in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM):
            how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            print(f"train: rank {rank} ended: {how}", file=sys.stderr)
        raise SystemExit(code if code > 0 else 1) from None
    except SignalException as end:
        raise SystemExit(128 + end.sigval) from None
