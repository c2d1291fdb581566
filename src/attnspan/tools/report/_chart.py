"""What every chart is made of: data for Plotly without a theme, and words for those who do not see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnspan.tools.bench.results import Cell
from attnspan.tools.bench.standings import View
from attnspan.tools.bench.targets import mask_kind
from attnspan.tools.report._numbers import length_text, plain, rounded

__all__ = [
    "OURS",
    "Chart",
    "Facet",
    "Palette",
    "Section",
    "Table",
    "TableCell",
    "decades_axis",
    "facets",
    "lengths_axis",
    "log_ticks",
    "whiskers",
]

OURS = "attnspan"
_COLORS = 7
_MANY = 12
_TICKS = 6
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
            parts.setdefault(f"{family}: {mask_kind(cell)}, D {cell.workload.head_dim}", []).append(cell)
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
    """Ticks of a logarithmic axis around 1: powers of two, or multiples of a step where there are too few."""
    if high < 4 * low:
        for step in (0.05, 0.1, 0.25, 0.5, 1.0):
            ticks = [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
            if len(ticks) <= _TICKS:
                return [round(tick, 2) for tick in ticks]
    for stride in (1, 2, 3, 5, 10):
        ticks = [2.0**power for power in range(-20, 21) if power % stride == 0 and low <= 2.0**power <= high]
        if len(ticks) <= _TICKS:
            return ticks
    return [1.0]


def decades_axis(low: float, high: float, title: str, text: Callable[[float], str]) -> dict[str, Any]:
    """A logarithmic axis whose ticks are round figures with their units, thinned until they fit.

    Args:
        low: Lowest value shown, above 0.
        high: Highest value shown.
        title: What is on the axis.
        text: How a figure is written.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**power for power in powers for step in steps]
        ticks = [tick for tick in ticks if low / 1.3 <= tick <= high * 1.3]
        if len(ticks) <= 7:
            break
    return {
        "type": "log",
        "title": {"text": title},
        "tickvals": ticks,
        "ticktext": [rounded(text(tick)) for tick in ticks],
    }


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
