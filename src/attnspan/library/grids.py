"""Masks for images and video: neighbourhoods on a canvas of tokens, and orders in which tokens are stored.

A canvas has one axis or more, for example (height, width) or (time, height, width). Tokens are in row-major
order unless a function says otherwise. You can pass an int for the same size on every axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array, Arrays
from attnspan.errors import ShapeError, expect, shown
from attnspan.masks import Mask
from attnspan.masks.intervals import Interval, Rows
from attnspan.masks.lowering import Lowering

from .mixtures import reordered

Sizes = int | Sequence[int]
Order = np.ndarray[Any, np.dtype[np.int64]]
Axis = tuple[Array, int, int, Any]
"""Keys of a query along one axis: `count` keys `first`, `first + step`, ... that are within [0, stop)."""


class _Grid(Mask):
    """Masks whose queries see a box on a canvas, and the text after it."""

    canvas: Any

    def _key_len(self) -> Any:
        return math.prod(self.canvas) + getattr(self, "text", 0)

    def _cells(self, arrays: Arrays, index: Array) -> list[tuple[Array, Array]]:
        raise NotImplementedError(f"{type(self).__name__} must define _cells")

    def _lower(self, low: Lowering) -> Rows:
        index, n, keys = low.q_index, math.prod(self.canvas), self._key_len()
        inside = (index >= 0) & (index < n)
        intervals = [low.seen_by(inside, lo, hi) for lo, hi in self._cells(low.arrays, index)]
        if keys > n:
            writes = (index >= n) & (index < keys)
            first = intervals[0]
            intervals[0] = Interval(first.lo, low.arrays.where(writes, n, first.hi))
            intervals.append(low.seen_by(inside | writes, n, keys))
        return Rows(tuple(intervals))


class natten(_Grid):
    """Neighbourhood attention: each token sees the `kernel` tokens around it, in a window on the canvas.

    On each axis, the window of place x is [start, start + kernel), with start = x - kernel // 2 clipped to
    [0, n - kernel]. Tokens at a border therefore see as many keys as other tokens. With a dilation d, only
    places with x's residue modulo d count. With a stride s, s neighbours share the window of the neighbour in
    their middle. On a causal axis, the window ends at x. This is NATTEN's definition, also for even kernels.

    attention-gym's `generate_natten` rounds an even kernel up to the next odd number, like
    `natten(canvas, kernel | 1)`. It also swaps its axes, so it is right only for square canvases with square
    kernels.

    R = product of kernel over all axes but the last. It is multiplied by the last kernel if the last axis is
    dilated, and 1 is added with text. In 1-D, R = 1.

    Source: NAT (Hassani et al. 2023), DiNAT (Hassani and Shi 2022), GNA (Hassani et al. 2025).

    Args:
        canvas: Tokens along each axis.
        kernel: Keys along each axis, at most the canvas.
        dilation: Distance of neighbouring keys. kernel * dilation is at most the canvas.
        stride: Number of neighbours that share a window, at most the kernel.
        causal: Whether an axis is causal: one bool for each axis, or one for all.
        text: Number of tokens after the canvas. They see everything, and all tokens see them.

    Raises:
        DtypeError: If a size is not an int.
        ShapeError: If a sequence of sizes does not fit the axes, or if the keys are not the tokens of the
            canvas and the text. Lowering checks the keys.
        OptionError: If a size is out of range, such as a kernel larger than the canvas.

    Example:
        >>> natten(5, 3).spans(5, 5).bounds[0, 0, :, 0].tolist()
        [[0, 3], [0, 3], [1, 4], [2, 5], [2, 5]]
        >>> natten((4, 4), (3, 3))
        natten((4, 4), (3, 3))
    """

    kernel: Any
    dilation: Any = 1
    stride: Any = 1
    causal: Any = False
    text: int = 0

    def __post_init__(self) -> None:
        self._check(canvas=_canvas, text=checks.count)
        axes = len(self.canvas)
        each, flags = partial(_sizes, axes=axes), partial(_sizes, axes=axes, check=checks.flag)
        self._check(kernel=each, dilation=each, stride=each, causal=flags)
        _check_kernel("natten", self.canvas, self.kernel, self.dilation)
        for k, s in zip(self.kernel, self.stride, strict=True):
            expect(s <= k, "natten: stride", "at most {}, the kernel", s, "Use a larger kernel", k)

    def _cells(self, arrays: Arrays, index: Array) -> list[tuple[Array, Array]]:
        places = _coordinates(index, self.canvas)
        return _boxes(arrays, [self._axis(arrays, number, x) for number, x in enumerate(places)], self.canvas)

    def _axis(self, arrays: Arrays, number: int, place: Array) -> Axis:
        """Keys on one axis. Places count within dilation groups. A stride group has its leader's window."""
        n, kernel, stride = self.canvas[number], self.kernel[number], self.stride[number]
        step = self.dilation[number]
        group, own = place % step, place // step
        length = (n - group + (step - 1)) // step
        if self.causal[number]:
            leader = arrays.minimum(own // stride * stride + (stride - 1), length - 1)
            return (leader - (kernel - 1)) * step + group, kernel, step, place + 1
        leader = arrays.minimum(own // stride * stride + stride // 2, length - 1)
        first = arrays.maximum(arrays.minimum(leader - kernel // 2, length - kernel), 0)
        return first * step + group, kernel, step, n

    def __repr__(self) -> str:
        words = [str(self.canvas), str(self.kernel)]
        for name, plain in (("dilation", 1), ("stride", 1), ("causal", False)):
            values = getattr(self, name)
            words += [f"{name}={values}"] if any(x != plain for x in values) else []
        return f"natten({', '.join([*words, *([f'text={self.text}'] if self.text else [])])})"


class sasa(_Grid):
    """Each token sees the tokens at most `radius` away on every axis. Windows are cut off at the borders.

    R = product of (2 * radius + 1) over all axes but the last.

    Source: stand-alone self-attention (Ramachandran et al. 2019), as in FlexAttention's walkthrough.

    Args:
        canvas: Tokens along each axis.
        radius: Number of visible places on each side, at least 0.

    Raises:
        DtypeError: If a size is not an int.
        ShapeError: If a sequence of sizes does not fit the axes, or if the keys are not the tokens of the
            canvas. Lowering checks the keys.
        OptionError: If a size is out of range.

    Example:
        >>> sasa(5, 1).spans(5, 5).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 3], [1, 4], [2, 5], [3, 5]]
    """

    radius: Any

    def __post_init__(self) -> None:
        self._check(canvas=_canvas)
        self._check(radius=partial(_sizes, axes=len(self.canvas), check=checks.count))

    def _cells(self, arrays: Arrays, index: Array) -> list[tuple[Array, Array]]:
        each = zip(_coordinates(index, self.canvas), self.radius, self.canvas, strict=True)
        return _boxes(arrays, [(x - radius, 2 * radius + 1, 1, n) for x, radius, n in each], self.canvas)


class sta(_Grid):
    """Sliding tile attention: neighbourhood attention of whole tiles, on tokens stored tile by tile.

    Put your tokens into `tile_order(canvas, tile)` first. Each tile is then contiguous, and the mask consists
    of full blocks. R = product of kernel / tile over all axes but the last, plus 1 with text.

    Source: attention-gym's `sta`, 2-D and 3-D. Sliding Tile Attention (Zhang et al. 2025, arXiv 2502.04507).

    Args:
        canvas: Tokens along each axis, a multiple of the tile.
        kernel: Keys along each axis, a multiple of the tile, at most the canvas.
        tile: Tokens of a tile along each axis.
        text: Number of tokens after the canvas. They see everything, and all tokens see them.

    Raises:
        DtypeError: If a size is not an int.
        ShapeError: If a sequence of sizes does not fit the axes, or if the keys are not the tokens of the
            canvas and the text. Lowering checks the keys.
        OptionError: If a size is out of range, or if the tile does not divide canvas and kernel.

    Example:
        >>> sta(8, 4, 2).spans(8, 8).bounds[0, 0, ::2, 0].tolist()
        [[0, 4], [0, 4], [2, 6], [4, 8]]
    """

    kernel: Any
    tile: Any
    text: int = 0

    def __post_init__(self) -> None:
        self._check(canvas=_canvas, text=checks.count)
        each = partial(_sizes, axes=len(self.canvas))
        self._check(kernel=each, tile=each)
        _check_kernel("sta", self.canvas, self.kernel)
        _tiles("sta: canvas", self.canvas, self.tile)
        _tiles("sta: kernel", self.kernel, self.tile)

    def _cells(self, arrays: Arrays, index: Array) -> list[tuple[Array, Array]]:
        numel = math.prod(self.tile)
        tiles, kernel = (_tiles("sta", x, self.tile) for x in (self.canvas, self.kernel))
        cells = natten(tiles, kernel)._cells(arrays, index // numel)
        return [(lo * numel, hi * numel) for lo, hi in cells]


def tiled_natten(canvas: Sizes, kernel: Sizes, tile: Sizes) -> Mask:
    """`natten(canvas, kernel)` on tokens stored tile by tile, in `tile_order(canvas, tile)`.

    The neighbourhood is exact, and not rounded to tiles as with `sta`. Each row of the window is cut where a
    tile ends. R is at most the rows of the kernel times the tiles that a window touches. It is smaller if the
    window covers the width of a tile.

    Lowering enumerates the visible pairs, in O(pairs log pairs) time, and reads the indices. Prepare the mask
    once.

    Source: attention-gym's `generate_tiled_natten`, which rounds kernels up to odd numbers (see `natten`).

    Args:
        canvas, kernel: As for `natten`.
        tile: Tokens of a tile along each axis. It divides the canvas.

    Raises:
        DtypeError, ShapeError, OptionError: As `natten` and `tile_order`.

    Example:
        >>> tiled_natten((4, 4), (3, 3), (2, 2)).spans(16, 16).dense()[0, 0, 0].astype(int).tolist()
        [1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    """
    return reordered(natten(canvas, kernel), tile_order(canvas, tile))


def morton_natten(canvas: Sizes, kernel: Sizes) -> Mask:
    """`natten(canvas, kernel)` on tokens along a Z-order curve, in `morton_order(canvas)`.

    R depends on canvas and kernel, for example 27 for windows of 13 x 13 on 64 x 64. Lowering enumerates the
    visible pairs, as for `tiled_natten`. Prepare the mask once.

    Source: attention-gym's `generate_morton_natten`.

    Args:
        canvas: As for `morton_order`.
        kernel: As for `natten`.

    Raises:
        DtypeError, ShapeError, OptionError: As `natten` and `morton_order`.

    Example:
        >>> morton_natten((4, 4), (3, 3)).spans(16, 16).dense()[0, 0, 0].astype(int).tolist()
        [1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    """
    canvas = (canvas, canvas) if isinstance(canvas, int) else canvas
    return reordered(natten(canvas, kernel), morton_order(canvas))


def tile_order(canvas: Sizes, tile: Sizes) -> Order:
    """Order of tokens tile by tile: tiles in row-major order, and the tokens of each tile in row-major order.

    Args:
        canvas: Tokens along each axis, a multiple of the tile.
        tile: Tokens of a tile along each axis.

    Returns:
        int64 (tokens,), the row-major token at each place. `x[..., order, :]` puts a sequence into this
        order, and `np.argsort(order)` puts it back.

    Raises:
        DtypeError: If a size is not an int.
        ShapeError: If canvas and tile have different numbers of axes.
        OptionError: If a size is below 1, or if the tile does not divide the canvas.

    Example:
        >>> tile_order((2, 4), (2, 2)).tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    canvas = _canvas("tile_order: canvas", canvas)
    tile = _sizes("tile_order: tile", tile, len(canvas))
    tiles = _tiles("tile_order: canvas", canvas, tile)
    shape = [n for pair in zip(tiles, tile, strict=True) for n in pair]
    axes = [*range(0, len(shape), 2), *range(1, len(shape), 2)]
    return np.arange(math.prod(canvas)).reshape(shape).transpose(axes).reshape(-1)


def morton_order(canvas: Sizes) -> Order:
    """Order of tokens along a Z-order (Morton) curve, whose lowest bit belongs to the last axis.

    attention-gym's curve has the lowest bit on its `x` axis, which is the column if its mask's `y` is the
    row.

    Args:
        canvas: Tokens along each axis: the same power of two on all axes. An int stands for two axes.

    Returns:
        int64 (tokens,), the row-major token at each place, as for `tile_order`.

    Raises:
        DtypeError: If a size is not an int.
        ShapeError: If there is no axis.
        OptionError: If the sizes differ or are not powers of two.

    Example:
        >>> morton_order((4, 4))[:8].tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]
    """
    canvas = _canvas("morton_order: canvas", (canvas, canvas) if isinstance(canvas, int) else canvas)
    n = canvas[0]
    fits = not (n & (n - 1)) and all(x == n for x in canvas)
    remedy = "Pad it to a square, or use tile_order"
    expect(fits, "morton_order: canvas", "one power of two for all axes", canvas, remedy)
    place = np.arange(math.prod(canvas))
    token = np.zeros_like(place)
    for bit in range(n.bit_length() - 1):
        for axis in range(len(canvas)):
            taken = place >> (bit * len(canvas) + len(canvas) - 1 - axis) & 1
            token += (taken << bit) * n ** (len(canvas) - 1 - axis)
    return token


def _places(axis: Axis) -> list[tuple[Array, Array]]:
    """Each place of an axis, and whether it is inside."""
    first, count, step, stop = axis
    places = [first + step * o for o in range(count)]
    return [(x, (x >= 0) & (x < stop)) for x in places]


def _boxes(arrays: Arrays, axes: list[Axis], shape: tuple[int, ...]) -> list[tuple[Array, Array]]:
    """Ascending cells [lo, hi) of a row-major grid, whose last axis is contiguous."""
    *leading, last = axes
    first, count, step, stop = last
    if step > 1:
        runs = [(x, arrays.where(inside, x + 1, x)) for x, inside in _places(last)]
    else:
        runs = [(arrays.maximum(first, 0), arrays.minimum(first + count, stop))]
    found = []
    for chosen in product(*map(_places, leading)):
        base, within = 0, True
        for (place, inside), n in zip(chosen, shape, strict=False):
            base, within = base * n + place, within & inside
        for lo, hi in runs:
            lo, hi = base * shape[-1] + lo, base * shape[-1] + hi
            hi = arrays.where(within, hi, lo) if leading else hi
            found.append((lo, arrays.maximum(hi, lo)))
    return found


def _coordinates(index: Array, shape: tuple[int, ...]) -> list[Array]:
    """Coordinates of row-major indices."""
    found = []
    for n in reversed(shape):
        found.append(index % n)
        index = index // n
    return found[::-1]


def _sizes(
    what: str, value: Any, axes: int | None = None, check: Callable[[str, Any], Any] = checks.positive
) -> tuple[Any, ...]:
    """Make one size for each axis, from a sequence or from one size for all axes."""
    if not isinstance(value, list | tuple):
        return (check(what, value),) * (1 if axes is None else axes)
    n, fits = len(value), axes is None or len(value) == axes
    expect(fits, what, "{} sizes, one for each axis", n, "Pass as many sizes", axes, error=ShapeError)
    return tuple(check(what, x) for x in value)


def _canvas(what: str, value: Any) -> tuple[int, ...]:
    """Check sizes of at least one axis. The number of tokens must fit int32."""
    sizes = _sizes(what, value)
    expect(len(sizes) > 0, what, "at least one axis", "none", "Pass a size for each axis", error=ShapeError)
    checks.positive(f"{what}: number of tokens", math.prod(sizes))
    return sizes


def _tiles(what: str, sizes: Sequence[int], tile: tuple[int, ...]) -> tuple[int, ...]:
    """Number of tiles on each axis. Raises if the tile does not divide a size."""
    fits = not any(n % t for n, t in zip(sizes, tile, strict=True))
    remedy = "Pad it, or choose a tile that divides it"
    expect(fits, what, "multiples of the tile {}", tuple(sizes), remedy, tile)
    return tuple(n // t for n, t in zip(sizes, tile, strict=True))


def _check_kernel(
    what: str, canvas: tuple[int, ...], kernel: tuple[int, ...], dilation: tuple[int, ...] | None = None
) -> None:
    """Raise if a kernel, with its dilation, is larger than the canvas."""
    dilation = (1,) * len(canvas) if dilation is None else dilation
    times = f" times {shown(dilation)}" if max(dilation) > 1 else ""
    expected = "at most the canvas {}" + (" with its dilation" if times else "")
    remedy = "Use a smaller kernel. To see a whole axis, pass its size"
    fits = all(k * d <= n for n, k, d in zip(canvas, kernel, dilation, strict=True))
    expect(fits, f"{what}: kernel", expected, shown(kernel) + times, remedy, canvas)
