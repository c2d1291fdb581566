"""The command line. Each command imports its own dependencies, so that ``show`` works without torch."""

import sys
from collections.abc import Callable
from inspect import Signature
from typing import Annotated, Any

import typer

from attnspan.__main__ import main as show_or_explain

__all__ = ["build_app", "main", "run"]

_JOB = ("pyarrow", "tokenizers", "tensorboard", "safetensors")  # packages of the training job
# Optional package -> how the user installs it.
_INSTALLS = {
    **dict.fromkeys(("typer", "rich", "torch", "jinja2", "plotly"), "pip install ./lab in a checkout"),
    **dict.fromkeys(_JOB, f"pip install {' '.join(_JOB)}"),
    **dict.fromkeys(("transformers", "diffusers"), "pip install './lab[zoo]' in a checkout"),
}


def main() -> None:
    """Run the command ``attnspan``."""
    run(lambda: build_app()(prog_name="attnspan"))


def run(command: Callable[[], object]) -> None:
    """Run a command line. A user error prints one message and exits with code 2, without a traceback."""
    try:
        command()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALLS:
            raise
        _fail(f"{package} is not installed: {_INSTALLS[package]}")
    except (ValueError, TypeError, OSError) as error:
        # The user can fix errors that attnspan raises. Any other error is a defect and keeps its traceback.
        if not type(error).__module__.startswith(("attnspan.", "train.")):
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    print(f"attnspan: {message}", file=sys.stderr)
    raise SystemExit(2)


def build_app() -> "typer.Typer":
    """Build the typer application with all commands.

    Raises:
        ModuleNotFoundError: typer is not installed.

    Example:
        >>> [command.name for command in build_app().registered_commands]
        ['show', 'explain', 'tune', 'bench', 'doctor', 'zoo', 'simulate']
    """
    from attnspan_lab.doctor.command import doctor
    from attnspan_lab.simulate import command as simulate
    from attnspan_lab.tune.command import tune
    from attnspan_lab.zoo.command import zoo

    app = typer.Typer(
        help="Exact attention for PyTorch and JAX. You pass the mask as data.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    version = typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)

    @app.callback()
    def common(_version: Annotated[bool, version] = False) -> None:
        pass

    # `python -m attnspan` parses the arguments of these two commands.
    through = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command("show", help="Draw a mask in the terminal, or as SVG.", context_settings=through)(
        _of_the_library
    )
    why = "Print which backend runs a call and why the others do not. --env prints versions and the machine."
    app.command("explain", help=why, context_settings=through)(_of_the_library)
    app.command("tune", help="Find the fastest kernel configurations on this machine.")(tune)
    app.command("bench", help="Benchmark attnspan against other attention implementations.")(_bench_command())
    what = "Find faults and costs of a model's attention in PyTorch or JAX, or test if a benchmark is honest."
    app.command("doctor", help=what)(doctor)
    app.command("zoo", help="Run models of transformers and diffusers with each attention.")(zoo)
    app.command("simulate", help="Compare context-parallel strategies without starting ranks.")(simulate)
    return app


def _of_the_library(context: "typer.Context") -> None:
    show_or_explain([context.info_name or "", *context.args])


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"attnspan {version('attnspan')}")
        raise SystemExit(0)


def _bench_command() -> Callable[..., None]:
    """Make a function with a parameter for each field of `BenchOptions`."""
    from attnspan_lab.bench.options import NAMES, BenchOptions
    from attnspan_lab.console import options_of

    def bench(**given: Any) -> None:
        from attnspan_lab.bench.command import execute
        from attnspan_lab.report import write_page

        names = tuple(given.pop("names") or ())
        raise typer.Exit(execute(BenchOptions(names, **given), write_page))

    bench.__signature__ = Signature(options_of(BenchOptions, names=NAMES))  # type: ignore[attr-defined]
    return bench
