"""The gradient of a dense bias on the GPU: a program for each tile of it, summed over all who share it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...varying import axes_of, declared, spread
from .backward import load_key_tiles, load_query_tiles, slopes, tile_state
from .tiles import Arrays, Plan, load_keys, load_rows, loop, specs, store


def differentiate_bias(plan: Plan, arrays: Arrays, warps: int, interpret: bool) -> jax.Array:
    """The gradient of a dense bias, in no more memory than its own.

    Args:
        plan: What the kernel is compiled for.
        arrays: What it reads.
        warps: Of each program.
        interpret: Run it as plain JAX.

    Returns:
        float32 in the shape of the bias.
    """
    batch, heads, q_len, k_len = arrays.bias.shape
    one_row = q_len == 1
    rows = () if one_row else (plan.block_q,)
    axes = axes_of(arrays)
    call = pl.pallas_call(
        functools.partial(_kernel, plan, one_row),
        grid=(plan.k_blocks, 1 if one_row else plan.q_blocks, batch * heads),
        in_specs=[specs(plan, arrays)],
        out_specs=pl.BlockSpec((None, *(rows or (None,)), plan.block_k), lambda j, i, owner: (owner, i, j)),
        out_shape=declared((batch * heads, q_len, k_len), jnp.float32, axes),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name="attnspan_dbias",
    )
    dbias: jax.Array = call(spread(arrays, axes)).reshape(arrays.bias.shape)
    return dbias


def _kernel(plan: Plan, one_row: bool, arrays: Arrays, ref: Any) -> None:
    block_k, block_q, owner = (pl.program_id(axis) for axis in range(3))
    owners = arrays.bias.shape[:2]
    # How many batch rows, heads and blocks of queries share an element of the bias.
    spread = [whole // own for whole, own in zip(arrays.q.shape[:2], owners, strict=True)]
    spread.append(plan.q_blocks if one_row else 1)
    own_b, own_h = lax.div(owner, jnp.int32(owners[1])), lax.rem(owner, jnp.int32(owners[1]))

    def member(t: Any, total: Any) -> Any:
        # One of the two terms is 0: an axis has its own elements, or shares one.
        t, i = lax.div(t, jnp.int32(spread[2])), block_q + lax.rem(t, jnp.int32(spread[2]))
        b = own_b + lax.div(t, jnp.int32(spread[1]))
        h = own_h + lax.rem(t, jnp.int32(spread[1]))
        return lax.cond(
            tile_state(arrays, (b, h), i, block_k) > 0,
            lambda total: total + _tile(plan, arrays, (b, h), i, block_k, one_row),
            lambda total: total,
            total,
        )

    zeros = jnp.zeros((plan.block_k,) if one_row else (plan.block_q, plan.block_k), jnp.float32)
    total = loop(spread[0] * spread[1] * spread[2], member, zeros)
    keys = load_keys(plan, arrays, 0, block_k)
    if one_row:
        store(ref, total, keys.inside)
        return
    rows = load_rows(plan, arrays, 0, 0, block_q)
    mask = None if rows.inside is None else jnp.broadcast_to(rows.inside[:, None], total.shape)
    if keys.inside is not None:
        columns = jnp.broadcast_to(keys.inside[None, :], total.shape)
        mask = columns if mask is None else mask & columns
    triton.store(ref, total, mask=mask)


def _tile(plan: Plan, arrays: Arrays, at: tuple[Any, Any], i: Any, j: Any, one_row: bool) -> Any:
    b, h = at
    rows, keys = load_rows(plan, arrays, b, h, i), load_keys(plan, arrays, b, j)
    q, dout = load_query_tiles(plan, arrays, at, rows)
    k, v = load_key_tiles(plan, arrays, (b, lax.div(h, jnp.int32(plan.group))), keys)
    found, _ = slopes(plan, arrays, at, (q, k, v, dout), rows, keys, masked=True)
    return found.dx.sum(0) if one_row else found.dx
