"""The kernels of the GPU: forward and dq by blocks of queries, dk and dv by blocks of keys, no atomics.

Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithms 1 and 2, with blocks by the mask's spans.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...._dropout import scale_of_kept
from ...varying import axes_of, declared, spread
from .. import result_dtype
from ..tiles import LN2, LOG2E
from .tiles import Arrays, Keys, Plan, Reader, Rows, both, loop, product, shared, specs, store, zero_unseen


def forward(plan: Plan, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """out (B, Hq, Sq, Dv) in q's dtype, and lse float32 (B, Hq, Sq)."""
    rows = arrays.q.shape[:3]
    results = [((*rows, plan.v_dim), result_dtype(arrays.q, plan.static)), (rows, jnp.float32)]
    out, lse = _by_queries("attnspan_forward", _forward_kernel, plan, arrays, results, [(plan.v_width,), ()])
    return out, lse


def differentiate_queries(plan: Plan, arrays: Arrays) -> tuple[jax.Array, jax.Array | None]:
    """dq (B, Hq, Sq, D), and of each row's slope float32 (B, Hq, Sq), None where there are no slopes."""
    results: list[Any] = [(arrays.q.shape, result_dtype(arrays.q, plan.static))]
    columns: list[tuple[int, ...]] = [(plan.width,)]
    if plan.has_slopes:
        results, columns = [*results, (arrays.q.shape[:3], jnp.float32)], [*columns, ()]
    dq, *rest = _by_queries("attnspan_dq", _query_kernel, plan, arrays, results, columns)
    return dq, rest[0] if rest else None


def differentiate_keys(plan: Plan, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """The gradients of k and v."""
    batch, heads, _, _ = arrays.k.shape
    blocks = [
        pl.BlockSpec((None, None, plan.block_k, columns), lambda j, h, b: (b, h, j, 0))
        for columns in (plan.width, plan.v_width)
    ]
    results = [(x.shape, result_dtype(x, plan.static)) for x in (arrays.k, arrays.v)]
    grid = (plan.k_blocks, heads, batch)
    dk, dv = _launch("attnspan_dkv", _key_kernel, plan, arrays, grid, blocks, results)
    return dk, dv


def differentiate_bias(plan: Plan, arrays: Arrays) -> jax.Array:
    """The gradient of a dense bias, float32: a program for each of its tiles, in no more memory."""
    batch, heads, q_len, k_len = arrays.bias.shape
    rows = () if q_len == 1 else (plan.block_q,)
    grid = (plan.k_blocks, plan.q_blocks if rows else 1, batch * heads)
    block = pl.BlockSpec((None, *(rows or (None,)), plan.block_k), lambda j, i, owner: (owner, i, j))
    results = [((batch * heads, q_len, k_len), jnp.float32)]
    (found,) = _launch("attnspan_dbias", _bias_kernel, plan, arrays, grid, [block], results)
    return found.reshape(arrays.bias.shape)  # type: ignore[no-any-return]


def _by_queries(
    name: str, kernel: Callable[..., None], plan: Plan, arrays: Arrays, results: Any, columns: Any
) -> Any:
    batch, heads, _, _ = arrays.q.shape
    blocks = [
        pl.BlockSpec(
            (None, None, plan.block_q, *width),
            lambda i, h, b, width=width: (b, h, plan.q_blocks - 1 - i, *(0 for _ in width)),
        )
        for width in columns
    ]
    return _launch(name, kernel, plan, arrays, (plan.q_blocks, heads, batch), blocks, results)


def _launch(
    name: str,
    kernel: Callable[..., None],
    plan: Plan,
    arrays: Arrays,
    grid: tuple[int, ...],
    blocks: Any,
    results: Any,
) -> Any:
    axes = axes_of(arrays)
    call = pl.pallas_call(
        partial(kernel, plan),
        grid=grid,
        in_specs=[specs(plan, arrays)],
        out_specs=blocks,
        out_shape=[declared(shape, dtype, axes) for shape, dtype in results],
        compiler_params=triton.CompilerParams(num_warps=plan.warps, num_stages=2),
        interpret=plan.interpret,
        name=name,
    )
    return call(spread(arrays, axes))


def _visit_keys(arrays: Arrays, at: tuple[Any, Any], block: Any, step: Any, carry: Any) -> Any:
    """Run `step(masked, j, carry)` over the blocks of keys that a block of queries visits."""
    visits = arrays.visits
    place = (*shared(visits, at), block)

    def run(r: Any, carry: Any) -> Any:
        first, end, all_first, all_end = (visits[(*place, r, i)] for i in range(4))
        carry = lax.fori_loop(first, all_first, partial(step, True), carry)
        carry = lax.fori_loop(all_first, all_end, partial(step, False), carry)
        return lax.fori_loop(all_end, end, partial(step, True), carry)

    return loop(visits.shape[3], run, carry)


def _tile_state(arrays: Arrays, at: tuple[Any, Any], block_q: Any, block_k: Any) -> Any:
    """0 for a tile that nobody visits, 1 for a masked one, 2 where every row sees every key."""
    visits = arrays.visits
    place = (*shared(visits, at), block_q)

    def run(r: Any, state: Any) -> Any:
        first, end, all_first, all_end = (visits[(*place, r, i)] for i in range(4))
        inside = ((first <= block_k) & (block_k < end)).astype(jnp.int32)
        return state + inside + ((all_first <= block_k) & (block_k < all_end)).astype(jnp.int32)

    return loop(visits.shape[3], run, jnp.int32(0))


def _visit_queries(arrays: Arrays, at: tuple[Any, Any], block: Any, step: Any, carry: Any) -> Any:
    """Run `step(masked, i, carry)` over the blocks of queries of a head that visit a block of keys."""
    ranges = arrays.q_visits
    place = (*shared(ranges, at), block)

    def body(i: Any, carry: Any) -> Any:
        branches: list[Any] = [lambda carry: carry, partial(step, True, i), partial(step, False, i)]
        return lax.switch(_tile_state(arrays, at, i, block), branches, carry)

    return lax.fori_loop(ranges[(*place, 0)], ranges[(*place, 1)], body, carry)


def _by_queries_at(plan: Plan, arrays: Arrays) -> tuple[Any, Reader, Rows]:
    # The last block of a causal mask has the most work: it must not begin last.
    block = plan.q_blocks - 1 - pl.program_id(0)
    reader = Reader(plan, arrays, (pl.program_id(2), pl.program_id(1)))
    return block, reader, reader.rows(block)


def _forward_kernel(plan: Plan, arrays: Arrays, out_ref: Any, lse_ref: Any) -> None:
    block, reader, rows = _by_queries_at(plan, arrays)
    q = reader.matrix(arrays.q, rows, plan.width, plan.head_dim)
    top = jnp.full(plan.block_q, -jnp.inf, jnp.float32)
    total = jnp.zeros(plan.block_q, jnp.float32)
    if arrays.sinks is not None:
        top = jnp.maximum(top, arrays.sinks[reader.at[1]] * LOG2E)
        total = jnp.where(top == -jnp.inf, total, total + 1.0)

    def step(masked: bool, j: Any, carry: Any) -> Any:
        """One block of keys: the running maximum, sum and output of the block's rows."""
        top, total, out = carry
        keys = reader.keys(j)
        k, v = reader.of_keys(keys)
        tile = reader.scores(q, k, rows, keys, masked)
        v = zero_unseen(v, tile.visible)
        scores = tile.scores if tile.visible is None else jnp.where(tile.visible, tile.scores, -jnp.inf)
        higher = jnp.maximum(top, scores.max(1))
        # A row that has seen nothing yet has no maximum: -inf - -inf would be NaN.
        level = jnp.where(higher == -jnp.inf, 0.0, higher)
        weights, fade = jnp.exp2(scores - level[:, None]), jnp.exp2(top - level)
        total = total * fade + weights.sum(1)
        if tile.keep is not None:
            weights = jnp.where(tile.keep, weights * scale_of_kept(plan.static.dropout_p), 0.0)
        return higher, total, out * fade[:, None] + product(weights.astype(v.dtype), v)

    carry = top, total, jnp.zeros((plan.block_q, plan.v_width), jnp.float32)
    top, total, out = _visit_keys(arrays, reader.at, block, step, carry)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    illegal = rows.spans[0][0] < 0
    lse = jnp.where(empty, -jnp.inf, (top + jnp.log2(total)) * LN2)
    store(lse_ref, jnp.where(illegal, jnp.nan, lse), rows.inside)
    out = jnp.where(illegal[:, None], jnp.nan, out / total[:, None])
    store(out_ref, out.astype(out_ref.dtype), rows.inside, plan.v_dim)


def _query_kernel(plan: Plan, arrays: Arrays, dq_ref: Any, *slope_ref: Any) -> None:
    block, reader, rows = _by_queries_at(plan, arrays)
    q, dout = reader.of_rows(rows)

    def step(masked: bool, j: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        keys = reader.keys(j)
        k, v = reader.of_keys(keys)
        (_, dx, ds), tile = reader.gradients((q, k, v, dout), rows, keys, masked)
        k = zero_unseen(k, tile.visible)
        dq = carry[0] + product(ds.astype(k.dtype), k)
        return (dq, carry[1] + (dx * tile.distance).sum(1)) if plan.has_slopes else (dq,)

    carry: tuple[Any, ...] = (jnp.zeros((plan.block_q, plan.width), jnp.float32),)
    if plan.has_slopes:
        carry = (*carry, jnp.zeros(plan.block_q, jnp.float32))
    carry = _visit_keys(arrays, reader.at, block, step, carry)
    store(dq_ref, (carry[0] * plan.static.scale).astype(dq_ref.dtype), rows.inside, plan.head_dim)
    if plan.has_slopes:
        store(slope_ref[0], carry[1], rows.inside)


def _key_kernel(plan: Plan, arrays: Arrays, dk_ref: Any, dv_ref: Any) -> None:
    block, kv_head, b = (pl.program_id(axis) for axis in range(3))
    first = Reader(plan, arrays, (b, kv_head * plan.group))
    keys = first.keys(block)
    k, v = first.of_keys(keys)

    def step(reader: Reader, masked: bool, i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        dk, dv = carry
        rows = reader.rows(i)
        q, dout = reader.of_rows(rows)
        (weights, _, ds), tile = reader.gradients((q, k, v, dout), rows, keys, masked, keys_down=True)
        q, dout = (zero_unseen(x, tile.visible) for x in (q, dout))
        dv = dv + product(weights.astype(dout.dtype), dout)
        return dk + product(ds.astype(q.dtype), q), dv

    def head(member: Any, carry: Any) -> Any:
        reader = Reader(plan, arrays, (b, kv_head * plan.group + member))
        return _visit_queries(arrays, reader.at, block, partial(step, reader), carry)

    carry: Any = tuple(jnp.zeros((plan.block_k, width), jnp.float32) for width in (plan.width, plan.v_width))
    dk, dv = loop(plan.group, head, carry)
    store(dk_ref, (dk * plan.static.scale).astype(dk_ref.dtype), keys.inside, plan.head_dim)
    store(dv_ref, dv.astype(dv_ref.dtype), keys.inside, plan.v_dim)


def _bias_kernel(plan: Plan, arrays: Arrays, ref: Any) -> None:
    block_k, block_q, owner = (pl.program_id(axis) for axis in range(3))
    owners, one_row = arrays.bias.shape[:2], arrays.bias.shape[2] == 1
    # How many batch rows, heads and blocks of queries share an element of the bias.
    spread = [whole // own for whole, own in zip(arrays.q.shape[:2], owners, strict=True)]
    spread.append(plan.q_blocks if one_row else 1)
    own_b, own_h = lax.div(owner, jnp.int32(owners[1])), lax.rem(owner, jnp.int32(owners[1]))

    def tile(reader: Reader, i: Any, total: Any) -> Any:
        rows: Rows = reader.rows(i)
        keys: Keys = reader.keys(block_k)
        (q, dout), (k, v) = reader.of_rows(rows), reader.of_keys(keys)
        (_, dx, _), _ = reader.gradients((q, k, v, dout), rows, keys, masked=True)
        return total + (dx.sum(0) if one_row else dx)

    def member(t: Any, total: Any) -> Any:
        # One of the two terms is 0: an axis has its own elements, or shares one.
        t, i = lax.div(t, jnp.int32(spread[2])), block_q + lax.rem(t, jnp.int32(spread[2]))
        at = own_b + lax.div(t, jnp.int32(spread[1])), own_h + lax.rem(t, jnp.int32(spread[1]))
        seen = _tile_state(arrays, at, i, block_k) > 0
        return lax.cond(seen, partial(tile, Reader(plan, arrays, at), i), lambda total: total, total)

    zeros = jnp.zeros((plan.block_k,) if one_row else (plan.block_q, plan.block_k), jnp.float32)
    total = loop(spread[0] * spread[1] * spread[2], member, zeros)
    reader = Reader(plan, arrays, (jnp.int32(0), jnp.int32(0)))
    keys = reader.keys(block_k)
    if one_row:
        store(ref, total, keys.inside)
        return
    columns = None if keys.inside is None else keys.inside[None, :]
    triton.store(ref, total, mask=both(reader.rows(block_q).inside, columns, total.shape))
