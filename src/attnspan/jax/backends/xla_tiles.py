"""Tiles of the blockwise backend: the key blocks that a block of queries touches, and their visible pairs.

Query heads that share a key head have a separate axis. Arrays are (B, Hkv, G, Sq, D) for queries and
(B, Hkv, Sk, D) for keys, so that a sharded batch or head axis is never merged with another.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnspan.jax.dropout import keeps, row_words
from attnspan.jax.part import JaxPart

from .tiles import InBlocks

#: Queries and keys of a tile if memory allows. Larger tiles cost at least as much CPU time per visible pair,
#: and masks that change between queries leave more of them half empty.
_Q_BLOCK, _K_BLOCK = 256, 256

#: Most scores of one tile over all batch elements and heads. Beyond it tiles shrink, down to the least sides.
_TILE, _LEAST = 2**22, 128


@dataclass(frozen=True)
class Tiling(InBlocks):
    """The sizes of a call and of its tiles."""

    batch: int
    kv_heads: int
    group: int
    q_len: int
    k_len: int
    block_q: int
    block_k: int


class QueryBlock(NamedTuple):
    """One block of queries: its start, the queries that it owns, and their visible keys.

    The last block starts early, so that it is as long as the others. The queries that it shares with the
    block before see nothing in it.
    """

    start: jax.Array
    own: jax.Array | None  # bool (m,), or None if it owns all queries
    lo: jax.Array  # (B|1, Hkv|1, G|1, m, R)
    hi: jax.Array
    indices: jax.Array  # (B|1, m)
    words: Any  # two of uint32 (B, Hkv, G, m, 1) with dropout
    order: jax.Array  # blocks of keys that some query touches, ascending
    blocks: jax.Array  # their number
    # The largest bias of a query if it is far from 0, as a distance and as a bias (B|1, Hkv, G, m, 1). It is
    # subtracted from the scores and added to the lse.
    origin: jax.Array | int = 0
    base: jax.Array | None = None

    @property
    def alive(self) -> jax.Array:
        """Queries that see at least one key, (B|1, Hkv|1, G|1, m, 1)."""
        return (self.lo < self.hi).any(-1, keepdims=True)


class KeyBlock(NamedTuple):
    """One block of keys, for a block of queries."""

    start: jax.Array
    indices: jax.Array  # (B|1, n)
    visible: jax.Array  # (B|1, Hkv|1, G|1, m, n)

    @property
    def seen(self) -> jax.Array:
        """Keys that some query of the tile sees, (B|1, Hkv|1, n)."""
        return self.visible.any((2, 3))


def sizes_of(q: jax.Array, k: jax.Array) -> Tiling:
    """Return the sizes of a call and of its tiles."""
    batch, q_heads, q_len, _ = q.shape
    kv_heads, k_len = k.shape[1:3]
    q_block, k_block = _Q_BLOCK, _K_BLOCK
    # A symbolic batch may be that large.
    rows = batch * q_heads if isinstance(batch, int) else _TILE
    while rows * q_block * k_block > _TILE and (q_block > _LEAST or k_block > _LEAST):
        q_block, k_block = (q_block, k_block // 2) if k_block > q_block else (q_block // 2, k_block)
    group = q_heads // kv_heads
    return Tiling(batch, kv_heads, group, q_len, k_len, min(q_block, q_len), min(k_block, k_len))


def grouped(x: jax.Array, sizes: Tiling) -> jax.Array:
    """Reshape (B|1, Hq|1, ...) to (B|1, Hkv|1, G|1, ...)."""
    heads = (1, 1) if x.shape[1] == 1 else (sizes.kv_heads, sizes.group)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def ungrouped(x: jax.Array) -> jax.Array:
    """Reshape (B, Hkv, G, ...) to (B, Hq, ...)."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def take(x: jax.Array, start: Any, size: int, axis: int) -> jax.Array:
    """Return elements of one axis from `start` on. An axis of size 1 stays whole, because it is broadcast."""
    if x.shape[axis] == 1:
        return x
    taken: jax.Array = lax.dynamic_slice_in_dim(x, start, size, axis)
    return taken


def add_block(x: jax.Array, block: jax.Array, start: Any, axis: int) -> jax.Array:
    """Return `x` with a block added to it along one axis."""
    old = lax.dynamic_slice_in_dim(x, start, block.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, old + block.astype(x.dtype), start, axis)


def count_from(start: Any, size: int) -> jax.Array:
    """Return start, start + 1, ... as int32 (1, size)."""
    return lax.broadcasted_iota(jnp.int32, (1, size), 1) + start  # type: ignore[no-any-return]


def rows_of(i: jax.Array, part: JaxPart, sizes: Tiling) -> QueryBlock:
    """Return the i-th block of queries."""
    begin = i * np.int32(sizes.block_q)
    start = jnp.minimum(begin, np.int32(sizes.q_len - sizes.block_q))
    bounds = lax.dynamic_slice_in_dim(grouped(part.bounds, sizes), start, sizes.block_q, 3)
    own = None
    if sizes.q_len % sizes.block_q:
        own = count_from(start, sizes.block_q)[0] >= begin
        bounds = jnp.where(own[:, None, None], bounds, 0)
    bounds = jnp.clip(bounds, 0, sizes.k_len)
    lo, hi = bounds[..., 0], bounds[..., 1]
    if part.q_index is None:
        index = count_from(start + np.int32(sizes.k_len - sizes.q_len), sizes.block_q)
    else:
        index = lax.dynamic_slice_in_dim(part.q_index, start, sizes.block_q, 1)
    words = None
    if part.dropout_p:
        assert part.dropout_seed is not None, "dropout has seeds"
        seeds = grouped(part.dropout_seed, sizes)[:, :, :, None]
        words = row_words(seeds[..., :1], seeds[..., 1:], index[:, None, None, :, None])
    return QueryBlock(start, own, lo, hi, index, words, *_touched(lo, hi, sizes))


def _touched(lo: jax.Array, hi: jax.Array, sizes: Tiling) -> tuple[jax.Array, jax.Array]:
    """Return the blocks of keys in which some query has a key, in ascending order, and their number."""
    blocks = jnp.arange(sizes.k_blocks, dtype=jnp.int32)
    first, last = lo[..., None] // np.int32(sizes.block_k), (hi[..., None] - 1) // np.int32(sizes.block_k)
    touched = ((lo < hi)[..., None] & (first <= blocks) & (blocks <= last)).any((0, 1, 2, 3, 4))
    order = jnp.sort(jnp.where(touched, blocks, np.int32(sizes.k_blocks)))
    return order, touched.sum(dtype=jnp.int32)


def keys_of(t: jax.Array, rows: QueryBlock, part: JaxPart, sizes: Tiling) -> KeyBlock:
    """Return the t-th of the blocks of keys that a block of queries touches."""
    begin = lax.dynamic_index_in_dim(rows.order, t, keepdims=False) * np.int32(sizes.block_k)
    start = jnp.minimum(begin, np.int32(sizes.k_len - sizes.block_k))
    place = count_from(start, sizes.block_k)[0]
    lo, hi = rows.lo[..., None], rows.hi[..., None]
    visible = ((lo <= place) & (place < hi)).any(-2)
    if sizes.k_len % sizes.block_k:  # The last block starts early, with keys of the block before.
        visible = visible & (place >= begin)
    if part.k_index is None:
        return KeyBlock(start, place[None], visible)
    return KeyBlock(start, lax.dynamic_slice_in_dim(part.k_index, start, sizes.block_k, 1), visible)


def kept_of(rows: QueryBlock, keys: KeyBlock, part: JaxPart) -> jax.Array:
    """Return whether dropout keeps each weight of a tile, (B, Hkv, G, m, n)."""
    first, second = rows.words
    kept: jax.Array = keeps(part.dropout_p, first, second, keys.indices[:, None, None, None, :])
    return kept
