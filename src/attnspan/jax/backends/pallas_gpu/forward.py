"""The forward kernel of the GPU: a program for each block of queries of a head.

Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithm 1, with blocks of keys by the mask's spans.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...._dropout import scale_of_kept
from ...varying import axes_of, declared, spread
from .. import result_dtype
from .tiles import (
    LN2,
    LOG2E,
    Arrays,
    Plan,
    load_keys,
    load_rows,
    matrix,
    product,
    score,
    shared,
    specs,
    store,
    visit,
    zero_unseen,
)

Carry = tuple[Any, Any, Any]


def attend(plan: Plan, arrays: Arrays, warps: int, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Run the kernel.

    Args:
        plan: What it is compiled for.
        arrays: What it reads, without those of the backward pass.
        warps: Of each program.
        interpret: Run it as plain JAX.

    Returns:
        out (B, Hq, Sq, Dv) in q's dtype, and lse float32 (B, Hq, Sq).
    """
    batch, heads, _, _ = arrays.q.shape
    rows = batch, heads, plan.q_len

    def block(columns: tuple[int, ...]) -> pl.BlockSpec:
        shape = (None, None, plan.block_q, *columns)
        return pl.BlockSpec(shape, lambda i, h, b: (b, h, plan.q_blocks - 1 - i, *(0 for _ in columns)))

    axes = axes_of(arrays)
    call = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid=(plan.q_blocks, heads, batch),
        in_specs=[specs(plan, arrays)],
        out_specs=[block((plan.v_width,)), block(())],
        out_shape=[
            declared((*rows, plan.v_dim), result_dtype(arrays.q, plan.static), axes),
            declared(rows, jnp.float32, axes),
        ],
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name="attnspan_forward",
    )
    out, lse = call(spread(arrays, axes))
    return out, lse


def _kernel(plan: Plan, arrays: Arrays, out_ref: Any, lse_ref: Any) -> None:
    # The last block of a causal mask has the most work: it must not begin last.
    block = plan.q_blocks - 1 - pl.program_id(0)
    h, b = pl.program_id(1), pl.program_id(2)
    rows = load_rows(plan, arrays, b, h, block)
    q = matrix(arrays.q, (b, h), rows.start, (plan.block_q, plan.width), rows.inside, plan.head_dim)
    top = jnp.full(plan.block_q, -jnp.inf, jnp.float32)
    total = jnp.zeros(plan.block_q, jnp.float32)
    if arrays.sinks is not None:
        sink = arrays.sinks[h] * LOG2E
        top = jnp.maximum(top, sink)
        total = jnp.where(top == -jnp.inf, total, total + 1.0)
    out = jnp.zeros((plan.block_q, plan.v_width), jnp.float32)

    def step(masked: bool) -> Any:
        return lambda j, carry: _step(plan, arrays, (b, h), q, rows, masked, j, carry)

    visits = arrays.visits
    at = shared(visits.shape[0], b), shared(visits.shape[1], h), block
    ranges = lambda run, column: visits[(*at, run, column)]  # noqa: E731
    top, total, out = visit(ranges, visits.shape[3], step, (top, total, out))
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    illegal = rows.spans[0][0] < 0
    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * LN2)
    store(lse_ref, jnp.where(illegal, jnp.nan, lse), rows.inside)
    out = jnp.where(illegal[:, None], jnp.nan, out / total[:, None])
    store(out_ref, out.astype(out_ref.dtype), rows.inside, plan.v_dim)


def _step(
    plan: Plan,
    arrays: Arrays,
    at: tuple[Any, Any],
    q: Any,
    rows: Any,
    masked: bool,
    j: Any,
    carry: Carry,
) -> Carry:
    """One block of keys: the running maximum, sum and output of the block's rows."""
    top, total, out = carry
    b, h = at
    keys = load_keys(plan, arrays, b, j)
    where = b, lax.div(h, jnp.int32(plan.group))
    k = matrix(arrays.k, where, keys.start, (plan.block_k, plan.width), keys.inside, plan.head_dim)
    tile = score(plan, arrays, at, (q, k), rows, keys, masked=masked)
    v = matrix(arrays.v, where, keys.start, (plan.block_k, plan.v_width), keys.inside, plan.v_dim)
    v = zero_unseen(v, tile.visible, 0)
    scores = tile.scores if tile.visible is None else jnp.where(tile.visible, tile.scores, -jnp.inf)
    higher = jnp.maximum(top, scores.max(1))
    # A row that has seen nothing yet has no maximum: -inf - -inf would be NaN.
    level = jnp.where(higher == -jnp.inf, 0.0, higher)
    weights, fade = jnp.exp2(scores - level[:, None]), jnp.exp2(top - level)
    total = total * fade + weights.sum(1)
    if tile.keep is not None:
        weights = jnp.where(tile.keep, weights * scale_of_kept(plan.static.dropout_p), 0.0)
    return higher, total, out * fade[:, None] + product(weights.astype(v.dtype), v)
