"""The body of ``attnspan bench``: what the options mean, and what is printed when."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnspan.bench.ceilings import native_probe
from attnspan.bench.cells import Cell, Workload
from attnspan.bench.compare import compare
from attnspan.bench.devices import device_named
from attnspan.bench.options import BenchOptions, numbers, words
from attnspan.bench.peers import PEERS
from attnspan.bench.results import Results
from attnspan.bench.runner import peers_named
from attnspan.bench.session import Plan, run_session
from attnspan.bench.table import seconds_text, show_comparison, show_results, show_summary
from attnspan.bench.timing import Budget
from attnspan.bench.workloads import DTYPES, MODES, builtin, grid, load_workloads, select
from attnspan.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

__all__ = ["execute", "list_workloads", "plan_of", "run_bench"]

WritePage = Callable[[Results, Path], None]

_DEFAULT_DTYPES = ("float32", "bfloat16")
_TRAINING = "training"
_WIDTH = 160  # Of a table that goes into a file.


def execute(options: BenchOptions, write_page: WritePage, console: Console | None = None) -> bool:
    """Run the command.

    Args:
        options: What is asked for.
        write_page: Writes the HTML page of results.
        console: Where to print; the terminal by default.

    Returns:
        Whether a comparison found something slower.

    Raises:
        OptionError: An option names nothing that exists, or a file cannot be read.

    Example:
        >>> from rich.console import Console
        >>> options = BenchOptions(("small-16",), list=True)
        >>> execute(options, print, Console(width=100))  # doctest: +ELLIPSIS
        small-16 ...
        False
    """
    console = console or _console()
    if options.compare is not None:
        old, new = options.compare
        comparison = compare(Results.load(old), Results.load(new))
        show_comparison(comparison, console)
        return comparison.has_regressed
    if options.summary is not None:
        show_summary(Results.load(options.summary), console)
    elif options.list:
        list_workloads(options, console)
    else:
        run_bench(options, console, write_page)
    return False


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console


def plan_of(options: BenchOptions) -> Plan:
    """What the options ask for, without the training.

    Args:
        options: Of the command.

    Raises:
        OptionError: An option names nothing that exists.

    Example:
        >>> plan_of(BenchOptions(("dense-*",), dtypes="float32")).total
        4
    """
    dtypes, modes, peers = words(options.dtypes), words(options.modes), words(options.peers)
    _known("--dtypes", dtypes, DTYPES)
    _known("--modes", modes, MODES)
    peers_named(peers)
    device_named(options.device)
    if _TRAINING in options.asked and options.device != "cpu":
        raise OptionError(
            "training", expected="--device cpu", got=options.device, remedy="The reference job runs on CPU"
        )
    own = load_workloads(options.workloads) if options.workloads else ()
    names = tuple(name for name in options.asked if name != _TRAINING)
    chosen: tuple[Workload, ...] = ()
    if names or options.full or _TRAINING not in options.asked:
        everything = (*own, *builtin(), *grid()) if names or options.full else own or builtin()
        chosen = select(
            everything,
            names,
            dtypes=dtypes or (DTYPES if options.full or own else _DEFAULT_DTYPES),
            lengths=numbers("--lengths", options.lengths),
            head_dims=numbers("--head-dims", options.head_dims),
        )
    return Plan(
        chosen,
        modes or MODES,
        peers,
        options.device,
        options.threads,
        Budget(options.seconds, options.width),
        options.full if options.memory is None else options.memory,
        native_probe(),
    )


def _known(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
    for value in given:
        if value not in known:
            raise OptionError(
                option,
                expected=f"some of {', '.join(known)}",
                got=repr(value),
                remedy="Name one of these",
            )


def run_bench(options: BenchOptions, console: Console, write_page: WritePage) -> Results:
    """Measure, print, and write what was asked for.

    Args:
        options: Of the command.
        console: Where to print.
        write_page: Writes the HTML page, where the options ask for one.

    Returns:
        The results, also where they were cut short by Ctrl-C.

    Raises:
        OptionError: An option names nothing that exists.

    Example:
        >>> from rich.console import Console
        >>> options = BenchOptions(("small-16",), modes="forward", peers="sdpa-flash", seconds=0.02)
        >>> run_bench(options, Console(quiet=True, width=100), print).cells[0].runs[1].peer
        'sdpa-flash'
    """
    plan = plan_of(options)
    with _progress(plan, console) as (before, after):
        results = run_session(plan, path=options.json, before=before, after=after)
    wants_training = _TRAINING in options.asked or (options.full and options.device == "cpu")
    if results.complete and wants_training:
        results = _with_training(results, options, plan, console)
    show_results(results, console)
    if any(cell.workload.family == "grid" for cell in results.cells):
        console.print()
        show_summary(results, console)
    if options.json is not None:
        results.save(options.json)
        console.print(f"raw samples: {options.json}", highlight=False)
    if options.html is not None:
        write_page(results, options.html)
        console.print(f"page: {options.html}", highlight=False)
    return results


def _with_training(results: Results, options: BenchOptions, plan: Plan, console: Console) -> Results:
    from attnspan.bench.training import measure_training
    from attnspan.train.config import TrainConfig

    console.print("training steps", highlight=False)
    config = TrainConfig(threads=plan.threads or 0)
    try:
        training = measure_training(config, options.rounds, memory=plan.memory)
    except KeyboardInterrupt:
        return replace(results, complete=False)
    return replace(results, training=training)


@contextmanager
def _progress(
    plan: Plan, console: Console
) -> Iterator[tuple[Callable[[Workload, str], None], Callable[[Cell], None]]]:
    """A bar with the cell in progress; where nobody watches, a line for each cell that is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    watched = console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not watched) as progress:
        task = progress.add_task("ceilings", total=plan.total)

        def before(workload: Workload, mode: str) -> None:
            progress.update(task, description=f"{workload.label} {mode}")

        def after(cell: Cell) -> None:
            progress.update(task, advance=1)
            ratios = ", ".join(f"{run.peer} {run.ratio.median:.2f}x" for run in cell.peers if run.ratio)
            line = f"{cell.label}: {seconds_text(cell.seconds(cell.ours))} {ratios}"
            progress.console.print(line.rstrip(), highlight=False)

        yield before, after


def list_workloads(options: BenchOptions, console: Console) -> None:
    """Print workloads and peers by name.

    Args:
        options: Its names and its file of workloads count.
        console: Where to print.

    Example:
        >>> from rich.console import Console
        >>> list_workloads(BenchOptions(names=("small-16",)), Console(width=100))  # doctest: +ELLIPSIS
        small-16 ...
    """
    own = load_workloads(options.workloads) if options.workloads else ()
    seen: dict[str, Workload] = {}
    for workload in select((*own, *builtin(), *grid()), options.asked):
        if workload.family != "grid" or options.asked:
            seen.setdefault(workload.name, workload)
    for workload in seen.values():
        line = f"{workload.name:<22} {workload.family:<10} {workload.sizes:<20} {workload.mask:<20}"
        console.print(f"{line} {workload.note}".rstrip(), highlight=False, soft_wrap=True)
    if not options.asked:
        cells = f"{len(grid()) // len(DTYPES)} cells in each of {', '.join(DTYPES)}"
        console.print(f"{'grid':<22} {cells}", highlight=False)
        console.print(f"{'training':<22} whole steps of the reference job", highlight=False)
        console.print(f"peers: {', '.join(peer.name for peer in PEERS)}", highlight=False)
