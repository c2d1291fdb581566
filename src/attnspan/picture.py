"""Pictures of masks: half-blocks in a terminal, runs of keys as shapes in a notebook.

A picture that fits shows every pair. A larger one shows, per cell, the visible fraction of the pairs behind
it.
"""

from __future__ import annotations

import html
import sys
from itertools import pairwise
from typing import Any, TextIO

import numpy as np

from ._intervals import sweep
from .arrays import NUMPY, arrays_for
from .errors import OptionError, ShapeError
from .spans import Spans

__all__ = ["show", "svg", "svg_of_mask", "text"]

_HALVES = np.array([" ", "▀", "▄", "█"])
_SHADES = np.array([" ", "░", "▒", "▓", "█"])
_EXACT = 256
"""Rows or keys up to which a notebook picture shows every pair."""


def show(
    mask: Any,
    q_len: int,
    k_len: int,
    *,
    at: tuple[int, int] = (0, 0),
    width: int = 64,
    height: int = 32,
    file: TextIO | None = None,
    **options: Any,
) -> None:
    """Print a picture of a mask.

    Args:
        mask: a mask expression.
        q_len, k_len: rows and keys of the problem.
        at: batch row and head to draw.
        width, height: characters at most, without the frame. A character is one key by two rows, or a larger
            cell.
        file: where to; default standard output.
        **options: `batch`, `heads`, `q_index`, `k_index` of `Mask.spans`.

    Raises:
        OptionError: for illegal spans, or sizes below 1.

    Example:
        >>> from attnspan import causal
        >>> show(causal(), 4, 4)
        causal()
          key 0
        query┌────┐
            0│█▄  │
            2│███▄│
             └────┘
        4 queries x 4 keys, R = 1, 62.5 % visible
    """
    spans = mask.spans(q_len, k_len, **options)
    print(repr(mask), text(spans, at=at, width=width, height=height), sep="\n", file=file or sys.stdout)


def text(spans: Spans, *, at: tuple[int, int] = (0, 0), width: int = 64, height: int = 32) -> str:
    """The picture of `show`, without its title.

    Args:
        spans: a lowered mask.
        at, width, height: as in `show`.

    Returns:
        Lines of text.

    Raises:
        OptionError: for illegal spans, or sizes below 1.

    Example:
        >>> from attnspan import window
        >>> print(text(window(0).spans(2, 2)))
          key 0
        query┌──┐
            0│▀▄│
             └──┘
        2 queries x 2 keys, R = 1, 50.0 % visible
    """
    if width < 1 or height < 1:
        raise OptionError(
            "picture",
            expected="width and height of at least 1",
            got=f"{width}, {height}",
            remedy="Leave them out",
        )
    plane = _plane(spans, at)
    scale = max(-(-plane.k_len // width), -(-plane.q_len // (2 * height)), 1)
    if scale == 1:
        dense = np.pad(plane.dense()[0, 0], ((0, plane.q_len % 2), (0, 0))).astype(int)
        cells = _HALVES[dense[::2] + 2 * dense[1::2]]
    else:
        cells = _SHADES[_shade(_coverage(plane, 2 * scale, scale), len(_SHADES) - 1)]
    lines = ["".join(row) for row in cells]
    ticks = "".join(str(x * scale).ljust(8) for x in range(0, max(cells.shape[1], 1), 8))
    margin = max(len("query"), len(str(plane.q_len)))
    numbers = [
        str(2 * scale * i) if i % (1 if len(lines) <= 4 else 4) == 0 else "" for i in range(len(lines))
    ]
    across = "─" * cells.shape[1]
    picture = [
        f"{'key':>{margin}} {ticks}".rstrip(),
        f"{'query':>{margin}}┌{across}┐",
        *(f"{number:>{margin}}│{line}│" for number, line in zip(numbers, lines, strict=True)),
        f"{'':>{margin}}└{across}┘",
        _caption(spans, plane) + (f", a character is {2 * scale} x {scale}" if scale > 1 else ""),
    ]
    return "\n".join(picture)


def svg(spans: Spans, *, title: str = "", at: tuple[int, int] = (0, 0), size: int = 320) -> str:
    """The picture as a stand-alone SVG; O(q_len * R) shapes, and no more than a small number of cells for
    long masks.

    Args:
        spans: a lowered mask.
        title: a line above the picture.
        at: batch row and head to draw.
        size: pixels of the longer side.

    Returns:
        The SVG element.

    Raises:
        OptionError: for illegal spans.

    Example:
        >>> from attnspan import causal
        >>> svg(causal().spans(2, 2)).count("<path")
        2
    """
    plane = _plane(spans, at)
    scale = -(-max(plane.q_len, plane.k_len, 1) // _EXACT)
    rows, columns = (max(-(-n // scale), 1) for n in (plane.q_len, plane.k_len))
    cell = size / max(rows, columns)
    shapes = _exact_shapes(plane) if scale == 1 else _shaded_shapes(plane, scale)
    if scale == 1 and cell >= 5:
        shapes.append(_grid(rows, columns))
    left, top = 78, 44
    wide, tall = columns * cell, rows * cell
    caption = _caption(spans, plane)
    # Wide enough for the caption in letters of about 6 pixels, and for a title in letters of about 8.
    total = max(left + wide + 16, left + 8 * len(title) + 8, left + 6 * len(caption))
    full = top + tall + 34
    # A card of its own: the picture of an <img> does not know whether the page around it is dark.
    card = f'<rect width="{total:.0f}" height="{full:.0f}" rx="6" fill="#ffffff"/>'
    ink = 'fill="#1f2328" font-family="system-ui, sans-serif" font-size="11"'
    heading = f'font-size="13" font-weight="600">{html.escape(title)}</text>'
    labels = _labels(plane, scale, cell, left, top)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:.0f} {full:.0f}" '
        f'width="{total:.0f}" height="{full:.0f}">{card}<g {ink}><text x="{left}" y="16" {heading}{labels}'
        f'<text x="{left}" y="{full - 12:.0f}" opacity="0.75">{caption}</text></g>'
        f'<g transform="translate({left} {top}) scale({cell:.6g})" shape-rendering="crispEdges">'
        f'<rect width="{columns}" height="{rows}" fill="#8a94a6" fill-opacity="0.16"/>'
        f"{''.join(shapes)}</g></svg>"
    )


def svg_of_mask(mask: Any) -> str | None:
    """A small picture of a mask for a notebook, at the sizes its arrays imply, else 64 by 64.

    Returns:
        None where the arrays need sizes that a notebook cannot know (batch rows, say); it then shows the
        expression.

    Example:
        >>> from attnspan import causal
        >>> svg_of_mask(causal())[:4]
        '<svg'
    """
    leaves = list(mask._leaves())
    k_len = next((n for n in (leaf._key_len() for leaf in leaves) if n is not None), None)
    q_len = next((n for n in (leaf._row_len() for leaf in leaves) if n is not None), k_len)
    q_len = q_len if q_len is not None else 64
    try:
        return svg(mask.spans(q_len, q_len if k_len is None else k_len), title=repr(mask))
    except (OptionError, ShapeError):
        return None


def _plane(spans: Spans, at: tuple[int, int]) -> Spans:
    spans._require_values("show")
    """One batch row and head, as NumPy, checked."""
    b, h = (min(x, n - 1) for x, n in zip(at, spans.bounds.shape[:2], strict=True))
    bounds = arrays_for([spans.bounds]).to_numpy(spans.bounds[b : b + 1, h : h + 1])
    return Spans(bounds, spans.k_len).validate()


def _caption(spans: Spans, plane: Spans) -> str:
    visible = f"{100 * plane.coverage():.1f} % visible"
    return f"{plane.q_len} queries x {plane.k_len} keys, R = {spans.runs}, {visible}"


def _coverage(plane: Spans, q_block: int, k_block: int) -> np.ndarray[Any, Any]:
    pairs = plane.block_pairs(q_block, k_block)[0, 0]
    rows = np.minimum(plane.q_len - np.arange(pairs.shape[0]) * q_block, q_block)
    keys = np.minimum(plane.k_len - np.arange(pairs.shape[1]) * k_block, k_block)
    return np.asarray(pairs / np.outer(rows, keys))


def _shade(coverage: np.ndarray[Any, Any], full: int) -> np.ndarray[Any, Any]:
    """0 for nothing at all, `full` for everything, and the steps between in even parts."""
    between = 1 + np.floor(coverage * (full - 1)).astype(int)
    return np.where(coverage == 0, 0, np.where(coverage == 1, full, np.minimum(between, full - 1)))


def _rectangle(row: int, rows: int, lo: int, hi: int) -> str:
    return f"M{lo} {row}h{hi - lo}v{rows}h{lo - hi}z"


def _exact_shapes(plane: Spans) -> list[str]:
    """One path; equal neighbouring rows are drawn as one."""
    lo, hi = plane.bounds[0, 0, ..., 0], plane.bounds[0, 0, ..., 1]
    lo, hi = sweep(NUMPY, lo, hi, depth=1, count=lo.shape[1], top=plane.k_len)
    changes = np.flatnonzero(((lo[1:] != lo[:-1]) | (hi[1:] != hi[:-1])).any(axis=1)) + 1
    starts = [0, *changes.tolist()] if len(lo) else []
    stops = [*starts[1:], len(lo)]
    path = [
        _rectangle(i, j - i, int(a), int(b))
        for i, j in zip(starts, stops, strict=True)
        for a, b in zip(lo[i], hi[i], strict=True)
        if a < b
    ]
    return [f'<path fill="#4263eb" d="{"".join(path)}"/>']


def _shaded_shapes(plane: Spans, scale: int) -> list[str]:
    """One path for each of ten shades."""
    shades = _shade(_coverage(plane, scale, scale), 10)
    paths: dict[int, list[str]] = {}
    for i, row in enumerate(shades):
        edges = [0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), len(row)]
        for lo, hi in pairwise(edges):
            if row[lo] > 0:
                paths.setdefault(int(row[lo]), []).append(_rectangle(i, 1, lo, hi))
    return [
        f'<path fill="#4263eb" fill-opacity="{shade / 10}" d="{"".join(path)}"/>'
        for shade, path in sorted(paths.items())
    ]


def _grid(rows: int, columns: int) -> str:
    lines = [f"M0 {i}H{columns}" for i in range(1, rows)] + [f"M{j} 0V{rows}" for j in range(1, columns)]
    return f'<path stroke="#fff" stroke-opacity="0.45" stroke-width="0.08" d="{"".join(lines)}"/>'


def _labels(plane: Spans, scale: int, cell: float, left: int, top: int) -> str:
    """Numbers of a few keys above and of a few rows beside the picture."""

    def ticks(n: int) -> list[int]:
        step = 1
        while n / step > 5:
            step *= 2
        return list(range(0, n, step))

    def at(number: int) -> float:
        return (number + 0.5 * scale) * cell / scale

    keys = "".join(
        f'<text x="{left + at(j):.1f}" y="{top - 6}" text-anchor="middle">{j}</text>'
        for j in ticks(plane.k_len)
    )
    rows = "".join(
        f'<text x="{left - 6}" y="{top + at(i) + 4:.1f}" text-anchor="end">{i}</text>'
        for i in ticks(plane.q_len)
    )
    corner = f'<text x="{left - 6}" y="{top - 6}" text-anchor="end" opacity="0.75">query \\ key</text>'
    return corner + keys + rows
