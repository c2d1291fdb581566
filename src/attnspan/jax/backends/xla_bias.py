"""Biases of the blockwise backend and their gradients, tile by tile.

A `Bias` has these methods:

* `placed(rows, part)` returns the rows with the base that is subtracted from their biases.
* `tile(rows, keys)` returns the numbers that are added to the scores, (B|1, Hkv|1, G|1, m, n).
* `zeros()` returns an empty gradient, and `add(gradient, rows, keys, dx)` adds a tile to it.
* `finish(gradient)` returns the gradient in the shape of the parameter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI
from attnspan.jax.part import JaxPart

from .tiles import by_distance
from .xla_tiles import KeyBlock, QueryBlock, Tiling, add_block, grouped, take, ungrouped


def bias_of(part: JaxPart, sizes: Tiling, wide: Any) -> Bias | None:
    """Return the bias of a call, computed in `wide`."""
    kind = part.bias_kind
    if kind == 0:
        return None
    assert part.bias is not None, "a kind of bias needs its parameter"
    if kind == DENSE:
        return _Dense(part.bias, sizes, wide)
    if kind == DISTANCE:
        placed = part.q_index is not None or part.k_index is not None
        return _Table(part.bias, sizes, wide) if placed else _Diagonals(part.bias, sizes, wide)
    assert kind in (ALIBI, SIGNED_ALIBI), kind
    return _Slopes(part.bias, sizes, wide, signed=kind == SIGNED_ALIBI)


def _distance(rows: QueryBlock, keys: KeyBlock) -> jax.Array:
    """Return key index minus query index, (B|1, m, n)."""
    return keys.indices[:, None, :] - rows.indices[:, :, None]


def _places(queries: jax.Array, k_index: jax.Array | None) -> jax.Array:
    """Count the keys before each query (B|1, m), visible or not."""
    if k_index is None:
        return queries
    batch = max(queries.shape[0], k_index.shape[0])
    keys, queries = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in (k_index, queries))
    return jax.vmap(jnp.searchsorted)(keys, queries).astype(jnp.int32)


def _index_at(places: jax.Array, k_index: jax.Array | None) -> jax.Array:
    """Return the indices of the keys at places (B|1, H, G, m, R)."""
    if k_index is None:
        return places
    flat = places.reshape(*places.shape[:3], -1)
    found: jax.Array = jnp.take_along_axis(k_index[:, None, None], flat, -1, mode="clip")
    return found.reshape(found.shape[0], *places.shape[1:])


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the sum over the axes that have size 1 in `shape`."""
    return x.sum([axis for axis, size in enumerate(shape) if size == 1], keepdims=True)


class _Plain:
    """Biases that are added unchanged."""

    def placed(self, rows: QueryBlock, part: JaxPart) -> QueryBlock:
        del part
        return rows


#: Slopes times distances up to this size are added unchanged, because float scores are precise enough.
_MOST_PLAIN = 64.0


class _Slopes:
    """ALiBi: a slope (B|1, Hkv, G) times a function of the distance."""

    def __init__(self, slopes: jax.Array, sizes: Tiling, wide: Any, *, signed: bool) -> None:
        self.slopes = grouped(slopes[..., None, None].astype(wide), sizes)
        self.shape, self.signed = slopes.shape, signed

    def _factor(self, rows: QueryBlock, keys: KeyBlock) -> jax.Array:
        distance = _distance(rows, keys)[:, None, None]
        return distance if self.signed else -jnp.abs(distance)

    def placed(self, rows: QueryBlock, part: JaxPart) -> QueryBlock:
        """Return `rows` with each row's largest bias as its base, if all of the row's keys are far away.

        If the keys do not ascend, the base may be another bias. The result is then correct but less precise.
        """
        lo, hi = rows.lo, rows.hi
        queries = rows.indices[:, None, None, :, None]
        place = _places(rows.indices, part.k_index)[:, None, None, :, None]
        ends = [lo, hi - 1, jnp.clip(place - 1, lo, hi - 1), jnp.clip(place, lo, hi - 1)]
        near = jnp.concatenate([_index_at(at, part.k_index) - queries for at in ends], -1)
        near = near if self.signed else -jnp.abs(near)
        seen = jnp.concatenate([lo < hi] * 4, -1)
        up = jnp.where(seen, jnp.where(self.slopes < 0, -near, near), np.iinfo(np.int32).min)
        top = up.max(-1, keepdims=True)
        origin = jnp.where(self.slopes < 0, -top, top)
        base = self.slopes * origin.astype(self.slopes.dtype)
        far = rows.alive & (jnp.abs(base) > _MOST_PLAIN)
        return rows._replace(origin=jnp.where(far, origin, 0), base=jnp.where(far, base, 0))

    def tile(self, rows: QueryBlock, keys: KeyBlock) -> jax.Array:
        # Distances stay integers, because float32 cannot tell neighbours apart beyond 2^24.
        return self.slopes * (self._factor(rows, keys) - rows.origin).astype(self.slopes.dtype)

    def zeros(self) -> jax.Array:
        return jnp.zeros_like(self.slopes)

    def add(self, gradient: jax.Array, rows: QueryBlock, keys: KeyBlock, dx: jax.Array) -> jax.Array:
        factor = self._factor(rows, keys).astype(self.slopes.dtype)
        return gradient + _sum_to(dx * factor, gradient.shape)

    def finish(self, gradient: jax.Array) -> jax.Array:
        return gradient.reshape(self.shape)


class _Dense(_Plain):
    """Dense values (B|1, Hkv|1, G|1, Sq|1, Sk)."""

    def __init__(self, values: jax.Array, sizes: Tiling, wide: Any) -> None:
        self.shape, self.wide, self.sizes = values.shape, wide, sizes
        self.values = grouped(values, sizes)

    def tile(self, rows: QueryBlock, keys: KeyBlock) -> jax.Array:
        block = take(self.values, rows.start, self.sizes.block_q, 3)
        return take(block, keys.start, self.sizes.block_k, 4).astype(self.wide)

    def zeros(self) -> jax.Array:
        return jnp.zeros(self.values.shape, self.wide)

    def add(self, gradient: jax.Array, rows: QueryBlock, keys: KeyBlock, dx: jax.Array) -> jax.Array:
        lead = self.values.shape[:4]
        block = _sum_to(dx, (*lead, dx.shape[4]))
        start = [jnp.int32(0)] * 3 + [rows.start if lead[3] > 1 else jnp.int32(0), keys.start]
        old = lax.dynamic_slice(gradient, start, block.shape)
        return lax.dynamic_update_slice(gradient, old + block, start)

    def finish(self, gradient: jax.Array) -> jax.Array:
        return gradient.reshape(self.shape)


class _Table(_Plain):
    """Values by distance (Hq, 2L + 1) for given indices. Every pair looks up its own value."""

    def __init__(self, table: jax.Array, sizes: Tiling, wide: Any) -> None:
        self.table, self.sizes = table.astype(wide), sizes

    def tile(self, rows: QueryBlock, keys: KeyBlock) -> jax.Array:
        return grouped(by_distance(self.table, rows.indices, keys.indices), self.sizes)

    def zeros(self) -> jax.Array:
        return jnp.zeros_like(self.table)

    def add(self, gradient: jax.Array, rows: QueryBlock, keys: KeyBlock, dx: jax.Array) -> jax.Array:
        reach = self.table.shape[1] // 2
        columns = jnp.clip(_distance(rows, keys), -reach, reach) + reach
        dx = _sum_to(dx, (columns.shape[0], *dx.shape[1:]))
        return gradient.at[:, columns].add(ungrouped(dx).swapaxes(0, 1))

    def finish(self, gradient: jax.Array) -> jax.Array:
        return gradient


class _Diagonals(_Plain):
    """Values by distance for indices that count. Each diagonal of a tile has one value, without lookups.

    Distances run from 1 - k_len to q_len - 1. A vector of period m + n is laid out in rows of m + n - 1, so
    it moves one element to the right with every row. This gives a tile its diagonals. Read backwards, it sums
    each diagonal.
    """

    def __init__(self, table: jax.Array, sizes: Tiling, wide: Any) -> None:
        self.sizes, self.reach = sizes, table.shape[1] // 2
        distance = np.arange(1 - sizes.k_len, sizes.q_len)
        columns = np.clip(distance, -self.reach, self.reach) + self.reach
        self.values = table.astype(wide)[:, columns].reshape(sizes.kv_heads, sizes.group, len(distance))

    def _start(self, rows: QueryBlock, keys: KeyBlock) -> jax.Array:
        """Return the first distance of a tile: from its last query to its first key."""
        return keys.start - rows.start + np.int32(self.sizes.q_len - self.sizes.block_q)

    def tile(self, rows: QueryBlock, keys: KeyBlock) -> jax.Array:
        m, n = self.sizes.block_q, self.sizes.block_k
        values = lax.dynamic_slice_in_dim(self.values, self._start(rows, keys), m + n - 1, 2)
        period = jnp.concatenate([values[..., m - 1 :], values[..., :1], values[..., : m - 1]], -1)
        lead = values.shape[:2]
        flat = jnp.broadcast_to(period[:, :, None], (*lead, m, m + n)).reshape(*lead, m * (m + n))
        return flat[..., : m * (m + n - 1)].reshape(1, *lead, m, m + n - 1)[..., :n]

    def zeros(self) -> jax.Array:
        return jnp.zeros_like(self.values)

    def add(self, gradient: jax.Array, rows: QueryBlock, keys: KeyBlock, dx: jax.Array) -> jax.Array:
        m, n = self.sizes.block_q, self.sizes.block_k
        lead = gradient.shape[:2]
        wide = jnp.pad(dx.sum(0), [(0, 0)] * 3 + [(0, m - 1)]).reshape(*lead, m * (m + n - 1))
        period = jnp.pad(wide, [(0, 0)] * 2 + [(0, m)]).reshape(*lead, m, m + n).sum(2)
        sums = jnp.concatenate([period[..., n + 1 :], period[..., :n]], -1)
        return add_block(gradient, sums, self._start(rows, keys), 2)

    def finish(self, gradient: jax.Array) -> jax.Array:
        """Return sums by column from sums by distance. The outer columns sum all farther distances."""
        reach, zero = self.reach, self.sizes.k_len - 1  # where distance is 0
        gradient = gradient.reshape(-1, gradient.shape[2])
        if reach == 0:
            return gradient.sum(1, keepdims=True)
        behind, ahead = min(reach - 1, zero), min(reach - 1, self.sizes.q_len - 1)
        near = gradient[:, zero - behind : zero + ahead + 1]
        near = jnp.pad(near, [(0, 0), (reach - 1 - behind, reach - 1 - ahead)])
        first = gradient[:, : max(zero - reach + 1, 0)].sum(1, keepdims=True)
        last = gradient[:, zero + reach :].sum(1, keepdims=True)
        return jnp.concatenate([first, near, last], 1)


Bias = _Slopes | _Dense | _Table | _Diagonals
