"""Shapes, labels and grids that the pictures of README and of docs/concepts share."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

BLUE, PALE, GREY, ORANGE, PEACH = "#4263eb", "#b4c1fa", "#e9ebef", "#d9480f", "#ffc9a3"
DIM = "#57606a"
SMALL: dict[str, object] = {"font_size": 10}


def card(width: int, height: float, *body: str) -> str:
    """The whole picture, on a white card: an <img> does not know whether the page around it is dark."""
    size = f'viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}"'
    paper = f'<rect width="{width}" height="{height:g}" rx="6" fill="#ffffff"/>'
    ink = 'fill="#1f2328" font-family="system-ui, sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{paper}<g {ink}>{"".join(body)}</g></svg>\n'


def at(x: float, y: float, *parts: str) -> str:
    """Parts that are drawn from a point on."""
    return f'<g transform="translate({x:g} {y:g})">{"".join(parts)}</g>'


def label(
    x: float, y: float, text: object, *, bold: bool = False, anchor: str = "start", **more: object
) -> str:
    """A line of text."""
    weight = {"font_weight": 600} if bold else {}
    shown = html.escape(str(text), quote=False)
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{_attributes(more | weight)}>{shown}</text>'


def rect(x: float, y: float, width: float, height: float, color: str, **more: object) -> str:
    """A filled rectangle."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{color}"{_attributes(more)}/>'


def line(x0: float, y0: float, x1: float, y1: float, color: str = "#1f2328", **more: object) -> str:
    """A line between two points."""
    return f'<path d="M{x0:g} {y0:g}L{x1:g} {y1:g}" stroke="{color}"{_attributes(more)}/>'


def _attributes(values: dict[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in values.items())


def legend(*entries: tuple[str, str]) -> str:
    """A colored square and its meaning for each entry, 18 pixels apart."""
    lines = [
        rect(0, 18 * n, 11, 11, color) + label(17, 18 * n + 10, text)
        for n, (color, text) in enumerate(entries)
    ]
    return "".join(lines)


def legend_of_tiles(states: Any) -> str:
    """How many tiles a kernel skips, computes, and masks, from `Spans.block_states`."""
    skipped, masked, whole = (int((states == state).sum()) for state in range(3))
    return legend(
        (GREY, f"{skipped} of {states.size} tiles: skipped"),
        (BLUE, f"{whole} of {states.size}: no mask arithmetic"),
        (PALE, f"{masked} of {states.size}: computed and masked"),
    )


def colored(visible: Any, color: str = BLUE) -> Any:
    """The color of each pair of a boolean mask."""
    return np.where(visible, color, GREY)


def interval(ends: Any) -> str:
    """A span as text."""
    return "[{}, {})".format(*map(int, ends))


def cells(colors: Any, size: float) -> str:
    """Squares from (0, 0) on."""
    squares = [rect(j * size, i * size, size - 1, size - 1, x) for (i, j), x in np.ndenumerate(colors)]
    return "".join(squares)


def grid(
    colors: Any,
    size: float,
    *,
    title: str = "",
    digits: Any = None,
    step: int = 1,
    scale: int = 1,
    queries: str = "← queries",
) -> str:
    """Squares with a title and both axes. Each `step`-th square has its number, times `scale`."""

    def middle(x: float, y: float, number: object, **more: object) -> str:
        return label((x + 0.5) * size, y, number, anchor="middle", **SMALL, **more)

    parts = [label(0, -33, title, bold=True), label(0, -17, "keys →", **SMALL), cells(colors, size)]
    parts.append(label(0, -22, queries, anchor="end", transform="rotate(-90)", **SMALL))
    rows, keys = colors.shape
    parts += [middle(j, -4, scale * j) for j in range(0, keys, step)]
    parts += [label(-5, (i + 0.5) * size + 4, scale * i, anchor="end", **SMALL) for i in range(0, rows, step)]
    for (i, j), digit in np.ndenumerate(np.zeros((0, 0)) if digits is None else digits):
        ink = "#ffffff" if colors[i, j] in (BLUE, ORANGE) else DIM
        parts.append(middle(j, (i + 0.5) * size + 4, int(digit), fill=ink))
    return "".join(parts)
