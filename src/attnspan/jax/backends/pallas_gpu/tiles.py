"""What the kernels of the GPU share: their arguments, masked loads, and the scores of one tile.

A tile is a block of queries times a block of keys. It is stored with its queries or with its keys as rows,
whichever a kernel's products want; `Rows` and `Keys` hold vectors, and a tile spreads them as it needs.
Scores are in units of log2, so that weights are powers of two.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...._biases import HIDES
from ....options import ALIBI, DENSE, SIGNED_ALIBI
from ...dropout import keeps
from .. import Static

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for; lengths in elements.

    Attributes:
        static: Numbers of the call.
        q_len: Queries.
        k_len: Keys.
        head_dim: Elements of a query.
        v_dim: Elements of a value.
        group: Query heads of one key head.
        block_q: Queries in a tile, a power of two from 16 on.
        block_k: Keys in a tile, likewise.
    """

    static: Static
    q_len: int
    k_len: int
    head_dim: int
    v_dim: int
    group: int
    block_q: int
    block_k: int

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def k_blocks(self) -> int:
        return -(-self.k_len // self.block_k)

    @property
    def has_slopes(self) -> bool:
        return self.static.bias_kind in (ALIBI, SIGNED_ALIBI)

    @property
    def width(self) -> int:
        """Columns of a tile of queries or keys: what the GPU's products take."""
        return power_of_two(self.head_dim)

    @property
    def v_width(self) -> int:
        return power_of_two(self.v_dim)


class Arrays(NamedTuple):
    """What a kernel reads, whole; arrays before it runs, references inside.

    Shapes: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), bounds as in `Operands`, visits of
    `key_visits`, q_visits of `query_visits`, words uint32 (2, B, Hq, Sq), dout (B, Hq, Sq, Dv), lse and
    common float32 (B, Hq, Sq): the lse in units of log2 (inf where a row saw nothing), and dlse minus the
    row's sum of p_j dp_j.
    """

    q: Any
    k: Any
    v: Any
    bounds: Any
    visits: Any
    bias: Any = None
    sinks: Any = None
    words: Any = None
    q_index: Any = None
    k_index: Any = None
    q_visits: Any = None
    dout: Any = None
    lse: Any = None
    common: Any = None


class Rows(NamedTuple):
    """Vectors over the queries of a tile; `inside` is None where no block is ragged."""

    start: Any
    inside: Any
    spans: list[tuple[Any, Any]]
    index: Any
    words: Any


class Keys(NamedTuple):
    """Vectors over the keys of a tile."""

    start: Any
    number: Any
    inside: Any
    index: Any


class Tile(NamedTuple):
    """Scores of a tile: log2 units, the softcap's derivative, which pairs are visible, which are kept.

    The last three are None where they would be 1 or true throughout; `distance` is what a slope multiplies.
    """

    scores: Any
    slope: Any
    visible: Any
    keep: Any
    distance: Any


def power_of_two(n: int) -> int:
    """The least power of two from n on, and 16 at least, as products on the GPU want it.

    Example:
        >>> power_of_two(80), power_of_two(3)
        (128, 16)
    """
    return max(16, 1 << max(n - 1, 0).bit_length())


def product(a: Any, b: Any) -> Any:
    """a @ b in float32. Products of float32 are exact ones: TF32 would keep 10 bits of them."""
    return lax.dot(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def spec(shape: tuple[int, ...], **to: int) -> pl.BlockSpec:
    """The whole array as one block; `rows` and `columns` round its last two axes up to multiples."""
    multiples = [1] * (len(shape) - 2) + [to.get("rows", 1), to.get("columns", 1)]
    multiples = multiples[-len(shape) :]
    block = tuple(-(-n // m) * m for n, m in zip(shape, multiples, strict=True))
    return pl.BlockSpec(block, lambda *_: (0,) * len(shape))


def specs(plan: Plan, arrays: Arrays) -> Arrays:
    """The block specs of a kernel's arguments. Beyond an array's ends, loads are masked."""

    def rows(x: Any, columns: int) -> Any:
        return None if x is None else spec(x.shape, rows=plan.block_q, columns=columns)

    def last(x: Any, block: int) -> Any:
        return None if x is None else spec(x.shape, columns=block)

    bounds = arrays.bounds.shape
    padded = (*bounds[:2], plan.q_blocks * plan.block_q, *bounds[3:])
    bias = last(arrays.bias, 1)
    if plan.static.bias_kind == DENSE:
        one_row = arrays.bias.shape[2] == 1
        bias = spec(arrays.bias.shape, rows=1 if one_row else plan.block_q, columns=plan.block_k)
    return Arrays(
        q=rows(arrays.q, plan.width),
        k=spec(arrays.k.shape, rows=plan.block_k, columns=plan.width),
        v=spec(arrays.v.shape, rows=plan.block_k, columns=plan.v_width),
        bounds=spec(padded),
        visits=spec(arrays.visits.shape),
        bias=bias,
        sinks=last(arrays.sinks, 1),
        words=last(arrays.words, plan.block_q),
        q_index=last(arrays.q_index, plan.block_q),
        k_index=last(arrays.k_index, plan.block_k),
        q_visits=last(arrays.q_visits, 1),
        dout=rows(arrays.dout, plan.v_width),
        lse=last(arrays.lse, plan.block_q),
        common=last(arrays.common, plan.block_q),
    )


def shared(size: int, at: Any) -> Any:
    """Where to look along an axis that may have one element for all."""
    # No Python number: the interpreter of masked loads knows only arrays.
    return jnp.int32(0) if size == 1 else at


def matrix(ref: Any, at: tuple[Any, ...], start: Any, shape: tuple[int, int], inside: Any, dim: int) -> Any:
    """Rows `start`.. of a reference at `at`, with zeros beyond its rows and columns."""
    mask = None if inside is None else inside[:, None]
    if shape[1] != dim:
        columns = (lax.iota(jnp.int32, shape[1]) < dim)[None, :]
        mask = columns if mask is None else mask & columns
    view = ref.at[(*at, pl.ds(start, shape[0]), pl.ds(0, shape[1]))]
    if mask is None:
        return triton.load(view)
    return triton.load(view, mask=jnp.broadcast_to(mask, shape), other=0)


def vector(ref: Any, at: tuple[Any, ...], start: Any, size: int, inside: Any, other: float) -> Any:
    """Elements `start`.. of a reference's last axis, with `other` beyond its end."""
    view = ref.at[(*at, pl.ds(start, size))]
    return triton.load(view) if inside is None else triton.load(view, mask=inside, other=other)


def load_rows(plan: Plan, arrays: Arrays, b: Any, h: Any, block: Any) -> Rows:
    """What the tiles of a block of queries need of its rows."""
    size = plan.block_q
    start = block * size
    number = start + lax.iota(jnp.int32, size)
    inside = None if plan.q_len % size == 0 else number < plan.q_len
    bounds = arrays.bounds
    at = shared(bounds.shape[0], b), shared(bounds.shape[1], h)

    def edge(run: int, side: int) -> Any:
        view = bounds.at[(*at, pl.ds(start, size), jnp.int32(run), jnp.int32(side))]
        return triton.load(view) if inside is None else triton.load(view, mask=inside, other=0)

    index, words = number + (plan.k_len - plan.q_len), None
    if arrays.q_index is not None:
        index = vector(arrays.q_index, (shared(arrays.q_index.shape[0], b),), start, size, inside, 0)
    if arrays.words is not None:
        words = [vector(arrays.words, (jnp.int32(i), b, h), start, size, inside, 0) for i in (0, 1)]
    spans = [(edge(run, 0), edge(run, 1)) for run in range(bounds.shape[3])]
    return Rows(start, inside, spans, index, words)


def load_keys(plan: Plan, arrays: Arrays, b: Any, block: Any) -> Keys:
    """What the tiles of a block of keys need of them."""
    size = plan.block_k
    start = block * size
    number = start + lax.iota(jnp.int32, size)
    inside = None if plan.k_len % size == 0 else number < plan.k_len
    index = number
    if arrays.k_index is not None:
        index = vector(arrays.k_index, (shared(arrays.k_index.shape[0], b),), start, size, inside, 0)
    return Keys(start, number, inside, index)


def score(
    plan: Plan,
    arrays: Arrays,
    at: tuple[Any, Any],
    operands: tuple[Any, Any],
    rows: Rows,
    keys: Keys,
    *,
    masked: bool,
    keys_down: bool = False,
) -> Tile:
    """The scores of a tile.

    Args:
        plan: What the kernel is compiled for.
        arrays: What it reads.
        at: Batch row and query head.
        operands: Tiles of queries (block_q, width) and of keys (block_k, width).
        rows: Of the queries.
        keys: Of the keys.
        masked: Some row of the tile may not see some of its keys.
        keys_down: Keys are the tile's rows, and queries its columns.

    Returns:
        The tile, (block_q, block_k), or its transpose.
    """
    static = plan.static

    def by_row(x: Any) -> Any:
        return x[None, :] if keys_down else x[:, None]

    def by_key(x: Any) -> Any:
        return x[:, None] if keys_down else x[None, :]

    q, k = operands
    products = product(k, q.T) if keys_down else product(q, k.T)
    scores, slope = products * (static.scale * LOG2E), None
    if static.softcap:
        squashed = jnp.tanh(products * (static.scale / static.softcap))
        scores, slope = squashed * (static.softcap * LOG2E), 1 - squashed * squashed
    visible = keep = distance = None
    if masked:
        numbers = by_key(keys.number)
        for lo, hi in rows.spans:
            seen = (numbers >= by_row(lo)) & (numbers < by_row(hi))
            visible = seen if visible is None else visible | seen
    if plan.has_slopes:
        away = (by_key(keys.index) - by_row(rows.index)).astype(jnp.float32)
        distance = away if static.bias_kind == SIGNED_ALIBI else -jnp.abs(away)
        steepness = arrays.bias[shared(arrays.bias.shape[0], at[0]), at[1]]
        scores = scores + distance * (steepness * LOG2E)
    elif static.bias_kind == DENSE:
        bias = _dense(plan, arrays.bias, at, rows, keys, keys_down)
        # Not bias >= HIDES, which would hide a NaN.
        scores, shown = scores + bias * LOG2E, jnp.logical_not(bias < HIDES)
        visible = shown if visible is None else visible & shown
    if static.dropout_p:
        first, second = (by_row(x) for x in rows.words)
        keep = keeps(static.dropout_p, first, second, by_key(keys.index))
    return Tile(scores, slope, visible, keep, distance)


def _dense(plan: Plan, ref: Any, at: tuple[Any, Any], rows: Rows, keys: Keys, keys_down: bool) -> Any:
    where = tuple(shared(ref.shape[i], at[i]) for i in (0, 1))
    shape = plan.block_q, plan.block_k
    if ref.shape[2] == 1:
        bias = vector(ref, (*where, jnp.int32(0)), keys.start, plan.block_k, keys.inside, 0)[None, :]
        bias = jnp.broadcast_to(bias.astype(jnp.float32), shape)
    else:
        view = ref.at[(*where, pl.ds(rows.start, shape[0]), pl.ds(keys.start, shape[1]))]
        inside = [
            x[:, None] if axis == 0 else x[None, :]
            for axis, x in enumerate((rows.inside, keys.inside))
            if x is not None
        ]
        if inside:
            mask = jnp.broadcast_to(inside[0] if len(inside) == 1 else inside[0] & inside[1], shape)
            bias = triton.load(view, mask=mask, other=0).astype(jnp.float32)
        else:
            bias = triton.load(view).astype(jnp.float32)
    return bias.T if keys_down else bias


def zero_unseen(x: Any, visible: Any, axis: int) -> Any:
    """Rows of `x` that nobody across `axis` of the tile sees become 0: 0 * NaN would reach everybody."""
    if visible is None:
        return x
    seen = visible.astype(jnp.int32).max(axis)
    return jnp.where(seen[:, None] > 0, x, jnp.zeros_like(x))


def visit(ranges: Any, runs: int, step: Any, carry: Any) -> Any:
    """Run `step(masked)(block, carry)` over the blocks of keys that a block of queries visits.

    Args:
        ranges: Reference of int32 (..., R, 4) with its leading axes chosen, as a function of run and column.
        runs: R.
        step: Makes the body for masked and for unmasked tiles.
        carry: What the body takes and gives.

    Returns:
        The last carry.
    """

    def run(r: Any, carry: Any) -> Any:
        first, end, all_first, all_end = (ranges(r, i) for i in range(4))
        carry = lax.fori_loop(first, all_first, step(True), carry)
        carry = lax.fori_loop(all_first, all_end, step(False), carry)
        return lax.fori_loop(all_end, end, step(True), carry)

    return run(jnp.int32(0), carry) if runs == 1 else loop(runs, run, carry)


def loop(count: int, body: Any, carry: Any) -> Any:
    """Run `body(i, carry)` for i below `count`, with an index of 32 bits also where JAX has 64."""
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)


def store(ref: Any, x: Any, inside: Any, dim: int | None = None) -> None:
    """Write rows, and columns below `dim`, that lie inside the array."""
    mask = None
    if x.ndim == 1:
        mask = inside
    elif inside is not None:
        mask = jnp.broadcast_to(inside[:, None], x.shape)
    if dim is not None and dim != x.shape[1]:
        columns = jnp.broadcast_to((lax.iota(jnp.int32, x.shape[1]) < dim)[None, :], x.shape)
        mask = columns if mask is None else mask & columns
    triton.store(ref, x, mask=mask)
