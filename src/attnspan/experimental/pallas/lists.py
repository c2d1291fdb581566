"""Tables of the blocks of keys that a block of queries touches, and the reverse. Kernels prefetch them.

The spans of a block of queries lie in a few intervals of key blocks (usually one, two with global keys). A
kernel's grid has as many steps as the longest list has blocks, so blocks outside of the intervals are neither
copied nor computed. Tables are conservative: they may list a tile without visible pairs, but they never omit
a tile with visible pairs.

Shape suffixes: b batch or 1, h heads or 1, n blocks of rows, g intervals.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .visits import key_visits, query_visits

#: Most intervals of a block's list. If there are more runs, they share these intervals.
MOST_INTERVALS = 4

#: Most entries of a table. All scalars are prefetched into the scalar memory of a core, 1 MiB on current
#: devices. A kernel has at most six tables: 6 * 4 bytes * 2**14 are 3/8 of it.
MOST_ENTRIES = 2**14


@dataclass(frozen=True)
class Lists:
    """The intervals of the other side's blocks that each block of queries (or of keys) touches.

    Both tables are int32 (b, h, n, g). ``ends`` counts the blocks of the intervals up to and including this
    one. In this interval, a step plus ``shifts`` is the block.
    """

    ends: jax.Array
    shifts: jax.Array

    @classmethod
    def of(cls, first: jax.Array, end: jax.Array) -> "Lists":
        """Make a list from ascending disjoint intervals [first, end), which may be empty."""
        counts = end - first
        ends = jnp.cumsum(counts, 3, dtype=jnp.int32)
        return cls(ends, jnp.where(counts > 0, first - (ends - counts), 0).astype(jnp.int32))

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of the tables, which their flat form lacks."""
        return self.ends.shape

    @property
    def steps(self) -> jax.Array:
        """The length of the longest list, at least 1, because each block needs a step to write its result."""
        return jnp.maximum(self.ends[..., -1].max(), 1).astype(jnp.int32)

    def flat(self) -> tuple[jax.Array, jax.Array]:
        """Return the tables with one axis, because scalar memory pads the last axis of several."""
        return self.ends.reshape(-1), self.shifts.reshape(-1)


@dataclass(frozen=True)
class Blocks:
    """The tables of one mask and one pair of block sizes.

    The tables of keys are ranges, and some blocks in a range may not touch. ``full`` has two int32 (b, h, n,
    g) arrays: first and end of the blocks in which every query sees every key.
    """

    of_queries: Lists
    of_keys: Lists
    full: tuple[jax.Array, jax.Array]


def blocks(bounds: jax.Array, k_len: int, block_q: int, block_k: int) -> Blocks:
    """Make the tables from `legal` bounds, int32 (b, h, n * block_q, R, 2), in O(S * R)."""
    batch, heads, rows, runs, _ = bounds.shape
    count, groups, k_blocks = rows // block_q, min(runs, MOST_INTERVALS), -(-k_len // block_k)
    most = max(count, k_blocks) * groups
    # Usually all heads share a mask. If many heads have different masks, they share their tables.
    split = bounds.reshape(batch, heads, count, block_q, runs, 2)
    if batch * heads * most > MOST_ENTRIES:
        order, lead = (2, 0, 1, 3, 4, 5), (1, 1)
        if batch * most <= MOST_ENTRIES:
            order, lead = (0, 2, 1, 3, 4, 5), (batch, 1)
        block_q *= batch * heads // lead[0]
        bounds = split.transpose(order).reshape(*lead, -1, runs, 2)
    visits = key_visits(bounds, k_len, block_q, block_k)
    first, end, all_first, all_end = (_grouped(visits[..., i], groups) for i in range(4))
    # The longest range that all queries see, from the ranges that share an interval.
    best = (all_end - all_first).argmax(-1)[..., None]
    full = tuple(jnp.take_along_axis(x, best, -1)[..., 0] for x in (all_first, all_end))
    of_keys = query_visits(visits, k_blocks)
    lists = Lists.of(first[..., 0], end[..., -1])
    return Blocks(lists, Lists.of(of_keys[..., :1], of_keys[..., 1:]), full)  # type: ignore[arg-type]


def place(dims: tuple[int, ...], b: Any, h: Any, i: Any) -> Any:
    """Return the start of block i's intervals of batch element b and head h in flat tables of `dims`."""
    batch, heads, count, groups = dims
    row = (b if batch > 1 else 0) * heads + (h if heads > 1 else 0)
    return (row * count + i) * groups


def block_at(tables: tuple[Any, Any], dims: tuple[int, ...], b: Any, h: Any, i: Any, step: Any) -> Any:
    """Return the block of a step. Past the end of a list it is the last block, so nothing new is copied.

    ``tables`` are ``ends`` and ``shifts``, flat, as arrays or references, of shape ``dims``.
    """
    ends, shifts = tables
    at, groups = place(dims, b, h, i), dims[3]
    step = jnp.maximum(jnp.minimum(step, ends[at + groups - 1] - 1), 0)
    block = step + shifts[at]
    for g in range(1, groups):
        block = jnp.where(step >= ends[at + g - 1], step + shifts[at + g], block)
    return block


def touches(tables: tuple[Any, Any], dims: tuple[int, ...], b: Any, h: Any, i: Any, j: Any) -> Any:
    """Return whether block j is in the list of block i."""
    ends, shifts = tables
    at, before, found = place(dims, b, h, i), 0, False
    for g in range(dims[3]):
        end, shift = ends[at + g], shifts[at + g]
        found |= (before + shift <= j) & (j < end + shift)
        before = end
    return found


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """Reshape (b, h, n, R) to (b, h, n, groups, m). Neighbouring runs share an interval.

    Copies of the last run pad the last interval.
    """
    each = -(-x.shape[-1] // groups)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, each * groups - x.shape[-1])), mode="edge")
    return x.reshape(*x.shape[:-1], groups, each)
