"""``python examples/train``: train a language model on packed documents."""

import sys
from pathlib import Path

import typer

# Python puts this folder first on the path, but ``import train`` needs its parent.
sys.path[0] = str(Path(__file__).parents[1])

from attnspan_lab.cli import run  # noqa: E402
from train.command import command  # noqa: E402

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})(command())
    run(lambda: app(prog_name="python examples/train"))
