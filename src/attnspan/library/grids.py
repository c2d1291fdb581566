"""Masks of images and video: neighbourhoods on a canvas of tokens, and orders in which tokens are stored.

Canvases have one axis or more (2-D: height, width; 3-D: time, height, width); tokens are in row-major order
unless a function says otherwise. An int stands for the same size on every axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _arguments as checked
from .._expression import Mask
from ..errors import OptionError, shown
from ._grids import Natten, Sasa, Sta
from ._leaf import divides, product, sizes
from .mixtures import reordered

__all__ = [
    "Order",
    "Sizes",
    "morton_natten",
    "morton_order",
    "natten",
    "sasa",
    "sta",
    "tile_order",
    "tiled_natten",
]

Sizes = int | Sequence[int]
Order = np.ndarray[Any, np.dtype[np.int64]]


def natten(
    canvas: Sizes,
    kernel: Sizes,
    dilation: Sizes = 1,
    stride: Sizes = 1,
    causal: bool | Sequence[bool] = False,
    text: int = 0,
) -> Mask:
    """Neighbourhood attention: each token sees the `kernel` tokens around it, by a window that stays on the
    canvas.

    On each axis, the window of place x is [start, start + kernel) with start = x - kernel // 2 moved into
    [0, n - kernel]: tokens at a border see as many keys as others. With a dilation d, places are counted
    among those of x's residue modulo d; with a stride s, s neighbours share the window of the one in their
    middle. On a causal axis the window ends at x. This is NATTEN's definition, even kernels included.

    attention-gym's `generate_natten` takes an even kernel as one larger: it is `natten(canvas, kernel | 1)`.
    It also names its axes the other way round, and is right on square canvases with square kernels only.

    R = product of kernel over all axes but the last, times the last kernel where the last axis is dilated,
    plus 1 with text. 1-D: R = 1.

    Source: NAT (Hassani et al. 2023), DiNAT (Hassani and Shi 2022), GNA (Hassani et al. 2025).

    Args:
        canvas: tokens along each axis.
        kernel: keys along each axis, at most the canvas.
        dilation: distance of neighbouring keys; kernel * dilation is at most the canvas.
        stride: neighbours that share a window, at most the kernel.
        causal: for each axis, or for all.
        text: tokens after the canvas, which see everything and are seen by all.

    Raises:
        OptionError, DtypeError, ShapeError: for sizes that do not fit each other or the keys.

    Example:
        >>> natten(5, 3).spans(5, 5).bounds[0, 0, :, 0].tolist()
        [[0, 3], [0, 3], [1, 4], [2, 5], [2, 5]]
        >>> natten((4, 4), (3, 3))
        natten((4, 4), (3, 3))
    """
    canvas = sizes("natten: canvas", canvas)
    axes = len(canvas)
    kernel = sizes("natten: kernel", kernel, axes)
    dilation, stride = sizes("natten: dilation", dilation, axes), sizes("natten: stride", stride, axes)
    flags = (causal,) * axes if isinstance(causal, bool) else tuple(bool(x) for x in causal)
    sizes("natten: causal", [int(x) for x in flags], axes, least=0)
    product(canvas)
    _fits("natten", canvas, kernel, dilation)
    for k, s in zip(kernel, stride, strict=True):
        if s > k:
            raise OptionError(
                "natten: stride",
                expected=f"at most {k}, the kernel",
                got=shown(s),
                remedy="Use a larger kernel",
            )
    return Natten(canvas, kernel, dilation, stride, flags, checked.count("natten: text", text))


def sasa(canvas: Sizes, radius: Sizes) -> Mask:
    """Each token sees those at most `radius` away on every axis; windows are cut off at the borders.

    R = product of (2 * radius + 1) over all axes but the last.

    Source: stand-alone self-attention (Ramachandran et al. 2019), as in FlexAttention's walkthrough.

    Args:
        canvas: tokens along each axis.
        radius: places seen on either side, at least 0.

    Raises:
        OptionError, DtypeError, ShapeError: for sizes that do not fit the keys.

    Example:
        >>> sasa(5, 1).spans(5, 5).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 3], [1, 4], [2, 5], [3, 5]]
    """
    canvas = sizes("sasa: canvas", canvas)
    product(canvas)
    return Sasa(canvas, sizes("sasa: radius", radius, len(canvas), least=0))


def sta(canvas: Sizes, kernel: Sizes, tile: Sizes, text: int = 0) -> Mask:
    """Sliding tile attention: neighbourhood attention of whole tiles, on tokens stored tile by tile.

    Put tokens into `tile_order(canvas, tile)` first: each tile is contiguous then, the mask consists of full
    blocks, and R = product of kernel / tile over all axes but the last, plus 1 with text.

    Source: attention-gym's `sta`, 2-D and 3-D; Sliding Tile Attention (Zhang et al. 2025, arXiv 2502.04507).

    Args:
        canvas: tokens along each axis, a multiple of the tile.
        kernel: keys along each axis, a multiple of the tile, at most the canvas.
        tile: tokens of a tile along each axis.
        text: tokens after the canvas, which see everything and are seen by all.

    Raises:
        OptionError, DtypeError, ShapeError: for sizes that do not fit each other or the keys.

    Example:
        >>> sta(8, 4, 2).spans(8, 8).bounds[0, 0, ::2, 0].tolist()
        [[0, 4], [0, 4], [2, 6], [4, 8]]
    """
    canvas = sizes("sta: canvas", canvas)
    kernel, tile = sizes("sta: kernel", kernel, len(canvas)), sizes("sta: tile", tile, len(canvas))
    divides("sta: canvas", canvas, tile)
    divides("sta: kernel", kernel, tile)
    product(canvas)
    _fits("sta", canvas, kernel, (1,) * len(canvas))
    return Sta(canvas, kernel, tile, checked.count("sta: text", text))


def tiled_natten(canvas: Sizes, kernel: Sizes, tile: Sizes) -> Mask:
    """`natten(canvas, kernel)` on tokens stored tile by tile, in `tile_order(canvas, tile)`.

    The neighbourhood is exact, not rounded to tiles as by `sta`. Each row of the window is cut where a tile
    ends: R is up to kernel rows times the tiles that a window touches, fewer where it covers a tile's width.
    It is found by enumerating the visible pairs, O(pairs log pairs), and needs indices that can be read:
    prepare it once.

    Source: attention-gym's `generate_tiled_natten`, with odd kernels as `natten` says.

    Args:
        canvas: tokens along each axis, a multiple of the tile.
        kernel: keys along each axis, at most the canvas.
        tile: tokens of a tile along each axis.

    Raises:
        OptionError, DtypeError, ShapeError: for sizes that do not fit each other or the keys.

    Example:
        >>> tiled_natten((4, 4), (3, 3), (2, 2)).spans(16, 16).dense()[0, 0, 0].astype(int).tolist()
        [1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    """
    return reordered(natten(canvas, kernel), tile_order(canvas, tile))


def morton_natten(canvas: Sizes, kernel: Sizes) -> Mask:
    """`natten(canvas, kernel)` on tokens along a Z-order curve, in `morton_order(canvas)`.

    R is by data, 27 for windows of 13 x 13 on 64 x 64. It is found as by `tiled_natten`, in O(pairs log
    pairs): prepare it once.

    Source: attention-gym's `generate_morton_natten`.

    Args:
        canvas: tokens along each axis, powers of two, all the same.
        kernel: keys along each axis, at most the canvas.

    Raises:
        OptionError, DtypeError, ShapeError: for sizes that do not fit each other or the keys.

    Example:
        >>> morton_natten((4, 4), (3, 3)).spans(16, 16).dense()[0, 0, 0].astype(int).tolist()
        [1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    """
    canvas = sizes("morton_natten: canvas", canvas, None if isinstance(canvas, Sequence) else 2)
    return reordered(natten(canvas, kernel), morton_order(canvas))


def tile_order(canvas: Sizes, tile: Sizes) -> Order:
    """Tokens tile by tile: tiles in row-major order, and within each tile its tokens in row-major order.

    Args:
        canvas: tokens along each axis, a multiple of the tile.
        tile: tokens of a tile along each axis.

    Returns:
        int64 (tokens,): the row-major token at each place; `x[..., order, :]` puts a sequence into this
        order, and `np.argsort(order)` back.

    Raises:
        OptionError, DtypeError, ShapeError: for a tile that does not divide the canvas.

    Example:
        >>> tile_order((2, 4), (2, 2)).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    canvas = sizes("tile_order: canvas", canvas)
    tile = sizes("tile_order: tile", tile, len(canvas))
    tiles = divides("tile_order: canvas", canvas, tile)
    shape = [n for pair in zip(tiles, tile, strict=True) for n in pair]
    axes = [*range(0, len(shape), 2), *range(1, len(shape), 2)]
    return np.arange(product(canvas)).reshape(shape).transpose(axes).reshape(-1)


def morton_order(canvas: Sizes) -> Order:
    """Tokens along a Z-order (Morton) curve, whose lowest bit is that of the last axis.

    attention-gym's takes its `x` as the lowest, which is the column if its mask's `y` is the row.

    Args:
        canvas: tokens along each axis, powers of two, all the same; an int stands for two axes.

    Returns:
        int64 (tokens,): the row-major token at each place, as `tile_order`.

    Raises:
        OptionError, DtypeError, ShapeError: for other sizes.

    Example:
        >>> morton_order((4, 4))[:8].tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    canvas = sizes("morton_order: canvas", canvas, None if isinstance(canvas, Sequence) else 2)
    n = canvas[0]
    if n & (n - 1) or any(x != n for x in canvas):
        raise OptionError(
            "morton_order: canvas",
            expected="one power of two for all axes",
            got=shown(canvas),
            remedy="Pad it to a square, or use tile_order",
        )
    place = np.arange(product(canvas))
    token = np.zeros_like(place)
    for bit in range(n.bit_length() - 1):
        for axis in range(len(canvas)):
            taken = place >> (bit * len(canvas) + len(canvas) - 1 - axis) & 1
            token += (taken << bit) * n ** (len(canvas) - 1 - axis)
    return token


def _fits(what: str, canvas: tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...]) -> None:
    for n, k, d in zip(canvas, kernel, dilation, strict=True):
        if k * d > n:
            raise OptionError(
                f"{what}: kernel",
                expected=f"at most the canvas {canvas}" + (" with its dilation" if max(dilation) > 1 else ""),
                got=shown(kernel) + (f" times {dilation}" if max(dilation) > 1 else ""),
                remedy="Use a smaller kernel, or full() along that axis: a kernel of its size",
            )
