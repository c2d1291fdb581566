"""The command: parses the options, starts several ranks if requested, and runs the training."""

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
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attnspan_lab.bench.monitor import Monitor
from attnspan_lab.console import options_of
from attnspan_lab.report import write_page
from train.config import MOVABLE, CheckpointError, ConfigError, JobError, TrainConfig

if TYPE_CHECKING:
    import torch

    from train.train import Observe

__all__ = ["command"]


def command() -> Callable[..., None]:
    """Make the command: a function with its own options, and one for each field of `TrainConfig`."""
    import typer

    def train(
        context: typer.Context,
        name: Annotated[str | None, typer.Option(help="name of the run (default: the time)")] = None,
        runs_dir: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
        resume: Annotated[
            bool, typer.Option("--resume", help="resume the run --name, or the last run")
        ] = False,
        from_step: Annotated[
            int | None, typer.Option(help="with --resume: step of an older checkpoint")
        ] = None,
        sample: Annotated[
            int, typer.Option(help="bytes of text to sample from the model at the end", min=0)
        ] = 200,
        monitor: Annotated[bool, typer.Option(help="record the time of each step by phase")] = True,
        **options: Any,
    ) -> None:
        from train.parallelize import is_rank

        sources = {key: context.get_parameter_source(key) for key in options}
        given = {key for key, source in sources.items() if source and source.name == "COMMANDLINE"}
        config, folder = TrainConfig(**options), _folder(name, runs_dir, resume)
        whole, remedy = from_step is None or resume, "Add --resume, or leave --from-step out"
        ConfigError.unless(whole, "--from-step with --resume", "it alone", remedy)
        if resume:
            config = _stored(folder, config, given)
        if not is_rank() and (config.world > 1 or config.fsdp):
            _start_ranks(config, folder)
        else:
            how = {"resume": resume, "from_step": from_step, "sample": sample}
            _run(config, folder, monitor, how)

    own = [each for each in inspect.signature(train).parameters.values() if each.name != "options"]
    train.__signature__ = inspect.Signature([*own, *options_of(TrainConfig)])  # type: ignore[attr-defined]
    return train


def _run(config: TrainConfig, folder: Path, monitor: bool, how: dict[str, Any]) -> None:
    """Run one rank, or a job of one process."""
    from train.parallelize import open_ranks
    from train.stop import Stopped
    from train.train import train

    stopped: Stopped | None = None
    with open_ranks(config) as ranks:
        try:
            folder = ranks.first(lambda: folder)
            watched = _monitored(folder, ranks.device) if monitor and ranks.is_first else nullcontext()
            with watched as observe:
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
def _monitored(folder: Path, device: "torch.device") -> "Iterator[Observe]":
    """Create the run's monitor, and write its page at the end, even if the run was interrupted."""
    made: list[Monitor] = []

    def observe(ceiling: float | None) -> Monitor:
        made.append(Monitor(folder, ceiling=ceiling, device=device))
        return made[0]

    try:
        yield observe
    finally:
        # A run that is resumed at its end takes no step and keeps its page.
        if made and made[0].results().monitor:
            page = folder / "monitor.html"
            write_page(made[0].results(), page)
            print(f"monitor: {page}, overhead {made[0].overhead:.2%} of the time of the steps")


def _folder(name: str | None, runs_dir: Path, resume: bool) -> Path:
    named = name is not None or not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    remedy = "Pass a name for the run, so that restarted ranks find it"
    ConfigError.unless(named, "--name with torchrun --max-restarts", "none", remedy)
    if name is not None or not resume:
        return runs_dir / (name or time.strftime("%Y%m%d-%H%M%S"))
    folders = sorted(runs_dir.glob("*/checkpoints/step-*"), key=lambda path: path.stat().st_mtime)
    wanted = f"a run with a checkpoint in {runs_dir}"
    CheckpointError.unless(folders, wanted, "none", "Start a run without --resume")
    return folders[-1].parents[1]


def _stored(folder: Path, config: TrainConfig, given: set[str]) -> TrainConfig:
    """Load the configuration of a run, with the movable options of this command. Other options must agree."""
    path, remedy = folder / "config.json", "Pass the run's name with --name, or start it without --resume"
    CheckpointError.unless(path.is_file(), f"a run to resume in {folder}", "nothing there", remedy)
    stored = TrainConfig.load(path)
    for name in sorted(given - set(MOVABLE)):
        flag, before, now = "--" + name.replace("_", "-"), getattr(stored, name), getattr(config, name)
        wanted, remedy = (
            f"{flag} {before}, as {folder} was started",
            "Leave the option out, or start a new run",
        )
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
    # Fix the name here: ranks that read the clock could disagree.
    this = str(Path(__file__).parent)
    command = [this, *sys.argv[1:], "--runs-dir", str(folder.parent), "--name", folder.name]
    # When ranks are stopped, they get the timeout of a collective to finish the step and to save.
    patience = ["--shutdown-timeout", str(math.ceil(config.timeout))]
    arguments = ["--standalone", "--nproc-per-node", str(config.world), *patience, *command]
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
