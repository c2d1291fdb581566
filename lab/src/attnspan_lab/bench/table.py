"""Results as tables that fit the terminal. Narrow terminals get fewer columns, and a list of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnspan_lab.bench.cells import Ceilings, Cell, Run, Timing, verdicts
from attnspan_lab.bench.results import RankTimes, Results, TrainingCell
from attnspan_lab.bench.standings import MEAN_HEAD_DIMS, MEAN_LENGTHS, targets
from attnspan_lab.bench.statistics import Interval, Samples, discoveries, paired
from attnspan_lab.console import (
    NONE,
    Column,
    bytes_text,
    percent,
    print_table,
    rate_text,
    ratio_digits,
    seconds_text,
)

if TYPE_CHECKING:
    from rich.console import Console

    from attnspan_lab.bench.compare import Comparison

__all__ = ["Figure", "figures", "ratio_texts", "show_comparison", "show_results", "show_summary"]

_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_SHORT |= {"forward": "fwd", "forward+backward": "fwd+bwd"}


def _short(name: str) -> str:
    return _SHORT.get(name, name)


_Verdicts = dict[tuple[str, str], str]

_SLOW_WAIT = 1.5  # From this ratio of per-call to pipelined time, waiting is a third or more of a call.


def show_results(results: Results, console: Console) -> None:
    """Print environment, cells by family and mode, and training.

    Example:
        >>> from rich.console import Console
        >>> show_results(Results(environment={"cpu": "a machine", "threads": 2}), Console(width=100))
        a machine, 2 threads
    """
    console.print(_machine_line(results))
    roof = results.roof
    if roof:
        console.print(_ceilings_line(roof))
    everywhere, said = _refused_everywhere(results.cells), verdicts(results.cells)
    for family, mode in dict.fromkeys((cell.workload.family, cell.mode) for cell in results.cells):
        cells = [c for c in results.cells if (c.workload.family, c.mode) == (family, mode)]
        if family == "grid":
            _show_grid(console, cells, mode, said)
        else:
            _show_cells(console, f"{family}, {mode}", cells, roof, said)
        for line in _refusals(cells, everywhere):
            console.print(line, style="dim")
    for peer, reason in everywhere:
        console.print(f"nowhere {peer}: {reason}", style="dim")
    if results.ranks:
        _show_ranks(console, results.ranks)
    if results.training:
        _show_training(console, results.training)
    for line in _remarks(results, said):
        console.print(line, style="yellow")


def _machine_line(results: Results) -> str:
    env = results.environment
    versions = env.get("versions") or {}
    parts = [str(env.get("cpu") or "unknown processor")]
    if env.get("threads"):
        parts.append(f"{env['threads']} thread{'s' if env['threads'] != 1 else ''}")
    if env.get("gpu"):
        parts.append(str(env["gpu"]["name"]))
    parts += [str(env["isa"])] if env.get("isa") else []
    parts += [f"{name} {versions[name]}" for name in ("torch", "jax") if versions.get(name)]
    return ", ".join(parts)


def _ceilings_line(ceilings: Ceilings) -> str:
    def text(kind: str, rate: str) -> str:
        spread = ceilings.spread.get(kind)
        return f"{kind} {rate}" + ("" if spread is None else f" (spread {spread:.0%})")

    lowest_first = sorted(ceilings.flops.items(), key=lambda item: item[1])
    rates = [text(kind, rate_text(rate)) for kind, rate in lowest_first]
    return "measured ceilings: " + ", ".join(
        [*rates, text("read_bandwidth", rate_text(ceilings.read_bandwidth, "B/s"))]
    )


@dataclass(frozen=True)
class Figure:
    """A column of a run: name, value, text, and the order in which columns are left out."""

    name: str
    value: Callable[[Cell, Run, Ceilings | None], float | None]
    text: Callable[[float | None], str]
    drop: int = 0


def _median(timing: Timing | None) -> float | None:
    return timing.median if timing else None


_FIGURES = (
    Figure("time", lambda cell, run, _: cell.seconds(run), seconds_text),
    Figure("spread", lambda cell, run, _: t.spread if (t := cell.timing(run)) else None, percent, 5),
    Figure("per call", lambda _, run, __: _median(run.execute) if run.pipelined else None, seconds_text, 2),
    Figure("in a row", lambda _, run, __: _median(run.pipelined), seconds_text, 2),
    Figure("rate", lambda cell, run, _: cell.flops_per_second(run), rate_text, 3),
    Figure("peak", lambda cell, run, roof: cell.share(run, roof), percent, 1),
    Figure("read", lambda cell, run, roof: cell.bandwidth_share(run, roof), percent, 2),
    Figure("memory", lambda _, run, __: run.peak_memory, bytes_text, 2),
    Figure("cores", lambda _, run, __: run.utilisation, percent, 6),
    Figure("dispatch", lambda _, run, __: _median(run.dispatch), seconds_text, 8),
    Figure("trace", lambda _, run, __: run.trace_seconds, seconds_text, 8),
    Figure("compile", lambda _, run, __: run.compile_seconds or None, seconds_text, 7),
    Figure("error", lambda _, run, __: run.error, lambda x: NONE if x is None else f"{x:.1e}", 9),
)


def figures(cells: Sequence[Cell], roof: Ceilings | None) -> list[Figure]:
    """Select the columns that at least one run has a value for."""
    runs = [(cell, run) for cell in cells for run in cell.runs]
    return [each for each in _FIGURES if any(each.value(*found, roof) is not None for found in runs)]


def _show_cells(
    console: Console,
    title: str,
    cells: Sequence[Cell],
    roof: Ceilings | None,
    said: dict[tuple[str, str], str],
) -> None:
    by_memory = any(_is_bound_by_memory(cell, roof) for cell in cells)
    shown = [figure for figure in figures(cells, roof) if figure.name != "read" or by_memory]
    columns = [Column("peer", words=True), *(Column(figure.name, drop=figure.drop) for figure in shown)]
    columns += [Column("ratio"), Column("interval", drop=1), Column("remark", words=True, drop=10)]
    rows: list[list[str]] = []
    for cell in cells:
        rows.append([f"{_name(cell)} {cell.workload.sizes}", *[""] * (len(columns) - 1)])
        rows += [_row(cell, run, roof, shown, said) for run in cell.runs if run.ran]
    print_table(console, title, columns, rows, bold=lambda row: not row[1])


def _row(cell: Cell, run: Run, roof: Ceilings | None, shown: Sequence[Figure], said: _Verdicts) -> list[str]:
    texts = {figure.name: figure.text(figure.value(cell, run, roof)) for figure in shown}
    if (run.waiting or 0) > _SLOW_WAIT:
        texts["in a row"] = f"!{texts['in a row']}"
    ratio = ratio_texts(run.ratio, run.noisy, said.get((cell.label, run.peer)))
    return [run.peer, *texts.values(), *ratio, run.note]


def _name(cell: Cell) -> str:
    work = cell.workload
    return f"{work.name} {_short(work.dtype)}{' cold' if cell.cold else ''}"


def _is_bound_by_memory(cell: Cell, ceilings: Ceilings | None) -> bool:
    """Whether bandwidth limits the cell in the roofline model."""
    dtype = cell.workload.dtype
    best = ceilings.best(dtype) if ceilings else None
    return ceilings is not None and best is not None and ceilings.attainable(dtype, cell.intensity) != best[1]


def ratio_texts(ratio: Interval | None, noisy: bool = False, verdict: str | None = None) -> tuple[str, str]:
    """Format the ratio, with "?" if it may be 1, and its interval, with "~" if it is wide."""
    if ratio is None:
        return ("", "")
    interval = f"{ratio_digits(ratio.low)}-{ratio_digits(ratio.high)}"
    mark = "?" if verdict == "open" else ""
    return (f"{mark}{ratio_digits(ratio.median)}", f"{interval}{' ~' if noisy else ''}")


def _show_grid(console: Console, cells: Sequence[Cell], mode: str, said: _Verdicts) -> None:
    """Print one row per cell: attnspan's time, and the ratio of each peer that ran in any cell."""
    peers = list(dict.fromkeys(run.peer for cell in cells for run in cell.peers if run.ran))
    columns = [Column("cell", words=True), Column("dtype", words=True), Column("ours")]
    columns.append(Column("rate", drop=1))
    for index, peer in enumerate(peers):
        columns += [Column(peer), Column(f"interval, {peer}", drop=2 + index)]
    rows = []
    for cell in cells:
        row = [cell.workload.name.removeprefix("grid-"), _short(cell.workload.dtype)]
        row += [seconds_text(cell.seconds(cell.ours)), rate_text(cell.flops_per_second(cell.ours))]
        for run in map(cell.run, peers):
            row += ratio_texts(run.ratio, run.noisy, said.get((cell.label, run.peer))) if run else ("", "")
        rows.append(row)
    print_table(console, f"grid, {mode}", columns, rows)


def _refused_everywhere(cells: Sequence[Cell]) -> tuple[tuple[str, str], ...]:
    """Find the peers that did not run in any cell for the same reason, which is printed only once."""
    given = [[(run.peer, run.reason) for run in cell.runs if run.reason] for cell in cells]
    return tuple(pair for pair in (given[0] if given else ()) if all(pair in others for others in given))


def _refusals(cells: Sequence[Cell], said: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield one line per peer and reason for workloads that did not run, except for reasons in ``said``."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for run in cell.runs:
            if run.reason is not None and (run.peer, run.reason) not in said:
                found.setdefault((run.peer, run.reason), []).append(cell.workload.label)
    for (peer, reason), labels in found.items():
        where = "" if len(labels) == len(cells) else f" ({', '.join(labels)})"
        yield f"not {peer}: {reason}{where}"


def _remarks(results: Results, said: _Verdicts) -> Iterator[str]:
    ratios = [run.ratio for cell in results.cells for run in cell.peers if run.ratio]
    if ratios:
        lowest, highest = (f"{100 * pick(ratio.level for ratio in ratios):.1f}" for pick in (min, max))
        levels = lowest if lowest == highest else f"{lowest} to {highest}"
        fewest = min(ratio.pairs for ratio in ratios)
        yield f"intervals: order statistics of at least {fewest} pairs, level {levels} %"
        asked = results.environment.get("samples", 0)
        lowered = sum(ratio.pairs < asked for ratio in ratios)
        if lowered:
            yield f"{lowered} of {len(ratios)} ratios have fewer than {asked} pairs: raise --seconds for more"
    undecided = sum(verdict == "open" for verdict in said.values())
    if undecided:
        yield (
            f"? {undecided} of {len(said)} ratios may be 1: the sign test is not significant, corrected for "
            f"{len(said)} ratios (Benjamini-Hochberg, 5 % false discoveries)"
        )
    noisy = [cell.label for cell in results.cells if cell.noisy]
    if noisy:
        yield (
            f"~ the machine is too noisy for {len(noisy)} of {len(results.cells)} cells: their intervals are "
            "wider than --width. Raise --samples and --seconds, or stop other processes"
        )
    if any((run.waiting or 0) > _SLOW_WAIT for cell in results.cells for run in cell.runs):
        yield '! waiting takes a third or more of each call: see "in a row" for the time of the device itself'
    if not results.complete:
        yield "the benchmark was stopped before the last cell"


def _show_ranks(console: Console, times: RankTimes) -> None:
    """Print the times of steps on several ranks, on one rank, and on one rank with SDPA and a dense mask."""
    rows = [[f"{times.ranks} ranks", seconds_text(Samples(times.all_ranks).median), "", ""]]
    for name, theirs in (("1 rank", times.one_rank), ("1 rank, SDPA", times.sdpa)):
        rows.append(
            [name, seconds_text(Samples(theirs).median), *ratio_texts(paired(times.all_ranks, theirs))]
        )
    columns = [Column("steps of", words=True), *map(Column, ("median", "ratio", "interval"))]
    rounds = len(times.all_ranks)
    title = f"training on {times.ranks} ranks, {rounds} steps each in turn, ratio: over the time of all ranks"
    print_table(console, title, columns, rows)
    far = f"losses {times.losses:.1e}, norms of gradients {times.norms:.1e}"
    console.print(f"largest relative difference from one rank in the first {rounds} steps: {far}")


def _show_training(console: Console, training: Sequence[TrainingCell]) -> None:
    columns = [Column("attention", words=True), Column("tokens/s"), Column("ratio"), Column("interval")]
    ratios = [cell.ratio.p if cell.ratio else 1.0 for cell in training]
    rows = [
        [
            cell.attention,
            NONE if cell.tokens_per_second is None else f"{cell.tokens_per_second.median:,.0f}",
            *ratio_texts(cell.ratio, cell.noisy, None if is_real else "open"),
            bytes_text(cell.peak_memory),
            cell.reason or cell.note,
        ]
        for cell, is_real in zip(training, discoveries(ratios), strict=True)
    ]
    columns += [Column("memory", drop=1), Column("remark", words=True)]
    print_table(console, "training steps", columns, rows)


def show_summary(results: Results, console: Console, peer: str = "sdpa-flash") -> None:
    """Print the summary of the grid, against one peer.

    Example:
        >>> from rich.console import Console
        >>> show_summary(Results(), Console(width=100))
        no cell of the grid was compared with sdpa-flash: measure with attnspan bench grid
    """
    found = targets(results, peer)
    if not found:
        line = f"no cell of the grid was compared with {peer}: measure with attnspan bench grid"
        console.print(line)
        return
    columns = [*(Column(name, words=True) for name in ("dtype", "mode", "mask")), Column("mean")]
    columns += [Column(f"peak D{dim}", drop=2) for dim in MEAN_HEAD_DIMS]
    columns += [Column("lowest of the grid", words=True, drop=1), Column("ratio"), Column("lost")]
    rows = []
    for target in found:
        label, lowest = target.lowest
        row = [_short(target.view.dtype), _short(target.view.mode), target.mask]
        row += [NONE if target.mean is None else ratio_digits(target.mean)]
        row += [percent(target.shares.get(dim)) for dim in MEAN_HEAD_DIMS]
        row += [label.removeprefix("grid-"), ratio_digits(lowest.median)]
        rows.append([*row, f"{target.count('behind')}/{len(target.ratios)}"])
    lengths = f"lengths {min(MEAN_LENGTHS):,} to {max(MEAN_LENGTHS):,}"
    print_table(console, f"time of {peer} over attnspan's, geometric mean over {lengths}", columns, rows)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print the changes between two files.

    Example:
        >>> from rich.console import Console
        >>> from attnspan_lab.bench.compare import compare
        >>> show_comparison(compare(Results(), Results()), Console(width=100))
        0 cells compared: 0 regressions
    """
    for line in comparison.machine:
        console.print(f"different machine or setting: {line}", style="yellow")
    if comparison.machine:
        console.print("Times are not compared, only ratios against a common peer.", style="yellow")
    changed = [change for change in comparison.changes if change.verdict != "same"]
    if changed:
        columns = [Column("cell", words=True), Column("time"), Column("interval", drop=2)]
        columns += [Column("against", words=True, drop=1), Column("lost"), Column("verdict", words=True)]
        rows = [
            [
                change.label,
                *ratio_texts(change.time),
                change.peer or "",
                ratio_texts(change.relative)[0],
                f"{change.verdict} {change.note}".strip(),
            ]
            for change in changed
        ]
        styles = ["red" if change.is_regression else None for change in changed]
        print_table(console, "new over old", columns, rows, styles=styles)
    for name, labels in (("new", comparison.appeared), ("old", comparison.disappeared)):
        for label in labels:
            console.print(f"only in the {name} file: {label}")
    console.print(f"{len(comparison.changes)} cells compared: {len(comparison.regressions)} regressions")
