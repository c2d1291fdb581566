"""Parts of every chart: data for Plotly without a theme, and words for those who do not see it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnspan_lab.bench.cells import OURS, Cell
from attnspan_lab.bench.standings import View
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.console import ratio_digits

__all__ = ["Chart", "Entry", "Palette", "Section", "Table", "axis", "facets", "plain", "ratio_text", "trace"]

_COLORS = 7
_MANY = 12  # Cells of a family from which on it is split by mask and head dim.
_SYMBOLS = ("square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon")


@dataclass(frozen=True)
class Chart:
    """One picture.

    Args:
        title: What it shows.
        note: How to read it.
        alt: What it says, for those who do not see it.
        data, layout: For Plotly. A colour is a name of page.css after "@", so that both themes have it; a
            trace whose `meta.peer` names a peer is shown and hidden with it.
        height: In pixels.
        view: Shown with the cells of this view only; None is always shown.
    """

    title: str
    note: str
    alt: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 300
    view: View | None = None


@dataclass(frozen=True)
class Entry:
    """One cell of a table: its text, the value it is sorted by, a smaller second line, a warning."""

    text: str
    value: float | str | None = None
    small: str = ""
    badge: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column heads each row, and whose columns of `words` hold no figures."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    words: frozenset[str]


@dataclass(frozen=True)
class Section:
    """A part of the page; ``layout`` is "", "single" (one chart per line) or "small" (more per line)."""

    anchor: str
    title: str
    lead: str
    charts: tuple[Chart, ...] = ()
    table: Table | None = None
    layout: str = ""


class Palette:
    """Colour and symbol of each peer that ran, the same all over the page."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.peers = tuple(dict.fromkeys(run.peer for cell in cells for run in cell.peers if run.ran))

    @property
    def drawn(self) -> tuple[str, ...]:
        """In the order in which they are drawn: ours last, on top of the others."""
        return (*self.peers, OURS)

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


def facets(cells: Iterable[Cell]) -> list[tuple[View, str, list[tuple[str, Cell]]]]:
    """Cells that share a chart, with their labels: by family; large families also by mask and head dim."""
    families: dict[tuple[View, str], list[Cell]] = {}
    for cell in cells:
        families.setdefault((View.of(cell), cell.workload.family), []).append(cell)
    found = []
    for (view, family), members in families.items():
        if len(members) <= _MANY:
            found.append((view, family, [(cell.workload.name, cell) for cell in members]))
            continue
        parts: dict[str, list[tuple[str, Cell]]] = {}
        for cell in members:
            title = f"{family}: {cell.workload.mask.removesuffix('()')}, D {cell.workload.head_dim}"
            parts.setdefault(title, []).append((cell.workload.sizes, cell))
        found += [(view, title, part) for title, part in parts.items()]
    return found


def axis(title: str, *, log: bool = False, **more: Any) -> dict[str, Any]:
    """An axis; a logarithmic one has its ticks at 1, 2 and 5 times powers of ten, as Plotly sets them."""
    kind = {"type": "log", "exponentformat": "SI", "minexponent": 3} if log else {"exponentformat": "SI"}
    return {"title": {"text": plain(title)}, **kind, **more}


def trace(palette: Palette, peer: str, hover: Sequence[str], **more: Any) -> dict[str, Any]:
    """A scatter of one peer, in its colour and with a text for each point."""
    marker = {"color": palette.color(peer), "symbol": palette.symbol(peer)}
    return {
        "type": "scatter",
        "name": plain(peer),
        "meta": {"peer": peer},
        "customdata": list(hover),
        "hovertemplate": "%{customdata}<extra></extra>",
        **more,
        "marker": marker | more.get("marker", {}),
    }


def plain(text: str) -> str:
    """Text for a chart, which takes tags for markup."""
    return html.escape(text, quote=False)


def ratio_text(ratio: Interval | None) -> str:
    """A ratio with its interval: "1.42x (1.40 to 1.45)"."""
    if ratio is None:
        return "-"
    low, middle, high = map(ratio_digits, (ratio.low, ratio.median, ratio.high))
    return f"{middle}x ({low} to {high})"
