"""Results as tables in a terminal of 100 columns or more; wider ones get more columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from attnspan.bench.cells import Ceilings, Cell, Run, Workload
from attnspan.bench.results import Results, TrainingCell
from attnspan.bench.samples import Ratio
from attnspan.bench.targets import MEAN_HEAD_DIMS, MEAN_LENGTHS, targets

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from attnspan.bench.compare import Comparison

__all__ = ["bytes_text", "seconds_text", "show_comparison", "show_results", "show_summary"]

_WIDE = 140
_SHORT = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "forward": "fwd",
    "forward+backward": "fwd+bwd",
}


def seconds_text(seconds: float | None) -> str:
    """A time with three digits and its unit; a dash for None.

    Args:
        seconds: The time, s.

    Example:
        >>> seconds_text(0.00123), seconds_text(12.3), seconds_text(None)
        ('1.23 ms', '12.3 s', '-')
    """
    if seconds is None:
        return "-"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:#.3g} {unit}".replace(". ", " ")
    return f"{seconds * 1e9:#.3g} ns".replace(". ", " ")


def bytes_text(size: float | None) -> str:
    """A size with its binary unit; a dash for None.

    Args:
        size: Bytes.

    Example:
        >>> bytes_text(3 * 2**20), bytes_text(None)
        ('3.0 MiB', '-')
    """
    if size is None:
        return "-"
    for exponent, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**exponent:
            return f"{size / 1024**exponent:.1f} {unit}"
    return f"{size:.0f} B"


def show_results(results: Results, console: Console) -> None:
    """Print environment, cells by family and mode, and training.

    Args:
        results: What was measured.
        console: Where to; its width decides the columns.

    Example:
        >>> from rich.console import Console
        >>> show_results(Results(environment={"cpu": "a machine", "threads": 2}), Console(width=100))
        a machine, 2 threads
    """
    console.print(_machine_line(results), highlight=False)
    if results.ceilings:
        console.print(_ceilings_line(results.ceilings), highlight=False)
    everywhere = _refused_everywhere(results.cells)
    for family, mode in dict.fromkeys((cell.workload.family, cell.mode) for cell in results.cells):
        cells = [c for c in results.cells if (c.workload.family, c.mode) == (family, mode)]
        console.print()
        if family == "grid":
            console.print(_grid_table(cells, mode))
        else:
            console.print(_cell_table(f"{family}, {mode}", cells, results.ceilings, console.width >= _WIDE))
        for line in _refusals(cells, everywhere):
            console.print(line, style="dim", highlight=False)
    for peer, reason in everywhere:
        console.print(f"nowhere {peer}: {reason}", style="dim", highlight=False)
    if results.training:
        console.print()
        console.print(_training_table(results.training))
    for line in _warnings(results):
        console.print(line, style="yellow", highlight=False)


def _machine_line(results: Results) -> str:
    env = results.environment
    versions = env.get("versions") or {}
    parts = [str(env.get("cpu") or "unknown processor")]
    if env.get("threads"):
        parts.append(f"{env['threads']} thread{'s' if env['threads'] != 1 else ''}")
    if env.get("gpu"):
        parts.append(str(env["gpu"]["name"]))
    parts += [str(env[name]) for name in ("isa",) if env.get(name)]
    parts += [f"{name} {versions[name]}" for name in ("torch", "jax") if versions.get(name)]
    return ", ".join(parts)


def _ceilings_line(ceilings: Ceilings) -> str:
    lowest_first = sorted(ceilings.flops.items(), key=lambda item: item[1])
    rates = [f"{kind} {rate / 1e9:,.0f} GFLOP/s" for kind, rate in lowest_first]
    return "measured ceilings: " + ", ".join([*rates, f"read {ceilings.read_bandwidth / 1e9:,.1f} GB/s"])


def _table(title: str, columns: Iterable[tuple[str, bool]]) -> Table:
    """A table of columns (heading, right-aligned)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for heading, is_number in columns:
        table.add_column(
            heading, justify="right" if is_number else "left", no_wrap=is_number or heading == "peer"
        )
    return table


def _cell_table(title: str, cells: list[Cell], ceilings: Ceilings | None, wide: bool) -> Table:
    has_pipelined = any(run.pipelined for cell in cells for run in cell.runs)
    has_memory = any(run.peak_memory is not None for cell in cells for run in cell.runs)
    by_memory = any(_is_bound_by_memory(cell, ceilings) for cell in cells)
    columns = [("", False), ("time", True)]
    columns += [("spread", True)] if wide else []
    columns += [("in a row", True)] if has_pipelined else []
    columns += [("GFLOP/s", True), ("peak", True)]
    columns += [("read", True)] if by_memory else []
    columns += [("ratio", True), ("95 %", True)]
    columns += [("memory", True)] if has_memory else []
    columns += [("cores", True), ("compile", True), ("remark", False)] if wide else []
    table = _table(title, columns)
    table.columns[0].no_wrap = True
    for cell in cells:
        table.add_row(_name(cell.workload, wide), style="bold")
        for run in (run for run in cell.runs if run.ran):
            row = [f"  {run.peer}", seconds_text(run.execute.median if run.execute else None)]
            row += [f"{run.execute.spread:.0%}" if run.execute else "-"] if wide else []
            row += [_pipelined(run)] if has_pipelined else []
            row += [_rate(cell, run), _share(cell, run, ceilings)]
            row += [_read_share(cell, run, ceilings)] if by_memory else []
            row += _ratio(run.ratio, run.noisy)
            row += [bytes_text(run.peak_memory)] if has_memory else []
            if wide:
                use = "-" if run.utilisation is None else f"{run.utilisation:.0%}"
                row += [use, seconds_text(run.compile_seconds or None), run.note]
            table.add_row(*row)
    return table


def _name(workload: Workload, with_sizes: bool) -> str:
    name = f"{workload.name} {_SHORT.get(workload.dtype, workload.dtype)}"
    return f"{name} {workload.sizes}" if with_sizes else name


def _pipelined(run: Run) -> str:
    """Time per call of many in a row; marked where waiting is most of what a single call takes."""
    if run.pipelined is None:
        return "-"
    mark = "!" if run.waiting is not None and run.waiting > 1.5 else ""
    return f"{mark}{seconds_text(run.pipelined.median)}"


def _rate(cell: Cell, run: Run) -> str:
    rate = cell.flops_per_second(run)
    return "-" if rate is None else f"{rate / 1e9:,.1f}" if rate < 1e11 else f"{rate / 1e9:,.0f}"


def _share(cell: Cell, run: Run, ceilings: Ceilings | None) -> str:
    return _shares(cell.shares(run, ceilings).values() if ceilings else ())


def _is_bound_by_memory(cell: Cell, ceilings: Ceilings | None) -> bool:
    """Whether the roofline of the cell is the bandwidth's."""
    dtype = cell.workload.dtype
    best = ceilings.best(dtype) if ceilings else None
    return ceilings is not None and best is not None and ceilings.attainable(dtype, cell.intensity) != best


def _read_share(cell: Cell, run: Run, ceilings: Ceilings | None) -> str:
    share = cell.bandwidth_share(run, ceilings) if ceilings else None
    return "-" if share is None else f"{share:.0%}"


def _shares(shares: Iterable[float]) -> str:
    """Of each ceiling of the dtype, the lowest ceiling first, like "82/41 %"."""
    texts = [f"{share * 100:.0f}" for share in shares]
    return f"{'/'.join(texts)} %" if texts else "-"


def _ratio(ratio: Ratio | None, noisy: bool) -> tuple[str, str]:
    if ratio is None:
        return ("", "")
    interval = f"{_three_digits(ratio.low)}-{_three_digits(ratio.high)}"
    return (_three_digits(ratio.median), f"{interval}{' ~' if noisy else ''}")


def _three_digits(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}"


def _grid_table(cells: list[Cell], mode: str) -> Table:
    """One row for each cell: ours, and the ratio of each peer that ran anywhere."""
    peers = list(dict.fromkeys(run.peer for cell in cells for run in cell.peers if run.ran))
    columns = [("cell", False), ("dtype", False), ("ours", True), ("GFLOP/s", True)]
    columns += [item for peer in peers for item in ((peer, True), ("95 %", True))]
    table = _table(f"grid, {mode}", columns)
    for cell in cells:
        row = [cell.workload.name.removeprefix("grid-"), _SHORT[cell.workload.dtype]]
        row += [seconds_text(cell.seconds(cell.ours)), _rate(cell, cell.ours)]
        for peer in peers:
            run = cell.run(peer)
            row += _ratio(run.ratio, run.noisy) if run else ("", "")
        table.add_row(*row)
    return table


def _refused_everywhere(cells: tuple[Cell, ...]) -> tuple[tuple[str, str], ...]:
    """Peers that gave the same reason in every cell, with it: said once, not below each table."""
    given = [[(run.peer, run.reason) for run in cell.runs if run.reason] for cell in cells]
    return tuple(pair for pair in (given[0] if given else ()) if all(pair in others for others in given))


def _refusals(cells: list[Cell], said: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Who could not do what, and why; one line for each reason that is not said elsewhere."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for run in cell.runs:
            if run.reason is not None and (run.peer, run.reason) not in said:
                found.setdefault((run.peer, run.reason), []).append(cell.workload.label)
    for (peer, reason), labels in found.items():
        where = "" if len(labels) == len(cells) else f" ({', '.join(labels)})"
        yield f"  not {peer}: {reason}{where}"


def _warnings(results: Results) -> Iterator[str]:
    noisy = [cell.label for cell in results.cells if cell.noisy]
    if noisy:
        yield (
            f"~ the machine is too noisy for {len(noisy)} of {len(results.cells)} cells: their intervals "
            "did not get as narrow as asked within the time; give more --seconds, or quieten the machine"
        )
    if any((run.waiting or 0) > 1.5 for cell in results.cells for run in cell.runs):
        yield "! waiting for each call is a third or more of its time: the pipelined figure is the device's"
    if not results.complete:
        yield "stopped before the last cell"


def _training_table(training: tuple[TrainingCell, ...]) -> Table:
    columns = [("attention", False), ("tokens/s", True), ("ratio", True), ("95 %", True), ("memory", True)]
    table = _table("training steps", [*columns, ("remark", False)])
    for cell in training:
        speed = "-" if cell.tokens_per_second is None else f"{cell.tokens_per_second.median:,.0f}"
        ratio, interval = _ratio(cell.ratio, cell.noisy)
        remark = cell.reason or cell.note
        table.add_row(cell.attention, speed, ratio, interval, bytes_text(cell.peak_memory), remark)
    return table


def show_summary(results: Results, console: Console, peer: str = "sdpa-flash") -> None:
    """Print the table of targets over the grid.

    Args:
        results: What was measured.
        console: Where to.
        peer: Whom to compare with.

    Example:
        >>> from rich.console import Console
        >>> show_summary(Results(), Console(width=100))
        no cell of the grid was compared with sdpa-flash: measure with attnspan bench grid
    """
    found = targets(results, peer)
    if not found:
        console.print(
            f"no cell of the grid was compared with {peer}: measure with attnspan bench grid", highlight=False
        )
        return
    lengths = f"S {MEAN_LENGTHS[0]}..{MEAN_LENGTHS[-1]}, D {'/'.join(map(str, MEAN_HEAD_DIMS))}"
    columns = [("", False), ("mode", False), ("mask", False), ("mean", True)]
    columns += [(f"peak D{dim}", True) for dim in MEAN_HEAD_DIMS]
    columns += [("slowest of the grid", False), ("ratio", True), ("lost", True)]
    table = _table(f"time of {peer} over ours, geometric mean over {lengths}", columns)
    for target in found:
        label, slowest = target.slowest
        mean = "-" if target.mean is None else f"{target.mean:.2f}"
        shares = [_shares(target.reached(dim).values()) for dim in MEAN_HEAD_DIMS]
        row = [_SHORT[target.dtype], _SHORT[target.mode], target.mask, mean, *shares]
        lost = f"{target.losses}/{len(target.ratios)}"
        row += [label.removeprefix("grid-"), _three_digits(slowest.median), lost]
        table.add_row(*row)
    console.print(table)


def show_comparison(comparison: Comparison, console: Console) -> None:
    """Print what changed between two files.

    Args:
        comparison: From `attnspan.bench.compare.compare`.
        console: Where to.

    Example:
        >>> from rich.console import Console
        >>> from attnspan.bench.compare import compare
        >>> show_comparison(compare(Results(), Results()), Console(width=100))
        0 cells compared: 0 regressions
    """
    for line in comparison.machine:
        console.print(f"another machine or setting: {line}", style="yellow", highlight=False)
    changed = [change for change in comparison.changes if change.verdict != "same"]
    if changed:
        columns = [("cell", False), ("time", True), ("95 %", True), ("against", False), ("lost", True)]
        table = _table("new over old", [*columns, ("verdict", False)])
        for change in changed:
            time, interval = _ratio(change.time, False)
            relative, _ = _ratio(change.relative, False)
            verdict = f"{change.verdict} {change.note}".strip()
            style = "red" if change.is_regression else None
            table.add_row(change.label, time, interval, change.peer or "", relative, verdict, style=style)
        console.print(table)
    for name, labels in (("only in the new file", comparison.appeared), ("gone", comparison.disappeared)):
        for label in labels:
            console.print(f"{name}: {label}", highlight=False)
    console.print(
        f"{len(comparison.changes)} cells compared: {len(comparison.regressions)} regressions",
        highlight=False,
    )
