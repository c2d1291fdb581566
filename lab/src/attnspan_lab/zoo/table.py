"""Tables of the zoo as text: architectures, totals, problems and timed steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from attnspan_lab.bench.cells import OURS
from attnspan_lab.console import NONE, Column, bytes_text, print_table, seconds_text, times_text
from attnspan_lab.report.charts import ratio_text
from attnspan_lab.zoo.results import Row, Speed, ZooResults
from attnspan_lab.zoo.verdicts import (
    JUDGED,
    Summary,
    compiled_cell,
    complaints,
    is_own,
    own_pairs,
    rounding_ratio,
    summary_of,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "COLUMNS",
    "SPEED_COLUMNS",
    "headlines",
    "line_of",
    "median_line",
    "show_zoo",
    "speed_line",
    "total_lines",
]

#: Columns of the table of architectures, in the order of `line_of`.
COLUMNS = (
    Column("architecture", words=True),
    Column("verdict", words=True),
    Column("kind", words=True, drop=6),
    Column("layouts", words=True, drop=5),
    Column("ran", drop=3),
    Column("error", drop=2),
    Column("sdpa", drop=2),
    Column("flex", drop=4),
    Column(OURS),
    Column("graphs", drop=2),
    Column("leaks", words=True, drop=3),
    Column("all pairs", words=True, drop=4),
    Column("generates", drop=1),
)
#: Columns of the table of timed steps, in the order of `speed_line`.
SPEED_COLUMNS = (
    Column("architecture", words=True),
    Column("batch", words=True, drop=3),
    Column("SDPA, step", drop=1),
    Column("attnspan, step", drop=1),
    Column("ratio"),
    Column("SDPA, memory", drop=2),
    Column("attnspan, memory", drop=2),
    Column("memory ratio"),
    Column("not measured", words=True, drop=4),
)
_LEGEND = (
    "ran: uncompiled cells of attnspan with gradients. error: attnspan's largest error over eager's error, "
    "both against float64. sdpa, flex, attnspan: whether the model compiles to one graph (own: the model "
    "fails with every attention). graphs: attnspan's and SDPA's graphs over three lengths. all pairs: "
    "attentions that create a (tokens, tokens) tensor."
)


def line_of(row: Row) -> tuple[str, ...]:
    """Make an architecture's row of the table, a text for each of `COLUMNS`."""
    layouts = list(dict.fromkeys(x.layout for x in row.cells))
    ours = [x for x in row.cells if x.implementation == OURS]
    eager = [x for x in ours if x.mode == "eager" and not is_own(row, x)]
    ran = sum(not x.failed and x.backward for x in eager)
    ratios = [x for cell in ours if (x := rounding_ratio(row, cell)) is not None]
    wrong = len(complaints(row))
    return (
        row.name,
        "ok" if not wrong else "failed" if row.reason else f"{wrong} wrong",
        row.kind,
        " ".join(layouts) or NONE,
        f"{ran}/{len(eager)}",
        times_text(max(ratios, default=None)),
        *(_compiles(row, name) for name in ("sdpa", "flex", OURS)),
        _graphs(row),
        _leaks(row),
        _all_pairs(row),
        _generates(row),
    )


def _compiles(row: Row, name: str) -> str:
    cell = compiled_cell(row, name)
    if cell is None:
        return NONE
    if is_own(row, cell):
        return "own"
    return "no" if cell.failed else "yes" if cell.backward else "forward"


def _graphs(row: Row) -> str:
    found = [compiled_cell(row, name) for name in (OURS, "sdpa")]
    texts = [NONE if x is None or x.graphs is None or x.failed else str(x.graphs) for x in found]
    return NONE if texts == [NONE, NONE] else "/".join(texts)


def _leaks(row: Row) -> str:
    probed = [x for x in row.cells if x.leaks is not None]
    found = dict.fromkeys(x.implementation for x in probed if x.leaks)
    # With the identity, documents see each other only through the model's own layers.
    own = "identity" in found
    return "own" if own else (" ".join(found) or "none") if probed else NONE


def _all_pairs(row: Row) -> str:
    eager = [x for x in row.cells if x.mode == "eager" and x.implementation in JUDGED and not x.failed]
    ran = [x for x in eager if x.pairs is not None]
    found = dict.fromkeys(x.implementation for x in ran if own_pairs(row, x))
    return (" ".join(found) or "none") if ran else NONE


def _generates(row: Row) -> str:
    compared = [x for x in row.generations if not x.own]
    if not compared:
        return NONE
    return "equal" if all(x.equal for x in compared) else "no"


def total_lines(summary: Summary) -> list[tuple[str, ...]]:
    """Make the rows of totals: a name, and a text for each of `JUDGED`."""

    def compiled(name: str) -> str:
        alone = summary.forward_only[name]
        return f"{summary.compiles[name]}{f' (forward only: {alone})' if alone else ''}"

    return [
        ("cells that run, including gradients", *(str(summary.runs[x]) for x in JUDGED)),
        ("architectures that compile to one graph", *(compiled(x) for x in JUDGED)),
        ("cells within the rounding error of eager", *(str(summary.exact[x]) for x in JUDGED)),
        ("architectures where packed documents leak", *(str(summary.leaking[x]) for x in JUDGED)),
        ("architectures with a (tokens, tokens) tensor", *(str(summary.all_pairs[x]) for x in JUDGED)),
    ]


def headlines(summary: Summary) -> list[str]:
    """Make one sentence for each of attnspan's other totals."""
    made = [f"{share} with a {cache} cache" for cache, share in summary.generates.items() if share.total]
    found = [f"{summary.architectures} architectures. attnspan passes all checks in {summary.spotless}."]
    if summary.graphs.total:
        found.append(f"attnspan compiles no more graphs than SDPA over three lengths: {summary.graphs}.")
    if made:
        found.append(f"greedy generation gives the same tokens as eager: {', '.join(made)}.")
    return found


def speed_line(speed: Speed) -> tuple[str, ...]:
    """Make a timed architecture's row of the table, a text for each of `SPEED_COLUMNS`."""
    steps = [speed.seconds.get(x) for x in ("sdpa", OURS)]
    peaks = [speed.peaks.get(x) for x in ("sdpa", OURS)]
    return (
        speed.name,
        f"{speed.layout}, {speed.tokens:,} and {speed.memory_tokens:,} tokens",
        *(seconds_text(x.median if x else None) for x in steps),
        f"{ratio_text(speed.ratio)}{'~' if speed.noisy else ''}",
        *map(bytes_text, peaks),
        times_text(speed.memory_ratio),
        "; ".join(f"{what}: {why}" for what, why in speed.reasons.items()),
    )


def median_line(speeds: Sequence[Speed]) -> tuple[str, ...]:
    """Make the row with the medians of both ratios over all models."""
    times = [x.ratio.median for x in speeds if x.ratio is not None]
    sizes = [x.memory_ratio for x in speeds if x.memory_ratio is not None]
    ratios = [times_text(median(x) if x else None) for x in (times, sizes)]
    return (f"median of {len(times)}", "", "", "", ratios[0], "", "", ratios[1], "")


def show_zoo(results: ZooResults, console: Console) -> None:
    """Print all results."""
    if results.rows:
        lines = [line_of(row) for row in results.rows]
        styles = [None if line[1] == "ok" else "yellow" for line in lines]
        print_table(console, "architectures", COLUMNS, lines, styles=styles)
        console.print(_LEGEND, style="dim")
        summary = summary_of(results.rows)
        columns = [Column("totals", words=True), *(Column(name) for name in JUDGED)]
        print_table(console, "", columns, total_lines(summary))
        console.print()
        console.print("\n".join(headlines(summary)), style="bold")
        for row in results.rows:
            for what in complaints(row):
                console.print(f"{row.name}, {what}", style="yellow", markup=False)
    if results.speed:
        lines = [*map(speed_line, results.speed), median_line(results.speed)]
        print_table(
            console,
            "compiled training steps: SDPA over attnspan",
            SPEED_COLUMNS,
            lines,
            bold=lambda line: line[0].startswith("median"),
        )
    if not results.complete:
        console.print("stopped before the last architecture: continue with --resume", style="yellow")
