"""The options of ``attnspan bench``, and the command made from them. Imports no framework."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from attnspan.errors import OptionError

if TYPE_CHECKING:
    from attnspan.bench.results import Results

__all__ = ["BenchOptions", "command", "numbers", "words"]


def _option(panel: str, comment: str, *names: str) -> dict[str, Any]:
    """What the command line shows of a field: its panel, its help, and its names where they are not plain."""
    return {"help": comment, "panel": panel, "names": names}


_what = partial(_option, "What is measured")
_how = partial(_option, "How it is measured")
_where = partial(_option, "Where it goes")


@dataclass(frozen=True)
class BenchOptions:
    """Options of the command; lists are text with commas between, and empty text means the default.

    The comment of each field is in its metadata, because the command line prints it too.

    Args:
        names: Workloads, families, patterns like "documents-*", "grid", or "training" for whole steps.

    Example:
        >>> BenchOptions(dtypes="float32,bfloat16").seconds
        2.0
    """

    names: tuple[str, ...] = ()
    workload: str = field(
        default="",
        metadata=_what("more names, with commas between"),
    )
    full: bool = field(
        default=False,
        metadata=_what("named workloads, grid and (on CPU) training, every dtype, with memory", "--full"),
    )
    dtypes: str = field(default="", metadata=_what("float32, bfloat16, float16; default: the first two"))
    modes: str = field(default="", metadata=_what("forward, forward+backward; default: both"))
    lengths: str = field(default="", metadata=_what("numbers of keys; default: any"))
    head_dims: str = field(default="", metadata=_what("head dims; default: any"))
    peers: str = field(default="", metadata=_what("default: all, on the grid torch's fused kernels"))
    workloads: Path | None = field(default=None, metadata=_what("JSON file of workloads of one's own"))

    device: str = field(default="cpu", metadata=_how("cpu or cuda"))
    threads: int | None = field(default=None, metadata=_how("CPU threads; default: torch's"))
    seconds: float = field(default=2.0, metadata=_how("most time for each pair of peers in a cell"))
    width: float = field(
        default=0.04, metadata=_how("interval of a ratio that is narrow enough, as a fraction of it")
    )
    memory: bool | None = field(
        default=None, metadata=_how("peak memory of each peer too", "--memory/--no-memory")
    )
    rounds: int = field(default=20, metadata=_how("steps of each kind of attention in training"))

    json: Path | None = field(
        default=None, metadata=_where("raw samples and environment; written after every cell")
    )
    html: Path | None = field(default=None, metadata=_where("a page of figures that needs nothing else"))
    list: bool = field(
        default=False, metadata=_where("print workloads and peers, and measure nothing", "--list")
    )
    summary: Path | None = field(
        default=None, metadata=_where("print the table of targets of a results file")
    )
    compare: tuple[Path, Path] | None = field(
        default=None,
        metadata=_where("two results files, old and new: exit code 1 when something became slower"),
    )

    @property
    def asked(self) -> tuple[str, ...]:
        """Every name that was asked for, as an argument or by ``--workload``."""
        return (*self.names, *words(self.workload))


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas.

    Args:
        text: Of an option.

    Example:
        >>> words("a, b"), words("")
        (('a', 'b'), ())
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a list with commas.

    Args:
        option: Its name, for the error.
        text: Of the option.

    Raises:
        OptionError: A word is no positive number.

    Example:
        >>> numbers("--lengths", "128,512")
        (128, 512)
    """
    for word in words(text):
        if not word.isdecimal() or int(word) == 0:
            raise OptionError(
                option,
                expected="positive numbers with commas between",
                got=repr(word),
                remedy=f"Write it like {option} 128,512",
            )
    return tuple(map(int, words(text)))


def command(write_page: Callable[[Results, Path], None]) -> Callable[..., None]:
    """The command as a function with an option for each field of `BenchOptions`.

    Args:
        write_page: Writes the HTML page of results; a room above this one does it.

    Example:
        >>> command(print).__name__
        'bench'
    """
    import typer

    def bench(**given: Any) -> None:
        from attnspan.bench.command import execute

        names = tuple(given.pop("names") or ())
        options = BenchOptions(names, **given)
        if execute(options, write_page):
            raise typer.Exit(1)

    types = get_type_hints(BenchOptions)
    argument = inspect.Parameter(
        "names",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            list[str] | None,
            typer.Argument(help='workloads, families, patterns, "grid", "training"; default: the named'),
        ],
    )
    own = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.default,
            annotation=Annotated[
                types[item.name],
                typer.Option(
                    *item.metadata["names"],
                    help=item.metadata["help"],
                    rich_help_panel=item.metadata["panel"],
                ),
            ],
        )
        for item in fields(BenchOptions)
        if item.name != "names"
    ]
    bench.__signature__ = inspect.Signature([argument, *own])  # type: ignore[attr-defined]
    return bench
