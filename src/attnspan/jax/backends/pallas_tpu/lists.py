"""Blocks of keys that a block of queries touches, and the other way round, as tables that kernels prefetch.

The spans of a block of rows lie in a few intervals of key blocks (usually one, two with global keys). A
kernel's grid has a step for each block of the longest list, so blocks outside of the intervals are neither
copied nor computed. Tables are conservative: a tile may be listed that no row sees, never the reverse.

Shape suffixes: b batch or 1, h heads or 1, n blocks of rows, g intervals.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .visits import key_visits, query_visits

#: Most intervals that a block's list has; more runs than these share them.
MOST_INTERVALS = 4

#: Most entries of a table. Scalars are prefetched as a whole into the scalar memory of a core, of 1 MiB on
#: current devices, and a kernel has at most six tables: 6 * 4 bytes * 2**14 are 3/8 of it.
MOST_ENTRIES = 2**14


@dataclass(frozen=True)
class Lists:
    """For each block of rows (or of keys): the intervals of blocks of the other side that it touches.

    Both int32 (b, h, n, g): ``ends``, how many blocks the intervals up to this one have together, and
    ``shifts``, what is added to a step to get the block, in this interval.
    """

    ends: jax.Array
    shifts: jax.Array

    @classmethod
    def of(cls, first: jax.Array, end: jax.Array) -> "Lists":
        """A list of ascending disjoint intervals [first, end), which may be empty."""
        counts = end - first
        ends = jnp.cumsum(counts, 3, dtype=jnp.int32)
        return cls(ends, jnp.where(counts > 0, first - (ends - counts), 0).astype(jnp.int32))

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of the tables, which their flat form has lost."""
        return self.ends.shape

    @property
    def steps(self) -> jax.Array:
        """The longest list, at least 1: each block has a step in which its result is written."""
        return jnp.maximum(self.ends[..., -1].max(), 1).astype(jnp.int32)

    def flat(self) -> tuple[jax.Array, jax.Array]:
        """The tables in one axis: scalar memory pads the last one of several."""
        return self.ends.reshape(-1), self.shifts.reshape(-1)


@dataclass(frozen=True)
class Blocks:
    """The tables of one mask and one pair of block sizes.

    Those of keys are ranges, in which some blocks may not touch. ``full`` are two of int32 (b, h, n, g):
    first and end of the blocks of which every row sees every key.
    """

    of_queries: Lists
    of_keys: Lists
    full: tuple[jax.Array, jax.Array]


def blocks(bounds: jax.Array, k_len: int, block_q: int, block_k: int) -> Blocks:
    """The tables of bounds int32 (b, h, n * block_q, R, 2) of `legal`, in O(S * R)."""
    batch, heads, rows, runs, _ = bounds.shape
    count, groups, k_blocks = rows // block_q, min(runs, MOST_INTERVALS), -(-k_len // block_k)
    most = max(count, k_blocks) * groups
    # One mask for many heads is the rule; where each has its own and they are many, they share their tables.
    split = bounds.reshape(batch, heads, count, block_q, runs, 2)
    if batch * heads * most > MOST_ENTRIES:
        order, lead = (2, 0, 1, 3, 4, 5), (1, 1)
        if batch * most <= MOST_ENTRIES:
            order, lead = (0, 2, 1, 3, 4, 5), (batch, 1)
        block_q *= batch * heads // lead[0]
        bounds = split.transpose(order).reshape(*lead, -1, runs, 2)
    visits = key_visits(bounds, k_len, block_q, block_k)
    first, end, all_first, all_end = (_grouped(visits[..., i], groups) for i in range(4))
    # Of the ranges that share an interval, the longest that all rows see.
    best = (all_end - all_first).argmax(-1)[..., None]
    full = tuple(jnp.take_along_axis(x, best, -1)[..., 0] for x in (all_first, all_end))
    of_keys = query_visits(visits, k_blocks)
    lists = Lists.of(first[..., 0], end[..., -1])
    return Blocks(lists, Lists.of(of_keys[..., :1], of_keys[..., 1:]), full)  # type: ignore[arg-type]


def place(dims: tuple[int, ...], b: Any, h: Any, i: Any) -> Any:
    """Start of the intervals of block i of a batch row and a head in flat tables of the shape `dims`."""
    batch, heads, count, groups = dims
    row = (b if batch > 1 else 0) * heads + (h if heads > 1 else 0)
    return (row * count + i) * groups


def block_at(tables: tuple[Any, Any], dims: tuple[int, ...], b: Any, h: Any, i: Any, step: Any) -> Any:
    """The block of a step; behind the end of a list its last block, so that nothing new is copied.

    ``tables`` are ``ends`` and ``shifts``, flat, as arrays or references, of the shape ``dims``.
    """
    ends, shifts = tables
    at, groups = place(dims, b, h, i), dims[3]
    step = jnp.maximum(jnp.minimum(step, ends[at + groups - 1] - 1), 0)
    block = step + shifts[at]
    for g in range(1, groups):
        block = jnp.where(step >= ends[at + g - 1], step + shifts[at + g], block)
    return block


def touches(tables: tuple[Any, Any], dims: tuple[int, ...], b: Any, h: Any, i: Any, j: Any) -> Any:
    """Whether block j is in the list of block i."""
    ends, shifts = tables
    at, before, found = place(dims, b, h, i), 0, False
    for g in range(dims[3]):
        end, shift = ends[at + g], shifts[at + g]
        found |= (before + shift <= j) & (j < end + shift)
        before = end
    return found


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """(b, h, n, R) as (b, h, n, groups, m): neighbouring runs share an interval; the last run fills up."""
    each = -(-x.shape[-1] // groups)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, each * groups - x.shape[-1])), mode="edge")
    return x.reshape(*x.shape[:-1], groups, each)
