"""The options of ``attnspan bench``, and the command made from them. Imports no framework."""

# ruff: noqa: RUF009 (`option` makes a field of the dataclass)

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnspan_lab.console import option, options_of, words

__all__ = ["BenchOptions", "command"]

_what = partial(option, "What is measured")
_how = partial(option, "How it is measured")
_where = partial(option, "Where it goes")
_NAMES = 'workloads, families, patterns like "long-*", "grid", "training"; default: the named workloads'


@dataclass(frozen=True)
class BenchOptions:
    """Options of the command; the help text of each is in its metadata. Lists have commas between."""

    names: tuple[str, ...] = ()
    workload: str = _what("more names, with commas between", default="")
    full: bool = _what("everything: grid, training, every dtype, memory", "--full", default=False)
    dtypes: str = _what("float32, bfloat16, float16; default: the first two", default="")
    modes: str = _what("forward, forward+backward; default: both", default="")
    lengths: str = _what("numbers of keys; default: any", default="")
    head_dims: str = _what("head dims; default: any", default="")
    peers: str = _what(
        "default: all; on the grid torch's fused kernels, and OpenVINO if it is installed", default=""
    )
    workloads: Path | None = _what("JSON file of workloads of one's own", default=None)

    device: str = _how("cpu or cuda", default="cpu")
    threads: int | None = _how("CPU threads; default: torch's", default=None)
    samples: int = _how("samples of each peer in a cell, 9 or more", default=25)
    seconds: float = _how("for each peer in a cell; slow ones get fewer samples, at least 9", default=1.0)
    width: float = _how("ratios with wider intervals are marked noisy, as a fraction", default=0.04)
    cold: bool | None = _how("empty the caches first; default: for decoding", "--cold/--warm", default=None)
    memory: bool | None = _how("peak memory of each peer too", "--memory/--no-memory", default=None)
    rounds: int = _how("steps of each kind of attention in training, 9 or more", default=20)
    ranks: int = _how("ranks that share a sequence in training, next to one", default=1)

    json: Path | None = _where("raw samples; written after every cell; .gz compresses", default=None)
    html: Path | None = _where("a page of figures that needs nothing else; also of --show", default=None)
    list: bool = _where("print workloads and peers, and measure nothing", "--list", default=False)
    show: Path | None = _where("print the tables of a results file", default=None)
    cite: Path | None = _where(
        "print a results file as Markdown for a page; incomplete or unclean files are an error", default=None
    )
    summary: Path | None = _where("print the table of targets of a results file", default=None)
    compare: tuple[Path, Path] | None = _where(
        "results files, old and new: exit code 1 if something became slower", default=None
    )

    @property
    def asked(self) -> tuple[str, ...]:
        """Every name that was asked for, as an argument or by ``--workload``."""
        return (*self.names, *words(self.workload))


def command(write_page: Callable[[Any, Path], None]) -> Callable[..., None]:
    """The command as a function with an option for each field of `BenchOptions`.

    Args:
        write_page: Writes the HTML page of results.
    """
    import typer

    def bench(**given: Any) -> None:
        from attnspan_lab.bench.command import execute

        names = tuple(given.pop("names") or ())
        raise typer.Exit(execute(BenchOptions(names, **given), write_page))

    parameters = options_of(BenchOptions, names=_NAMES)
    bench.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return bench
