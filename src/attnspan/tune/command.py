"""The command ``attnspan tune``: options in, a table of what was gained out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from attnspan.errors import OptionError
from attnspan.tune.options import Options

if TYPE_CHECKING:
    from rich.console import Console

    from attnspan.bench.results import Results
    from attnspan.tune.cases import Case
    from attnspan.tune.entry import Entry
    from attnspan.tune.run import Outcome
    from attnspan.tune.target import Target

__all__ = ["command", "execute"]

_WIDTH = 120


def command(write_page: Callable[[Results, Path], None]) -> Callable[..., None]:
    """The command as a function with an option for each field of `Options`.

    Args:
        write_page: Writes the HTML page of results; a room above this one does it.

    Example:
        >>> command(print).__name__
        'tune'
    """
    import typer

    def tune(**options: Any) -> None:
        execute(Options(**options), write_page)

    types = get_type_hints(Options)
    tune.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=Annotated[
                    types[field.name],
                    typer.Option(
                        *field.metadata["names"],
                        help=field.metadata["help"],
                        rich_help_panel=field.metadata["panel"],
                    ),
                ],
            )
            for field in fields(Options)
        ]
    )
    return tune


def execute(
    options: Options, write_page: Callable[[Results, Path], None], target: Target | None = None
) -> None:
    """Run the command.

    Args:
        options: What is asked for.
        write_page: Writes the HTML page of results.
        target: The back end; the compiled CPU kernel by default.

    Raises:
        OptionError: An option cannot be used, or the cache cannot be read or written.
        ImportError: The compiled module is missing.

    Example:
        >>> import tempfile
        >>> execute(Options(show=True, cache=Path(tempfile.mkdtemp(), "tuned.json")), print) \
            # doctest: +ELLIPSIS
        /...tuned.json: nothing tuned for ...
    """
    from rich.console import Console

    from attnspan.tune import cache

    console = Console(soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH  # of a table that is read in a file
    if target is None:
        from attnspan.tune.cpu import CpuTarget

        target = CpuTarget(options.threads)
    path = _place(options, target.device)
    if options.clear:
        there = cache.clear(_required(path))
        console.print(f"{path}: {'removed' if there else 'there was none'}", highlight=False)
    elif options.show:
        _show(console, target, _required(path))
    else:
        _tune(console, options, target, path, write_page)


def _place(options: Options, device: str) -> Path | None:
    from attnspan.kernels.tuned import cache_path

    if options.cache is not None:
        return options.cache.expanduser()
    return cache_path(device)


def _required(path: Path | None) -> Path:
    if path is None:
        raise OptionError(
            "tuning cache",
            expected="a file",
            got="none, as ATTNSPAN_TUNE_CACHE is off or there is no home folder",
            remedy="Name one with --cache, or search with --dry-run",
        )
    return path


def _show(console: Console, target: Target, path: Path) -> None:
    from attnspan.kernels.tuned import installed_version
    from attnspan.tune import cache
    from attnspan.tune.table import gains

    entries = cache.read(path, target.device)
    ours = [entry for entry in entries if entry.version == installed_version()]
    if not ours:
        console.print(f"{path}: nothing tuned for {target.device}", highlight=False)
    else:
        console.print(gains(ours, f"{path}: tuned for {target.device}"), soft_wrap=False)
    if len(entries) > len(ours):
        console.print(f"{len(entries) - len(ours)} more of other versions are not used")


def _tune(
    console: Console,
    options: Options,
    target: Target,
    path: Path | None,
    write_page: Callable[[Results, Path], None],
) -> None:
    from attnspan.tune import cache
    from attnspan.tune.run import tune

    if not options.dry_run:
        cache.prepare(_required(path))
    cases = _waiting_longest_first(options.cases(), target, path)
    console.print(f"{_kinds(len(cases))} on {target.device}, {options.minutes:g} min at most")
    with _Keeper(console, target, None if options.dry_run else path, len(cases)) as keeper:
        outcome = tune(
            target,
            cases,
            seconds=options.seconds,
            budget=options.minutes * 60,
            keep=keeper.keep,
            seed=options.seed,
        )
    _report(console, outcome)
    if path is not None and not options.dry_run and outcome.entries:
        console.print(f"written to {path}{_use_hint(options)}", highlight=False)
    _export(options, target, outcome, write_page)


def _use_hint(options: Options) -> str:
    if options.cache is None:
        return ""
    return f"; used where ATTNSPAN_TUNE_CACHE={options.cache}"


def _waiting_longest_first(cases: list[Case], target: Target, path: Path | None) -> list[Case]:
    """Those that were never tuned by this version, then the oldest: a short budget gets on at every run."""
    from attnspan.kernels.tuned import installed_version
    from attnspan.tune import cache

    try:
        known = [] if path is None else cache.read(path, target.device)
    except OptionError:  # a damaged cache is put aside when the first entry is written
        known = []
    dates = {entry.key: entry.date for entry in known if entry.version == installed_version()}
    return sorted(cases, key=lambda case: dates.get(case.key(target.name, target.isa), ""))


class _Keeper:
    """Writes each entry as it comes, and says so: a bar in a terminal, a line elsewhere."""

    def __init__(self, console: Console, target: Target, path: Path | None, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console, self._target, self._path = console, target, path
        self._bar = Progress(
            TextColumn("[bold]tune"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("tune", total=total)

    def __enter__(self) -> _Keeper:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def keep(self, entry: Entry) -> None:
        from attnspan.tune import cache
        from attnspan.tune.table import line

        if self._path is not None:
            aside = cache.merge(self._path, self._target.device, [entry])
            if aside is not None:
                self._console.print(f"the cache could not be used and is now {aside}", highlight=False)
        self._console.print(line(entry), highlight=False, markup=False)
        self._bar.advance(self._task)


def _report(console: Console, outcome: Outcome) -> None:
    from attnspan.tune.run import BUSY
    from attnspan.tune.table import gains

    if outcome.entries:
        console.print(gains(outcome.entries, "what tuning gained"), soft_wrap=False)
        accepted = sum(entry.accepted for entry in outcome.entries)
        tried = sum(entry.tried for entry in outcome.entries)
        failed = sum(len(entry.failures) for entry in outcome.entries)
        console.print(
            f"{accepted} of {_kinds(len(outcome.entries))} gained; {tried} candidates, {failed} failed"
        )
    if any(entry.reason.startswith(BUSY) for entry in outcome.entries):
        console.print("finds beside busy neighbours are not used: tune again on a quiet machine")
    for case, reason in outcome.refused:
        console.print(f"not run: {case}: {reason}", highlight=False, markup=False)
    if outcome.unreached:
        why = "interrupted" if outcome.interrupted else "out of time"
        console.print(f"{why}: {_kinds(len(outcome.unreached))} left for the next run")


def _kinds(count: int) -> str:
    return f"{count} kind{'s' if count != 1 else ''} of calls"


def _export(
    options: Options, target: Target, outcome: Outcome, write_page: Callable[[Results, Path], None]
) -> None:
    if options.json is None and options.html is None:
        return
    results = _results(target, outcome)
    if options.json is not None:
        results.save(options.json)
    if options.html is not None:
        write_page(results, options.html)


def _results(target: Target, outcome: Outcome) -> Results:
    from attnspan.bench.environment import describe_environment
    from attnspan.bench.results import Results

    environment = describe_environment() | {"device_name": target.device}
    gains = tuple(entry.gain for entry in outcome.entries if entry.gain is not None)
    return Results(environment, tuning=gains, complete=not outcome.unreached)
