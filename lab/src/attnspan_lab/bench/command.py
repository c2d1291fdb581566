"""The implementation of ``attnspan bench``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnspan.errors import expect
from attnspan_lab.bench.ceilings import native_probe
from attnspan_lab.bench.cells import Cell, Workload
from attnspan_lab.bench.cited import cite
from attnspan_lab.bench.compare import compare
from attnspan_lab.bench.devices import device_named
from attnspan_lab.bench.options import BenchOptions
from attnspan_lab.bench.peers import PEERS, peers_named
from attnspan_lab.bench.results import Results
from attnspan_lab.bench.runner import Plan, run_plan
from attnspan_lab.bench.table import show_comparison, show_results, show_summary
from attnspan_lab.bench.timing import LEAST_ROUNDS, Budget
from attnspan_lab.bench.workloads import DTYPES, MODES, builtin, grid, load_workloads, select
from attnspan_lab.console import Column, chosen, numbers, print_table, progress, seconds_text, stdout, words
from attnspan_lab.files import check_writable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["execute", "plan_of", "run_bench"]

WritePage = Callable[[Results, Path], None]

_DEFAULT_DTYPES = ("float32", "bfloat16")
_TRAINING = "training"


def execute(options: BenchOptions, write_page: WritePage, console: Console | None = None) -> int:
    """Run the command.

    Args:
        options: Options of the command.
        write_page: Writes the HTML page of results.
        console: Console to print to. Default: the terminal.

    Returns:
        The exit code: 1 if a comparison found something slower, 130 if a measurement was interrupted.

    Raises:
        OptionError: An option has an unknown name, or a file cannot be read.
    """
    console = console or stdout()
    asked = [name for name in ("list", "show", "cite", "summary", "compare") if getattr(options, name)]
    one = " or ".join(f"--{name}" for name in asked)
    expect(len(asked) < 2, "attnspan bench", f"one of {one}", "several", "Run the command once for each")
    _check_page(options.html)
    if options.compare is not None:
        old, new = options.compare
        comparison = compare(Results.load(old), Results.load(new))
        show_comparison(comparison, console)
        return int(bool(comparison.regressions))
    if options.show is not None:
        results = Results.load(options.show)
        show_results(results, console)
        _write_page(results, options, write_page, console)
    elif options.cite is not None:
        print(cite(Results.load(options.cite)))  # plain text: a console would wrap its lines
    elif options.summary is not None:
        show_summary(Results.load(options.summary), console)
    elif options.list:
        _list_workloads(options, console)
    else:
        return 0 if run_bench(options, console, write_page).complete else 130
    return 0


def _check_page(path: Path | None) -> None:
    """Check that the page can be written, before anything is measured."""
    if path is not None:
        import jinja2  # noqa: F401
        import plotly  # noqa: F401

        check_writable(path)


def _write_page(results: Results, options: BenchOptions, write_page: WritePage, console: Console) -> None:
    if options.html is not None:
        write_page(results, options.html)
        console.print(f"page: {options.html}")


def plan_of(options: BenchOptions) -> Plan:
    """Plan the single calls that the options request, without training steps.

    Raises:
        OptionError: An option has an unknown name.

    Example:
        >>> plan_of(BenchOptions(("dense-*",), dtypes="float32")).total
        4
    """
    dtypes = chosen("--dtypes", options.dtypes, DTYPES)
    modes, peers = chosen("--modes", options.modes, MODES), words(options.peers)
    peers_named(peers)
    fits = _TRAINING not in options.asked or options.device == "cpu"
    expect(fits, "training", "--device cpu", options.device, "The reference job runs on CPU")
    device_named(options.device)
    trains = _TRAINING in options.asked or (options.full and options.device == "cpu")
    for what in ("samples", "rounds"):
        number = getattr(options, what)
        expect(number >= LEAST_ROUNDS, f"--{what}", "{} or more", number, "Pass more", LEAST_ROUNDS)
    expect(options.ranks >= 1, "--ranks", "1 or more", options.ranks, "Pass more")
    expect(options.ranks == 1 or trains, "--ranks", "a run of training", "none", "Add the name training")
    budget = Budget(options.seconds, options.samples, options.width)
    own = load_workloads(options.workloads) if options.workloads else ()
    names = tuple(name for name in options.asked if name != _TRAINING)
    found: tuple[Workload, ...] = ()
    if names or options.full or _TRAINING not in options.asked:
        everything = (*own, *builtin(), *grid()) if names or options.full else own or builtin()
        found = select(
            everything,
            names,
            dtypes=dtypes or (DTYPES if options.full or own else _DEFAULT_DTYPES),
            lengths=numbers("--lengths", options.lengths),
            head_dims=numbers("--head-dims", options.head_dims),
        )
    memory = options.full if options.memory is None else options.memory
    where = (options.device, options.threads)
    return Plan(found, modes or MODES, peers, *where, budget, memory, native_probe(), options.cold)


def run_bench(options: BenchOptions, console: Console, write_page: WritePage) -> Results:
    """Measure, print, and write the requested files. After Ctrl-C, partial results are kept.

    Args:
        options: Options of the command.
        console: Console to print to.
        write_page: Writes the HTML page, if the options request one.
    """
    plan = plan_of(options)
    if options.json is not None:
        check_writable(options.json)
    with progress(console, plan.total, "ceilings") as tell:

        def before(workload: Workload, mode: str) -> None:
            tell(description=f"{workload.label} {mode}")

        def after(cell: Cell) -> None:
            ratios = ", ".join(f"{run.peer} {run.ratio.median:.2f}x" for run in cell.peers if run.ratio)
            line = f"{cell.label}: {seconds_text(cell.seconds(cell.ours))} {ratios}".rstrip()
            tell(line, advance=1)

        results = run_plan(plan, path=options.json, before=before, after=after)
    wants_training = _TRAINING in options.asked or (options.full and options.device == "cpu")
    if results.complete and wants_training:
        results = _with_training(results, options, plan, console)
    show_results(results, console)
    if any(cell.workload.family == "grid" for cell in results.cells):
        show_summary(results, console)
    if options.json is not None and (results.cells or results.training or results.ranks):
        results.save(options.json)
        console.print(f"raw samples: {options.json}")
    _write_page(results, options, write_page, console)
    return results


def _with_training(results: Results, options: BenchOptions, plan: Plan, console: Console) -> Results:
    from attnspan_lab.bench.training import measure_ranks, measure_training, reference_config

    config = reference_config(threads=plan.threads or 0)
    with suppress(KeyboardInterrupt), progress(console, 1 + (options.ranks > 1), "training steps") as tell:
        if options.ranks > 1:
            tell(description=f"training steps on {options.ranks} ranks and on one")
            results = replace(results, ranks=measure_ranks(replace(config, cp=options.ranks), options.rounds))
            tell(advance=1, description="training steps")
        return replace(results, training=measure_training(config, options.rounds, memory=plan.memory))
    return replace(results, complete=False)


def _list_workloads(options: BenchOptions, console: Console) -> None:
    """Print the names of workloads and peers."""
    own = load_workloads(options.workloads) if options.workloads else ()
    seen: dict[str, Workload] = {}
    for workload in select((*own, *builtin(), *grid()), options.asked):
        if workload.family != "grid" or options.asked:
            seen.setdefault(workload.name, workload)
    columns = [Column("name", words=True), Column("family", words=True, drop=1), Column("sizes", words=True)]
    columns += [Column("mask", words=True), Column("note", words=True, drop=2)]
    rows = [[w.name, w.family, w.sizes, w.mask, w.note] for w in seen.values()]
    if not options.asked:
        rows.append(["grid", "", "", "", f"{len(grid()) // len(DTYPES)} cells in each dtype"])
        rows.append(["training", "", "", "", "whole steps of the reference job"])
    print_table(console, "workloads", columns, rows)
    if not options.asked:
        console.print(f"peers: {', '.join(peer.name for peer in PEERS)}")
