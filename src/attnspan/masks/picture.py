"""Pictures of masks: half-blocks in a terminal, runs of keys as shapes in a notebook.

If the mask fits, the picture shows every pair. Otherwise, a cell shows the visible fraction of its pairs.
"""

from __future__ import annotations

import html
import sys
from itertools import pairwise
from typing import Any, TextIO

import numpy as np

from attnspan.base.arrays import arrays_for
from attnspan.errors import OptionError, ShapeError, expect

from .bounds import Spans

_HALVES = np.array([" ", "▀", "▄", "█"])
_SHADES = np.array([" ", "░", "▒", "▓", "█"])
_EXACT = 256
"""The most queries or keys for which a notebook picture shows every pair."""


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
        mask: A mask expression.
        q_len, k_len: Numbers of queries and keys.
        at: Batch element and head to draw.
        width, height: The most characters inside the frame. A character shows one key and two queries, or a
            larger cell.
        file: File to print to. Default: standard output.
        **options: `batch`, `heads`, `q_index`, `k_index` of `Mask.spans`.

    Raises:
        OptionError: For illegal spans, or if `width` or `height` is below 1.

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
    """Draw the picture of `show` for a lowered mask, without a title.

    Example:
        >>> from attnspan import window
        >>> print(text(window(0).spans(2, 2)))
          key 0
        query┌──┐
            0│▀▄│
             └──┘
        2 queries x 2 keys, R = 1, 50.0 % visible
    """
    sizes = f"{width}, {height}"
    expect(width > 0 < height, "picture", "width and height of at least 1", sizes, "Leave them out")
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
    step = 1 if len(lines) <= 4 else 4
    numbers = ["" if i % step else str(2 * scale * i) for i in range(len(lines))]
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
    """Draw the picture as a stand-alone SVG element, of O(q_len * R) shapes or at most 256 x 256 cells.

    Args:
        spans: A lowered mask.
        title: A line above the picture.
        at: Batch element and head to draw.
        size: Length of the longer side, in pixels.

    Raises:
        OptionError: For illegal spans.

    Example:
        >>> from attnspan import causal
        >>> svg(causal().spans(2, 2)).count("<path")
        2
    """
    plane = _plane(spans, at)
    scale = -(-max(plane.q_len, plane.k_len, 1) // _EXACT)
    rows, columns = (max(-(-n // scale), 1) for n in (plane.q_len, plane.k_len))
    cell = size / max(rows, columns)
    shapes = _shapes(_shade(_coverage(plane, scale, scale), 10), exact=scale == 1)
    if scale == 1 and cell >= 5:
        grid = [f"M0 {i}H{columns}" for i in range(1, rows)] + [f"M{j} 0V{rows}" for j in range(1, columns)]
        stroke = 'stroke="#fff" stroke-opacity="0.45" stroke-width="0.08"'
        shapes.append(f'<path {stroke} d="{"".join(grid)}"/>')
    left, top = 78, 44
    wide, tall = columns * cell, rows * cell
    caption = _caption(spans, plane)
    # Wide enough for the caption in letters of about 6 pixels, and for a title in letters of about 8.
    total = max(left + wide + 16, left + 8 * len(title) + 8, left + 6 * len(caption))
    full = top + tall + 34
    # The background is opaque, because the picture of an <img> does not know whether the page is dark.
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
    """Draw a small picture of a mask for a notebook, at the sizes of its arrays, or at 64 by 64.

    The result is None if the arrays need sizes that a notebook cannot know, such as the batch size.

    Example:
        >>> from attnspan import causal
        >>> svg_of_mask(causal())[:4]
        '<svg'
    """
    try:
        return svg(mask.spans(*implied_sizes(mask)), title=repr(mask))
    except (OptionError, ShapeError):
        return None


def implied_sizes(mask: Any, q_len: int | None = None, k_len: int | None = None) -> tuple[int, int]:
    """Numbers of queries and keys of a picture: as passed, else from the mask's arrays, else 64.

    Example:
        >>> from attnspan import causal, documents
        >>> implied_sizes(documents([0, 5, 9])), implied_sizes(causal(), q_len=4)
        ((9, 9), (4, 4))
    """
    leaves = mask.leaves()
    packed = [int(leaf.cu_seqlens_q.max()) for leaf in leaves if hasattr(leaf, "cu_seqlens_q")]
    k_lens = [n for n in (k_len, *(leaf._key_len() for leaf in leaves)) if n is not None]
    q_lens = [n for n in (q_len, *(leaf._row_len() for leaf in leaves), *packed) if n is not None]
    rows = [*q_lens, *k_lens, 64][0]
    return rows, [*k_lens, rows][0]


def _plane(spans: Spans, at: tuple[int, int]) -> Spans:
    """Spans of one batch element and head, as NumPy arrays, checked."""
    spans._require_values("show")
    planes = tuple(spans.bounds.shape[:2])
    # An axis of length 1 stands for every batch element or head.
    fits = all(x >= 0 and (n == 1 or x < n) for x, n in zip(at, planes, strict=True))
    expect(fits, "at", "a batch element and a head of {}", at, "Count from 0", planes)
    b, h = (min(x, n - 1) for x, n in zip(at, planes, strict=True))
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
    """Shade of a coverage: 0 for 0, `full` for 1, and even steps between."""
    between = 1 + np.floor(coverage * (full - 1)).astype(int)
    return np.where(coverage == 0, 0, np.where(coverage == 1, full, np.minimum(between, full - 1)))


def _shapes(shades: np.ndarray[Any, Any], exact: bool) -> list[str]:
    """Draw one path for each shade. Equal neighbouring rows are joined. An exact picture has one shade."""
    paths: dict[int, list[str]] = {}
    changes = np.flatnonzero((shades[1:] != shades[:-1]).any(axis=1)) + 1
    for i, j in pairwise([0, *changes.tolist(), len(shades)]):
        row = shades[i:j][:1].ravel()
        edges = [0, *(np.flatnonzero(row[1:] != row[:-1]) + 1).tolist(), len(row)]
        for lo, hi in pairwise(edges):
            if lo < hi and row[lo] > 0:
                paths.setdefault(int(row[lo]), []).append(f"M{lo} {i}h{hi - lo}v{j - i}h{lo - hi}z")
    opacity = {shade: "" if exact else f' fill-opacity="{shade / 10}"' for shade in paths}
    return [f'<path fill="#4263eb"{opacity[x]} d="{"".join(path)}"/>' for x, path in sorted(paths.items())]


def _labels(plane: Spans, scale: int, cell: float, left: int, top: int) -> str:
    """Numbers of at most five keys above the picture, and of at most five queries to its left."""

    def ticks(n: int) -> list[tuple[int, float]]:
        step = 1
        while n / step > 5:
            step *= 2
        return [(number, (number / scale + 0.5) * cell) for number in range(0, n, step)]

    def label(x: object, y: object, anchor: str, number: int) -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{number}</text>'

    corner = f'<text x="{left - 6}" y="{top - 6}" text-anchor="end" opacity="0.75">query \\ key</text>'
    keys = [label(f"{left + at:.1f}", top - 6, "middle", j) for j, at in ticks(plane.k_len)]
    rows = [label(left - 6, f"{top + at + 4:.1f}", "end", i) for i, at in ticks(plane.q_len)]
    return "".join([corner, *keys, *rows])
