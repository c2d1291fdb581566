"""Output of all commands: figures as text, tables that fit the terminal, options made from dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from attnspan.errors import OptionError, expect

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "NONE",
    "Column",
    "bytes_text",
    "chosen",
    "numbers",
    "option",
    "options_of",
    "percent",
    "print_table",
    "progress",
    "rate_text",
    "ratio_digits",
    "seconds_text",
    "stdout",
    "times_text",
    "words",
]

NONE = "-"  #: stands where there is no figure
_FILE_WIDTH = 160  # of a table that goes into a file
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_PER_SECOND = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))


def _scaled(value: float | None, units: Sequence[tuple[float, str]]) -> str:
    if value is None:
        return NONE
    # By its three digits: 0.9999 s is 1.00 s, not 1,000 ms.
    size, unit = next((entry for entry in units if abs(float(f"{value:.3g}")) >= entry[0]), units[-1])
    return f"{ratio_digits(value / size)} {unit}"


def ratio_digits(value: float) -> str:
    """Three digits: "1.23", "12.3", "1,234".

    Example:
        >>> ratio_digits(1.234), ratio_digits(9.996), ratio_digits(1234.0)
        ('1.23', '10.0', '1,234')
    """
    size = abs(float(f"{value:.3g}"))
    return f"{value:,.0f}" if size >= 100 or size == 0 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def times_text(ratio: float | None) -> str:
    """A ratio with three digits.

    Example:
        >>> times_text(1.234), times_text(None)
        ('1.23x', '-')
    """
    return NONE if ratio is None else f"{ratio_digits(ratio)}x"


def seconds_text(seconds: float | None) -> str:
    """A time with three digits and its unit.

    Example:
        >>> seconds_text(0.00123), seconds_text(12.3), seconds_text(None)
        ('1.23 ms', '12.3 s', '-')
    """
    return _scaled(seconds, _SECONDS)


def bytes_text(size: float | None) -> str:
    """A size with three digits and its binary unit.

    Example:
        >>> bytes_text(3 * 2**20), bytes_text(None)
        ('3.00 MiB', '-')
    """
    return _scaled(size, _BYTES)


def rate_text(rate: float | None, unit: str = "FLOP/s") -> str:
    """A rate with three digits and its decimal unit.

    Example:
        >>> rate_text(2.1e11), rate_text(1.8e10, "B/s")
        ('210 GFLOP/s', '18.0 GB/s')
    """
    return _scaled(rate, [(size, f"{prefix}{unit}") for size, prefix in _PER_SECOND])


def percent(share: float | None) -> str:
    """A share of 0..1.

    Example:
        >>> percent(0.87), percent(0.021), percent(None)
        ('87 %', '2.1 %', '-')
    """
    return NONE if share is None else f"{share * 100:.{0 if share >= 0.0995 else 1}f} %"


def stdout() -> Console:
    """The terminal; where output goes into a file and COLUMNS does not say otherwise, 160 columns."""
    from rich.console import Console

    # Names such as a.py:factory are no emoji.
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH
    return console


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: Its heading.
        words: Holds words, which are left-aligned and may wrap; figures never wrap.
        drop: Columns of a higher number are left out first where the terminal is narrow; 0 always stays.
    """

    name: str
    words: bool = False
    drop: int = 0


def print_table(
    console: Console,
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    bold: Callable[[Sequence[str]], bool] = lambda _: False,
    styles: Sequence[str | None] = (),
) -> None:
    """Print a table that fits. Where it does not, columns are left out and named below it.

    Args:
        console: Where to; its width decides.
        title: Above the table.
        columns: With the order in which they are dropped.
        rows: A text for each column.
        bold: Whether a row is a heading.
        styles: Of the rows, where they differ.

    Example:
        >>> from rich.console import Console
        >>> columns = [Column("who", words=True), Column("time"), Column("memory", drop=1)]
        >>> rows = [["attnspan", "1 s", "3 MiB"]]
        >>> print_table(Console(width=16), "calls", columns, rows)  # doctest: +NORMALIZE_WHITESPACE
        <BLANKLINE>
        calls
        who        time
        ───────────────
        attnspan    1 s
        not shown at 16
        columns: memory
    """
    rows = [tuple(row) for row in rows]
    widths = _widths(columns, rows, console.width)
    table = _table(title, [(columns[index], width) for index, width in widths.items()])
    for index, row in enumerate(rows):
        style = styles[index] if styles else None
        table.add_row(*(row[i] for i in widths), style="bold" if bold(row) else style)
    console.print()
    # Where even these columns do not fit, a line that the terminal breaks is better than half a figure.
    needed = sum(widths.values()) + 3 * (len(widths) - 1)
    terminal, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = terminal
    left_out = [column.name for index, column in enumerate(columns) if index not in widths]
    if left_out:
        console.print(f"not shown at {terminal} columns: {', '.join(left_out)}", style="dim")


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """Width of each column that is kept, by its index; none cuts a figure or a word."""

    def longest(texts: Iterable[str]) -> int:
        return max(map(len, texts), default=0)

    texts = [[column.name, *(row[index] for row in rows)] for index, column in enumerate(columns)]
    least = {
        index: longest(part for text in texts[index] for part in (text.split() if column.words else [text]))
        for index, column in enumerate(columns)
    }
    # Columns are three apart.
    while width < sum(least.values()) + 3 * (len(least) - 1):
        droppable = [index for index in least if columns[index].drop]
        if not droppable:
            break
        del least[max(droppable, key=lambda index: columns[index].drop)]
    missing = {index: longest(texts[index]) - least[index] for index in least}
    for _ in range(width - sum(least.values()) - 3 * (len(least) - 1)):
        widest = max(missing, key=lambda index: missing[index])
        least[widest] += missing[widest] > 0
        missing[widest] -= missing[widest] > 0
    return least


def _table(title: str, columns: Sequence[tuple[Column, int]]) -> Table:
    """An empty table of columns with their widths."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for column, width in columns:
        table.add_column(
            column.name,
            justify="left" if column.words else "right",
            width=width,
            no_wrap=not column.words,
            overflow="fold",
        )
    return table


def words(text: str) -> tuple[str, ...]:
    """The words of a list with commas.

    Example:
        >>> words("a, b"), words("")
        (('a', 'b'), ())
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def chosen(name: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The words of a list with commas, each of which must be known.

    Args:
        name: The option, for the error.
        text: Its value.
        known: What can be chosen.

    Raises:
        OptionError: A word is not known.

    Example:
        >>> chosen("--modes", "eager", ["eager", "compiled"])
        ('eager',)
    """
    known = tuple(known)
    for word in words(text):
        expect(word in known, name, f"some of {', '.join(known)}", repr(word), "Name one of these")
    return words(text)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The positive numbers of a list with commas.

    Args:
        name: The option, for the error.
        text: Its value.

    Raises:
        OptionError: A word is not a positive number.

    Example:
        >>> numbers("--lengths", "128,512")
        (128, 512)
    """
    for word in words(text):
        is_number = word.isdecimal() and int(word) > 0
        expect(
            is_number,
            name,
            "positive numbers with commas between",
            repr(word),
            f"Write it like {name} 128,512",
        )
    return tuple(map(int, words(text)))


@contextmanager
def progress(console: Console, total: int, first: str = "") -> Iterator[Callable[..., None]]:
    """Progress bar that names the step in progress and disappears at the end; elsewhere, lines.

    Yields:
        A function of a line to print above the bar, its style, and what rich's `Progress.update` takes.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(first, total=total)

        def tell(line: str = "", *, style: str | None = None, **update: Any) -> None:
            bar.update(task, **update)
            if line:
                bar.console.print(line, style=style, markup=False, soft_wrap=True)

        yield tell


def option(panel: str, comment: str, *names: str, default: Any) -> Any:
    """A field of a dataclass of options: where the help shows it, its text, and names that are not plain."""
    return dataclasses.field(default=default, metadata={"help": comment, "panel": panel, "names": names})


def options_of(kind: type, *, names: str = "") -> list[inspect.Parameter]:
    """The parameters of a command, one for each field of a dataclass whose metadata has "help" and "panel".

    Args:
        kind: The dataclass.
        names: Help of the field ``names``, which takes the command's arguments; empty if there is none.

    Raises:
        OptionError: A field has no help.
    """
    import typer

    def parameter(field: dataclasses.Field[Any], annotation: Any) -> inspect.Parameter:
        if field.name == "names" and names:
            default, annotated = None, Annotated[list[str] | None, typer.Argument(help=names)]
        else:
            said = field.metadata
            if "help" not in said:
                raise OptionError(field.name, expected="a help text", got="none", remedy="Give the field one")
            shown = typer.Option(*said.get("names", ()), help=said["help"], rich_help_panel=said["panel"])
            default, annotated = field.default, Annotated[annotation, shown]
        return inspect.Parameter(
            field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotated
        )

    types = get_type_hints(kind)
    return [parameter(field, types[field.name]) for field in dataclasses.fields(kind)]
