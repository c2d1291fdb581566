"""Tables and measurements that the four programs of this folder share."""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def show(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str] = ()
) -> None:
    """Print a table, and a paragraph for each note under it."""
    table = Table(*columns[:1], title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in columns[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=max(100, Console().width), highlight=False, markup=False)
    console.print(table, *notes, sep="\n")


def first_line(error: BaseException) -> str:
    """The first line of an error, with its type."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def seconds(call: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def medians(calls: Mapping[str, Callable[[], object]], rounds: int = 15) -> dict[str, float]:
    """The median time of each call in seconds, after one call. They take turns, so a slow moment hits all."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(seconds(call))
    return {name: statistics.median(x) for name, x in samples.items()}


def milliseconds(call: Callable[[], object], rounds: int = 7) -> str:
    """The median time of a call in milliseconds, after one call that is not measured."""
    return f"{medians({'': call}, rounds)[''] * 1e3:.0f}"


def peak_megabytes(call: Callable[[], object]) -> str:
    """The memory that a call needs above what the process holds before, in MB. Linux only, else "-"."""
    if not _FORGET.exists():
        return "-"
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    _FORGET.write_text("5")  # Linux: the high-water mark starts again from here.
    call()
    return f"{(_resident('VmHWM') - before) / 1e3:.0f}"


def _resident(field: str) -> int:
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines[field].split()[0])
