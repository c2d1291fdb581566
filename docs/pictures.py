"""The pictures of docs/library.md: `python docs/pictures.py` writes them again, and a test compares them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import attnspan
from attnspan import library
from attnspan.picture import svg

FOLDER = Path(__file__).parent / "images" / "library"

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


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in GALLERY:
        (FOLDER / f"{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main()
