"""Output of all commands: numbers as text, tables that fit the terminal, options from dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from attnspan.errors import expect

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

NONE = "-"  #: placeholder for a missing value
_FILE_WIDTH = 160  # columns of output that goes into a file
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_PER_SECOND = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))


def _scaled(value: float | None, units: Sequence[tuple[float, str]]) -> str:
    if value is None:
        return NONE
    # Choose the unit after rounding: 0.9999 s is 1.00 s, not 1,000 ms.
    size, unit = next((entry for entry in units if abs(float(f"{value:.3g}")) >= entry[0]), units[-1])
    return f"{ratio_digits(value / size)} {unit}"


def ratio_digits(value: float) -> str:
    """Format a number with three digits: "1.23", "12.3", "1,234".

    Example:
        >>> ratio_digits(1.234), ratio_digits(9.996), ratio_digits(1234.0)
        ('1.23', '10.0', '1,234')
    """
    size = abs(float(f"{value:.3g}"))
    return f"{value:,.0f}" if size >= 100 or size == 0 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def times_text(ratio: float | None) -> str:
    """Format a ratio with three digits.

    Example:
        >>> times_text(1.234), times_text(None)
        ('1.23x', '-')
    """
    return NONE if ratio is None else f"{ratio_digits(ratio)}x"


def seconds_text(seconds: float | None) -> str:
    """Format a time with three digits and its unit.

    Example:
        >>> seconds_text(0.00123), seconds_text(12.3), seconds_text(None)
        ('1.23 ms', '12.3 s', '-')
    """
    return _scaled(seconds, _SECONDS)


def bytes_text(size: float | None) -> str:
    """Format a size with three digits and its binary unit.

    Example:
        >>> bytes_text(3 * 2**20), bytes_text(None)
        ('3.00 MiB', '-')
    """
    return _scaled(size, _BYTES)


def rate_text(rate: float | None, unit: str = "FLOP/s") -> str:
    """Format a rate with three digits and its decimal unit.

    Example:
        >>> rate_text(2.1e11), rate_text(1.8e10, "B/s")
        ('210 GFLOP/s', '18.0 GB/s')
    """
    return _scaled(rate, [(size, f"{prefix}{unit}") for size, prefix in _PER_SECOND])


def percent(share: float | None) -> str:
    """Format a share between 0 and 1 in percent.

    Example:
        >>> percent(0.87), percent(0.021), percent(None)
        ('87 %', '2.1 %', '-')
    """
    return NONE if share is None else f"{share * 100:.{0 if share >= 0.0995 else 1}f} %"


def stdout() -> Console:
    """Return the terminal's console. For output to a file, the width is COLUMNS or else 160."""
    from rich.console import Console

    # Without emoji, because a.py:factory would be parsed as one.
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH
    return console


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: Heading of the column.
        words: The column holds words, which are left-aligned and may wrap. Numbers never wrap.
        drop: On narrow terminals, columns with higher numbers are left out first. 0 always stays.
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
    """Print a table that fits the console. Columns that do not fit are left out and listed below.

    Args:
        console: Console to print to. Its width limits the table.
        title: Title above the table.
        columns: Columns, with the order in which they are left out.
        rows: One text per column for each row.
        bold: Returns whether a row is a heading.
        styles: Style of each row. Default: no styles.

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
    # If even these columns do not fit, a line that the terminal breaks is better than half a number.
    needed = sum(widths.values()) + 3 * (len(widths) - 1)
    terminal, console.width = console.width, max(console.width, needed)
    console.print(table)
    console.width = terminal
    left_out = [column.name for index, column in enumerate(columns) if index not in widths]
    if left_out:
        console.print(f"not shown at {terminal} columns: {', '.join(left_out)}", style="dim")


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> dict[int, int]:
    """Compute the width of each kept column, by index. No width cuts a number or a word."""

    def longest(texts: Iterable[str]) -> int:
        return max(map(len, texts), default=0)

    texts = [[column.name, *(row[index] for row in rows)] for index, column in enumerate(columns)]
    least = {
        index: longest(part for text in texts[index] for part in (text.split() if column.words else [text]))
        for index, column in enumerate(columns)
    }
    # Three characters separate columns.
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
    """Make an empty table with columns of these widths."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    look: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "show_edge": False}
    table = Table(title=title, title_justify="left", title_style="bold", **look)
    for column, width in columns:
        how: dict[str, Any] = {"justify": "left" if column.words else "right", "no_wrap": not column.words}
        table.add_column(column.name, width=width, overflow="fold", **how)
    return table


def words(text: str) -> tuple[str, ...]:
    """Split a comma-separated list.

    Example:
        >>> words("a, b"), words("")
        (('a', 'b'), ())
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def chosen(name: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Split a comma-separated list of known words.

    Args:
        name: The option, for the error.
        text: Value of the option.
        known: Words that can be chosen.

    Raises:
        OptionError: A word is not known.

    Example:
        >>> chosen("--modes", "eager", ["eager", "compiled"])
        ('eager',)
    """
    known = tuple(known)
    for word in words(text):
        expect(word in known, name, f"some of {', '.join(known)}", repr(word), "Use one of these")
    return words(text)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Parse a comma-separated list of positive numbers.

    Args:
        name: The option, for the error.
        text: Value of the option.

    Raises:
        OptionError: A word is not a positive number.

    Example:
        >>> numbers("--lengths", "128,512")
        (128, 512)
    """
    for word in words(text):
        is_number, wanted = word.isdecimal() and int(word) > 0, "positive numbers, separated by commas"
        expect(is_number, name, wanted, repr(word), f"Write it like {name} 128,512")
    return tuple(map(int, words(text)))


@contextmanager
def progress(console: Console, total: int, first: str = "") -> Iterator[Callable[..., None]]:
    """Show a progress bar that names the current step and disappears at the end.

    Without a terminal, only the printed lines appear.

    Yields:
        A function with three kinds of arguments: a line to print above the bar, its style, and arguments of
        rich's `Progress.update`.
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
    """Make a field of an options dataclass: its panel in the help, its help text, and its own flag names."""
    return dataclasses.field(default=default, metadata={"help": comment, "panel": panel, "names": names})


def options_of(kind: type, *, names: str = "") -> list[inspect.Parameter]:
    """Make the parameters of a command from a dataclass with "help" and "panel" in its fields' metadata.

    Args:
        kind: The dataclass.
        names: Help text of the field ``names``, which holds the command's arguments. Empty without arguments.

    Raises:
        OptionError: A field has no help.
    """
    import typer

    def parameter(field: dataclasses.Field[Any], annotation: Any) -> inspect.Parameter:
        if field.name == "names" and names:
            default, annotated = None, Annotated[list[str] | None, typer.Argument(help=names)]
        else:
            said = field.metadata
            expect("help" in said, field.name, "a help text", "none", "Add a help text to the field")
            shown = typer.Option(*said.get("names", ()), help=said["help"], rich_help_panel=said["panel"])
            default, annotated = field.default, Annotated[annotation, shown]
        return inspect.Parameter(
            field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotated
        )

    types = get_type_hints(kind)
    return [parameter(field, types[field.name]) for field in dataclasses.fields(kind)]
