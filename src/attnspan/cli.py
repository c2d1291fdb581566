"""The command line. Each command imports what it needs, so that ``show`` works without torch."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    import numpy as np
    import torch
    import typer
    from numpy.typing import NDArray

    from attnspan.tools.bench.monitor import Monitor
    from attnspan.tools.bench.results import Results

__all__ = ["build_app", "main"]

# Which extra brings a module that may be missing.
_EXTRAS = {
    **dict.fromkeys(("typer", "rich"), "cli"),
    **dict.fromkeys(("torch", "pyarrow", "tokenizers", "tensorboard"), "train"),
    **dict.fromkeys(("jinja2", "plotly"), "bench"),
    **dict.fromkeys(("transformers", "diffusers"), "zoo"),
}


def main() -> None:
    """Run the command line. An error of the user is one message and exit code 2, without a traceback."""
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
        ['train', 'sample', 'show', 'tune', 'bench', 'doctor', 'zoo', 'simulate']
    """
    import typer

    from attnspan.tools.bench.options import command as bench
    from attnspan.tools.doctor.command import doctor
    from attnspan.tools.simulate import command as simulate
    from attnspan.tools.tune.command import tune
    from attnspan.tools.zoo.command import zoo
    from attnspan.train.command import command as train

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

    app.command("train", help="Train a language model on packed documents.")(train(_monitored))
    app.command("sample", help="Continue a text with a trained model.")(_sample_command())
    app.command("show", help="Draw a mask.")(_show_command())
    app.command("tune", help="Find the fastest configurations on this machine.")(tune)
    app.command("bench", help="Compare attention with its peers on this machine.")(bench(_write_page))
    app.command("doctor", help="Say what is wrong with a model's attention under the compiler.")(doctor)
    app.command("zoo", help="Run other libraries' models with each attention.")(zoo)
    app.command("simulate", help="Predict how strategies compare over many ranks.")(simulate(_corpus_lengths))
    return app


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

    example = 'a mask, like "causal & documents([0, 10, 32])"; every mask of the library by its name'
    sizes = "; default: what the mask's lists imply, else"

    def show(
        expression: Annotated[str, typer.Argument(help=example)] = "",
        q_len: Annotated[int | None, typer.Option(help=f"query rows{sizes} 64")] = None,
        k_len: Annotated[int | None, typer.Option(help=f"keys{sizes} as many as queries")] = None,
        batch: Annotated[int, typer.Option(help="batch rows, for masks that differ between them")] = 1,
        heads: Annotated[int, typer.Option(help="heads, for masks that differ between them")] = 1,
        at: Annotated[tuple[int, int], typer.Option(help="batch row and head to draw")] = (0, 0),
        svg: Annotated[Path | None, typer.Option(help="write a picture to this file instead")] = None,
        list_names: Annotated[bool, typer.Option("--list", help="print the names of all masks")] = False,
    ) -> None:
        from attnspan import picture
        from attnspan.errors import expect
        from attnspan.files import write_whole
        from attnspan.masks import names, parse

        if list_names:
            print(*sorted(names()), sep="\n")
            return
        expect(expression, "attnspan show", "a mask", "none", 'Write one, like "causal", or see --list')
        mask = parse(expression)
        rows, keys = picture.implied_sizes(mask, q_len, k_len)
        inside = 0 <= at[0] < batch and 0 <= at[1] < heads
        expect(inside, "--at", "a row below --batch and a head below --heads", at, "Pass others")
        if svg is None:
            # Numbers of rows, a frame, and the last number of a key stand next to the picture.
            width = min(64, get_terminal_size().columns - 14)
            picture.show(mask, rows, keys, at=at, batch=batch, heads=heads, width=max(width, 1))
            return
        lowered = mask.spans(rows, keys, batch=batch, heads=heads).lowered
        write_whole(svg, picture.svg(lowered, title=expression, at=at))
        print(svg)

    return show


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"attnspan {version('attnspan')}")
        raise SystemExit(0)


@contextmanager
def _monitored(folder: Path, device: "torch.device") -> "Iterator[Callable[[float | None], Monitor]]":
    """Make the job's monitor, and write its page at the end, even if the run was interrupted."""
    for package in ("jinja2", "plotly"):
        if find_spec(package) is None:  # Said before the training, not after it.
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    from attnspan.tools.bench.monitor import Monitor

    made: list[Monitor] = []

    def observe(ceiling: float | None) -> Monitor:
        made.append(Monitor(folder, ceiling=ceiling, device=device))
        return made[0]

    try:
        yield observe
    finally:
        # A run that is resumed at its very end takes no step, and keeps the page that it has.
        if made and made[0].results().monitor:
            page = folder / "monitor.html"
            _write_page(made[0].results(), page)
            print(f"monitor: {page}; it took {made[0].overhead:.2%} of the time of the steps")


def _corpus_lengths(tokens: int, seed: int) -> "NDArray[np.integer]":
    """Lengths of the documents in the first row of the training job's data."""
    import numpy as np

    from attnspan.train.config import TrainConfig
    from attnspan.train.data import PackedStream
    from attnspan.train.documents import Vocabulary, load_data

    corpus = load_data(TrainConfig(), Vocabulary()).train
    row = next(PackedStream(corpus, seq_len=tokens, batch_size=1, seed=seed))
    return np.bincount(row.ids[0].numpy())


def _write_page(results: "Results", path: Path) -> None:
    from attnspan.tools.report import write_page

    write_page(results, path)
