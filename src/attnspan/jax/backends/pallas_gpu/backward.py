"""The backward kernels of the GPU: dq by blocks of queries, dk and dv by blocks of keys, no atomics."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...._dropout import scale_of_kept
from ...varying import axes_of, declared, spread
from .. import result_dtype
from .tiles import (
    Arrays,
    Keys,
    Plan,
    Rows,
    Tile,
    load_keys,
    load_rows,
    loop,
    matrix,
    product,
    score,
    shared,
    specs,
    store,
    vector,
    visit,
    zero_unseen,
)


class Slopes(NamedTuple):
    """Of a tile: the weights after dropout, and the gradients of the scores after and before the softcap."""

    weights: Any
    dx: Any
    ds: Any


def differentiate_queries(
    plan: Plan, arrays: Arrays, warps: int, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The gradient of q, and of each row's slope where there are slopes.

    Args:
        plan: What the kernel is compiled for.
        arrays: What it reads.
        warps: Of each program.
        interpret: Run it as plain JAX.

    Returns:
        dq (B, Hq, Sq, D), and float32 (B, Hq, Sq) or None.
    """
    batch, heads, q_len, _ = arrays.q.shape

    def block(*columns: int) -> pl.BlockSpec:
        shape = (None, None, plan.block_q, *columns)
        return pl.BlockSpec(shape, lambda i, h, b: (b, h, plan.q_blocks - 1 - i, *(0 for _ in columns)))

    axes = axes_of(arrays)
    out_specs = [block(plan.width)]
    out_shape = [declared(arrays.q.shape, result_dtype(arrays.q, plan.static), axes)]
    if plan.has_slopes:
        out_specs.append(block())
        out_shape.append(declared((batch, heads, q_len), jnp.float32, axes))
    call = pl.pallas_call(
        functools.partial(_query_kernel, plan),
        grid=(plan.q_blocks, heads, batch),
        in_specs=[specs(plan, arrays)],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name="attnspan_dq",
    )
    dq, *rest = call(spread(arrays, axes))
    return dq, rest[0] if rest else None


def differentiate_keys(
    plan: Plan, arrays: Arrays, warps: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The gradients of k and v; arguments as of `differentiate_queries`."""
    batch, heads, _, _ = arrays.k.shape

    def block(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, plan.block_k, columns), lambda j, h, b: (b, h, j, 0))

    axes = axes_of(arrays)
    call = pl.pallas_call(
        functools.partial(_key_kernel, plan),
        grid=(plan.k_blocks, heads, batch),
        in_specs=[specs(plan, arrays)],
        out_specs=[block(plan.width), block(plan.v_width)],
        out_shape=[declared(x.shape, result_dtype(x, plan.static), axes) for x in (arrays.k, arrays.v)],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name="attnspan_dkv",
    )
    dk, dv = call(spread(arrays, axes))
    return dk, dv


def slopes(
    plan: Plan,
    arrays: Arrays,
    at: tuple[Any, Any],
    operands: tuple[Any, Any, Any, Any],
    rows: Rows,
    keys: Keys,
    *,
    masked: bool,
    keys_down: bool = False,
) -> tuple[Slopes, Tile]:
    """Gradients of the scores of a tile.

    Args:
        plan, arrays, at, rows, keys, masked, keys_down: As of `score`.
        operands: Tiles of q, k, v and dout.
    """
    q, k, v, dout = operands
    tile = score(plan, arrays, at, (q, k), rows, keys, masked=masked, keys_down=keys_down)
    # Queries beyond the end have an infinite lse: their weights are 0, whatever they score.
    lse, common = (
        vector(ref, at, rows.start, plan.block_q, rows.inside, other)
        for ref, other in ((arrays.lse, jnp.inf), (arrays.common, 0.0))
    )
    lse, common = (x[None, :] if keys_down else x[:, None] for x in (lse, common))
    weights = jnp.exp2(tile.scores - lse)
    dp = product(v, dout.T) if keys_down else product(dout, v.T)
    kept_weights = weights
    if tile.keep is not None:
        factor = scale_of_kept(plan.static.dropout_p)
        dp = jnp.where(tile.keep, dp * factor, 0.0)
        kept_weights = jnp.where(tile.keep, weights * factor, 0.0)
    dx = weights * (dp + common)
    if tile.visible is not None:
        dx = jnp.where(tile.visible, dx, 0.0)
        kept_weights = jnp.where(tile.visible, kept_weights, 0.0)
    ds = dx if tile.slope is None else dx * tile.slope
    if tile.slope is not None and tile.visible is not None:
        ds = jnp.where(tile.visible, ds, 0.0)
    return Slopes(kept_weights, dx, ds), tile


def load_query_tiles(plan: Plan, arrays: Arrays, at: tuple[Any, Any], rows: Rows) -> tuple[Any, Any]:
    """Tiles of q and dout."""
    size, inside = plan.block_q, rows.inside
    q = matrix(arrays.q, at, rows.start, (size, plan.width), inside, plan.head_dim)
    return q, matrix(arrays.dout, at, rows.start, (size, plan.v_width), inside, plan.v_dim)


def load_key_tiles(plan: Plan, arrays: Arrays, at: tuple[Any, Any], keys: Keys) -> tuple[Any, Any]:
    """Tiles of k and v; `at` has the key head."""
    size, inside = plan.block_k, keys.inside
    k = matrix(arrays.k, at, keys.start, (size, plan.width), inside, plan.head_dim)
    return k, matrix(arrays.v, at, keys.start, (size, plan.v_width), inside, plan.v_dim)


def _query_kernel(plan: Plan, arrays: Arrays, dq_ref: Any, *slope_ref: Any) -> None:
    block = plan.q_blocks - 1 - pl.program_id(0)
    h, b = pl.program_id(1), pl.program_id(2)
    rows = load_rows(plan, arrays, b, h, block)
    q, dout = load_query_tiles(plan, arrays, (b, h), rows)

    def step(masked: bool) -> Any:
        def body(j: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            keys = load_keys(plan, arrays, b, j)
            k, v = load_key_tiles(plan, arrays, (b, lax.div(h, jnp.int32(plan.group))), keys)
            found, tile = slopes(plan, arrays, (b, h), (q, k, v, dout), rows, keys, masked=masked)
            k = zero_unseen(k, tile.visible, 0)
            dq = carry[0] + product(found.ds.astype(k.dtype), k)
            return (dq, carry[1] + (found.dx * tile.distance).sum(1)) if plan.has_slopes else (dq,)

        return body

    carry: tuple[Any, ...] = (jnp.zeros((plan.block_q, plan.width), jnp.float32),)
    if plan.has_slopes:
        carry = (*carry, jnp.zeros(plan.block_q, jnp.float32))
    visits = arrays.visits
    place = shared(visits.shape[0], b), shared(visits.shape[1], h), block
    carry = visit(lambda run, column: visits[(*place, run, column)], visits.shape[3], step, carry)
    store(dq_ref, (carry[0] * plan.static.scale).astype(dq_ref.dtype), rows.inside, plan.head_dim)
    if plan.has_slopes:
        store(slope_ref[0], carry[1], rows.inside)


def _key_kernel(plan: Plan, arrays: Arrays, dk_ref: Any, dv_ref: Any) -> None:
    block, kv_head, b = (pl.program_id(axis) for axis in range(3))
    keys = load_keys(plan, arrays, b, block)
    k, v = load_key_tiles(plan, arrays, (b, kv_head), keys)

    def step(h: Any, masked: bool, i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        dk, dv = carry
        rows = load_rows(plan, arrays, b, h, i)
        q, dout = load_query_tiles(plan, arrays, (b, h), rows)
        operands = q, k, v, dout
        found, tile = slopes(plan, arrays, (b, h), operands, rows, keys, masked=masked, keys_down=True)
        q, dout = (zero_unseen(x, tile.visible, 0) for x in (q, dout))
        dv = dv + product(found.weights.astype(dout.dtype), dout)
        return dk + product(found.ds.astype(q.dtype), q), dv

    def head(member: Any, carry: Any) -> Any:
        h = kv_head * plan.group + member
        return _visit_queries(arrays, (b, h), block, functools.partial(step, h), carry)

    widths = plan.width, plan.v_width
    carry: Any = tuple(jnp.zeros((plan.block_k, width), jnp.float32) for width in widths)
    carry = head(jnp.int32(0), carry) if plan.group == 1 else loop(plan.group, head, carry)
    store(dk_ref, (carry[0] * plan.static.scale).astype(dk_ref.dtype), keys.inside, plan.head_dim)
    store(dv_ref, carry[1].astype(dv_ref.dtype), keys.inside, plan.v_dim)


def tile_state(arrays: Arrays, at: tuple[Any, Any], block_q: Any, block_k: Any) -> Any:
    """0 for a tile that nobody visits, 1 for a masked one, 2 where every row sees every key."""
    visits = arrays.visits
    place = shared(visits.shape[0], at[0]), shared(visits.shape[1], at[1]), block_q

    def run(r: Any, state: Any) -> Any:
        first, end, all_first, all_end = (visits[(*place, r, i)] for i in range(4))
        inside = ((first <= block_k) & (block_k < end)).astype(jnp.int32)
        return state + inside + ((all_first <= block_k) & (block_k < all_end)).astype(jnp.int32)

    runs = visits.shape[3]
    return run(jnp.int32(0), jnp.int32(0)) if runs == 1 else loop(runs, run, jnp.int32(0))


def _visit_queries(arrays: Arrays, at: tuple[Any, Any], block: Any, step: Any, carry: Any) -> Any:
    """Run `step(masked, i, carry)` over the blocks of queries of a head that visit a block of keys."""
    ranges = arrays.q_visits
    place = shared(ranges.shape[0], at[0]), shared(ranges.shape[1], at[1]), block

    def body(i: Any, carry: Any) -> Any:
        branches = [
            lambda carry: carry,
            lambda carry: step(True, i, carry),
            lambda carry: step(False, i, carry),
        ]
        return lax.switch(tile_state(arrays, at, i, block), branches, carry)

    return lax.fori_loop(ranges[(*place, 0)], ranges[(*place, 1)], body, carry)
