"""Verdicts on the figures of the zoo: whose a failure is, what is exact, what leaks, how many compile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from attnspan_lab.bench.cells import OURS
from attnspan_lab.zoo.architecture import IMPLEMENTATIONS
from attnspan_lab.zoo.cells import Cell, Row

__all__ = [
    "FACTOR",
    "FLOOR",
    "JUDGED",
    "Share",
    "Summary",
    "compared_layout",
    "compiled_cell",
    "complaints",
    "is_exact",
    "is_own",
    "own_pairs",
    "rounding_ratio",
    "summary_of",
]

#: Attentions that are judged; "identity" tells whose a failure is.
JUDGED = tuple(name for name in IMPLEMENTATIONS if name != "identity")
#: An error counts as rounding up to this many times the eager implementation's own, both from float64.
#: Two float32 programs that round differently have errors of independent signs and about one size.
FACTOR = 2.0
#: ... and this much, for models of so few operations that the eager one is exact by luck: 8 roundings.
FLOOR = 8 * 2.0**-24
# Where masks matter most comes first: only there all implementations are compiled.
_COMPARED = ("packed", "padded", "plain")


def compared_layout(layouts: Iterable[str]) -> str | None:
    """The layout in which implementations are compared when compiled; None where there is no layout."""
    there = set(layouts)
    return next((x for x in _COMPARED if x in there), None)


def is_own(row: Row, cell: Cell) -> bool:
    """Whether a failure is the model's own.

    What returns the values gets no further, and no attention gets to gradients: as of a model in which the
    compiler gets gradients wrong.
    """
    same = row.cell("identity", cell.mode, cell.layout)
    return same is not None and _reached(same) <= _reached(cell) and _nobody(row, cell)


def _nobody(row: Row, cell: Cell) -> bool:
    """Whether no attention gets to gradients, the identity neither."""
    others = [x for x in row.cells if (x.mode, x.layout) == (cell.mode, cell.layout)]
    return any(x.implementation == "identity" for x in others) and all(_reached(x) < 2 for x in others)


def _reached(cell: Cell) -> int:
    """0: nothing; 1: results; 2: gradients too."""
    return 0 if cell.failed else 1 + cell.backward


def is_exact(row: Row, cell: Cell) -> bool | None:
    """Whether results and gradients are within the eager implementation's own rounding; None: unknown."""
    like = row.cell("eager", "eager", cell.layout)
    if cell.failed or cell.ties or like is None or cell.output_error is None or like.output_error is None:
        return None
    pairs = [(cell.output_error, like.output_error)]
    if cell.gradient_error is not None and like.gradient_error is not None:
        pairs.append((cell.gradient_error, like.gradient_error))
    # NaN is no rounding.
    return all(mine <= FACTOR * theirs + FLOOR for mine, theirs in pairs)


def rounding_ratio(row: Row, cell: Cell) -> float | None:
    """The larger of a cell's errors over the eager implementation's; None where they are not compared."""
    if cell.implementation == "identity" or is_exact(row, cell) is None:
        return None
    like = row.cell("eager", "eager", cell.layout)
    assert like is not None, "what it was compared with"
    pairs = (cell.output_error, like.output_error), (cell.gradient_error, like.gradient_error)
    return max((mine / theirs for mine, theirs in pairs if mine is not None and theirs), default=None)


def own_pairs(row: Row, cell: Cell) -> list[tuple[int, ...]]:
    """Tensors of all pairs of tokens that attention makes: those that the model makes in any case are not."""
    same = row.cell("identity", "eager", cell.layout)
    others = [] if same is None else [_sizes(x) for x in same.pairs or ()]
    return [x for x in cell.pairs or () if _sizes(x) not in others]


def _sizes(shape: tuple[int, ...]) -> list[int]:
    """Sizes in order: a table (S, S, H) of the model's is the same as a bias (1, H, S, S)."""
    return sorted(n for n in shape if n > 1)


def _leaks(row: Row, cell: Cell) -> bool | None:
    """Whether attention lets documents see each other; None if not probed, or if the model itself does."""
    same = row.cell("identity", cell.mode, cell.layout)
    return None if cell.leaks is None or (same is not None and same.leaks) else bool(cell.leaks)


def complaints(row: Row, implementation: str = OURS) -> list[str]:
    """Complaints about an implementation in an architecture, a sentence each; none for a model's own."""
    found = [f"{row.name}: {row.reason}"] if row.reason else []
    for cell in row.cells:
        if cell.implementation == implementation:
            found += [f"{cell.mode} {cell.layout}: {what}" for what in _of_cell(row, cell)]
    for made in row.generations if implementation == OURS else ():
        if made.equal is False and not made.own:
            found.append(f"generate, {made.cache} cache: {made.reason}")
    return found


def _of_cell(row: Row, cell: Cell) -> list[str]:
    if cell.failed:
        return [] if is_own(row, cell) else [f"{cell.failed}: {cell.reason}"]
    found = [] if cell.backward or is_own(row, cell) else [f"no backward: {cell.reason}"]
    like = row.cell("eager", "eager", cell.layout)
    if is_exact(row, cell) is False and like is not None:
        mine, theirs = (f"{_error(x.output_error)}, {_error(x.gradient_error)}" for x in (cell, like))
        found.append(f"results and gradients differ from float64 by {mine}; eager by {theirs}")
    if _leaks(row, cell):
        found.append(f"leaks: {cell.leaks}")
    if cell.implementation == OURS:
        same = row.cell("identity", "eager", cell.layout)
        if cell.others > (0 if same is None else same.others):
            found.append(f"torch's attention ran {cell.others} times, attnspan's {cell.calls}")
        if pairs := own_pairs(row, cell):
            found.append(f"makes a tensor of all pairs of tokens, {pairs[0]}")
        if _graphs_no_more(row, cell) is False:
            sdpa = row.cell("sdpa", cell.mode, cell.layout)
            assert sdpa is not None, "what was compared"
            found.append(f"{cell.graphs} graphs, SDPA {sdpa.graphs}")
    return found


def _error(x: float | None) -> str:
    return "-" if x is None else f"{x:.1e}"


def _graphs_no_more(row: Row, cell: Cell) -> bool | None:
    """Whether a compiled cell needs no more graphs than SDPA's; None where they cannot be compared."""
    sdpa = row.cell("sdpa", cell.mode, cell.layout)
    known = sdpa is not None and sdpa.graphs is not None and not sdpa.failed
    if not known or cell.graphs is None or cell.failed or sdpa is None or sdpa.shapes != cell.shapes:
        return None
    return cell.graphs <= (sdpa.graphs or 0)


@dataclass(frozen=True)
class Share:
    """So many of so many."""

    count: int = 0
    total: int = 0

    def __add__(self, holds: bool | None) -> Share:
        return self if holds is None else Share(self.count + holds, self.total + 1)

    def __str__(self) -> str:
        return f"{self.count} of {self.total}" if self.total else "-"

    @property
    def share(self) -> float | None:
        """0..1; None of nothing."""
        return self.count / self.total if self.total else None


@dataclass(frozen=True)
class Summary:
    """Totals over architectures.

    Attributes:
        architectures: How many were run.
        runs: By implementation, cells without the compiler that run forward and backward, of those that do
            with identity.
        compiles: Architectures that compile to one graph, gradients too, of those that do with identity.
        forward_only: Architectures of which the forward alone compiles.
        graphs: Architectures of which attnspan needs no more graphs than SDPA, of those compared.
        exact: Cells within the eager implementation's rounding, of those judged.
        leaking: Architectures in which a packed document sees another, of those probed.
        all_pairs: Architectures in which attention makes a tensor of all pairs of tokens, of those that ran.
        generates: Of attnspan, by cache: equal to the eager implementation, of those compared.
        spotless: Architectures without a complaint about attnspan.
    """

    architectures: int = 0
    runs: dict[str, Share] = field(default_factory=dict)
    compiles: dict[str, Share] = field(default_factory=dict)
    forward_only: dict[str, int] = field(default_factory=dict)
    graphs: Share = Share()
    exact: dict[str, Share] = field(default_factory=dict)
    leaking: dict[str, Share] = field(default_factory=dict)
    all_pairs: dict[str, Share] = field(default_factory=dict)
    generates: dict[str, Share] = field(default_factory=dict)
    spotless: Share = Share()


def summary_of(rows: Sequence[Row]) -> Summary:
    """The totals of some architectures.

    Example:
        >>> summary_of([Row("llama", "transformers", "decoder")]).architectures
        1
    """
    ran = [row for row in rows if row.cells]

    def by_name(holds: object) -> dict[str, Share]:
        return {name: _share(ran, name, holds) for name in JUDGED}

    def alone(name: str) -> int:
        found = [compiled_cell(row, name) for row in ran]
        return sum(x is not None and not x.failed and not x.backward for x in found)

    graphs, generates = Share(), dict.fromkeys(("dynamic", "static"), Share())
    for row in ran:
        ours = compiled_cell(row, OURS)
        graphs += None if ours is None else _graphs_no_more(row, ours)
        for made in row.generations:
            generates[made.cache] += made.equal
    return Summary(
        architectures=len(rows),
        runs=by_name(_runs),
        compiles=by_name(_compiles),
        forward_only={name: alone(name) for name in JUDGED},
        graphs=graphs,
        exact=by_name(_exact),
        leaking=by_name(_leaking),
        all_pairs=by_name(_all_pairs),
        generates=generates,
        spotless=Share(sum(not complaints(row) for row in rows), len(rows)),
    )


def _share(rows: Sequence[Row], name: str, holds: object) -> Share:
    assert callable(holds)
    total = Share()
    for row in rows:
        for each in holds(row, name):
            total += each
    return total


def _cells(row: Row, name: str, mode: str = "eager") -> list[Cell]:
    return [x for x in row.cells if x.implementation == name and x.mode == mode]


def compiled_cell(row: Row, name: str) -> Cell | None:
    """Compiled cell in which implementations are compared, or None."""
    layout = compared_layout(x.layout for x in row.cells)
    return None if layout is None else row.cell(name, "compiled", layout)


def _runs(row: Row, name: str) -> list[bool | None]:
    return [None if _nobody(row, x) else _reached(x) == 2 for x in _cells(row, name)]


def _compiles(row: Row, name: str) -> list[bool | None]:
    """Whether the compared layout compiles; None where it was not tried, or is the model's own failure."""
    cell = compiled_cell(row, name)
    return [] if cell is None or _nobody(row, cell) else [_reached(cell) == 2]


def _exact(row: Row, name: str) -> list[bool | None]:
    return [is_exact(row, x) for x in row.cells if x.implementation == name]


def _leaking(row: Row, name: str) -> list[bool | None]:
    return [_leaks(row, x) for x in _cells(row, name)]


def _all_pairs(row: Row, name: str) -> list[bool | None]:
    ran = [x for x in _cells(row, name) if not x.failed and x.pairs is not None]
    return [any(own_pairs(row, x) for x in ran)] if ran else []
