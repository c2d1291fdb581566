"""Masks of images and video: neighbourhoods on a canvas of tokens, and orders in which tokens are stored.

Canvases have one axis or more (2-D: height, width; 3-D: time, height, width); tokens are in row-major order
unless a function says otherwise. An int stands for the same size on every axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product as pairs
from typing import Any

import numpy as np

from .. import checks
from .._intervals import Interval, Rows
from ..arrays import Array, Arrays
from ..errors import expect
from ..lowering import Lowering
from ..masks import Mask
from ._shared import divides, fits_canvas, product, seen_by, sizes, warn_of_size
from .mixtures import reordered

__all__ = ["morton_natten", "morton_order", "natten", "sasa", "sta", "tile_order", "tiled_natten"]

Sizes = int | Sequence[int]
Order = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False, repr=False)
class natten(Mask):
    """Neighbourhood attention: each token sees the `kernel` tokens around it, in a window on the canvas.

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

    canvas: Any
    kernel: Any
    dilation: Any = 1
    stride: Any = 1
    causal: Any = False
    text: int = 0

    def __post_init__(self) -> None:
        canvas = sizes("natten: canvas", self.canvas)
        axes = len(canvas)
        kernel = sizes("natten: kernel", self.kernel, axes)
        dilation = sizes("natten: dilation", self.dilation, axes)
        stride = sizes("natten: stride", self.stride, axes)
        causal = (self.causal,) * axes if isinstance(self.causal, bool) else tuple(map(bool, self.causal))
        sizes("natten: causal", [int(x) for x in causal], axes, least=0)
        product(canvas)
        fits_canvas("natten", canvas, kernel, dilation)
        for k, s in zip(kernel, stride, strict=True):
            expect(s <= k, "natten: stride", "at most {}, the kernel", s, "Use a larger kernel", k)
        self._set(canvas=canvas, kernel=kernel, dilation=dilation, stride=stride, causal=causal)
        self._set(text=checks.count("natten: text", self.text))

    def _key_len(self, traced: bool = False) -> Any:  # noqa: ARG002
        return product(self.canvas) + self.text

    def _lower(self, low: Lowering) -> Rows:
        at = _coordinates(low.q_index, self.canvas)
        axes = [self._axis(low.arrays, number, place) for number, place in enumerate(at)]
        return _with_text(low, _boxes(low.arrays, axes, self.canvas), product(self.canvas), self.text)

    def _axis(self, arrays: Arrays, number: int, place: Array) -> _Axis:
        """Places of a dilation group count from 0; the leader of the row's stride group has its window."""
        n, kernel, stride = self.canvas[number], self.kernel[number], self.stride[number]
        step = self.dilation[number]
        group, own = place % step, place // step
        length = (n - group + (step - 1)) // step
        if self.causal[number]:
            leader = arrays.minimum(own // stride * stride + (stride - 1), length - 1)
            return _Axis((leader - (kernel - 1)) * step + group, kernel, step, 0, place + 1)
        leader = arrays.minimum(own // stride * stride + stride // 2, length - 1)
        first = arrays.maximum(arrays.minimum(leader - kernel // 2, length - kernel), 0)
        return _Axis(first * step + group, kernel, step, 0, n)

    def __repr__(self) -> str:
        words = [str(self.canvas), str(self.kernel)]
        for name, plain in (("dilation", 1), ("stride", 1), ("causal", False)):
            values = getattr(self, name)
            words += [f"{name}={values}"] if any(x != plain for x in values) else []
        return f"natten({', '.join([*words, *([f'text={self.text}'] if self.text else [])])})"


@dataclass(frozen=True, eq=False, repr=False)
class sasa(Mask):
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

    canvas: Any
    radius: Any

    def __post_init__(self) -> None:
        canvas = sizes("sasa: canvas", self.canvas)
        product(canvas)
        self._set(canvas=canvas, radius=sizes("sasa: radius", self.radius, len(canvas), least=0))

    def _key_len(self, traced: bool = False) -> Any:  # noqa: ARG002
        return product(self.canvas)

    def _lower(self, low: Lowering) -> Rows:
        at = zip(_coordinates(low.q_index, self.canvas), self.radius, self.canvas, strict=True)
        axes = [_Axis(place - radius, 2 * radius + 1, 1, 0, n) for place, radius, n in at]
        return _with_text(low, _boxes(low.arrays, axes, self.canvas), product(self.canvas), 0)


@dataclass(frozen=True, eq=False, repr=False)
class sta(Mask):
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

    canvas: Any
    kernel: Any
    tile: Any
    text: int = 0

    def __post_init__(self) -> None:
        canvas = sizes("sta: canvas", self.canvas)
        kernel = sizes("sta: kernel", self.kernel, len(canvas))
        tile = sizes("sta: tile", self.tile, len(canvas))
        divides("sta: canvas", canvas, tile)
        divides("sta: kernel", kernel, tile)
        product(canvas)
        fits_canvas("sta", canvas, kernel, (1,) * len(canvas))
        self._set(canvas=canvas, kernel=kernel, tile=tile, text=checks.count("sta: text", self.text))

    def _key_len(self, traced: bool = False) -> Any:  # noqa: ARG002
        return product(self.canvas) + self.text

    def _lower(self, low: Lowering) -> Rows:
        arrays, numel = low.arrays, product(self.tile)
        shape = tuple(n // t for n, t in zip(self.canvas, self.tile, strict=True))
        kernel = tuple(n // t for n, t in zip(self.kernel, self.tile, strict=True))
        at = zip(_coordinates(low.q_index // numel, shape), kernel, shape, strict=True)
        axes = [_Axis(arrays.clip(place - k // 2, 0, n - k), k, 1, 0, n) for place, k, n in at]
        cells = [(lo * numel, hi * numel) for lo, hi in _boxes(arrays, axes, shape)]
        return _with_text(low, cells, product(self.canvas), self.text)


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

    R is by data, 27 for windows of 13 x 13 on 64 x 64. It is found as by `tiled_natten`: prepare it once.

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
    fits = not (n & (n - 1)) and all(x == n for x in canvas)
    remedy = "Pad it to a square, or use tile_order"
    expect(fits, "morton_order: canvas", "one power of two for all axes", canvas, remedy)
    place = np.arange(product(canvas))
    token = np.zeros_like(place)
    for bit in range(n.bit_length() - 1):
        for axis in range(len(canvas)):
            taken = place >> (bit * len(canvas) + len(canvas) - 1 - axis) & 1
            token += (taken << bit) * n ** (len(canvas) - 1 - axis)
    return token


@dataclass(frozen=True, eq=False)
class _Axis:
    """One axis of the box of each row: `count` places from `first` on, `step` apart, within [low, high)."""

    first: Array
    count: int
    step: int
    low: Any
    high: Any

    def places(self) -> list[tuple[Array, Array]]:
        """Each place with whether it is inside."""
        at = [self.first + self.step * o for o in range(self.count)]
        return [(x, (x >= self.low) & (x < self.high)) for x in at]

    def stretch(self, arrays: Arrays) -> list[tuple[Array, Array]]:
        """The places as runs [lo, hi)."""
        if self.step > 1:
            return [(x, arrays.where(inside, x + 1, x)) for x, inside in self.places()]
        lo, hi = arrays.maximum(self.first, self.low), arrays.minimum(self.first + self.count, self.high)
        return [(lo, hi)]


def _boxes(arrays: Arrays, axes: list[_Axis], shape: tuple[int, ...]) -> list[tuple[Array, Array]]:
    """Cells [lo, hi) of a row-major grid, ascending: the last axis is contiguous, the others multiply."""
    found = []
    *leading, last = axes
    for chosen in pairs(*(axis.places() for axis in leading)):
        base, inside = None, None
        for (place, valid), n in zip(chosen, shape, strict=False):
            base = place if base is None else base * n + place
            inside = valid if inside is None else inside & valid
        for lo, hi in last.stretch(arrays):
            if base is not None:
                lo, hi = base * shape[-1] + lo, base * shape[-1] + hi
                hi = arrays.where(inside, hi, lo)
            found.append((lo, arrays.maximum(hi, lo)))
    return found


def _coordinates(index: Array, shape: tuple[int, ...]) -> list[Array]:
    """Coordinates of row-major indices."""
    found = []
    for n in reversed(shape):
        found.append(index % n)
        index = index // n
    return found[::-1]


def _with_text(low: Lowering, cells: list[tuple[Array, Array]], canvas: int, text: int) -> Rows:
    """What rows see of the canvas, and of the `text` tokens after it, which see all and are seen by all."""
    arrays, index = low.arrays, low.q_index
    inside = (index >= 0) & (index < canvas)
    intervals = [seen_by(low, inside, lo, hi) for lo, hi in cells]
    if text:
        writes = (index >= canvas) & (index < canvas + text)
        first = intervals[0]
        intervals[0] = Interval(first.lo, arrays.where(writes, canvas, first.hi))
        intervals.append(seen_by(low, inside | writes, canvas, canvas + text))
    warn_of_size(low, len(intervals))
    return Rows(tuple(intervals))
