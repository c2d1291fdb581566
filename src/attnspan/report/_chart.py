"""What every chart is made of: data for Plotly without a theme, and words for those who do not see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnspan.bench.results import Cell
from attnspan.bench.standings import View
from attnspan.report._numbers import length_text, plain

__all__ = [
    "OURS",
    "Chart",
    "Facet",
    "Palette",
    "Section",
    "Table",
    "TableCell",
    "facets",
    "lengths_axis",
    "log_ticks",
    "whiskers",
]

OURS = "attnspan"
_COLORS = 7
_MANY = 12
_SYMBOLS = ("square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon")


@dataclass(frozen=True)
class Chart:
    """One picture.

    Args:
        title: What it shows.
        note: How to read it.
        alt: What it says, for those who do not see it.
        figure: `data` and `layout` of Plotly. A colour is a name of page.css after "@", so that both themes
            have it; a trace whose `meta.peer` names a peer is shown and hidden with it.
        height: In pixels.
        view: Shown with the cells of this view only; None is always shown.
    """

    title: str
    note: str
    alt: str
    figure: dict[str, Any]
    height: int
    view: View | None = None


@dataclass(frozen=True)
class TableCell:
    """One cell of a table: its text, the value it is sorted by, a smaller second line, a warning."""

    text: str
    value: float | str | None = None
    small: str = ""
    badge: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        caption: What it holds.
        columns: Names; the first column heads each row.
        rows: Cells, row by row.
        text_columns: Indices of the columns of words; the others are figures.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    text_columns: frozenset[int]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Args:
        anchor: Its name in links.
        title: Its heading.
        lead: What it is about, a sentence or two.
        charts: In order.
        table: Below the charts, or None.
        wide: One chart per line.
        small: More of them per line.
    """

    anchor: str
    title: str
    lead: str
    charts: tuple[Chart, ...] = ()
    table: Table | None = None
    wide: bool = False
    small: bool = False


@dataclass(frozen=True)
class Facet:
    """Cells that share a chart.

    Args:
        view: Their device, mode and element type.
        title: Their family, and what else they have in common.
        cells: In the order of the file.
        split: They are a part of their family: sizes tell them apart.
    """

    view: View
    title: str
    cells: tuple[Cell, ...]
    split: bool

    def label(self, cell: Cell) -> str:
        """What stands beside a cell on an axis."""
        return cell.workload.sizes if self.split else cell.workload.name


def facets(cells: Iterable[Cell]) -> list[Facet]:
    """Cells by view and family; a large family by mask and head dim besides."""
    families: dict[tuple[View, str], list[Cell]] = {}
    for cell in cells:
        families.setdefault((View.of(cell), cell.workload.family), []).append(cell)
    found = []
    for (view, family), members in families.items():
        if len(members) <= _MANY:
            found.append(Facet(view, family, tuple(members), split=False))
            continue
        parts: dict[str, list[Cell]] = {}
        for cell in members:
            parts.setdefault(f"{family}: {cell.workload.mask}, D {cell.workload.head_dim}", []).append(cell)
        found += [Facet(view, title, tuple(part), split=True) for title, part in parts.items()]
    return found


class Palette:
    """Colour and symbol of each peer that ran, the same all over the page.

    Args:
        cells: Whose peers are to be told apart.
    """

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.peers = tuple(dict.fromkeys(run.peer for cell in cells for run in cell.peers if run.ran))

    def color(self, peer: str) -> str:
        """Name of a colour in page.css, after "@"."""
        return "@ours" if peer == OURS else f"@peer{self.peers.index(peer) % _COLORS + 1}"

    def symbol(self, peer: str) -> str:
        """A marker of Plotly; it tells apart what two eyes in a hundred see in one colour."""
        if peer == OURS:
            return "circle"
        index = self.peers.index(peer)
        # Another symbol when the colours begin again.
        return _SYMBOLS[(index + index // _COLORS) % len(_SYMBOLS)]


def lengths_axis(lengths: Iterable[int], title: str) -> dict[str, Any]:
    """A logarithmic axis whose ticks are the lengths themselves."""
    ticks = sorted(set(lengths))
    return {
        "type": "log",
        "title": {"text": plain(title)},
        "tickvals": ticks,
        "ticktext": [length_text(tick) for tick in ticks],
    }


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis around 1: powers of two, thinned until at most eight are left."""
    powers = range(-20, 21)
    for step in (1, 2, 3, 5, 10):
        ticks = [2.0**power for power in powers if power % step == 0 and low <= 2.0**power <= high]
        if len(ticks) <= 8:
            return ticks
    return [1.0]


def whiskers(middle: Sequence[float], low: Sequence[float], high: Sequence[float]) -> dict[str, Any]:
    """Error bars from an interval."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [top - value for top, value in zip(high, middle, strict=True)],
        "arrayminus": [value - bottom for bottom, value in zip(low, middle, strict=True)],
        "color": "@ink",
        "thickness": 1.2,
        "width": 2,
    }
