"""Samples of each mask of the library, each with its definition and its R."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
from collections.abc import Callable
from typing import Any

import library_definitions as d
import numpy as np
from mask_samples import BATCH, Sample

import attnspan as a
from attnspan import library as lib

HEADS = 2
_TABLE, _ID = np.array([[2, 1, 2, 3], [0, 0, 0, 1]]), np.arange(24)


def _own(
    name: str, build: Callable[..., a.Mask], sees: Callable[..., Any], *arrays: np.ndarray, **options: Any
) -> Sample:
    """Rows that are no tokens see nothing."""
    options = {"keys": 24, "rows": None, **options}
    rows = options["keys"] if options["rows"] is None else options["rows"]
    inside = lambda b, h, i, j: 0 <= i < rows and sees(b, h, i, j)  # noqa: E731
    return Sample(name, arrays, build, inside, heads=HEADS, **options)


def _natten(note: str, canvas: tuple, kernel: tuple, runs: int = 1, text: int = 0, **options: Any) -> Sample:
    return _own(
        f"natten, {note}",
        lambda: lib.natten(canvas, kernel, text=text, **options),
        lambda b, h, i, j: d.neighbours(canvas, kernel, i, j, text, **options),
        keys=int(np.prod(canvas)) + text,
        runs=runs,
    )


def _sta(note: str, canvas: tuple, kernel: tuple, tile: tuple, runs: int = 1, text: int = 0) -> Sample:
    return _own(
        f"sta, {note}",
        lambda: lib.sta(canvas, kernel, tile, text),
        lambda b, h, i, j: d.tiles_near(canvas, kernel, tile, i, j, text),
        keys=int(np.prod(canvas)) + text,
        runs=runs,
    )


def _as_gym(note: str, n: int, kernel: int) -> Sample:
    return _own(
        f"natten, as attention-gym, {note}",
        lambda: lib.natten((n, n), kernel | 1),
        lambda b, h, i, j: d.gym_natten(n, kernel, i, j),
        keys=n * n,
        runs=kernel | 1,
    )


def _one_document(cu: np.ndarray, inner: Callable[[int, int], Any]) -> Callable[..., Any]:
    return lambda b, h, i, j: d.in_document(cu[b] if cu.ndim == 2 else cu, i, j, inner)


LIBRARY = [
    _own(
        "dilated", lambda: lib.dilated(7, 3), lambda b, h, i, j: abs(i - j) <= 7 and (i - j) % 3 == 0, runs=5
    ),
    _own(
        "dilated, causal",
        lambda: lib.dilated(6, 3, causal=True),
        lambda b, h, i, j: 0 <= i - j <= 6 and (i - j) % 3 == 0,
        runs=3,
    ),
    _own("dilated, by 1", lambda: lib.dilated(4, 1), lambda b, h, i, j: abs(i - j) <= 4),
    _own(
        "global_sliding, first tokens",
        lambda: lib.global_sliding(2, 3),
        lambda b, h, i, j: abs(i - j) <= 2 or i < 3 or j < 3,
        runs=2,
    ),
    _own(
        "global_sliding, keys only",
        lambda: lib.global_sliding(2, 3, rows=False),
        lambda b, h, i, j: abs(i - j) <= 2 or j < 3,
        runs=2,
    ),
    _own(
        "global_sliding, marked tokens",
        lambda marked: lib.global_sliding(2, marked, max_runs=2),
        lambda b, h, i, j: abs(i - j) <= 2 or d.MARKED[i] or d.MARKED[j],
        *(d.MARKED,),
        runs=3,
    ),
    _own(
        "global_sliding, marked per batch row, keys only",
        lambda marked: lib.global_sliding(2, marked, rows=False, max_runs=2),
        lambda b, h, i, j: abs(i - j) <= 2 or d.MARKED_TWO_ROWS[b][j],
        *(d.MARKED_TWO_ROWS,),
        runs=3,
    ),
    _own("prefix_lm", lambda: lib.prefix_lm(7), lambda b, h, i, j: j <= i or j < 7),
    _own(
        "prefix_lm, per batch row",
        lib.prefix_lm,
        lambda b, h, i, j: j <= i or j < (4, 30)[b],
        np.array([4, 30]),
    ),
    _own(
        "prefix_lm, packed",
        lib.prefix_lm,
        _one_document(d.CU, lambda x, y: y <= x or y < 2),
        *(np.array([2, 2, 2, 2]), d.CU),
    ),
    _own(
        "shared_prefix",
        lib.shared_prefix,
        lambda b, h, i, j: d.shares_prefix(d.CU, d.PREFIX_OF, i, j),
        *(d.CU, d.PREFIX_OF),
        runs=2,
    ),
    _own(
        "shared_prefix, per batch row, prompt last",
        lib.shared_prefix,
        lambda b, h, i, j: d.shares_prefix(d.CU_TWO_ROWS[b], _TABLE[b], i, j),
        *(d.CU_TWO_ROWS, _TABLE),
        runs=2,
    ),
    _own("block_causal", lambda: lib.block_causal(5), lambda b, h, i, j: j // 5 <= i // 5),
    *(
        _own(
            f"block_diffusion, {n}",
            lambda n=n: lib.block_diffusion(n, 4),
            lambda b, h, i, j, n=n: d.block_diffusion(n, 4, i, j),
            keys=2 * n,
            runs=2,
        )
        for n in (12, 11)
    ),
    _own("draft_blocks", lambda: lib.draft_blocks(9, 4), lambda b, h, i, j: d.drafts(9, 4, i, j), runs=2),
    _own(
        "draft_blocks, per batch row",
        lambda n: lib.draft_blocks(n, 3),
        lambda b, h, i, j: d.drafts((0, 6)[b], 3, i, j),
        np.array([0, 6]),
        runs=2,
    ),
    _own("tree", lib.tree, lambda b, h, i, j: d.ancestor(d.PARENTS, 0, i, j), d.PARENTS, keys=9, runs=5),
    _own(
        "tree, after a prefix",
        lambda parents: lib.tree(parents, prefix=5, depth=6),
        lambda b, h, i, j: d.ancestor(d.PARENTS, 5, i, j),
        d.PARENTS,
        keys=14,
        runs=7,
    ),
    _own(
        "tree, per batch row, in a cache with room to spare",
        lambda parents, prefix: lib.tree(parents, prefix),
        lambda b, h, i, j: d.ancestor(d.PARENTS_TWO_ROWS[b], (3, 7)[b], i, j),
        *(d.PARENTS_TWO_ROWS, np.array([3, 7])),
        runs=5,
    ),
    _natten("1-D", (24,), (5,)),
    _natten("2-D", (4, 6), (3, 3), 3),
    _natten("2-D, even kernel, text", (4, 6), (2, 4), 3, text=3),
    _natten("3-D", (3, 3, 4), (2, 3, 3), 6),
    _natten("dilated", (5, 7), (2, 3), 6, dilation=(2, 2)),
    _natten("strided", (5, 7), (3, 4), 3, stride=(2, 3)),
    _natten("causal in time", (5, 7), (3, 3), 3, causal=(True, False)),
    _natten("all", (6, 9), (2, 3), 6, dilation=(2, 3), stride=(2, 2), causal=(True, True)),
    _as_gym("odd", 5, 3),
    _as_gym("even", 6, 4),
    _own(
        "sasa",
        lambda: lib.sasa((4, 6), (1, 2)),
        lambda b, h, i, j: abs(i // 6 - j // 6) <= 1 and abs(i % 6 - j % 6) <= 2,
        runs=3,
    ),
    _sta("2-D", (4, 6), (2, 6), (2, 2)),
    _sta("2-D, text", (6, 4), (4, 2), (2, 1), 3, text=2),
    _sta("3-D, even kernel", (4, 4, 3), (2, 4, 2), (1, 2, 1), 4),
    _own(
        "tiled_natten",
        lambda: lib.tiled_natten((4, 6), (3, 3), (2, 3)),
        lambda b, h, i, j: d.neighbours((4, 6), (3, 3), *(d.tile_token((4, 6), (2, 3), p) for p in (i, j))),
        runs=None,
    ),
    _own(
        "morton_natten",
        lambda: lib.morton_natten(4, 3),
        lambda b, h, i, j: d.gym_natten(4, 3, d.morton_token(4, i), d.morton_token(4, j)),
        keys=16,
        runs=None,
    ),
    _own(
        "flamingo",
        lambda at: lib.flamingo(at, 3),
        lambda b, h, i, j: d.last_image(d.IMAGES, 3, i, j),
        d.IMAGES,
        keys=9,
        rows=12,
    ),
    _own(
        "flamingo, earlier images, per batch row",
        lambda at: lib.flamingo(at, 2, earlier=True),
        lambda b, h, i, j: d.last_image(d.IMAGES_TWO_ROWS[b], 2, i, j, earlier=True),
        d.IMAGES_TWO_ROWS,
        keys=6,
        rows=12,
    ),
    _own(
        "vision_cross_attention",
        lambda x: lib.vision_cross_attention(x, 3),
        lambda b, h, i, j: d.INTERVALS[j // 3][0] <= i < d.INTERVALS[j // 3][1],
        d.INTERVALS,
        keys=9,
        rows=12,
        runs=3,
    ),
    _own(
        "vision_cross_attention, per batch row",
        lambda x: lib.vision_cross_attention(x, 2),
        lambda b, h, i, j: d.INTERVALS_TWO_ROWS[b][j // 2][0] <= i < d.INTERVALS_TWO_ROWS[b][j // 2][1],
        d.INTERVALS_TWO_ROWS,
        keys=6,
        rows=12,
        runs=3,
    ),
    _own(
        "spatial_heads",
        lambda: lib.spatial_heads(4, 5, 0.8),
        lambda b, h, i, j: d.spatial(4, 5, 4, False, i, j),
        runs=2,
    ),
    _own(
        "spatial_heads, first frame",
        lambda: lib.spatial_heads(4, 5, 1, sink=True, multiple=2),
        lambda b, h, i, j: d.spatial(4, 5, 4, True, i, j),
        runs=2,
    ),
    _own(
        "temporal_heads",
        lambda: lib.temporal_heads(3, 4, 6, 1.5),
        lambda b, h, i, j: d.temporal(3, 6, 2, i, j),
        keys=27,
        runs=5,
    ),
    _own(
        "selected_blocks",
        lambda chosen: lib.selected_blocks(chosen, 4),
        lambda b, h, i, j: d.selected(d.CHOSEN, 4, b, h, i, j),
        d.CHOSEN,
        keys=22,
        runs=3,
    ),
    _own(
        "selected_blocks, padded, by batch row and head",
        lambda chosen, sizes: lib.selected_blocks(chosen, 4, sizes),
        lambda b, h, i, j: d.selected(d.CHOSEN_BY_HEAD, 4, b, h, i, j, d.SIZES),
        *(d.CHOSEN_BY_HEAD, d.SIZES),
        runs=3,
    ),
    _own(
        "per_row",
        lambda ids: lib.per_row([a.causal(), lib.dilated(4, 2) & a.segments(ids)]),
        lambda b, h, i, j: j <= i if b == 0 else abs(i - j) in (0, 2, 4) and i // 12 == j // 12,
        _ID // 12,
        runs=5,
    ),
    _own(
        "per_head",
        lambda lengths: lib.per_head([a.window(2), a.causal() & (a.window(1) | a.prefix(lengths))]),
        lambda b, h, i, j: j <= i and (i - j <= 2 if h == 0 else i - j <= 1 or j < (2, 5)[b]),
        np.array([2, 5]),
        runs=2,
    ),
    _own(
        "per_document, global and sliding",
        lambda cu: lib.per_document(lib.global_sliding(1, 2), cu),
        _one_document(d.CU_TWO_ROWS, lambda x, y: abs(x - y) <= 1 or x < 2 or y < 2),
        d.CU_TWO_ROWS,
        runs=2,
    ),
    _own(
        "per_document, causal",
        lambda cu: lib.per_document(a.causal(), cu),
        _one_document(d.CU, lambda x, y: y <= x),
        d.CU,
    ),
    _own(
        "batchify",
        lambda: lib.batchify(lib.global_sliding(1, 2, rows=False), 7),
        lambda b, h, i, j: i // 7 == j // 7 and (abs(i - j) <= 1 or j % 7 < 2),
        runs=2,
    ),
    _own(
        "batchify, segments",
        lambda ids: lib.batchify(a.causal() & a.segments(ids), 6),
        lambda b, h, i, j: i // 6 == j // 6 and j <= i and i % 6 // 4 == j % 6 // 4,
        _ID[:6] // 4,
    ),
    _own(
        "reordered",
        lambda order: lib.reordered(a.causal() & a.window(5), order),
        lambda b, h, i, j: 0 <= (i * 7 % 24) - (j * 7 % 24) <= 5,
        _ID * 7 % 24,
        runs=None,
    ),
]
__all__ = ["BATCH", "HEADS", "LIBRARY"]
