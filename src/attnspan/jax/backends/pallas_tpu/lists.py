"""Which blocks of keys a block of queries touches, and the other way round, as tables that kernels prefetch.

The spans of a block of rows lie in a few intervals of key blocks (usually one, two beside global keys). A
kernel's grid has a step for each block of the longest list, so blocks outside of the intervals are neither
copied nor computed. Tables are conservative: a tile may be listed that no row sees, never the reverse.

Shape suffixes: b batch or 1, h heads or 1, n blocks of rows, g intervals.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Most intervals that a block's list has; more runs than these share them.
MOST_INTERVALS = 4

#: Most entries of a table. Scalars are prefetched as a whole into the scalar memory of a core, of 1 MiB on
#: current devices, and a kernel has at most six tables: 6 * 4 bytes * 2**14 are 3/8 of it.
MOST_ENTRIES = 2**14

_FAR = np.int32(2**31 - 1)


@dataclass(frozen=True)
class Lists:
    """For each block of rows (or of keys): the intervals of blocks of the other side that it touches.

    Attributes:
        ends: int32 (b, h, n, g), how many blocks the intervals up to this one have together.
        shifts: int32 (b, h, n, g), what is added to a step to get the block, in this interval.

    Example:
        >>> lists = Lists(jnp.array([[[[2, 3]]]]), jnp.array([[[[4, 7]]]]))  # blocks 4 and 5, then 9
        >>> [int(block_at(lists.flat(), lists.dims, 0, 0, 0, jnp.int32(step))) for step in range(5)]
        [4, 5, 9, 9, 9]
        >>> int(lists.steps)
        3
    """

    ends: jax.Array
    shifts: jax.Array

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

    Attributes:
        of_queries: Blocks of keys of each block of queries.
        full_lo: int32 (b, h, n, g): with ``full_hi``, ranges of keys that every row of the block sees.
        full_hi: int32 (b, h, n, g).
        k_blocks: How many blocks of keys there are.
    """

    of_queries: Lists
    full_lo: jax.Array
    full_hi: jax.Array
    k_blocks: int

    def of_keys(self) -> Lists:
        """Blocks of queries of each block of keys: the transpose, by (S / block)**2 fused comparisons."""
        starts, ends = intervals(self.of_queries)
        columns = jnp.arange(self.k_blocks, dtype=jnp.int32)[:, None, None]
        # (b, h, key block, query block, g), never stored: it is reduced as it is made.
        touched = (starts[:, :, None] <= columns) & (columns < ends[:, :, None])
        rows = jnp.arange(starts.shape[2], dtype=jnp.int32)[:, None]
        first = jnp.where(touched, rows, _FAR).min(3)
        last = jnp.where(touched, rows + 1, 0).max(3)
        return _lists(first, last)


def clean(bounds: jax.Array, k_len: int) -> jax.Array:
    """Bounds whose illegal rows see nothing and are marked: all of their numbers are -1.

    Args:
        bounds: int32 (b, h, Sq, R, 2).
        k_len: Number of keys.

    Returns:
        Bounds of the same shape; empty spans of legal rows are 0, 0.

    Example:
        >>> clean(jnp.array([[[[[0, 2]], [[1, 9]], [[3, 3]]]]]), 4).tolist()
        [[[[[0, 2]], [[-1, -1]], [[0, 0]]]]]
    """
    lo, hi = bounds[..., 0], bounds[..., 1]
    filled = lo < hi
    reached = jax.lax.cummax(jnp.where(filled, hi, 0), axis=3)
    before = jnp.pad(reached, ((0, 0), (0, 0), (0, 0), (1, 0)))[..., :-1]
    wrong = (lo < 0) | (lo > hi) | (hi > k_len) | (filled & (lo < before))
    found = jnp.where(filled[..., None], bounds, 0)
    return jnp.where(wrong.any(-1)[..., None, None], -1, found)


def blocks(bounds: jax.Array, k_len: int, block_q: int, block_k: int) -> Blocks:
    """The tables of a mask, in O(S * R).

    Args:
        bounds: int32 (b, h, n * block_q, R, 2), of `clean`; rows beyond the end see nothing.
        k_len: Number of keys.
        block_q: Rows of a block.
        block_k: Keys of a block.

    Example:
        >>> causal = jnp.array([[0, 1], [0, 2], [0, 3], [0, 4]], jnp.int32).reshape(1, 1, 4, 1, 2)
        >>> found = blocks(causal, 4, 2, 2)
        >>> found.of_queries.ends.ravel().tolist(), found.full_hi.ravel().tolist()
        ([1, 2], [1, 3])
        >>> found.of_keys().ends.ravel().tolist(), found.of_keys().shifts.ravel().tolist()
        ([2, 1], [0, 1])
    """
    batch, heads, rows, runs, _ = bounds.shape
    count, groups = rows // block_q, min(runs, MOST_INTERVALS)
    k_blocks = -(-k_len // block_k)
    split = bounds.reshape(batch, heads, count, block_q, runs, 2)
    over: tuple[int, ...] = (3,)
    # One mask for many heads is the rule; where each has its own and they are many, they share their tables.
    if batch * heads * max(count, k_blocks) * groups > MOST_ENTRIES:
        over = (1, 3)
    if batch * max(count, k_blocks) * groups > MOST_ENTRIES and len(over) > 1:
        over = (0, 1, 3)
    lo, hi = split[..., 0], split[..., 1]
    first = jnp.where(lo < hi, lo, _FAR).min(over, keepdims=True)[:, :, :, 0]
    last = hi.max(over, keepdims=True)[:, :, :, 0]
    full_lo = lo.max(over, keepdims=True)[:, :, :, 0]
    full_hi = hi.min(over, keepdims=True)[:, :, :, 0]
    full_lo, full_hi = _longest(full_lo, full_hi, groups)
    first, last = _grouped(first, groups).min(-1), _grouped(last, groups).max(-1)
    starts = jnp.where(first == _FAR, 0, first // block_k)
    stops = -(-last // block_k)
    return Blocks(_lists(starts, stops), full_lo, full_hi, k_blocks)


def intervals(lists: Lists) -> tuple[jax.Array, jax.Array]:
    """First block, and the one behind the last, of each interval; both int32 (b, h, n, g).

    Example:
        >>> starts, ends = intervals(Lists(jnp.array([[[[2, 3]]]]), jnp.array([[[[4, 7]]]])))
        >>> starts.ravel().tolist(), ends.ravel().tolist()
        ([4, 9], [6, 10])
    """
    before = jnp.pad(lists.ends, ((0, 0), (0, 0), (0, 0), (1, 0)))[..., :-1]
    return before + lists.shifts, lists.ends + lists.shifts


def place(dims: tuple[int, ...], b: Any, h: Any, i: Any) -> Any:
    """Where the intervals of block i begin in flat tables.

    Example:
        >>> place((1, 4, 10, 2), 3, 2, 5)
        50
    """
    batch, heads, count, groups = dims
    row = (b if batch > 1 else 0) * heads + (h if heads > 1 else 0)
    return (row * count + i) * groups


def block_at(tables: tuple[Any, Any], dims: tuple[int, ...], b: Any, h: Any, i: Any, step: Any) -> Any:
    """The block of a step; behind the end of a list its last block, so that nothing new is copied.

    Args:
        tables: ``ends`` and ``shifts``, flat, arrays or references.
        dims: The shape of the tables.
        b: Batch row.
        h: Head.
        i: Block of rows.
        step: int32, from 0 on.
    """
    ends, shifts = tables
    at, groups = place(dims, b, h, i), dims[3]
    step = jnp.maximum(jnp.minimum(step, ends[at + groups - 1] - 1), 0)
    block = step + shifts[at]
    for g in range(1, groups):
        block = jnp.where(step >= ends[at + g - 1], step + shifts[at + g], block)
    return block


def touches(tables: tuple[Any, Any], dims: tuple[int, ...], b: Any, h: Any, i: Any, j: Any) -> Any:
    """Whether block j is in the list of block i.

    Example:
        >>> lists = Lists(jnp.array([[[[2, 3]]]]), jnp.array([[[[4, 7]]]]))
        >>> [bool(touches(lists.flat(), lists.dims, 0, 0, 0, j)) for j in (3, 4, 5, 6, 9)]
        [False, True, True, False, True]
    """
    ends, shifts = tables
    at, before, found = place(dims, b, h, i), 0, False
    for g in range(dims[3]):
        end, shift = ends[at + g], shifts[at + g]
        found |= (before + shift <= j) & (j < end + shift)
        before = end
    return found


def _lists(starts: jax.Array, stops: jax.Array) -> Lists:
    """Intervals in any order, which may overlap or be empty (start >= stop), as lists."""
    empty = starts >= stops
    starts, stops = jnp.where(empty, _FAR, starts), jnp.where(empty, 0, stops)
    if starts.shape[-1] > 1:
        starts, stops = jax.lax.sort((starts, stops), dimension=3, num_keys=1)
    reached = jax.lax.cummax(stops, axis=3)
    before = jnp.pad(reached, ((0, 0), (0, 0), (0, 0), (1, 0)))[..., :-1]
    starts = jnp.maximum(starts, before)
    counts = jnp.where(starts < stops, stops - starts, 0)
    ends = jnp.cumsum(counts, 3, dtype=jnp.int32)
    # An empty interval has no step; its shift is that of the one before it, and 0 where there is none.
    shifts = jnp.where(counts > 0, starts - (ends - counts), 0)
    return Lists(ends, shifts.astype(jnp.int32))


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """(b, h, n, R) as (b, h, n, groups, m): neighbouring runs share an interval; the last run fills up."""
    each = -(-x.shape[-1] // groups)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, each * groups - x.shape[-1])), mode="edge")
    return x.reshape(*x.shape[:-1], groups, each)


def _longest(lo: jax.Array, hi: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Of the runs that share an interval, the range that is seen by all rows and is longest."""
    lo, hi = _grouped(lo, groups), _grouped(hi, groups)
    best = (hi - lo).argmax(-1)[..., None]
    return tuple(jnp.take_along_axis(x, best, -1)[..., 0] for x in (lo, hi))  # type: ignore[return-value]
