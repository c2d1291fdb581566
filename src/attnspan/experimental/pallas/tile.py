"""A tile of scores in a TPU's vector memory: its visible pairs and its scores.

Tiles are transposed, keys by queries. Data of a query (bounds, maxima, sums, lse) is then a row of lanes. A
row of lanes takes 1/128 of a column's memory, and it is broadcast and reduced without moving data between
lanes. Scores are in units of log2, because a TPU only has exp2.

Blocks span whole head dims, so head dims need no padding to 128 lanes. Memory is laid out in tiles of 128
lanes anyway, and the compiler masks the rest of a contraction. Blocks hold arbitrary values past the end of a
length.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from attnspan.call.biases import HIDES
from attnspan.call.schema import ALIBI, DENSE, SIGNED_ALIBI
from attnspan.jax.backends.tiles import LOG2E, InBlocks, scores_of_products
from attnspan.jax.dropout import keeps
from attnspan.jax.part import JaxPart

from . import lists as tables

#: Contracted dims of products of a tile with an array along its lanes or rows.
NT = (((1,), (1,)), ((), ()))
TN = (((0,), (0,)), ((), ()))
NN = (((1,), (0,)), ((), ()))


class Place(NamedTuple):
    """Place of a tile as scalars: batch element, query head, key head, block of queries, block of keys."""

    b: Any
    h: Any
    kv: Any
    i: Any
    j: Any


Refs = dict[str, Any]


@dataclass(frozen=True)
class Tile(InBlocks):
    """The numbers that a kernel is compiled for."""

    block_q: int
    block_k: int
    q_len: int
    k_len: int
    q_heads: int
    group: int
    part: JaxPart

    def whole(self, full: tuple[Any, Any], dims: tuple[int, ...], p: Place) -> Any:
        """Return whether every query of the tile sees every key, as far as the tables know."""
        if self.part.bias_kind == DENSE:  # it may hide keys
            return False
        at, found = tables.place(dims, p.b, p.h, p.i), False
        for g in range(dims[3]):
            found |= (full[0][at + g] <= p.j) & (p.j < full[1][at + g])
        return found

    def visible(self, refs: Refs, p: Place) -> Any:
        """Return whether each query sees each key, bool (block_k, block_q). False past the last query."""
        rows = refs["rows"]
        keys = p.j * self.block_k + jax.lax.broadcasted_iota(jnp.int32, (self.block_k, self.block_q), 0)

        def seen(r: Any) -> Any:
            lo, hi = rows[0, 0, pl.ds(2 * r, 1), :], rows[0, 0, pl.ds(2 * r + 1, 1), :]
            return (keys >= lo) & (keys < hi)

        runs = rows.shape[2] // 2
        if runs <= 8:
            found = seen(0)
            for r in range(1, runs):
                found |= seen(r)
            return found

        def join(r: Any, found: Any) -> Any:  # ints: loops carry no vectors of bits
            return jnp.where(seen(r), 1, found)

        return jax.lax.fori_loop(0, runs, join, jnp.zeros(keys.shape, jnp.int32)) > 0

    def scores(self, refs: Refs, p: Place, products: Any) -> tuple[Any, Any, Any]:
        """Return scores in units of log2, their derivative by the scaled products, and the shown keys.

        The derivative is None if it is 1. The shown keys are None unless a dense bias may hide keys.
        """
        part, shown = self.part, None
        x, slope = scores_of_products(products, part)
        if part.bias_kind in (ALIBI, SIGNED_ALIBI):
            x += (self.slope(refs, p) * np.float32(LOG2E)) * self.distance(refs, p)
        elif part.bias_kind == DENSE:
            bias = refs["bias"][0, 0].astype(jnp.float32)
            bias = column(bias) if bias.shape[0] == 1 else bias.T
            shown = ~(jnp.broadcast_to(bias, x.shape) < np.float32(HIDES))
            x += bias * np.float32(LOG2E)
        return x, slope, shown

    def slope(self, refs: Refs, p: Place) -> Any:
        slopes = refs["slopes"]
        return slopes[p.h if slopes.shape[0] == self.q_heads else p.b * self.q_heads + p.h]

    def distance(self, refs: Refs, p: Place) -> Any:
        """Return the factor of a slope, float32 (block_k, block_q)."""
        distance = (self.k_index(refs, p) - self.q_index(refs, p)).astype(jnp.float32)
        return distance if self.part.bias_kind == SIGNED_ALIBI else -jnp.abs(distance)

    def q_index(self, refs: Refs, p: Place) -> Any:
        """Return the global indices of the queries, int32 (1, block_q)."""
        if "q_index" in refs:
            return refs["q_index"][0]
        first = p.i * self.block_q + (self.k_len - self.q_len)
        return first + jax.lax.broadcasted_iota(jnp.int32, (1, self.block_q), 1)

    def k_index(self, refs: Refs, p: Place) -> Any:
        """Return the global indices of the keys, int32 (block_k, 1)."""
        if "k_index" in refs:
            return column(refs["k_index"][0])
        return p.j * self.block_k + jax.lax.broadcasted_iota(jnp.int32, (self.block_k, 1), 0)

    def keep(self, refs: Refs, p: Place) -> Any:
        """Return whether dropout keeps each weight, bool (block_k, block_q)."""
        words = refs["words"]
        first, second = words[0, 0, 0:1, :], words[0, 0, 1:2, :]
        return keeps(self.part.dropout_p, first, second, self.k_index(refs, p))


def dot(a: Any, b: Any, dims: Any) -> Any:
    """Return a product summed in float32, at full precision for float32.

    By default, a TPU multiplies float32 in one pass of bfloat16.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def column(row: Any) -> Any:
    """Reshape (1, n) to (n, 1)."""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def only(x: Any, which: Any) -> Any:
    """Return `x` with 0 in rows where `which` (n, 1) is False: they may hold NaN, and 0 * NaN is NaN."""
    return jnp.where(which, x.astype(jnp.float32), 0).astype(x.dtype)


def some(visible: Any, axis: int) -> Any:
    """Return whether each key (axis 1) or query (axis 0) of a tile of bits has a pair."""
    return jnp.where(visible, 1.0, 0.0).max(axis, keepdims=True) > 0
