"""Boxes on grids: what a row sees of a canvas whose tokens are in row-major order, or tile by tile."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as pairs
from typing import Any

from .._intervals import Interval, Rows
from .._lowering import Lowering
from ..arrays import Array, Arrays
from ._leaf import Leaf, product, seen_by, warn_of_size


@dataclass(frozen=True, eq=False)
class Axis:
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


def boxes(arrays: Arrays, axes: list[Axis], shape: tuple[int, ...]) -> list[tuple[Array, Array]]:
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


def coordinates(index: Array, shape: tuple[int, ...]) -> list[Array]:
    """Coordinates of row-major indices."""
    found = []
    for n in reversed(shape):
        found.append(index % n)
        index = index // n
    return found[::-1]


def with_text(low: Lowering, cells: list[tuple[Array, Array]], canvas: int, text: int) -> Rows:
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


@dataclass(frozen=True, eq=False, repr=False)
class Natten(Leaf):
    canvas: tuple[int, ...]
    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    stride: tuple[int, ...]
    causal: tuple[bool, ...]
    text: int = 0

    called = "natten"

    def _key_len(self) -> Any:
        return product(self.canvas) + self.text

    def _lower(self, low: Lowering) -> Rows:
        at = coordinates(low.q_index, self.canvas)
        axes = [self._axis(low.arrays, number, place) for number, place in enumerate(at)]
        return with_text(low, boxes(low.arrays, axes, self.canvas), product(self.canvas), self.text)

    def _axis(self, arrays: Arrays, number: int, place: Array) -> Axis:
        """Places of a dilation group count from 0; the leader of the row's stride group has its window."""
        n, kernel, stride = self.canvas[number], self.kernel[number], self.stride[number]
        step = self.dilation[number]
        group, own = place % step, place // step
        length = (n - group + (step - 1)) // step
        if self.causal[number]:
            leader = arrays.minimum(own // stride * stride + (stride - 1), length - 1)
            return Axis((leader - (kernel - 1)) * step + group, kernel, step, 0, place + 1)
        leader = arrays.minimum(own // stride * stride + stride // 2, length - 1)
        first = arrays.maximum(arrays.minimum(leader - kernel // 2, length - kernel), 0)
        return Axis(first * step + group, kernel, step, 0, n)

    def __repr__(self) -> str:
        given = [
            f"{name}={getattr(self, name)}" for name in ("dilation", "stride", "causal") if self._set(name)
        ]
        given += [f"text={self.text}"] if self.text else []
        return f"natten({', '.join([str(self.canvas), str(self.kernel), *given])})"

    def _set(self, name: str) -> bool:
        plain = False if name == "causal" else 1
        return any(x != plain for x in getattr(self, name))


@dataclass(frozen=True, eq=False, repr=False)
class Sasa(Leaf):
    canvas: tuple[int, ...]
    radius: tuple[int, ...]

    called = "sasa"

    def _key_len(self) -> Any:
        return product(self.canvas)

    def _lower(self, low: Lowering) -> Rows:
        at = coordinates(low.q_index, self.canvas)
        axes = [
            Axis(place - radius, 2 * radius + 1, 1, 0, n)
            for place, radius, n in zip(at, self.radius, self.canvas, strict=True)
        ]
        return with_text(low, boxes(low.arrays, axes, self.canvas), product(self.canvas), 0)


@dataclass(frozen=True, eq=False, repr=False)
class Sta(Leaf):
    canvas: tuple[int, ...]
    kernel: tuple[int, ...]
    tile: tuple[int, ...]
    text: int = 0

    called = "sta"

    def _key_len(self) -> Any:
        return product(self.canvas) + self.text

    def _lower(self, low: Lowering) -> Rows:
        arrays, numel = low.arrays, product(self.tile)
        shape = tuple(n // t for n, t in zip(self.canvas, self.tile, strict=True))
        kernel = tuple(n // t for n, t in zip(self.kernel, self.tile, strict=True))
        axes = [
            Axis(arrays.clip(place - count // 2, 0, n - count), count, 1, 0, n)
            for place, count, n in zip(coordinates(low.q_index // numel, shape), kernel, shape, strict=True)
        ]
        cells = [(lo * numel, hi * numel) for lo, hi in boxes(arrays, axes, shape)]
        return with_text(low, cells, product(self.canvas), self.text)
