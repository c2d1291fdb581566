"""What a query may see under each mask of the library, pair by pair, written anew from its source."""

from collections.abc import Callable
from typing import Any

import numpy as np

CU = np.array([0, 5, 5, 16, 22])
CU_TWO_ROWS = np.array([[0, 5, 9, 24, 24], [0, 1, 20, 21, 22]])
PREFIX_OF = np.array([0, 0, 0, 2])
MARKED = np.isin(np.arange(24), [0, 1, 9, 10, 11])
MARKED_TWO_ROWS = np.stack([MARKED, np.arange(24) == 23])
PARENTS = np.array([-1, 0, 0, 1, 1, 2, 5, -1, 7])
PARENTS_TWO_ROWS = np.array([[-1, 0, 1, 2], [-1, -1, 0, 2]])
IMAGES = np.array([2, 3, 9])
IMAGES_TWO_ROWS = np.array([[0, 4, 5], [3, 8, 99]])
INTERVALS = np.array([[0, 7], [1, 7], [7, 12]])
INTERVALS_TWO_ROWS = np.array([[[5, 9], [0, 6], [5, 12]], [[0, 0], [3, 4], [4, 4]]])
CHOSEN = np.array([[[[0, 2, 2], [3, 1, -1], [5, 4, 0], [-1, -1, -1], [0, 1, 5], [5, 5, 5]]]])
CHOSEN_BY_HEAD = np.stack([np.stack([CHOSEN[0, 0], 5 - CHOSEN[0, 0] % 6]), np.stack([CHOSEN[0, 0] % 5] * 2)])
SIZES = np.array([4, 1, 4, 0, 3, 2])


def document_of(cu: np.ndarray, i: int) -> int | None:
    return next((d for d in range(len(cu) - 1) if cu[d] <= i < cu[d + 1]), None)


def in_document(cu: np.ndarray, i: int, j: int, inner: Callable[[int, int], Any]) -> bool:
    """attention-gym, generate_doc_mask_mod: one document, and the inner mask on places within it."""
    d = document_of(cu, i)
    return d is not None and d == document_of(cu, j) and inner(i - cu[d], j - cu[d])


def shares_prefix(cu: np.ndarray, of: np.ndarray, i: int, j: int) -> bool:
    """attention-gym, generate_shared_prefix_mask_mod."""
    mine, theirs = document_of(cu, i), document_of(cu, j)
    return mine is not None and theirs is not None and (j <= i if mine == theirs else of[mine] == theirs)


def block_diffusion(n: int, block: int, i: int, j: int) -> bool:
    """attention-gym, generate_block_diffusion_mask: diagonal, offset causal, causal."""
    bi, bj, noisy_i, noisy_j = i % n // block, j % n // block, i < n, j < n
    diagonal = bi == bj and noisy_i == noisy_j
    return diagonal or (bi > bj and noisy_i and not noisy_j) or (bi >= bj and not noisy_i and not noisy_j)


def drafts(prefix: int, block: int, i: int, j: int) -> bool:
    """attention-gym, generate_jetspec_training_mask_mod; rows of the prefix are causal."""
    mine = (i - prefix) // block == (j - prefix) // block and j >= prefix
    return j <= i if i < prefix else j < prefix or (mine and j <= i)


def ancestor(parents: np.ndarray, prefix: int, i: int, j: int) -> bool:
    """attention-gym, generate_jetspec_tree_causal_mask_mod; rows of the prefix are causal."""
    if i < prefix:
        return j <= i
    node = i - prefix
    while 0 <= node < len(parents) and node != j - prefix:
        node = parents[node]
    return 0 <= i - prefix < len(parents) and (j < prefix or node == j - prefix)


def at(canvas: tuple[int, ...], i: int) -> tuple[int, ...]:
    return tuple(int(x) for x in np.unravel_index(i, canvas))


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


def neighbours(canvas: tuple, kernel: tuple, i: int, j: int, text: int = 0, **options: Any) -> bool:
    n = int(np.prod(canvas))
    if i >= n or j >= n:
        return i < n + text and j < n + text
    axes = range(len(canvas))
    each = [{name: value[x] for name, value in options.items()} for x in axes]
    x, y = at(canvas, i), at(canvas, j)
    return all(near(canvas[k], kernel[k], x[k], y[k], **each[k]) for k in axes)


def gym_natten(n: int, kernel: int, i: int, j: int) -> bool:
    """attention-gym, generate_natten on a square canvas: a centre held kernel // 2 away from the borders."""
    half = kernel // 2
    centres = [min(max(x, half), n - 1 - half) for x in at((n, n), i)]
    return all(abs(c - y) <= half for c, y in zip(centres, at((n, n), j), strict=True))


def tiles_near(canvas: tuple, kernel: tuple, tile: tuple, i: int, j: int, text: int = 0) -> bool:
    """attention-gym, generate_sta_mask_mod: neighbourhoods of tiles, whose tokens are contiguous."""
    n, numel = int(np.prod(canvas)), int(np.prod(tile))
    if i >= n or j >= n:
        return i < n + text and j < n + text
    tiles, reach = (tuple(np.array(x) // np.array(tile)) for x in (canvas, kernel))
    return neighbours(tiles, reach, i // numel, j // numel)


def tile_token(canvas: tuple[int, int], tile: tuple[int, int], p: int) -> int:
    """attention-gym, get_x_y_tiled: the row-major token at place p."""
    t, o = divmod(p, tile[0] * tile[1])
    (ty, tx), (y, x) = divmod(t, canvas[1] // tile[1]), divmod(o, tile[1])
    return (ty * tile[0] + y) * canvas[1] + tx * tile[1] + x


def morton_token(n: int, p: int) -> int:
    """attention-gym, morton_decode: even bits are x, odd bits y."""
    x, y = (sum((p >> (2 * bit + odd) & 1) << bit for bit in range(8)) for odd in (0, 1))
    return y * n + x


def last_image(places: np.ndarray, length: int, i: int, j: int, earlier: bool = False) -> bool:
    """Flamingo, section 2.1: phi(i) is the last image at or before token i."""
    phi = max((n for n, at in enumerate(places) if at <= i), default=-1)
    return j // length <= phi if earlier else j // length == phi


def spatial(prompt: int, frame: int, band: int, sink: bool, i: int, j: int) -> bool:
    """attention-gym, generate_spatial_head_mask_mod."""
    return i < prompt or j < prompt + (frame if sink else 0) or abs(i - j) < band


def temporal(prompt: int, frame: int, reach: int, i: int, j: int) -> bool:
    """attention-gym, generate_temporal_head_mask_mod."""
    return i < prompt or j < prompt or abs((i - prompt) % frame - (j - prompt) % frame) < reach


def selected(chosen: np.ndarray, block: int, b: int, h: int, i: int, j: int, sizes: Any = None) -> bool:
    """attention-gym, generate_vsa_mask_mod."""
    row = chosen[b % len(chosen), h % chosen.shape[1], i // block]
    return j // block in row and (sizes is None or j % block < sizes[j // block])
