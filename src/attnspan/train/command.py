"""The command ``attnspan train``: options in, ranks started where there are to be several, a run out."""

import inspect
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from attnspan.train.config import MOVABLE, TrainConfig
from attnspan.train.errors import CheckpointError, ConfigError, JobError

if TYPE_CHECKING:
    import typer

    from attnspan.train.hooks import Observer
    from attnspan.train.ranks import Ranks

__all__ = ["command"]

Monitored = Callable[[Path], AbstractContextManager[Callable[[float], AbstractContextManager["Observer"]]]]


@dataclass(frozen=True)
class _Wishes:
    """The command's own options, beside those of `TrainConfig`."""

    name: str | None
    runs_dir: Path
    resume: bool
    from_step: int | None
    compare: bool
    parity: bool
    monitor: bool


def command(monitored: Monitored) -> Callable[..., None]:
    """The command as a function with its own options, and one for each field of `TrainConfig`.

    Args:
        monitored: Opens what records the steps of a run in a folder; a room above this one does it.

    Example:
        >>> "cp" in inspect.signature(command(nullcontext)).parameters
        True
    """
    import typer

    def train(
        context: typer.Context,
        name: Annotated[str | None, typer.Option(help="name of the run; default: the time")] = None,
        runs_dir: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
        resume: Annotated[
            bool, typer.Option("--resume", help="go on with --name, or with the last run")
        ] = False,
        from_step: Annotated[int | None, typer.Option(help="with --resume: an older checkpoint")] = None,
        compare: Annotated[bool, typer.Option(help="at the end, time some steps against SDPA")] = True,
        parity: Annotated[
            bool, typer.Option(help="at the end of a run of several ranks, repeat its first steps on one")
        ] = True,
        monitor: Annotated[bool, typer.Option(help="record where the time of each step goes")] = True,
        **options: Any,
    ) -> None:
        wishes = _Wishes(name, runs_dir, resume, from_step, compare, parity, monitor)
        given = {key: value for key, value in options.items() if _is_given(context, key)}
        _run(TrainConfig(**options), given, wishes, monitored)

    own = [
        parameter for parameter in inspect.signature(train).parameters.values() if parameter.name != "options"
    ]
    train.__signature__ = inspect.Signature([*own, *_config_options()])  # type: ignore[attr-defined]
    return train


def _run(config: TrainConfig, given: dict[str, Any], wishes: _Wishes, monitored: Monitored) -> None:
    """In a process that is a rank already, the run; in one that is not, the ranks."""
    from attnspan.train.ranks import is_rank, open_ranks

    folder = _folder(wishes)
    if wishes.resume:
        config = _stored_config(folder, given)
    elif wishes.from_step is not None:
        raise ConfigError(
            expected="--from-step beside --resume", got="it alone", remedy="add --resume, or leave it away"
        )
    if not is_rank() and (config.world > 1 or config.fsdp):
        _start_ranks(config, folder)
        return
    with open_ranks(config) as ranks:
        try:
            _train(config, ranks.first(lambda: folder), wishes, monitored, ranks)
        except JobError as error:
            _let_go(error)
            if not error.shared or ranks.is_first:
                raise
            raise SystemExit(2) from None  # The first rank says it for all.


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of an error hold: process groups that are alive at exit abort the process."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _train(config: TrainConfig, folder: Path, wishes: _Wishes, monitored: Monitored, ranks: "Ranks") -> None:
    from attnspan.train.run import train as run_training

    with monitored(folder) if wishes.monitor and ranks.is_first else nullcontext() as observe:
        run_training(
            config,
            folder,
            resume=wishes.resume,
            from_step=wishes.from_step,
            against_sdpa=wishes.compare,
            against_one_rank=wishes.parity,
            ranks=ranks,
            observe=observe,
        )


def _folder(wishes: _Wishes) -> Path:
    if wishes.name is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise ConfigError(
            expected="--name beside torchrun --max-restarts",
            got="none",
            remedy="name the run, so that restarted ranks find it",
        )
    if wishes.resume and wishes.name is None:
        return _last_run(wishes.runs_dir)
    return wishes.runs_dir / (wishes.name or time.strftime("%Y%m%d-%H%M%S"))


def _start_ranks(config: TrainConfig, folder: Path) -> None:
    """Start this very command once per rank, as ``torchrun --standalone`` does; it is torchrun's own code."""
    import torch
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # What it logs of a rank that failed is said below, once.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    share = max(1, torch.get_num_threads() // config.world)
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads or share))
    # The name is settled: ranks that looked at the clock could disagree.
    command = ["-m", "attnspan", *sys.argv[1:], "--name", folder.name]
    arguments = ["--standalone", "--nproc-per-node", str(config.world), *command]
    try:
        torchrun.run(torchrun.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode != 2:  # Then the rank has said itself what is wrong.
            print(f"attnspan: rank {rank} ended: {_ending(failure.exitcode)}", file=sys.stderr)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 1) from None
    except SignalException as end:
        raise SystemExit(128 + end.sigval) from None


def _ending(exitcode: int) -> str:
    return f"exit code {exitcode}" if exitcode > 0 else f"signal {signal.Signals(-exitcode).name}"


def _config_options() -> list[inspect.Parameter]:
    """One option for each field of `TrainConfig`, whose comment is the help."""
    import typer

    types = get_type_hints(TrainConfig)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=field.default,
            annotation=Annotated[
                types[field.name],
                typer.Option(help=field.metadata["help"], rich_help_panel=field.metadata["panel"]),
            ],
        )
        for field in fields(TrainConfig)
    ]


def _is_given(context: "typer.Context", name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _stored_config(folder: Path, given: dict[str, Any]) -> TrainConfig:
    """The configuration of the run itself, on other ranks if so asked; other options must agree with it."""
    from attnspan.train.run import resume_config

    stored = resume_config(folder)
    for name, value in given.items():
        if name not in MOVABLE and value != getattr(stored, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                expected=f"{flag} {getattr(stored, name)}, as {folder} was started",
                got=f"{flag} {value}",
                remedy="leave the option away, or start a new run",
            )
    return stored.on_ranks(**{name: value for name, value in given.items() if name in MOVABLE})


def _last_run(runs_dir: Path) -> Path:
    pointers = sorted(runs_dir.glob("*/checkpoints/LATEST"), key=lambda path: path.stat().st_mtime)
    if not pointers:
        raise CheckpointError(
            expected=f"a run with a checkpoint in {runs_dir}", got="none", remedy="start one without --resume"
        )
    return pointers[-1].parents[1]
