"""Line charts as small SVG files, for light and dark pages."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]

COLOURS = ("#4c6ef5", "#0ca678", "#f08c00", "#e03131", "#ae3ec9", "#868e96", "#1098ad")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 210, 150, 52, 30, 40, 26

STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#212529}.grid{stroke:#adb5bd;stroke-opacity:.45}"
    ".title{font-weight:600;font-size:12px}.soft{fill:#495057}"
    "@media(prefers-color-scheme:dark){text{fill:#e9ecef}.soft{fill:#adb5bd}.grid{stroke:#868e96}}"
)


@dataclass(frozen=True)
class Panel:
    """One chart: lines over a logarithmic axis."""

    title: str
    lines: Mapping[str, Points]


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis with its title and ticks. The title of the y axis is the chart's title."""

    label: str
    ticks: Sequence[tuple[float, str]]

    def place(self, value: float) -> float:
        """Return the position of a value between the first tick (0) and the last tick (1)."""
        low, high = math.log(self.ticks[0][0]), math.log(self.ticks[-1][0])
        return (math.log(value) - low) / (high - low)


def decades(values: Sequence[float], unit: str = "") -> list[tuple[float, str]]:
    """Choose ticks at powers of ten around all values, with ticks in between if there are few."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) - 1e-9)
    steps = (1, 2, 5) if high - low <= 2 else (1,)
    ticks = [digit * 10.0**power for power in range(low, high + 1) for digit in steps]
    first = max(i for i, tick in enumerate(ticks) if tick <= min(values) * (1 + 1e-9))
    last = min(i for i, tick in enumerate(ticks) if tick >= max(values) * (1 - 1e-9))
    return [(tick, f"{tick:,.10g}{unit}") for tick in ticks[first : max(last, first + 1) + 1]]


def draw(panels: Sequence[Panel], x: Axis, y: Axis, names: Sequence[str], *, columns: int = 3) -> str:
    """Draw all panels on common axes, with one legend. Lines whose names begin with "ring" are dashed."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    legend, legend_height = _legend(names, columns * (WIDTH + LEFT) - GAP)
    parts = [f'<text class="title" x="{LEFT}" y="16">{_text(y.label)}</text>', legend]
    for number, panel in enumerate(panels):
        left = (number % columns) * (WIDTH + LEFT) + LEFT
        top = legend_height + (number // columns) * (HEIGHT + TOP + BOTTOM) + TOP
        parts.append(f'<g transform="translate({left} {top})">{_panel(panel, names, x, y)}</g>')
    width, height = columns * (WIDTH + LEFT) + GAP, legend_height + rows * (HEIGHT + TOP + BOTTOM)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def _legend(names: Sequence[str], width: int) -> tuple[str, int]:
    parts, left, top = [], LEFT, 36
    for number, name in enumerate(names):
        needed = 34 + 6.2 * len(name)
        if left > LEFT and left + needed > width + LEFT:
            left, top = LEFT, top + 18
        stroke = _stroke(number, name)
        parts.append(
            f'<path d="M{left} {top - 4}h22" {stroke}/><text x="{left + 27}" y="{top}">{_text(name)}</text>'
        )
        left += int(needed) + 12
    return "".join(parts), top + 8


def _panel(panel: Panel, names: Sequence[str], x: Axis, y: Axis) -> str:
    parts = [f'<text class="title" y="-10">{_text(panel.title)}</text>']
    for value, label in y.ticks:
        at = HEIGHT * (1 - y.place(value))
        parts.append(f'<path class="grid" d="M0 {at:.1f}h{WIDTH}"/>')
        parts.append(f'<text class="soft" x="-5" y="{at + 4:.1f}" text-anchor="end">{_text(label)}</text>')
    for value, label in x.ticks:
        at = WIDTH * x.place(value)
        parts.append(f'<path class="grid" d="M{at:.1f} 0v{HEIGHT}"/>')
        parts.append(
            f'<text class="soft" x="{at:.1f}" y="{HEIGHT + 15}" text-anchor="middle">{_text(label)}</text>'
        )
    middle = f'x="{WIDTH / 2}" y="{HEIGHT + 31}" text-anchor="middle"'
    parts.append(f'<text class="soft" {middle}>{_text(x.label)}</text>')
    for name, points in panel.lines.items():
        placed = [(WIDTH * x.place(a), HEIGHT * (1 - y.place(b))) for a, b in points]
        stroke = _stroke(names.index(name), name)
        line = "L".join(f"{a:.1f} {b:.1f}" for a, b in placed)
        parts.append(f'<path d="M{line}" {stroke}/>')
        colour = COLOURS[names.index(name) % len(COLOURS)]
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4" fill="{colour}"/>' for a, b in placed]
    return "".join(parts)


def _stroke(number: int, name: str) -> str:
    # Dashes of two coinciding rings alternate, so that both are visible.
    offset = 5 * (number % 2)
    dashed = f' stroke-dasharray="5 5" stroke-dashoffset="{offset}"' if name.startswith("ring") else ""
    return f'fill="none" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="1.8"{dashed}'


def _text(text: str) -> str:
    return html.escape(text)
