"""Common parts of pages: charts as theme-independent data for Plotly, tables, and sections."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from attnspan_lab.bench.cells import OURS, Cell
from attnspan_lab.bench.standings import View
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.console import NONE, ratio_digits

__all__ = [
    "Chart",
    "Entry",
    "Palette",
    "Section",
    "Table",
    "axis",
    "bars",
    "hovered",
    "line_at",
    "names_axis",
    "plain",
    "ratio_text",
]

_COLORS = 7
_SYMBOLS = ("square", "diamond", "triangle-up", "triangle-down", "cross", "x", "pentagon")


@dataclass(frozen=True)
class Chart:
    """One chart.

    Args:
        title: Title of the chart.
        note: Explanation of how to read the chart.
        alt: Alternative text for screen readers.
        data, layout: Data and layout for Plotly. "@" and a name of page.css is a colour in both themes. The
            page shows and hides a trace with the peer that its `meta.peer` names.
        height: Height in pixels.
        view: The view that shows the chart. None shows it in all views.
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
    """One cell of a table: text, sort value, smaller second line, and warning."""

    text: str
    value: float | str | None = None
    small: str = ""
    badge: str = ""


@dataclass(frozen=True)
class Table:
    """A table. The first column is the heading of each row.

    Args:
        caption: Text above the columns.
        columns: Names of the columns.
        rows: Cells of each row.
        filters: Values of each row by the name of a filter. Empty for a table without filters.
        hint: Placeholder of the search field.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry | str]]
    filters: Sequence[dict[str, str]] = ()
    hint: str = ""

    @property
    def words(self) -> list[bool]:
        """Whether each column holds text: none of its cells has a value."""
        return [
            all(getattr(x, "value", None) is None for x in column) for column in zip(*self.rows, strict=True)
        ]


@dataclass(frozen=True)
class Section:
    """A section of the page. ``layout`` is "", "single" (one chart per line) or "small" (more per line)."""

    anchor: str
    title: str
    lead: str
    charts: Sequence[Chart] = ()
    table: Table | None = None
    layout: str = ""


class Palette:
    """Colour and symbol of each peer that ran, the same in all charts of the page."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.peers = tuple(dict.fromkeys(run.peer for cell in cells for run in cell.peers if run.ran))

    @property
    def drawn(self) -> tuple[str, ...]:
        """Names in drawing order. attnspan is last, on top of the others."""
        return (*self.peers, OURS)

    def color(self, peer: str) -> str:
        """Return "@" and the name of the peer's colour in page.css."""
        return "@ours" if peer == OURS else f"@peer{self.peers.index(peer) % _COLORS + 1}"

    def symbol(self, peer: str) -> str:
        """Return the peer's Plotly marker, which distinguishes peers for colour-blind readers."""
        if peer == OURS:
            return "circle"
        index = self.peers.index(peer)
        # Use another symbol when the colours repeat.
        return _SYMBOLS[(index + index // _COLORS) % len(_SYMBOLS)]


def axis(title: str, *, log: bool = False, **more: Any) -> dict[str, Any]:
    """Make an axis. Logarithmic axes have ticks at 1, 2 and 5 times powers of ten."""
    kind = {"type": "log", "exponentformat": "SI", "minexponent": 3} if log else {"exponentformat": "SI"}
    return {"title": {"text": plain(title)}, **kind, **more}


def hovered(kind: str, hover: Sequence[str], **more: Any) -> dict[str, Any]:
    """Make a Plotly trace with a hover text for each point."""
    template = "%{customdata}<extra></extra>"
    return {"type": kind, "customdata": list(hover), "hovertemplate": template, **more}


def bars(spans: Sequence[tuple[float, float, float]], hover: Sequence[str], **more: Any) -> dict[str, Any]:
    """Make horizontal bars from 0 or `base`, with whiskers from the low to the high value."""
    base = more.get("base", [0.0] * len(spans))
    whiskers = {
        "type": "data",
        "symmetric": False,
        "array": [high - middle for _, middle, high in spans],
        "arrayminus": [middle - low for low, middle, _ in spans],
        "color": "@ink",
        **more.pop("error_x", {}),
    }
    x = [middle - start for (_, middle, _), start in zip(spans, base, strict=True)]
    return hovered("bar", hover, orientation="h", x=x, error_x=whiskers, **more)


def names_axis(names: Sequence[str], **more: Any) -> dict[str, Any]:
    """Make a vertical axis with names at 0, 1, 2 and so on, from top to bottom."""
    texts = [plain(name) for name in names]
    return {"tickvals": list(range(len(names))), "ticktext": texts, "range": [len(names) - 0.5, -0.5], **more}


def line_at(x: float, **look: Any) -> dict[str, Any]:
    """Make a vertical line over the whole height."""
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": look}


def plain(text: str) -> str:
    """Escape text for a chart, because Plotly interprets tags."""
    return html.escape(text, quote=False)


def ratio_text(ratio: Interval | None) -> str:
    """Format a ratio with its interval: "1.42x (1.40 to 1.45)"."""
    if ratio is None:
        return NONE
    low, middle, high = map(ratio_digits, (ratio.low, ratio.median, ratio.high))
    return f"{middle}x ({low} to {high})"
