"""Samples of each mask of the library, each with its definition and its R."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from library_definitions import (
    CHOSEN,
    CHOSEN_BY_HEAD,
    CU,
    CU_TWO_ROWS,
    IMAGES,
    IMAGES_TWO_ROWS,
    INTERVALS,
    INTERVALS_TWO_ROWS,
    MARKED,
    MARKED_TWO_ROWS,
    PARENTS,
    PARENTS_TWO_ROWS,
    PREFIX_OF,
    SIZES,
    ancestor,
    block_diffusion,
    drafts,
    gym_natten,
    in_document,
    last_image,
    morton_token,
    neighbours,
    selected,
    shares_prefix,
    spatial,
    temporal,
    tile_token,
    tiles_near,
)

import attnspan as a
from attnspan import library as lib

BATCH, HEADS = 2, 2


@dataclass(frozen=True)
class Sample:
    """`build(*arrays)` is the mask; `sees(b, h, i, j)`: index i sees key j; `runs` is R; None: by data."""

    function: str
    note: str
    build: Callable[..., a.Mask]
    sees: Callable[[int, int, int, int], Any]
    keys: int = 24
    runs: int | None = 1
    arrays: tuple[np.ndarray, ...] = ()
    rows: int | None = None
    """Rows of cross attention."""

    @property
    def name(self) -> str:
        return f"{self.function}, {self.note}" if self.note else self.function

    def mask(self, convert: Callable[[np.ndarray], Any] = np.asarray) -> a.Mask:
        return self.build(*map(convert, self.arrays))

    def dense(self, q_index: np.ndarray, k_index: np.ndarray) -> np.ndarray:
        """Bool (B, H, q_len, k_len), by a loop over all pairs. Rows that are no tokens see nothing."""
        whole = _pairs(self.name)
        inside = (q_index >= 0) & (q_index < whole.shape[2])
        return whole[:, :, np.where(inside, q_index, 0)][..., k_index] & inside[:, None]


@functools.cache
def _pairs(name: str) -> np.ndarray:
    sample = SAMPLES[IDS.index(name)]
    rows = sample.keys if sample.rows is None else sample.rows
    shape = (BATCH, HEADS, rows, sample.keys)
    return np.array([sample.sees(*map(int, pair)) for pair in np.ndindex(shape)], bool).reshape(shape)


def _natten(note: str, canvas: tuple, kernel: tuple, runs: int = 1, text: int = 0, **options: Any) -> Sample:
    return Sample(
        "natten",
        note,
        lambda: lib.natten(canvas, kernel, text=text, **options),
        lambda b, h, i, j: neighbours(canvas, kernel, i, j, text, **options),
        keys=int(np.prod(canvas)) + text,
        runs=runs,
    )


def _sta(note: str, canvas: tuple, kernel: tuple, tile: tuple, runs: int = 1, text: int = 0) -> Sample:
    return Sample(
        "sta",
        note,
        lambda: lib.sta(canvas, kernel, tile, text),
        lambda b, h, i, j: tiles_near(canvas, kernel, tile, i, j, text),
        keys=int(np.prod(canvas)) + text,
        runs=runs,
    )


SAMPLES = [
    Sample(
        "dilated",
        "",
        lambda: lib.dilated(7, 3),
        lambda b, h, i, j: abs(i - j) <= 7 and (i - j) % 3 == 0,
        runs=5,
    ),
    Sample(
        "dilated",
        "causal",
        lambda: lib.dilated(6, 3, causal=True),
        lambda b, h, i, j: 0 <= i - j <= 6 and (i - j) % 3 == 0,
        runs=3,
    ),
    Sample("dilated", "by 1", lambda: lib.dilated(4, 1), lambda b, h, i, j: abs(i - j) <= 4),
    Sample(
        "global_sliding",
        "first tokens",
        lambda: lib.global_sliding(2, 3),
        lambda b, h, i, j: abs(i - j) <= 2 or i < 3 or j < 3,
        runs=2,
    ),
    Sample(
        "global_sliding",
        "keys only",
        lambda: lib.global_sliding(2, 3, rows=False),
        lambda b, h, i, j: abs(i - j) <= 2 or j < 3,
        runs=2,
    ),
    Sample(
        "global_sliding",
        "marked tokens",
        lambda marked: lib.global_sliding(2, marked, max_runs=2),
        lambda b, h, i, j: abs(i - j) <= 2 or MARKED[i] or MARKED[j],
        runs=3,
        arrays=(MARKED,),
    ),
    Sample(
        "global_sliding",
        "marked per batch row, keys only",
        lambda marked: lib.global_sliding(2, marked, rows=False, max_runs=2),
        lambda b, h, i, j: abs(i - j) <= 2 or MARKED_TWO_ROWS[b][j],
        runs=3,
        arrays=(MARKED_TWO_ROWS,),
    ),
    Sample("prefix_lm", "", lambda: lib.prefix_lm(7), lambda b, h, i, j: j <= i or j < 7),
    Sample(
        "prefix_lm",
        "per batch row",
        lib.prefix_lm,
        lambda b, h, i, j: j <= i or j < (4, 30)[b],
        arrays=(np.array([4, 30]),),
    ),
    Sample(
        "prefix_lm",
        "packed",
        lib.prefix_lm,
        lambda b, h, i, j: in_document(CU, i, j, lambda x, y: y <= x or y < 2),
        arrays=(np.array([2, 2, 2, 2]), CU),
    ),
    Sample(
        "shared_prefix",
        "",
        lib.shared_prefix,
        lambda b, h, i, j: shares_prefix(CU, PREFIX_OF, i, j),
        runs=2,
        arrays=(CU, PREFIX_OF),
    ),
    Sample(
        "shared_prefix",
        "per batch row, prompt last",
        lib.shared_prefix,
        lambda b, h, i, j: shares_prefix(CU_TWO_ROWS[b], [[2, 1, 2, 3], [0, 0, 0, 1]][b], i, j),
        runs=2,
        arrays=(CU_TWO_ROWS, np.array([[2, 1, 2, 3], [0, 0, 0, 1]])),
    ),
    Sample("block_causal", "", lambda: lib.block_causal(5), lambda b, h, i, j: j // 5 <= i // 5),
    Sample(
        "block_diffusion",
        "",
        lambda: lib.block_diffusion(12, 4),
        lambda b, h, i, j: block_diffusion(12, 4, i, j),
        runs=2,
    ),
    Sample(
        "block_diffusion",
        "ragged",
        lambda: lib.block_diffusion(11, 4),
        lambda b, h, i, j: block_diffusion(11, 4, i, j),
        keys=22,
        runs=2,
    ),
    Sample("draft_blocks", "", lambda: lib.draft_blocks(9, 4), lambda b, h, i, j: drafts(9, 4, i, j), runs=2),
    Sample(
        "draft_blocks",
        "per batch row",
        lambda n: lib.draft_blocks(n, 3),
        lambda b, h, i, j: drafts((0, 6)[b], 3, i, j),
        runs=2,
        arrays=(np.array([0, 6]),),
    ),
    Sample(
        "tree", "", lib.tree, lambda b, h, i, j: ancestor(PARENTS, 0, i, j), keys=9, runs=5, arrays=(PARENTS,)
    ),
    Sample(
        "tree",
        "after a prefix",
        lambda parents: lib.tree(parents, prefix=5, depth=6),
        lambda b, h, i, j: ancestor(PARENTS, 5, i, j),
        keys=14,
        runs=7,
        arrays=(PARENTS,),
    ),
    Sample(
        "tree",
        "per batch row, in a cache with room to spare",
        lambda parents, prefix: lib.tree(parents, prefix),
        lambda b, h, i, j: ancestor(PARENTS_TWO_ROWS[b], (3, 7)[b], i, j),
        runs=5,
        arrays=(PARENTS_TWO_ROWS, np.array([3, 7])),
    ),
    _natten("1-D", (24,), (5,)),
    _natten("2-D", (4, 6), (3, 3), 3),
    _natten("2-D, even kernel, text", (4, 6), (2, 4), 3, text=3),
    _natten("3-D", (3, 3, 4), (2, 3, 3), 6),
    _natten("dilated", (5, 7), (2, 3), 6, dilation=(2, 2)),
    _natten("strided", (5, 7), (3, 4), 3, stride=(2, 3)),
    _natten("causal in time", (5, 7), (3, 3), 3, causal=(True, False)),
    _natten("all", (6, 9), (2, 3), 6, dilation=(2, 3), stride=(2, 2), causal=(True, True)),
    Sample(
        "natten",
        "as attention-gym, odd",
        lambda: lib.natten((5, 5), 3),
        lambda b, h, i, j: gym_natten(5, 3, i, j),
        keys=25,
        runs=3,
    ),
    Sample(
        "natten",
        "as attention-gym, even",
        lambda: lib.natten((6, 6), 4 | 1),
        lambda b, h, i, j: gym_natten(6, 4, i, j),
        keys=36,
        runs=5,
    ),
    Sample(
        "sasa",
        "",
        lambda: lib.sasa((4, 6), (1, 2)),
        lambda b, h, i, j: abs(i // 6 - j // 6) <= 1 and abs(i % 6 - j % 6) <= 2,
        runs=3,
    ),
    _sta("2-D", (4, 6), (2, 6), (2, 2)),
    _sta("2-D, text", (6, 4), (4, 2), (2, 1), 3, text=2),
    _sta("3-D, even kernel", (4, 4, 3), (2, 4, 2), (1, 2, 1), 4),
    Sample(
        "tiled_natten",
        "",
        lambda: lib.tiled_natten((4, 6), (3, 3), (2, 3)),
        lambda b, h, i, j: neighbours((4, 6), (3, 3), *(tile_token((4, 6), (2, 3), p) for p in (i, j))),
        runs=None,
    ),
    Sample(
        "morton_natten",
        "",
        lambda: lib.morton_natten(4, 3),
        lambda b, h, i, j: gym_natten(4, 3, morton_token(4, i), morton_token(4, j)),
        keys=16,
        runs=None,
    ),
    Sample(
        "flamingo",
        "",
        lambda at: lib.flamingo(at, 3),
        lambda b, h, i, j: last_image(IMAGES, 3, i, j),
        keys=9,
        rows=12,
        arrays=(IMAGES,),
    ),
    Sample(
        "flamingo",
        "earlier images, per batch row",
        lambda at: lib.flamingo(at, 2, earlier=True),
        lambda b, h, i, j: last_image(IMAGES_TWO_ROWS[b], 2, i, j, earlier=True),
        keys=6,
        rows=12,
        arrays=(IMAGES_TWO_ROWS,),
    ),
    Sample(
        "vision_cross_attention",
        "",
        lambda x: lib.vision_cross_attention(x, 3),
        lambda b, h, i, j: INTERVALS[j // 3][0] <= i < INTERVALS[j // 3][1],
        keys=9,
        rows=12,
        runs=3,
        arrays=(INTERVALS,),
    ),
    Sample(
        "vision_cross_attention",
        "per batch row",
        lambda x: lib.vision_cross_attention(x, 2),
        lambda b, h, i, j: INTERVALS_TWO_ROWS[b][j // 2][0] <= i < INTERVALS_TWO_ROWS[b][j // 2][1],
        keys=6,
        rows=12,
        runs=3,
        arrays=(INTERVALS_TWO_ROWS,),
    ),
    Sample(
        "spatial_heads",
        "",
        lambda: lib.spatial_heads(4, 5, 0.8),
        lambda b, h, i, j: spatial(4, 5, 4, False, i, j),
        runs=2,
    ),
    Sample(
        "spatial_heads",
        "first frame",
        lambda: lib.spatial_heads(4, 5, 1, sink=True, multiple=2),
        lambda b, h, i, j: spatial(4, 5, 4, True, i, j),
        runs=2,
    ),
    Sample(
        "temporal_heads",
        "",
        lambda: lib.temporal_heads(3, 4, 6, 1.5),
        lambda b, h, i, j: temporal(3, 6, 2, i, j),
        keys=27,
        runs=5,
    ),
    Sample(
        "selected_blocks",
        "",
        lambda chosen: lib.selected_blocks(chosen, 4),
        lambda b, h, i, j: selected(CHOSEN, 4, b, h, i, j),
        keys=22,
        runs=3,
        arrays=(CHOSEN,),
    ),
    Sample(
        "selected_blocks",
        "padded, by batch row and head",
        lambda chosen, sizes: lib.selected_blocks(chosen, 4, sizes),
        lambda b, h, i, j: selected(CHOSEN_BY_HEAD, 4, b, h, i, j, SIZES),
        runs=3,
        arrays=(CHOSEN_BY_HEAD, SIZES),
    ),
    Sample(
        "per_row",
        "",
        lambda ids: lib.per_row([a.causal(), lib.dilated(4, 2) & a.segments(ids)]),
        lambda b, h, i, j: j <= i if b == 0 else abs(i - j) in (0, 2, 4) and i // 12 == j // 12,
        runs=5,
        arrays=(np.arange(24) // 12,),
    ),
    Sample(
        "per_head",
        "",
        lambda lengths: lib.per_head([a.window(2), a.causal() & (a.window(1) | a.prefix(lengths))]),
        lambda b, h, i, j: j <= i and (i - j <= 2 if h == 0 else i - j <= 1 or j < (2, 5)[b]),
        runs=2,
        arrays=(np.array([2, 5]),),
    ),
    Sample(
        "per_document",
        "global and sliding",
        lambda cu: lib.per_document(lib.global_sliding(1, 2), cu),
        lambda b, h, i, j: in_document(CU_TWO_ROWS[b], i, j, lambda x, y: abs(x - y) <= 1 or x < 2 or y < 2),
        runs=2,
        arrays=(CU_TWO_ROWS,),
    ),
    Sample(
        "per_document",
        "causal",
        lambda cu: lib.per_document(a.causal(), cu),
        lambda b, h, i, j: in_document(CU, i, j, lambda x, y: y <= x),
        arrays=(CU,),
    ),
    Sample(
        "batchify",
        "",
        lambda: lib.batchify(lib.global_sliding(1, 2, rows=False), 7),
        lambda b, h, i, j: i // 7 == j // 7 and (abs(i - j) <= 1 or j % 7 < 2),
        runs=2,
    ),
    Sample(
        "batchify",
        "segments",
        lambda ids: lib.batchify(a.causal() & a.segments(ids), 6),
        lambda b, h, i, j: i // 6 == j // 6 and j <= i and i % 6 // 4 == j % 6 // 4,
        arrays=(np.arange(6) // 4,),
    ),
    Sample(
        "reordered",
        "",
        lambda order: lib.reordered(a.causal() & a.window(5), order),
        lambda b, h, i, j: 0 <= (i * 7 % 24) - (j * 7 % 24) <= 5,
        runs=None,
        arrays=(np.arange(24) * 7 % 24,),
    ),
]
IDS = [sample.name for sample in SAMPLES]
