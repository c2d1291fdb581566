"""The pictures of docs/concepts/pictures.md. They are as wide as the text on a phone."""

from __future__ import annotations

from typing import Any

import drawing as d
import numpy as np

import attnspan
from attnspan.parallel import Layout

_WIDE, _BESIDE = 350, 108
_RANKS = ((d.BLUE, d.PALE), (d.ORANGE, d.PEACH))


def _seen(mask: attnspan.Mask, q_len: int, k_len: int, **index: Any) -> Any:
    return mask.spans(q_len, k_len, **index).dense()[0, 0]


def dense_picture() -> str:
    """A causal mask as ones and zeros."""
    seen = _seen(attnspan.causal(), 8, 8)
    legend = d.legend((d.BLUE, "1: the query sees the key"), (d.GREY, "0: the key is hidden from the query"))
    matrix = d.grid(d.colored(seen), 24, digits=seen, title="causal()")
    return d.card(_WIDE, 316, d.at(50, 62, matrix), d.at(50, 270, legend))


def documents_picture() -> str:
    """How much of a dense mask packed documents use."""
    text = "causal() & documents([0, 5, 11, 16])"
    seen = _seen(attnspan.parse(text), 16, 16)
    ones, zeros = int(seen.sum()), int((~seen).sum())
    legend = d.legend((d.BLUE, f"{ones} of {seen.size} entries are 1"), (d.GREY, f"{zeros} entries are 0"))
    matrix = d.grid(d.colored(seen), 12, step=5, title=text)
    return d.card(_WIDE, 316, d.at(50, 62, matrix), d.at(50, 270, legend))


def query_picture() -> str:
    """The keys that one query sees are one interval."""
    query, size, text = 6, 24, "causal() & documents([0, 3, 8])"
    spans = attnspan.parse(text).spans(8, 8)
    seen, (lo, hi) = spans.dense()[0, 0], spans.bounds[0, 0, query, 0].tolist()
    colors = d.colored(seen, d.PALE)
    colors[query] = d.colored(seen[query])
    ends = [
        d.line(x * size - 0.5, query * size, x * size - 0.5, 8 * size + 8, stroke_dasharray="3 2")
        + d.label(x * size, 8 * size + 20, f"{name} = {x}", anchor="middle")
        for name, x in (("lo", lo), ("hi", hi))
    ]
    matrix = d.grid(colors, size, digits=seen, title=text)
    said = d.label(0, 8 * size + 42, f"query {query} sees the keys [{lo}, {hi})", bold=True)
    return d.card(_WIDE, 316, d.at(50, 62, matrix, *ends, said))


def _with_bounds(text: str) -> str:
    """A mask, and next to each query its spans, in the colors of the squares."""
    size, inks = 20, (d.BLUE, d.ORANGE)
    spans = attnspan.parse(text).spans(8, 8)
    seen, table = spans.dense()[0, 0], []
    colors = d.colored(seen)
    for (i, r), lo in np.ndenumerate(spans.bounds[0, 0, :, :, 0]):
        hi = spans.bounds[0, 0, i, r, 1]
        colors[i, lo:hi] = inks[r]
        ink = inks[r] if lo < hi else d.DIM
        y = (i + 0.5) * size + 4
        table.append(d.label(22 + 64 * r, y, d.interval((lo, hi)), anchor="middle", fill=ink))
    table += [d.label(22 + 64 * r, -4, f"span {r}", anchor="middle", **d.SMALL) for r in range(spans.runs)]
    shape = d.label(0, 8 * size + 20, f"bounds.shape = {tuple(spans.bounds.shape)}", bold=True)
    axes = d.label(0, 8 * size + 40, "(B|1, H|1, q_len, R, 2)")
    matrix = d.grid(colors, size, digits=seen, title=text)
    return d.card(_WIDE, 274, d.at(44, 62, matrix, shape, axes), d.at(220, 62, *table))


def bounds_picture() -> str:
    """The spans of all queries are one tensor."""
    return _with_bounds("causal() & documents([0, 3, 8])")


def two_spans_picture() -> str:
    """A window and a global key give a query two spans."""
    return _with_bounds("causal() & (window(2) | global_keys(1))")


def _beside(matrices: dict[str, Any], size: float, *, digits: bool = False) -> list[str]:
    """Three matrices side by side. The first one names the queries."""
    panels = []
    for n, (title, seen) in enumerate(matrices.items()):
        options = {"title": title, "digits": seen if digits else None, "queries": "" if n else "← queries"}
        panels.append(d.at(34 + _BESIDE * n, 62, d.grid(d.colored(seen), size, **options)))
    return panels


def _combined(sign: str, a: str, b: str) -> str:
    """Two masks, given as text, and their combination by `&` or `|`."""
    texts = {"A": a, "B": b, f"A {sign} B": f"{a} {sign} {b}"}
    spans = {name: attnspan.parse(text).spans(6, 6) for name, text in texts.items()}
    panels = _beside({name: x.dense()[0, 0] for name, x in spans.items()}, 13)
    style: dict[str, object] = {"anchor": "middle", "bold": True, "font_size": 15}
    signs = [d.label(121 + _BESIDE * n, 106, x, **style) for n, x in enumerate((sign, "="))]
    lines = [
        d.label(34, 164 + 19 * n, f"{name}: {texts[name]}, R = {x.runs}")
        for n, (name, x) in enumerate(spans.items())
    ]
    return d.card(_WIDE, 216, *panels, *signs, *lines)


def and_picture() -> str:
    """`&` keeps the pairs that both masks show."""
    return _combined("&", "causal()", "documents([0, 2, 6])")


def or_picture() -> str:
    """`|` keeps the pairs that at least one mask shows."""
    return _combined("|", "window(1)", "global_keys(1)")


def tiles_picture() -> str:
    """The tiles that a kernel skips, computes, or computes and masks."""
    size, tile, text = 13, 4, "causal() & documents([0, 9, 16])"
    spans = attnspan.parse(text).spans(16, 16)
    seen, states = spans.dense()[0, 0], spans.block_states(tile, tile)[0, 0]
    colors = np.array([d.GREY, d.PALE, d.BLUE])[states.repeat(tile, 0).repeat(tile, 1)]
    colors[seen] = d.BLUE
    edges = [n * tile * size - 0.5 for n in range(5)]
    lines = [d.line(0, x, edges[-1], x) + d.line(x, 0, x, edges[-1]) for x in edges]
    matrix = d.grid(colors, size, step=tile, title=text)
    return d.card(_WIDE, 346, d.at(50, 62, matrix, *lines), d.at(50, 284, d.legend_of_tiles(states)))


def keys_picture() -> str:
    """A span stays one span if some of the keys are dropped."""
    lo, hi, kept, size = 2, 6, [0, 2, 3, 5, 7], 34
    spans = attnspan.spans(np.array([lo, hi], np.int32).reshape(1, 1, 1, 1, 2)).spans(1, 8)
    some = spans.take_keys(np.array(kept))
    whole, part = d.colored(spans.dense()[0, 0]), d.colored(some.dense()[0, 0])
    lost = [
        d.rect(j * size, 0, size - 1, size - 1, "#ffffff", fill_opacity=0.75)
        for j in range(8)
        if j not in kept
    ]
    links = [
        d.line((j + 0.5) * size, size + 2, (n + 0.5) * size, 90, d.DIM, stroke_dasharray="3 2")
        for n, j in enumerate(kept)
    ]
    before = d.grid(
        whole, size, queries="query", title=f"all {len(whole[0])} keys: span {d.interval((lo, hi))}"
    )
    after = d.grid(part, size, queries="query")
    said = d.label(0, 54, f"{len(kept)} kept keys: span {d.interval(some.bounds[0, 0, 0, 0])}", bold=True)
    why = d.label(0, 73, f"= [rank({lo}), rank({hi}))")
    return d.card(_WIDE, 268, d.at(50, 62, before, *lost, *links), d.at(50, 182, after, said, why))


def ranks_picture() -> str:
    """The queries of two ranks, and the keys that each rank needs."""
    size, text = 16, "causal() & documents([0, 7, 12])"
    mask = attnspan.parse(text)
    layout, seen = Layout.of(mask, q_len=12, ranks=2), _seen(mask, 12, 12)
    owner = np.isin(np.arange(12), layout.rows[1, 0]).astype(int)
    inks, pales = np.array(_RANKS).T
    parts = [d.grid(np.where(seen, inks[owner][:, None], d.GREY), size, title=text)]
    for i, rank in enumerate(owner):
        y = (i + 0.5) * size + 4
        parts.append(d.label(12 * size + 8, y, f"rank {rank}", fill=inks[rank], **d.SMALL))
    parts.append(d.label(0, 12 * size + 24, "keys that each rank needs (pale: fetched)"))
    for rank in range(2):
        needed, own = seen[owner == rank].any(0), owner == rank
        strip = np.where(needed, np.where(own, inks[rank], pales[rank]), d.GREY)
        said = d.label(12 * size + 8, 12, f"rank {rank}: {(needed & ~own).sum()} fetched", **d.SMALL)
        parts.append(d.at(0, 12 * size + 34 + 22 * rank, d.cells(strip[None], size), said))
    return d.card(_WIDE, 342, d.at(44, 62, *parts))


def alignment_picture() -> str:
    """Three alignments of four queries with six keys."""
    causal = attnspan.causal()
    found = {
        "top-left": _seen(causal, 4, 6, q_index=np.arange(4)),
        "bottom-right": _seen(causal, 4, 6),
        "per document": _seen(causal & attnspan.documents([0, 2, 4], [0, 4, 6]), 4, 6),
    }
    return d.card(_WIDE, 134, *_beside(found, 14, digits=True))


CONCEPTS = {
    "dense": dense_picture,
    "documents": documents_picture,
    "query": query_picture,
    "bounds": bounds_picture,
    "two-spans": two_spans_picture,
    "and": and_picture,
    "or": or_picture,
    "tiles": tiles_picture,
    "keys": keys_picture,
    "ranks": ranks_picture,
    "alignment": alignment_picture,
}
