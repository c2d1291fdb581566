"""Blocks of keys that a block of queries visits, and the reverse: O(S * R) arithmetic on bounds.

Legend: b batch or 1, h heads or 1, m blocks of queries, n blocks of keys, r runs.
"""

import jax
import jax.numpy as jnp
from jax import lax

_FAR = 2**30


def key_visits(bounds: jax.Array, k_len: int, block_q: int, block_k: int) -> jax.Array:
    """Return the blocks of keys that each block of queries has to visit.

    Args:
        bounds: int32 (b, h, Sq, R, 2), from `attnspan.jax.backends.tiles.legal`.
        k_len: Number of keys.
        block_q: Queries of a block.
        block_k: Keys of a block.

    Returns:
        int32 (b, h, m, R, 4). Each of R disjoint ascending ranges of blocks has a first block and an end. The
        other two numbers are first and end of the blocks in it of which every query sees every key.
    """
    lo, hi = (_blocked(bounds[..., i], block_q, 0) for i in (0, 1))
    filled = lo < hi
    first = jnp.where(filled, lo, _FAR).min(3) // block_k
    end = -(-jnp.where(filled, hi, 0).max(3) // block_k)
    # Rows that pad the last block do not count when a block is tested for being visible to all queries.
    inside = _blocked(jnp.ones_like(bounds[..., 0], bool), block_q, False)
    all_first = -(-jnp.where(inside, jnp.where(filled, lo, _FAR), 0).max(3) // block_k)
    all_end = jnp.where(inside, jnp.where(filled, hi, 0), k_len).min(3) // block_k
    if bounds.shape[3] > 1:
        # Runs of different queries may overlap, in any order, but no block may be visited twice.
        ranges = (first, end, all_first, all_end)
        first, end, all_first, all_end = lax.sort(ranges, dimension=3, num_keys=1)
    ends = lax.cummax(end, axis=3)
    first = jnp.maximum(first, jnp.pad(ends[..., :-1], [(0, 0)] * 3 + [(1, 0)]))
    first = jnp.minimum(first, ends)
    end = jnp.maximum(first, end)
    all_first = jnp.clip(all_first, first, end)
    all_end = jnp.clip(all_end, all_first, end)
    return jnp.stack([first, end, all_first, all_end], -1).astype(jnp.int32)


def query_visits(visits: jax.Array, k_blocks: int) -> jax.Array:
    """Return the range of query blocks that visit each of `k_blocks` blocks of keys, int32 (b, h, n, 2).

    `visits` (b, h, m, R, 4) comes from `key_visits`. Some query blocks within the range may not visit the
    block.
    """
    batch, heads, q_blocks, runs, _ = visits.shape
    first, end = (visits[..., i].reshape(batch * heads, q_blocks * runs) for i in (0, 1))
    at = jnp.repeat(jnp.arange(q_blocks, dtype=jnp.int32), runs)[None]
    lowest = _least_over_ranges(first, end, jnp.broadcast_to(at, first.shape), k_blocks)
    highest = -_least_over_ranges(first, end, jnp.broadcast_to(-at, first.shape), k_blocks)
    none = lowest == _FAR
    ranges = [jnp.where(none, 0, lowest), jnp.where(none, 0, highest + 1)]
    return jnp.stack(ranges, -1).reshape(batch, heads, k_blocks, 2).astype(jnp.int32)


def _least_over_ranges(first: jax.Array, end: jax.Array, value: jax.Array, size: int) -> jax.Array:
    """Return the least value of the ranges that cover each place below `size`, in O(n log n).

    It needs no n * n array. Every range is the union of two overlapping ranges whose length is a power of
    two. Minima are passed down from power to power.
    """
    filled = first < end
    length = jnp.where(filled, end - first, 1)
    level = 31 - lax.clz(length)
    rows = jnp.arange(first.shape[0])[:, None]
    value = jnp.where(filled, value, _FAR)
    top = max(size - 1, 1).bit_length()
    table = jnp.full((first.shape[0], top + 1, size), _FAR, jnp.int32)
    table = table.at[rows, level, jnp.where(filled, first, 0)].min(value)
    table = table.at[rows, level, jnp.where(filled, end - (1 << level), 0)].min(value)
    below = table[:, top]
    for power in range(top - 1, -1, -1):
        shifted = jnp.pad(below, ((0, 0), (1 << power, 0)), constant_values=_FAR)[:, :size]
        below = jnp.minimum(jnp.minimum(below, shifted), table[:, power])
    return below


def _blocked(x: jax.Array, block_q: int, fill: int | bool) -> jax.Array:
    """Reshape (b, h, Sq, R) to (b, h, m, block_q, R)."""
    batch, heads, q_len, runs = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -q_len % block_q), (0, 0)), constant_values=fill)
    return x.reshape(batch, heads, -1, block_q, runs)
