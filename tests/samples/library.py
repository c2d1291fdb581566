"""The masks of the library, each next to what its source says that a query may see, written anew.

A function makes a sample of any size; `LIBRARY` has one or more of each mask.
"""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
from collections.abc import Callable
from typing import Any

import numpy as np

import attnspan as a
from attnspan import library as lib
from samples.masks import BATCH, Sample, document

__all__ = ["BATCH", "HEADS", "LIBRARY"]

HEADS = 2
Sees = Callable[[int, int, int, int], Any]
Pair = Callable[[int, int], Any]


def own(name: str, build: Callable[..., a.Mask], sees: Sees, *arrays: np.ndarray, **options: Any) -> Sample:
    """A sample of 24 keys; rows that are no tokens see nothing."""
    options = {"keys": 24, "rows": None, **options}
    rows = options["keys"] if options["rows"] is None else options["rows"]
    inside = lambda b, h, i, j: 0 <= i < rows and sees(b, h, i, j)  # noqa: E731
    return Sample(name, arrays, build, inside, heads=HEADS, **options)


def row(x: np.ndarray, b: int, axes: int = 1) -> np.ndarray:
    """The entries of a batch row, of an array that may have none of its own."""
    return x[b] if x.ndim > axes else x


def in_documents(cu: np.ndarray, inner: Pair) -> Sees:
    """attention-gym, generate_doc_mask_mod: one document, and the inner mask on places within it."""

    def sees(b: int, h: int, i: int, j: int) -> Any:
        starts = row(cu, b)
        d = document(starts, i)
        return d is not None and d == document(starts, j) and inner(i - starts[d], j - starts[d])

    return sees


def dilated(window: int, dilation: int, causal: bool = False, keys: int = 24) -> Sample:
    reach = window // dilation
    return own(
        f"dilated, {window} by {dilation}{', causal' * causal}",
        lambda: lib.dilated(window, dilation, causal),
        lambda b, h, i, j: abs(i - j) <= window and (i - j) % dilation == 0 and (j <= i or not causal),
        keys=keys,
        runs=1 if dilation == 1 else reach + 1 + reach * (not causal),
    )


def shared_prefix(cu: np.ndarray, of: np.ndarray, keys: int = 24) -> Sample:
    """attention-gym, generate_shared_prefix_mask_mod."""

    def sees(b: int, h: int, i: int, j: int) -> Any:
        mine, theirs = document(row(cu, b), i), document(row(cu, b), j)
        alike = mine is not None and theirs is not None
        return alike and (j <= i if mine == theirs else row(of, b)[mine] == theirs)

    return own("shared_prefix", lib.shared_prefix, sees, cu, of, keys=keys, runs=2)


def block_diffusion(n: int, block: int) -> Sample:
    """attention-gym, generate_block_diffusion_mask: diagonal, offset causal, causal."""

    def sees(b: int, h: int, i: int, j: int) -> bool:
        bi, bj, noisy_i, noisy_j = i % n // block, j % n // block, i < n, j < n
        diagonal = bi == bj and noisy_i == noisy_j
        return diagonal or (bi > bj and noisy_i and not noisy_j) or (bi >= bj and not noisy_i and not noisy_j)

    return own(f"block_diffusion, {n}", lambda: lib.block_diffusion(n, block), sees, keys=2 * n, runs=2)


def draft_blocks(prefix: Any, block: int, keys: int = 24) -> Sample:
    """attention-gym, generate_jetspec_training_mask_mod; rows of the prefix are causal."""

    def sees(b: int, h: int, i: int, j: int) -> bool:
        n = prefix if isinstance(prefix, int) else prefix[b]
        mine = (i - n) // block == (j - n) // block and j >= n
        return j <= i if i < n else j < n or (mine and j <= i)

    arrays = () if isinstance(prefix, int) else (prefix,)
    build = lambda n=prefix: lib.draft_blocks(n, block)  # noqa: E731
    return own(f"draft_blocks{', per batch row' * len(arrays)}", build, sees, *arrays, keys=keys, runs=2)


def tree(note: str, parents: np.ndarray, prefix: Any = 0, depth: int | None = None, room: int = 0) -> Sample:
    """attention-gym, generate_jetspec_tree_causal_mask_mod; rows of the prefix are causal.

    R is the number of nodes on the longest path, and 1 for the prefix.
    """
    each = np.broadcast_to(prefix, BATCH)

    def sees(b: int, h: int, i: int, j: int) -> bool:
        nodes, n = row(parents, b), each[b]
        if i < n:
            return j <= i
        node = i - n
        while 0 <= node < len(nodes) and node != j - n:
            node = nodes[node]
        return 0 <= i - n < len(nodes) and (j < n or node == j - n)

    arrays = (parents,) if isinstance(prefix, int) else (parents, prefix)
    build = lambda parents, n=prefix: lib.tree(parents, n, depth)  # noqa: E731
    keys = parents.shape[-1] + each.max() + room
    return own(f"tree{note}", build, sees, *arrays, keys=int(keys), runs=build(parents).depth + 1)


def near(
    n: int, kernel: int, x: int, y: int, dilation: int = 1, stride: int = 1, causal: bool = False
) -> bool:
    """NATTEN's flex back end along one axis, without its grouping into tiles."""
    if x % dilation != y % dilation:
        return False
    group = list(range(x % dilation, n, dilation))
    own, other = group.index(x), group.index(y)
    if causal:
        leader = min(own // stride * stride + stride - 1, len(group) - 1)
        return own >= other and leader - other < kernel
    leader = min(own // stride * stride + stride // 2, len(group) - 1)
    left, right = kernel // 2, kernel // 2 + kernel % 2 - 1
    centre = min(max(leader, left), len(group) - 1 - right)
    return centre - left <= other <= centre + right


def at(canvas: tuple[int, ...], i: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.unravel_index(i, canvas))


def neighbours(canvas: tuple, kernel: tuple, i: int, j: int, **options: Any) -> bool:
    each = [{name: value[x] for name, value in options.items()} for x in range(len(canvas))]
    pairs = zip(canvas, kernel, at(canvas, i), at(canvas, j), each, strict=True)
    return all(near(n, k, x, y, **own) for n, k, x, y, own in pairs)


def _with_text(n: int, text: int, inner: Pair) -> Sees:
    """Tokens of a canvas see each other as `inner` says; text and canvas see all of each other."""
    return lambda b, h, i, j: inner(i, j) if i < n and j < n else i < n + text and j < n + text


def natten(note: str, canvas: tuple, kernel: tuple, text: int = 0, **options: Any) -> Sample:
    n, rows = int(np.prod(canvas)), int(np.prod(kernel[:-1]))
    return own(
        f"natten, {note}",
        lambda: lib.natten(canvas, kernel, text=text, **options),
        _with_text(n, text, lambda i, j: neighbours(canvas, kernel, i, j, **options)),
        keys=n + text,
        runs=rows * (kernel[-1] if options.get("dilation", (1,))[-1] > 1 else 1) + (text > 0),
    )


def sta(canvas: tuple, kernel: tuple, tile: tuple, text: int = 0, runs: int | None = None) -> Sample:
    """attention-gym, generate_sta_mask_mod: neighbourhoods of tiles, whose tokens are contiguous."""
    n, numel = int(np.prod(canvas)), int(np.prod(tile))
    tiles, reach = (tuple(np.array(x) // np.array(tile)) for x in (canvas, kernel))
    return own(
        "sta",
        lambda: lib.sta(canvas, kernel, tile, text),
        _with_text(n, text, lambda i, j: neighbours(tiles, reach, i // numel, j // numel)),
        keys=n + text,
        runs=runs,
    )


def gym_natten(n: int, kernel: int, i: int, j: int) -> bool:
    """attention-gym, generate_natten on a square canvas: a centre held kernel // 2 away from the borders."""
    half = kernel // 2
    centres = [min(max(x, half), n - 1 - half) for x in at((n, n), i)]
    return all(abs(c - y) <= half for c, y in zip(centres, at((n, n), j), strict=True))


def as_gym(n: int, kernel: int) -> Sample:
    return own(
        "natten, as attention-gym",
        lambda: lib.natten((n, n), kernel | 1),
        lambda b, h, i, j: gym_natten(n, kernel, i, j),
        keys=n * n,
        runs=kernel | 1,
    )


def tile_token(canvas: tuple[int, int], tile: tuple[int, int], p: int) -> int:
    """attention-gym, get_x_y_tiled: the row-major token at place p."""
    t, o = divmod(p, tile[0] * tile[1])
    (ty, tx), (y, x) = divmod(t, canvas[1] // tile[1]), divmod(o, tile[1])
    return (ty * tile[0] + y) * canvas[1] + tx * tile[1] + x


def morton_token(n: int, p: int) -> int:
    """attention-gym, morton_decode: even bits are x, odd bits y."""
    x, y = (sum((p >> (2 * bit + odd) & 1) << bit for bit in range(8)) for odd in (0, 1))
    return y * n + x


def flamingo(places: np.ndarray, length: int, earlier: bool = False) -> Sample:
    """Flamingo, section 2.1: phi(i) is the last image at or before token i."""

    def sees(b: int, h: int, i: int, j: int) -> bool:
        phi = max((n for n, at in enumerate(row(places, b)) if at <= i), default=-1)
        return j // length <= phi if earlier else j // length == phi

    build = lambda at: lib.flamingo(at, length, earlier)  # noqa: E731
    return own("flamingo", build, sees, places, keys=places.shape[-1] * length, rows=12)


def temporal_heads(prompt: int, frames: int, frame: int, width: float) -> Sample:
    """attention-gym, generate_temporal_head_mask_mod."""
    reach = int(width * frame // frames)

    def sees(b: int, h: int, i: int, j: int) -> bool:
        return i < prompt or j < prompt or abs((i - prompt) % frame - (j - prompt) % frame) < reach

    build = lambda: lib.temporal_heads(prompt, frames, frame, width)  # noqa: E731
    return own("temporal_heads", build, sees, keys=prompt + frames * frame, runs=frames + 1)


def selected_blocks(
    note: str,
    chosen: np.ndarray,
    block: int,
    sizes: np.ndarray | None = None,
    runs: int | None = 3,
    keys: int = 24,
) -> Sample:
    """attention-gym, generate_vsa_mask_mod."""

    def sees(b: int, h: int, i: int, j: int) -> bool:
        picked = chosen[b % len(chosen), h % chosen.shape[1], i // block]
        return j // block in picked and (sizes is None or j % block < sizes[j // block])

    arrays = (chosen,) if sizes is None else (chosen, sizes)
    build = lambda chosen, *sizes: lib.selected_blocks(chosen, block, *sizes)  # noqa: E731
    rows = chosen.shape[2] * block
    return own(f"selected_blocks{note}", build, sees, *arrays, keys=keys, rows=min(rows, keys), runs=runs)


def _global_sliding(note: str, marked: np.ndarray | None = None, runs: int = 2, **options: Any) -> Sample:
    """Of three first tokens, or of marked ones."""
    one = np.arange(24) < 3 if marked is None else marked
    rows = options.get("rows", True)
    return own(
        f"global_sliding, {note}",
        lambda tokens=3: lib.global_sliding(2, tokens, **options),
        lambda b, h, i, j: abs(i - j) <= 2 or (rows and row(one, b)[i]) or row(one, b)[j],
        *(() if marked is None else (marked,)),
        runs=runs,
    )


_CU, _ID, _ORDER = np.array([0, 5, 5, 16, 22]), np.arange(24), np.arange(24) * 7 % 24
_CU_TWO_ROWS = np.array([[0, 5, 9, 24, 24], [0, 1, 20, 21, 22]])
_MARKED = np.isin(np.arange(24), [0, 1, 9, 10, 11])
_PARENTS = np.array([-1, 0, 0, 1, 1, 2, 5, -1, 7])
_CHOSEN = np.array([[[[0, 2, 2], [3, 1, -1], [5, 4, 0], [-1, -1, -1], [0, 1, 5], [5, 5, 5]]]])
_BY_HEAD = np.stack([np.stack([_CHOSEN[0, 0], 5 - _CHOSEN[0, 0] % 6]), np.stack([_CHOSEN[0, 0] % 5] * 2)])
_INTERVALS = np.array([[[5, 9], [0, 6], [5, 12]], [[0, 0], [3, 4], [4, 4]]])


LIBRARY = [
    dilated(7, 3),
    _global_sliding("first tokens"),
    _global_sliding("marked tokens", _MARKED, 3, max_runs=2),
    _global_sliding(
        "marked per batch row, keys only", np.stack([_MARKED, _ID == 23]), 3, rows=False, max_runs=2
    ),
    own("prefix_lm", lib.prefix_lm, lambda b, h, i, j: j <= i or j < (4, 30)[b], np.array([4, 30])),
    own(
        "prefix_lm, packed",
        lib.prefix_lm,
        in_documents(_CU, lambda x, y: y <= x or y < 2),
        *(np.array([2, 2, 2, 2]), _CU),
    ),
    shared_prefix(_CU_TWO_ROWS, np.array([[2, 1, 2, 3], [0, 0, 0, 1]])),
    own("block_causal", lambda: lib.block_causal(5), lambda b, h, i, j: j // 5 <= i // 5),
    block_diffusion(11, 4),
    draft_blocks(9, 4),
    draft_blocks(np.array([0, 6]), 3),
    tree("", _PARENTS),
    tree(", after a prefix", _PARENTS, 5, depth=6),
    tree(
        ", per batch row, in a cache with room to spare",
        np.array([[-1, 0, 1, 2], [-1, -1, 0, 2]]),
        np.array([3, 7]),
        room=13,
    ),
    natten("2-D, even kernel, text", (4, 6), (2, 4), text=3),
    natten("all", (6, 9), (2, 3), dilation=(2, 3), stride=(2, 2), causal=(True, True)),
    own(
        "sasa",
        lambda: lib.sasa((4, 6), (1, 2)),
        lambda b, h, i, j: abs(i // 6 - j // 6) <= 1 and abs(i % 6 - j % 6) <= 2,
        runs=3,
    ),
    sta((6, 4), (4, 2), (2, 1), text=2, runs=3),
    own(
        "tiled_natten",
        lambda: lib.tiled_natten((4, 6), (3, 3), (2, 3)),
        lambda b, h, i, j: neighbours((4, 6), (3, 3), *(tile_token((4, 6), (2, 3), p) for p in (i, j))),
        runs=None,
    ),
    own(
        "morton_natten",
        lambda: lib.morton_natten(4, 3),
        lambda b, h, i, j: gym_natten(4, 3, morton_token(4, i), morton_token(4, j)),
        keys=16,
        runs=None,
    ),
    flamingo(np.array([[0, 4, 5], [3, 8, 99]]), 2, earlier=True),
    own(
        "vision_cross_attention",
        lambda x: lib.vision_cross_attention(x, 2),
        lambda b, h, i, j: _INTERVALS[b, j // 2, 0] <= i < _INTERVALS[b, j // 2, 1],
        _INTERVALS,
        keys=6,
        rows=12,
        runs=3,
    ),
    own(
        "spatial_heads, first frame",  # attention-gym, generate_spatial_head_mask_mod
        lambda: lib.spatial_heads(4, 5, 1, True, 2),
        lambda b, h, i, j: i < 4 or j < 9 or abs(i - j) < 4,
        runs=2,
    ),
    temporal_heads(3, 4, 6, 1.5),
    selected_blocks("", _CHOSEN, 4, keys=22),
    selected_blocks(", padded, by batch row and head", _BY_HEAD, 4, np.array([4, 1, 4, 0, 3, 2])),
    own(
        "per_row",
        lambda ids: lib.per_row([a.causal(), lib.dilated(4, 2) & a.segments(ids)]),
        lambda b, h, i, j: j <= i if b == 0 else abs(i - j) in (0, 2, 4) and i // 12 == j // 12,
        _ID // 12,
        runs=5,
    ),
    own(
        "per_head",
        lambda lengths: lib.per_head([a.window(2), a.causal() & (a.window(1) | a.prefix(lengths))]),
        lambda b, h, i, j: j <= i and (i - j <= 2 if h == 0 else i - j <= 1 or j < (2, 5)[b]),
        np.array([2, 5]),
        runs=2,
    ),
    own(
        "per_document",
        lambda cu: lib.per_document(lib.global_sliding(1, 2), cu),
        in_documents(_CU_TWO_ROWS, lambda x, y: abs(x - y) <= 1 or x < 2 or y < 2),
        _CU_TWO_ROWS,
        runs=2,
    ),
    own(
        "batchify, segments",
        lambda ids: lib.batchify(a.causal() & a.segments(ids), 6),
        lambda b, h, i, j: i // 6 == j // 6 and j <= i and i % 6 // 4 == j % 6 // 4,
        _ID[:6] // 4,
    ),
    own(
        "reordered",
        lambda order: lib.reordered(a.causal() & a.window(5), order),
        lambda b, h, i, j: 0 <= _ORDER[i] - _ORDER[j] <= 5,
        _ORDER,
        runs=None,
    ),
]
