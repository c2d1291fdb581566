"""Verdicts on the zoo's results: the cause of failures, exactness, leaks, and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from attnspan_lab.bench.cells import OURS
from attnspan_lab.zoo.architecture import IMPLEMENTATIONS
from attnspan_lab.zoo.results import Cell, Row

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

#: Attentions that are judged. "identity" only shows whether a failure is the model's own.
JUDGED = tuple(name for name in IMPLEMENTATIONS if name != "identity")
#: An error counts as rounding up to this many times eager's error, both against float64.
#: Two float32 programs that round differently have errors with independent signs and similar sizes.
FACTOR = 2.0
#: ... plus this much (8 roundings), for small models whose eager result is exact by chance.
FLOOR = 8 * 2.0**-24
# The layout with the hardest masks comes first: only in the first layout, all implementations are compiled.
_COMPARED = ("packed", "padded", "plain")


def compared_layout(layouts: Iterable[str]) -> str | None:
    """Choose the layout in which compiled implementations are compared, or None if there is no layout."""
    there = set(layouts)
    return next((x for x in _COMPARED if x in there), None)


def is_own(row: Row, cell: Cell) -> bool:
    """Whether a failure is the model's own.

    It is if the identity gets no further, and no attention computes gradients. An example is a model whose
    gradients the compiler cannot compute.
    """
    same = row.cell("identity", cell.mode, cell.layout)
    return same is not None and _reached(same) <= _reached(cell) and _nobody(row, cell)


def _nobody(row: Row, cell: Cell) -> bool:
    """Whether no attention computes gradients, not even the identity."""
    others = [x for x in row.cells if (x.mode, x.layout) == (cell.mode, cell.layout)]
    return any(x.implementation == "identity" for x in others) and all(_reached(x) < 2 for x in others)


def _reached(cell: Cell) -> int:
    """Return the progress of a cell: 0 for nothing, 1 for results, 2 for results and gradients."""
    return 0 if cell.failed else 1 + cell.backward


def is_exact(row: Row, cell: Cell) -> bool | None:
    """Whether results and gradients are within eager's rounding error. None if unknown."""
    like = row.cell("eager", "eager", cell.layout)
    if cell.failed or cell.ties or like is None or cell.output_error is None or like.output_error is None:
        return None
    pairs = [(cell.output_error, like.output_error)]
    if cell.gradient_error is not None and like.gradient_error is not None:
        pairs.append((cell.gradient_error, like.gradient_error))
    # NaN does not count as rounding.
    return all(mine <= FACTOR * theirs + FLOOR for mine, theirs in pairs)


def rounding_ratio(row: Row, cell: Cell) -> float | None:
    """Compute the larger of a cell's errors over eager's error. None if they are not compared."""
    if cell.implementation == "identity" or is_exact(row, cell) is None:
        return None
    like = row.cell("eager", "eager", cell.layout)
    assert like is not None, "what it was compared with"
    pairs = (cell.output_error, like.output_error), (cell.gradient_error, like.gradient_error)
    return max((mine / theirs for mine, theirs in pairs if mine is not None and theirs), default=None)


def own_pairs(row: Row, cell: Cell) -> list[tuple[int, ...]]:
    """List the (tokens, tokens) tensors that attention creates, without the model's own ones."""
    same = row.cell("identity", "eager", cell.layout)
    others = [] if same is None else [_sizes(x) for x in same.pairs or ()]
    return [x for x in cell.pairs or () if _sizes(x) not in others]


def _sizes(shape: tuple[int, ...]) -> list[int]:
    """Sort the sizes, so that a model's table (S, S, H) equals a bias (1, H, S, S)."""
    return sorted(n for n in shape if n > 1)


def _leaks(row: Row, cell: Cell) -> bool | None:
    """Whether attention lets documents see each other. None if not probed, or if the model itself leaks."""
    same = row.cell("identity", cell.mode, cell.layout)
    return None if cell.leaks is None or (same is not None and same.leaks) else bool(cell.leaks)


def complaints(row: Row, implementation: str = OURS) -> list[str]:
    """List an implementation's problems in an architecture as sentences.

    The model's own failures do not count.
    """
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
        found.append(f"results and gradients differ from float64 by {mine}, eager's by {theirs}")
    if _leaks(row, cell):
        found.append(f"leaks: {cell.leaks}")
    if cell.implementation == OURS:
        same = row.cell("identity", "eager", cell.layout)
        if cell.others > (0 if same is None else same.others):
            found.append(f"torch's attention ran {cell.others} times, attnspan's {cell.calls} times")
        if pairs := own_pairs(row, cell):
            found.append(f"creates a (tokens, tokens) tensor, {pairs[0]}")
        if _graphs_no_more(row, cell) is False:
            sdpa = row.cell("sdpa", cell.mode, cell.layout)
            assert sdpa is not None, "what was compared"
            found.append(f"{cell.graphs} graphs, SDPA {sdpa.graphs}")
    return found


def _error(x: float | None) -> str:
    return "-" if x is None else f"{x:.1e}"


def _graphs_no_more(row: Row, cell: Cell) -> bool | None:
    """Whether a compiled cell needs no more graphs than SDPA. None if they cannot be compared."""
    sdpa = row.cell("sdpa", cell.mode, cell.layout)
    known = sdpa is not None and sdpa.graphs is not None and not sdpa.failed
    if not known or cell.graphs is None or cell.failed or sdpa is None or sdpa.shapes != cell.shapes:
        return None
    return cell.graphs <= (sdpa.graphs or 0)


@dataclass(frozen=True)
class Share:
    """A count out of a total."""

    count: int = 0
    total: int = 0

    @classmethod
    def of(cls, found: Iterable[bool | None]) -> Share:
        """Count the values that hold. None does not count."""
        known = [x for x in found if x is not None]
        return cls(sum(known), len(known))

    def __str__(self) -> str:
        return f"{self.count} of {self.total}" if self.total else "-"

    @property
    def share(self) -> float | None:
        """The share from 0 to 1, or None if the total is 0."""
        return self.count / self.total if self.total else None


@dataclass(frozen=True)
class Summary:
    """Totals over architectures.

    Attributes:
        architectures: Number of architectures that ran.
        runs: Uncompiled cells that run forward and backward, out of the cells that do with identity, by
            implementation.
        compiles: Architectures that compile to one graph with gradients, out of the ones that do with
            identity.
        forward_only: Architectures in which only the forward pass compiles.
        graphs: Architectures in which attnspan needs no more graphs than SDPA, out of the compared ones.
        exact: Cells within eager's rounding error, out of the judged ones.
        leaking: Architectures in which a packed document sees another, out of the probed ones.
        all_pairs: Architectures in which attention creates a (tokens, tokens) tensor, out of the ones that
            ran.
        generates: Generations with attnspan that equal eager's, out of the compared ones, by cache.
        spotless: Architectures without a problem with attnspan.
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
    """Compute the totals of architectures.

    Example:
        >>> summary_of([Row("llama", "transformers", "decoder")]).architectures
        1
    """
    ran = [row for row in rows if row.cells]
    compiled = {name: [(row, compiled_cell(row, name)) for row in ran] for name in JUDGED}

    def by_name(holds: Callable[[Row, str], list[bool | None]]) -> dict[str, Share]:
        return {name: Share.of(x for row in ran for x in holds(row, name)) for name in JUDGED}

    def alone(name: str) -> int:
        return sum(x is not None and not x.failed and not x.backward for _, x in compiled[name])

    made = [x for row in ran for x in row.generations]
    return Summary(
        architectures=len(rows),
        runs=by_name(_runs),
        compiles=by_name(_compiles),
        forward_only={name: alone(name) for name in JUDGED},
        graphs=Share.of(_graphs_no_more(row, x) for row, x in compiled[OURS] if x is not None),
        exact=by_name(_exact),
        leaking=by_name(_leaking),
        all_pairs=by_name(_all_pairs),
        generates={
            cache: Share.of(x.equal for x in made if x.cache == cache) for cache in ("dynamic", "static")
        },
        spotless=Share.of(not complaints(row) for row in rows),
    )


def _cells(row: Row, name: str, mode: str = "eager") -> list[Cell]:
    return [x for x in row.cells if x.implementation == name and x.mode == mode]


def compiled_cell(row: Row, name: str) -> Cell | None:
    """Return the compiled cell in which implementations are compared, or None."""
    layout = compared_layout(x.layout for x in row.cells)
    return None if layout is None else row.cell(name, "compiled", layout)


def _runs(row: Row, name: str) -> list[bool | None]:
    return [None if _nobody(row, x) else _reached(x) == 2 for x in _cells(row, name)]


def _compiles(row: Row, name: str) -> list[bool | None]:
    """Whether the compared layout compiles. None if it was not tried, or if the model itself fails."""
    cell = compiled_cell(row, name)
    return [] if cell is None or _nobody(row, cell) else [_reached(cell) == 2]


def _exact(row: Row, name: str) -> list[bool | None]:
    return [is_exact(row, x) for x in row.cells if x.implementation == name]


def _leaking(row: Row, name: str) -> list[bool | None]:
    return [_leaks(row, x) for x in _cells(row, name)]


def _all_pairs(row: Row, name: str) -> list[bool | None]:
    ran = [x for x in _cells(row, name) if not x.failed and x.pairs is not None]
    return [any(own_pairs(row, x) for x in ran)] if ran else []
