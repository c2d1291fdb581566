"""The command ``attnspan zoo``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from attnspan.errors import expect
from attnspan_lab.console import Column, print_table, stdout, words
from attnspan_lab.files import check_writable
from attnspan_lab.zoo.architecture import LAYOUTS, MODES

if TYPE_CHECKING:
    from rich.console import Console

    from attnspan_lab.zoo.architecture import Architecture
    from attnspan_lab.zoo.cells import Row, Speed, ZooResults

__all__ = ["zoo"]

_BACKENDS = ("aot_eager", "inductor")
_WHAT, _HOW, _WHERE = "What is run", "How it is run", "Where it goes"


def zoo(
    only: Annotated[
        str, Option(help='names or patterns like "gemma*", commas between', rich_help_panel=_WHAT)
    ] = "",
    library: Annotated[str, Option(help="transformers or diffusers", rich_help_panel=_WHAT)] = "",
    layouts: Annotated[str, Option(help=f"some of {', '.join(LAYOUTS)}", rich_help_panel=_WHAT)] = "",
    modes: Annotated[str, Option(help=f"some of {', '.join(MODES)}", rich_help_panel=_WHAT)] = "",
    full: Annotated[
        bool, Option("--full", help="compile every attention in every layout", rich_help_panel=_WHAT)
    ] = False,
    speed: Annotated[
        bool, Option("--speed", help="time and memory of larger models instead", rich_help_panel=_WHAT)
    ] = False,
    list_names: Annotated[
        bool, Option("--list", help="print the architectures, and run nothing", rich_help_panel=_WHAT)
    ] = False,
    show: Annotated[
        Path | None, Option(help="print what a file holds, and run nothing", rich_help_panel=_WHAT)
    ] = None,
    backend: Annotated[
        str,
        Option(help="aot_eager or inductor; default: aot_eager, with --speed inductor", rich_help_panel=_HOW),
    ] = "",
    jobs: Annotated[int, Option(min=1, help="processes at once", rich_help_panel=_HOW)] = 1,
    limit: Annotated[
        float, Option(min=1, help="seconds for a cell; with --speed for a process", rich_help_panel=_HOW)
    ] = 900.0,
    rounds: Annotated[int, Option(min=9, help="samples of a timed step", rich_help_panel=_HOW)] = 15,
    time_tokens: Annotated[int, Option(min=8, help="of a row that is timed", rich_help_panel=_HOW)] = 2048,
    memory_tokens: Annotated[
        int, Option(min=8, help="of a row whose memory is measured", rich_help_panel=_HOW)
    ] = 8192,
    json: Annotated[
        Path | None, Option(help="all figures; written after every architecture", rich_help_panel=_WHERE)
    ] = None,
    resume: Annotated[
        Path | None, Option(help="go on with this file: what it has is not run", rich_help_panel=_WHERE)
    ] = None,
    page: Annotated[
        Path | None, Option(help="a page of figures that needs nothing else", rich_help_panel=_WHERE)
    ] = None,
    markdown: Annotated[
        Path | None, Option(help="the tables as Markdown, between the file's marks", rich_help_panel=_WHERE)
    ] = None,
) -> None:
    """Run the architectures of other libraries with each attention."""
    from attnspan_lab.zoo.cells import ZooResults
    from attnspan_lab.zoo.measure import SOURCES, left_out
    from attnspan_lab.zoo.table import show_zoo

    console, path = stdout(), json or resume
    _check(library, layouts, modes, backend)
    expect(not (show and (speed or resume)), "--show", "no run", "--speed or --resume", "Pass one of them")
    for target in (page, markdown, path):
        if target is not None:
            check_writable(target)
    if show is not None:
        results = ZooResults.load(show)
    else:
        chosen = _chosen(only, library)
        if list_names:
            _list(chosen, library, console)
            return
        # A file to go on with need not be there yet: the same command starts and resumes.
        start = ZooResults.load(resume) if resume is not None and resume.exists() else ZooResults()
        start = replace(start, left_out=left_out(SOURCES, library))
        common = {"layouts": words(layouts) or LAYOUTS, "backend": backend}
        numbers = {"rounds": rounds, "tokens": time_tokens, "memory_tokens": memory_tokens, "limit": limit}
        common |= {} if backend else {"backend": "inductor" if speed else "aot_eager"}
        if speed:
            results = _speed(chosen, {**common, **numbers}, start, path, console)
        else:
            given = {**common, "full": full, "modes": words(modes) or MODES}
            results = _run(chosen, given, start, path, jobs, limit, console)
    show_zoo(results, console)
    _write(results, page, markdown, console)
    if path is not None and show is None:
        console.print(f"figures: {path}")
    raise Exit(0 if results.complete or show is not None else 130)


def _check(library: str, layouts: str, modes: str, backend: str) -> None:
    for name, given, known in (
        ("--library", (library,) if library else (), ("transformers", "diffusers")),
        ("--layouts", words(layouts), LAYOUTS),
        ("--modes", words(modes), MODES),
        ("--backend", (backend,) if backend else (), _BACKENDS),
    ):
        for value in given:
            expect(value in known, name, f"some of {', '.join(known)}", repr(value), "Name one of these")


def _chosen(only: str, library: str) -> list[Architecture]:
    from fnmatch import fnmatchcase

    from attnspan_lab.zoo.measure import SOURCES, collect

    found = collect(SOURCES, library)
    patterns = words(only)
    for pattern in patterns:
        there = any(fnmatchcase(x.name, pattern) for x in found)
        expect(there, "--only", "names of architectures", repr(pattern), "See attnspan zoo --list")
    return [x for x in found if not patterns or any(fnmatchcase(x.name, y) for y in patterns)]


def _list(chosen: list[Architecture], library: str, console: Console) -> None:
    from attnspan_lab.zoo.measure import SOURCES, left_out

    columns = [Column(x, words=True) for x in ("architecture", "library", "kind", "sizes", "layouts")]
    rows = []
    for x in chosen:
        layouts = [layout for layout in LAYOUTS if x.batch(layout, 16, "tiny") is not None]
        rows.append((x.name, x.library, x.kind, " ".join(x.sizes), " ".join(layouts)))
    print_table(console, f"{len(chosen)} architectures", columns, rows)
    without = left_out(SOURCES, library)
    if without:
        columns = [Column("left out", words=True), Column("why", words=True)]
        print_table(console, "", columns, list(without.items()))


def _run(
    chosen: list[Architecture],
    given: dict[str, Any],
    start: ZooResults | None,
    path: Path | None,
    jobs: int,
    limit: float,
    console: Console,
) -> ZooResults:
    from attnspan_lab.zoo.measure import Settings
    from attnspan_lab.zoo.run import run_zoo
    from attnspan_lab.zoo.verdicts import complaints

    with _progress(len(chosen), console) as tell:

        def after(row: Row) -> None:
            wrong = complaints(row)
            tell(f"{row.name}: {f'{len(wrong)} wrong' if wrong else 'ok'}, {row.seconds:.0f} s")

        return run_zoo(chosen, Settings(**given), start=start, path=path, jobs=jobs, limit=limit, after=after)


def _speed(
    chosen: list[Architecture],
    given: dict[str, Any],
    start: ZooResults | None,
    path: Path | None,
    console: Console,
) -> ZooResults:
    from attnspan_lab.zoo.speed import SpeedSettings, measure_speed
    from attnspan_lab.zoo.table import speed_line

    benches = [x for x in chosen if "bench" in x.sizes]
    expect(benches, "--speed", "architectures of the size bench", "none of these", "See attnspan zoo --list")
    with _progress(len(benches), console) as tell:

        def after(speed: Speed) -> None:
            line = speed_line(speed)
            tell(f"{line[0]}: time {line[4]}, memory {line[7]} {line[8]}".rstrip())

        return measure_speed(benches, SpeedSettings(**given), start=start, path=path, after=after)


@contextmanager
def _progress(total: int, console: Console) -> Iterator[Callable[[str], None]]:
    """A bar; above it a line for each architecture that is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def tell(text: str) -> None:
            progress.update(task, advance=1)
            progress.console.print(text, markup=False)

        yield tell


def _write(results: ZooResults, page: Path | None, markdown: Path | None, console: Console) -> None:
    if page is not None:
        from attnspan_lab.zoo.page import write_page

        write_page(results, page)
        console.print(f"page: {page}")
    if markdown is not None:
        from attnspan_lab.zoo.markdown import write_markdown

        write_markdown(results, markdown)
        console.print(f"tables: {markdown}")
