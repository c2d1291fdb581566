"""The command ``attnspan zoo``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, Option

from attnspan.errors import expect
from attnspan_lab.console import Column, chosen, print_table, progress, stdout, words
from attnspan_lab.files import check_writable
from attnspan_lab.zoo.architecture import LAYOUTS, MODES

if TYPE_CHECKING:
    from rich.console import Console

    from attnspan_lab.zoo.architecture import Architecture
    from attnspan_lab.zoo.results import Row, Speed, ZooResults
    from attnspan_lab.zoo.speed import SpeedSettings

__all__ = ["zoo"]

_LIBRARIES, _BACKENDS = ("transformers", "diffusers"), ("aot_eager", "inductor")
_what, _how, _where = (
    partial(Option, rich_help_panel=title) for title in ("Selection", "Execution", "Output")
)


def zoo(
    only: Annotated[str, _what(help='names or patterns like "gemma*", separated by commas')] = "",
    library: Annotated[str, _what(help="transformers or diffusers (default: both)")] = "",
    layouts: Annotated[str, _what(help=f"some of {', '.join(LAYOUTS)} (default: all)")] = "",
    modes: Annotated[str, _what(help=f"some of {', '.join(MODES)} (default: all)")] = "",
    full: Annotated[
        bool, _what("--full", help="compile every attention in every layout, not only in one")
    ] = False,
    speed: Annotated[bool, _what("--speed", help="measure time and memory of larger models instead")] = False,
    list_names: Annotated[bool, _what("--list", help="print the architectures, and exit")] = False,
    show: Annotated[Path | None, _what(help="print the results of a file, and exit")] = None,
    backend: Annotated[
        str,
        _how(help="torch.compile backend, aot_eager or inductor (default: aot_eager, with --speed inductor)"),
    ] = "",
    jobs: Annotated[int, _how(min=1, help="number of parallel processes")] = 1,
    limit: Annotated[
        float, _how(min=1, help="time limit in seconds, for a cell or with --speed for a process")
    ] = 900.0,
    rounds: Annotated[int, _how(min=9, help="with --speed: samples of the timed step, 9 or more")] = 15,
    time_tokens: Annotated[int, _how(min=8, help="with --speed: tokens per row of the timed step")] = 2048,
    memory_tokens: Annotated[
        int, _how(min=8, help="with --speed: tokens per row of the step whose memory is measured")
    ] = 8192,
    json: Annotated[
        Path | None, _where(help="write all results to this JSON file after every architecture")
    ] = None,
    resume: Annotated[
        Path | None, _where(help="continue this JSON file: architectures in it are not run again")
    ] = None,
    page: Annotated[Path | None, _where(help="write a self-contained HTML page of the results")] = None,
    markdown: Annotated[
        Path | None, _where(help="write the tables as Markdown into this file, between its marks")
    ] = None,
) -> None:
    """Run architectures of transformers and diffusers with each attention, and compare the results."""
    from attnspan_lab.zoo.measure import SOURCES, left_out
    from attnspan_lab.zoo.plan import Settings
    from attnspan_lab.zoo.results import ZooResults
    from attnspan_lab.zoo.run import run_zoo
    from attnspan_lab.zoo.speed import SpeedSettings
    from attnspan_lab.zoo.table import show_zoo

    console, path = stdout(), json or resume
    chosen("--library", library, _LIBRARIES)
    chosen("--backend", backend, _BACKENDS)
    common: dict[str, Any] = {"layouts": chosen("--layouts", layouts, LAYOUTS) or LAYOUTS}
    common["backend"] = backend or ("inductor" if speed else "aot_eager")
    wanted_modes = chosen("--modes", modes, MODES) or MODES
    alone = not (show and (speed or resume))
    expect(alone, "--show", "no run", "--speed or --resume", "Pass only one of these options")
    for target in (page, markdown, path):
        if target is not None:
            check_writable(target)
    if show is not None:
        results = ZooResults.load(show)
    else:
        found = _matching(only, library)
        if list_names:
            _list(found, library, console)
            return
        # The file may be missing, so that the same command starts and resumes a run.
        start = ZooResults.load(resume) if resume is not None and resume.exists() else ZooResults()
        start = replace(start, left_out=left_out(SOURCES, library))
        if speed:
            sizes: dict[str, Any] = {"tokens": time_tokens, "memory_tokens": memory_tokens}
            sizes |= {"rounds": rounds, "limit": limit}
            results = _speed(found, SpeedSettings(**common, **sizes), start, path, console)
        else:
            settings = Settings(**common, full=full, modes=wanted_modes)
            with progress(console, len(found)) as tell:
                how: dict[str, Any] = {"jobs": jobs, "limit": limit, "after": partial(_say, tell)}
                results = run_zoo(found, settings, start=start, path=path, **how)
    show_zoo(results, console)
    _write(results, page, markdown, console)
    if path is not None and show is None:
        console.print(f"results: {path}")
    raise Exit(0 if results.complete or show is not None else 130)


def _matching(only: str, library: str) -> list[Architecture]:
    from fnmatch import fnmatchcase

    from attnspan_lab.zoo.measure import SOURCES, collect

    found = collect(SOURCES, library)
    patterns = words(only)
    for pattern in patterns:
        there = any(fnmatchcase(x.name, pattern) for x in found)
        expect(there, "--only", "names of architectures", repr(pattern), "See attnspan zoo --list")
    return [x for x in found if not patterns or any(fnmatchcase(x.name, y) for y in patterns)]


def _list(found: list[Architecture], library: str, console: Console) -> None:
    from attnspan_lab.zoo.measure import SOURCES, left_out

    columns = [Column(x, words=True) for x in ("architecture", "library", "kind", "sizes", "layouts")]
    rows = []
    for x in found:
        layouts = [layout for layout in LAYOUTS if x.batch(layout, 16, "tiny") is not None]
        rows.append((x.name, x.library, x.kind, " ".join(x.sizes), " ".join(layouts)))
    print_table(console, f"{len(found)} architectures", columns, rows)
    without = left_out(SOURCES, library)
    if without:
        columns = [Column("left out", words=True), Column("why", words=True)]
        print_table(console, "", columns, list(without.items()))


def _say(tell: Callable[..., None], row: Row) -> None:
    from attnspan_lab.zoo.verdicts import complaints

    wrong = complaints(row)
    tell(f"{row.name}: {f'{len(wrong)} wrong' if wrong else 'ok'}, {row.seconds:.0f} s", advance=1)


def _speed(
    found: list[Architecture],
    settings: SpeedSettings,
    start: ZooResults,
    path: Path | None,
    console: Console,
) -> ZooResults:
    from attnspan_lab.zoo.speed import measure_speed
    from attnspan_lab.zoo.table import speed_line

    benches = [x for x in found if "bench" in x.sizes]
    expect(benches, "--speed", "architectures of the size bench", "none of these", "See attnspan zoo --list")
    with progress(console, len(benches)) as tell:

        def after(speed: Speed) -> None:
            line = speed_line(speed)
            tell(f"{line[0]}: time {line[4]}, memory {line[7]} {line[8]}".rstrip(), advance=1)

        return measure_speed(benches, settings, start=start, path=path, after=after)


def _write(results: ZooResults, page: Path | None, markdown: Path | None, console: Console) -> None:
    if page is not None:
        from attnspan_lab.zoo.page import write_page

        write_page(results, page)
        console.print(f"page: {page}")
    if markdown is not None:
        from attnspan_lab.zoo.markdown import write_markdown

        write_markdown(results, markdown)
        console.print(f"tables: {markdown}")
