"""The command line. Each command imports what it needs, so that ``show`` works without torch."""

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from attnspan.train.config import TrainConfig
from attnspan.train.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import typer

    from attnspan.bench.monitor import Monitor
    from attnspan.bench.results import Results

__all__ = ["build_app", "main"]

# Which extra brings a module that may be missing.
_EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "torch": "train",
    "datasets": "train",
    "tokenizers": "train",
    "tensorboard": "train",
    "jinja2": "bench",
    "plotly": "bench",
}


def main() -> None:
    """Run the command line; what a user got wrong is one message and exit code 2, without a traceback.

    Example:
        >>> import sys
        >>> sys.argv = ["attnspan", "show", "causal | nonsense"]
        >>> try:
        ...     main()
        ... except SystemExit as end:
        ...     print(end.code)
        2
    """
    try:
        build_app()(prog_name="attnspan")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        _fail(f"{package} is not installed: pip install 'attnspan[{_EXTRAS[package]}]'")
    except (ValueError, TypeError, OSError) as error:
        # What attnspan raises is the user's to mend; anything else is a defect and keeps its traceback.
        if not type(error).__module__.startswith("attnspan."):
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    print(f"attnspan: {message}", file=sys.stderr)
    raise SystemExit(2)


def build_app() -> "typer.Typer":
    """The commands.

    Raises:
        ModuleNotFoundError: typer is not installed.

    Example:
        >>> [command.name for command in build_app().registered_commands]
        ['train', 'sample', 'show', 'tune', 'bench']
    """
    import typer

    app = typer.Typer(
        help="Attention whose mask is data.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    version = typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)

    @app.callback()
    def common(_version: Annotated[bool, version] = False) -> None:
        pass

    app.command("train", help="Train a language model on packed documents.")(_train_command())
    app.command("sample", help="Continue a text with a trained model.")(_sample_command())
    app.command("show", help="Draw a mask.")(_show_command())
    app.command("tune", help="Find the fastest configurations on this machine.")(_tune_command())
    app.command("bench", help="Measure attention beside its peers on this machine.")(_bench_command())
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"attnspan {version('attnspan')}")
        raise SystemExit(0)


def _train_command() -> Callable[..., None]:
    """The ``train`` command: its own options, and one for each field of `TrainConfig`."""
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
        monitor: Annotated[bool, typer.Option(help="record where the time of each step goes")] = True,
        **options: Any,
    ) -> None:
        from attnspan.train.run import train as run_training

        config = TrainConfig(**options)
        folder = runs_dir / (name or time.strftime("%Y%m%d-%H%M%S"))
        if resume:
            folder = runs_dir / name if name else _last_run(runs_dir)
            given = {key: value for key, value in options.items() if _is_given(context, key)}
            config = _stored_config(folder, given)
        elif from_step is not None:
            raise ConfigError(
                expected="--from-step beside --resume",
                got="it alone",
                remedy="add --resume, or leave it away",
            )
        with _monitored(folder) if monitor else nullcontext() as observe:
            run_training(
                config, folder, resume=resume, from_step=from_step, against_sdpa=compare, observe=observe
            )

    own = [
        parameter for parameter in inspect.signature(train).parameters.values() if parameter.name != "options"
    ]
    train.__signature__ = inspect.Signature([*own, *_config_options()])  # type: ignore[attr-defined]
    return train


@contextmanager
def _monitored(folder: Path) -> "Iterator[Callable[[float], Monitor]]":
    """Make the monitor that the job asks for; in the end write its page, also of a run that was cut short."""
    for package in ("jinja2", "plotly"):
        if find_spec(package) is None:  # Said before the training, not after it.
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    from attnspan.bench.monitor import Monitor
    from attnspan.report import write_page

    made: list[Monitor] = []

    def observe(ceiling: float) -> Monitor:
        made.append(Monitor(folder, ceiling=ceiling))
        return made[0]

    try:
        yield observe
    finally:
        # A run that is resumed at its very end takes no step, and keeps the page that it has.
        if made and made[0].results().monitor:
            page = folder / "monitor.html"
            write_page(made[0].results(), page)
            print(f"monitor: {page}; it took {made[0].overhead:.2%} of the time of the steps")


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
    """The configuration of the run itself; options beside ``--resume`` must agree with it."""
    from attnspan.train.run import resume_config

    stored = resume_config(folder)
    for name, value in given.items():
        if value != getattr(stored, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                expected=f"{flag} {getattr(stored, name)}, as {folder} was started",
                got=f"{flag} {value}",
                remedy="leave the option away, or start a new run",
            )
    return stored


def _last_run(runs_dir: Path) -> Path:
    pointers = sorted(runs_dir.glob("*/checkpoints/LATEST"), key=lambda path: path.stat().st_mtime)
    if not pointers:
        raise CheckpointError(
            expected=f"a run with a checkpoint in {runs_dir}", got="none", remedy="start one without --resume"
        )
    return pointers[-1].parents[1]


def _sample_command() -> Callable[..., None]:
    import typer

    def sample(
        checkpoint: Annotated[Path, typer.Argument(help="a run's folder, or one of its checkpoints")],
        prompt: Annotated[str, typer.Argument(help="text to continue")] = "",
        tokens: Annotated[int, typer.Option(help="most tokens to add")] = 256,
        temperature: Annotated[float, typer.Option(help="0 takes the likeliest token")] = 0.8,
        seed: Annotated[int, typer.Option(help="seed of the draw")] = 0,
    ) -> None:
        from attnspan.train.sample import generate

        print(prompt, end="")
        for text in generate(checkpoint, prompt, tokens=tokens, temperature=temperature, seed=seed):
            print(text, end="", flush=True)
        print()

    return sample


def _show_command() -> Callable[..., None]:
    import typer

    def show(
        expression: Annotated[str, typer.Argument(help='a mask, like "causal & window(128)"')],
        q_len: Annotated[int, typer.Option(help="query rows")] = 64,
        k_len: Annotated[int | None, typer.Option(help="keys; default: as many as queries")] = None,
        svg: Annotated[Path | None, typer.Option(help="write a picture to this file instead")] = None,
    ) -> None:
        from attnspan.masks import parse

        mask = parse(expression)
        if svg is None:
            mask.show(q_len, k_len)
            return
        from attnspan.picture import svg as draw

        lowered = mask.spans(q_len, q_len if k_len is None else k_len)
        svg.write_text(draw(lowered, title=repr(mask)))
        print(svg)

    return show


def _tune_command() -> Callable[..., None]:
    from attnspan.tune.command import command

    return command(_write_page)


def _bench_command() -> Callable[..., None]:
    from attnspan.bench.options import command

    return command(_write_page)


def _write_page(results: "Results", path: Path) -> None:
    from attnspan.report import write_page

    write_page(results, path)
