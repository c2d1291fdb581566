"""The pictures of README and docs/library.md, which `python docs/pictures.py` writes, and tests compare."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

import attnspan
from attnspan import library
from attnspan.masks.picture import svg
from attnspan_lab.console import ratio_digits
from attnspan_lab.files import read_json

IMAGES = Path(__file__).parent / "images"
FOLDER = IMAGES / "library"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

GALLERY: dict[str, tuple[str, int, int]] = {
    "dilated": ("dilated(8, 4)", 24, 24),
    "global_sliding": ("global_sliding(2, 3)", 24, 24),
    "prefix_lm": ("prefix_lm(8)", 24, 24),
    "shared_prefix": ("shared_prefix([0, 8, 14, 19, 24], [0, 0, 0, 0])", 24, 24),
    "block_causal": ("block_causal(6)", 24, 24),
    "block_diffusion": ("block_diffusion(12, 3)", 24, 24),
    "draft_blocks": ("draft_blocks(9, 5)", 24, 24),
    "tree": ("tree([-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5], prefix=7)", 11, 18),
    "natten": ("natten((5, 5), (3, 3))", 25, 25),
    "sasa": ("sasa((5, 5), 1)", 25, 25),
    "sta": ("sta((6, 6), (4, 4), (2, 2), text=4)", 40, 40),
    "tiled_natten": ("tiled_natten((6, 6), (3, 3), (3, 3))", 36, 36),
    "morton_natten": ("morton_natten((8, 8), (3, 3))", 64, 64),
    "spatial_heads": ("spatial_heads(4, 5, 1)", 24, 24),
    "temporal_heads": ("temporal_heads(4, 4, 5, 1.6)", 24, 24),
    "selected_blocks": (
        "selected_blocks(np.array([[[[0, 3], [1, 5], [2, 0], [3, 4], [4, 1], [5, 2]]]]), 4)",
        24,
        24,
    ),
    "flamingo": ("flamingo([2, 7, 13], 6)", 20, 18),
    "vision_cross_attention": ("vision_cross_attention(np.array([[2, 12], [7, 12], [13, 20]]), 6)", 20, 18),
    "per_row": ("per_row([causal(), key_padding(9, 'left')])", 16, 16),
    "per_head": ("per_head([causal() & window(4), causal()])", 16, 16),
    "per_document": ("per_document(global_sliding(1, 2), [0, 7, 16, 24])", 24, 24),
    "batchify": ("batchify(prefix_lm(3), 8)", 24, 24),
    "reordered": ("reordered(causal(), strided_order(24, 3))", 24, 24),
}
"""For each mask: how it is made, and the rows and keys of its picture."""

_SEVERAL = {"per_row": ("batch", "batch row"), "per_head": ("heads", "head")}


def mask_of(name: str) -> attnspan.Mask:
    """The mask of a picture, from the text that the page shows."""
    names: dict[str, Any] = {"np": np, **vars(attnspan), **vars(library)}
    return eval(GALLERY[name][0], names)  # type: ignore[no-any-return]


def draw(name: str) -> str:
    """The picture; of a mixture, its two masks side by side."""
    _, rows, keys = GALLERY[name]
    if name not in _SEVERAL:
        return svg(mask_of(name).spans(rows, keys), title=name, size=220) + "\n"
    axis, shown = _SEVERAL[name]
    spans = mask_of(name).spans(rows, keys, **{axis: 2})
    ends = ((0, 0), (1, 0) if axis == "batch" else (0, 1))
    return _beside([svg(spans, title=f"{name}: {shown} {max(at)}", at=at, size=180) for at in ends]) + "\n"


def _beside(pictures: list[str]) -> str:
    widths = [int(re.findall(r'^<svg [^>]* width="(\d+)"', picture)[0]) for picture in pictures]
    heights = [int(re.findall(r'^<svg [^>]* height="(\d+)"', picture)[0]) for picture in pictures]
    starts = np.cumsum([0, *widths[:-1]])
    inner = [p.replace("<svg ", f'<svg x="{x}" ', 1) for p, x in zip(pictures, starts, strict=True)]
    size = f'viewBox="0 0 {sum(widths)} {max(heights)}" width="{sum(widths)}" height="{max(heights)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(inner)}</svg>'


# README's first picture.

_INK = 'fill="#1f2328" font-family="system-ui, sans-serif" font-size="12"'
_BLUE, _PALE, _GREY = "#4263eb", "#b4c1fa", "#e9ebef"
_OFFSETS, _TILE, _CELL = [0, 10, 22, 32], 4, 7


def spans_picture() -> str:
    """A mask, its spans, and the tiles that a kernel visits."""
    spans = (attnspan.causal() & attnspan.documents(_OFFSETS)).spans(32, 32)
    seen, size = spans.dense()[0, 0], 32 * _CELL
    pairs = [_square(j, i, 1, _BLUE if seen[i, j] else _GREY) for i in range(32) for j in range(32)]
    blocks = seen.reshape(32 // _TILE, _TILE, 32 // _TILE, _TILE).mean((1, 3))
    tiles = [
        _square(j * _TILE, i * _TILE, _TILE, _GREY if share == 0 else _BLUE if share == 1 else _PALE)
        for (i, j), share in np.ndenumerate(blocks)
    ]
    rows = [0, 1, 9, 10, 11, 21, 22, 31]
    ends = [spans.bounds[0, 0, i, 0].tolist() for i in rows]
    lines = [
        f'<text x="0" y="{14 + 25 * n}">query {i:>2} sees keys</text>'
        f'<text x="120" y="{14 + 25 * n}" font-weight="600">[{lo}, {hi})</text>'
        for n, (i, (lo, hi)) in enumerate(zip(rows, ends, strict=True))
    ]
    empty, whole = int((blocks == 0).sum()), int((blocks == 1).sum())
    keys = (
        (_GREY, f"{empty} of {blocks.size} tiles skipped"),
        (_BLUE, f"{whole} without mask arithmetic"),
        (_PALE, f"{blocks.size - empty - whole} at an edge"),
    )
    legend = [
        f'<rect x="0" y="{size + 14 + 18 * n}" width="11" height="11" fill="{color}"/>'
        f'<text x="17" y="{size + 24 + 18 * n}">{text}</text>'
        for n, (color, text) in enumerate(keys)
    ]
    panels = (
        (
            "causal() &amp; documents([0, 10, 22, 32])",
            [*pairs, '<text x="0" y="248">the mask: who sees whom</text>'],
        ),
        (
            "its spans: an int32 tensor",
            [*lines, '<text x="0" y="248">8 bytes for a row and span</text>'],
        ),
        ("what a kernel visits", tiles + legend),
    )
    starts = (20, 290, 530)
    body = [
        f'<g transform="translate({x} 52)">{_text(0, -16, title, bold=True)}{"".join(parts)}</g>'
        for x, (title, parts) in zip(starts, panels, strict=True)
    ]
    return _card(770, 52 + size + 74, body)


def _square(x: int, y: int, side: int, color: str) -> str:
    at = f'x="{x * _CELL}" y="{y * _CELL}" width="{side * _CELL - 1}" height="{side * _CELL - 1}"'
    return f'<rect {at} fill="{color}"/>'


def _card(width: int, height: int, body: list[str]) -> str:
    # A card of its own: the picture of an <img> does not know whether the page around it is dark.
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    card = f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{card}<g {_INK}>{"".join(body)}</g></svg>\n'


# README's second picture.

_MEASURED = "zen4-documents-avx512.json.gz"
_PEERS = {"sdpa-per-document": "a call per document", "sdpa-dense-mask": "dense mask"}
_WORKLOADS = {
    "documents-8": "8 documents",
    "documents-32": "32 documents",
    "documents-256": "256 documents",
    "documents-corpus": "documents as long as a corpus's files",
}
_TICKS, _MOST, _LEFT, _WIDE = (1, 10, 100), 200.0, 200, 330


def bars_picture() -> str:
    """Speedup over SDPA for packed documents, on a logarithmic axis from 1."""
    cells = read_json(RESULTS / _MEASURED)["cells"]
    found = {x["workload"]["name"]: x for x in cells if x["mode"] == "forward"}
    body = [
        _text(20, 26, "Packed documents, causal, forward, float32: speedup over SDPA", bold=True),
        _text(20, 46, "two cores of an AMD EPYC (Zen 4), AVX-512, torch 2.13"),
        _text(20, 64, "8,192 tokens, 8 heads of 64. ~ marks a wide interval"),
    ]
    bars, y = [], 68
    for workload, title in _WORKLOADS.items():
        y += 30
        bars.append(_text(20, y, title, bold=True))
        runs = {run["peer"]: run for run in found[workload]["runs"]}
        for peer, name in _PEERS.items():
            y += 21
            ratio, noisy = runs[peer]["ratio"]["median"], " ~" if runs[peer]["noisy"] else ""
            end = _place(ratio)
            bars.append(_text(_LEFT - 10, y, f"SDPA, {name}", anchor="end"))
            bars.append(
                f'<rect x="{_LEFT}" y="{y - 11}" width="{end - _LEFT:.1f}" height="15" fill="{_BLUE}"/>'
            )
            bars.append(_text(round(end + 6, 1), y, f"{ratio_digits(ratio)}x{noisy}", bold=True))
    bottom = y + 14
    for tick in _TICKS:
        x = round(_place(tick), 1)
        body.append(f'<path d="M{x:g} 80V{bottom}" stroke="{_GREY}"/>')
        body.append(_text(x, bottom + 16, f"{tick}x", anchor="middle"))
    body.append(_text(_LEFT + _WIDE / 2, bottom + 34, "speedup (logarithmic axis)", anchor="middle"))
    return _card(600, bottom + 48, body + bars)


def _place(ratio: float) -> float:
    """Where a ratio is on the axis."""
    return _LEFT + _WIDE * math.log(ratio) / math.log(_MOST)


def _text(x: float, y: float, text: str, *, bold: bool = False, anchor: str = "start") -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{text}</text>'


README = {"spans": spans_picture, "packed-bars": bars_picture}


def main() -> None:
    """Write all pictures."""
    for name, picture in README.items():
        (IMAGES / f"{name}.svg").write_text(picture(), encoding="utf-8")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in GALLERY:
        (FOLDER / f"{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main()
