"""The pictures of README, of docs/library.md and of docs/concepts/pictures.md.

`python docs/pictures.py` writes them, and tests compare the files with what is drawn.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import drawing as d
import numpy as np
from concept_pictures import CONCEPTS

import attnspan
from attnspan import library
from attnspan.masks.picture import svg
from attnspan_lab.bench.statistics import Interval
from attnspan_lab.console import ratio_digits
from attnspan_lab.files import read_json

IMAGES = Path(__file__).parent / "images"
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


# README's pictures.

_OFFSETS, _TILE = [0, 10, 22, 32], 4


def spans_picture() -> str:
    """A mask, its spans, and the tiles that a kernel visits."""
    spans = (attnspan.causal() & attnspan.documents(_OFFSETS)).spans(32, 32)
    queries = [0, 1, 9, 10, 11, 21, 22, 31]
    lines = [
        d.label(0, 14 + 25 * n, f"query {i} sees keys")
        + d.label(128, 14 + 25 * n, d.interval(spans.bounds[0, 0, i, 0]), bold=True)
        for n, i in enumerate(queries)
    ]
    states = spans.block_states(_TILE, _TILE)[0, 0]
    visits = np.array([d.GREY, d.PALE, d.BLUE])[states]
    pairs = d.grid(d.colored(spans.dense()[0, 0]), 7, step=8, title=f"causal() & documents({_OFFSETS})")
    return d.card(
        790,
        370,
        d.at(44, 62, pairs),
        d.at(44, 310, d.label(0, 0, "the mask: which keys a query sees")),
        d.at(320, 62, d.label(0, -33, "its spans: an int32 tensor", bold=True), *lines),
        d.at(320, 310, d.label(0, 0, "8 bytes for each query and span")),
        d.at(556, 62, d.grid(visits, 7 * _TILE, scale=_TILE, title="tiles that a kernel visits")),
        d.at(556, 300, d.legend_of_tiles(states)),
    )


_MEASURED = "zen4-documents-avx512.json.gz"
_PEERS = {"sdpa-per-document": "SDPA, a call per document", "sdpa-dense-mask": "SDPA, dense mask"}
_WORKLOADS = {
    "documents-8": "8 documents",
    "documents-32": "32 documents",
    "documents-256": "256 documents",
    "documents-corpus": "documents as long as the files of a corpus",
}
_LEFT, _RIGHT, _MOST = 200, 330, 200.0
#: As `attnspan bench --width`.
_UNSURE = 0.04


def bars_picture() -> str:
    """Speedups over SDPA for packed documents, on a logarithmic axis from 1."""
    found = read_json(RESULTS / _MEASURED)
    cells = {x["workload"]["name"]: x for x in found["cells"] if x["mode"] == "forward"}
    body, y = [], 82
    for workload, title in _WORKLOADS.items():
        y += 34
        body.append(d.label(20, y, title, bold=True))
        runs = {run["peer"]: run for run in cells[workload]["runs"]}
        for peer, name in _PEERS.items():
            y += 21
            body.append(d.label(_LEFT - 10, y, name, anchor="end"))
            body.append(d.at(_LEFT, y, _bar(runs[peer]["ratio"])))
    about = found["environment"]
    axis = [
        d.line(_reach(x), 92, _reach(x), y + 8, color=d.GREY)
        + d.label(_reach(x), y + 22, f"{x}x", anchor="middle")
        for x in (1, 2, 5, 10, 20, 50, 100)
    ]
    version = about["versions"]["torch"].partition("+")[0]
    return d.card(
        600,
        y + 58,
        d.label(20, 26, "Packed documents, 8,192 tokens, 8 heads of 64, causal, forward, float32", bold=True),
        d.label(20, 46, f"AMD EPYC (Zen 4), {about['cores']} cores, AVX-512, PyTorch {version}"),
        d.label(20, 64, "Speedup of attnspan over SDPA: time of SDPA / time of attnspan"),
        d.label(20, 82, f"~ marks a speedup whose interval is wider than {100 * _UNSURE:.0f} % of it"),
        d.at(_LEFT, 0, *axis, d.label(0, y + 42, "speedup of attnspan over SDPA, log scale")),
        *body,
    )


def _reach(speedup: float) -> float:
    return max(2.0, _RIGHT * math.log(speedup) / math.log(_MOST)) if speedup > 1 else 0.0


def _bar(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return d.label(2, 0, "not timed: its result differs from the others")
    speedup = Interval(**ratio)
    mark = " ~" if speedup.width > _UNSURE else ""
    reach, shown = _reach(speedup.median), f"{ratio_digits(speedup.median)}x{mark}"
    return d.rect(0, -11, reach, 15, d.BLUE) + d.label(reach + 6, 0, shown, bold=True)


README = {"spans": spans_picture, "packed-bars": bars_picture}


def main() -> None:
    """Write all pictures."""
    drawn = {name: picture() for name, picture in README.items()}
    drawn |= {f"library/{name}": draw(name) for name in GALLERY}
    drawn |= {f"concepts/{name}": picture() for name, picture in CONCEPTS.items()}
    for name, text in drawn.items():
        path = IMAGES / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
