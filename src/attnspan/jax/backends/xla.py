"""Backend "xla": blockwise attention in plain JAX with O(S) memory, on any device that XLA supports.

The backend implements FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithms 1 and 2) with XLA loops. The
outer loop runs over blocks of queries. The inner loop runs over the blocks of keys that some of these queries
see. The program reads their number from the bounds while it runs, so masked blocks cost nothing. All batch
elements and heads share a tile.

A NaN or inf in a key reaches the queries that see the key, and other queries of the same tile. A key that no
query of a tile sees does not affect the tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnspan.call import Problem
from attnspan.call.biases import HIDES
from attnspan.call.dropout import scale_of_kept
from attnspan.call.options import DENSE
from attnspan.jax.part import Gradients, JaxPart, result_dtype
from attnspan.jax.varying import axes_of, spread

from .tiles import capped, common_of, gradients_of_scores, illegal_rows, sinks_gradient
from .xla_bias import Bias, bias_of
from .xla_tiles import (
    KeyBlock,
    QueryBlock,
    Tiling,
    add_block,
    grouped,
    kept_of,
    keys_of,
    rows_of,
    sizes_of,
    ungrouped,
)

_DTYPES = ("float16", "bfloat16", "float32", "float64")

#: Up to this size, a float lse is as precise as the weights.
_MOST_LSE = 128.0


def supports(problem: Problem, part: JaxPart) -> str | None:
    """Return None, or the reason why this backend cannot run a call."""
    del part
    if not (isinstance(problem.q_len, int) and isinstance(problem.k_len, int)):
        return "its blocks need concrete lengths, not symbols"
    return None if problem.dtype in _DTYPES else f"it computes in {', '.join(_DTYPES)}, not {problem.dtype}"


def forward(part: JaxPart, fine: bool = False) -> tuple[jax.Array, jax.Array]:
    """See `attnspan.backends`."""
    q, k, v = part.q, part.k, part.v
    batch, q_heads, q_len, _ = q.shape
    wide = _wide(q)
    out = jnp.zeros((batch, q_heads, q_len, v.shape[3]), result_dtype(q, part))
    lse = jnp.full(out.shape[:3], -jnp.inf, wide)
    if part.sinks is not None:
        lse = jnp.broadcast_to(part.sinks.astype(wide)[:, None], lse.shape)
    if fine:
        lse = lax.complex(lse, jnp.zeros_like(lse))
    if lse.size and k.shape[2]:
        loops = _Loops(part)
        body = loops.forward_rows
        start = (grouped(out, loops.sizes), grouped(lse, loops.sizes))
        out, lse = map(ungrouped, loops.run(loops.sizes.q_blocks, body, start))
    illegal = illegal_rows(part.bounds, k.shape[2])
    return jnp.where(illegal[..., None], jnp.nan, out), jnp.where(illegal, jnp.nan, lse)


def _fine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a + b with its rounding error as the imaginary part (Knuth 1969, TwoSum)."""
    total = a + b
    of_b = total - a
    lost = (a - (total - of_b)) + (b - of_b)
    return lax.complex(total, jnp.where(jnp.isfinite(total), lost, 0))


def backward(
    part: JaxPart,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    want_dbias: bool,
) -> Gradients:
    """See `attnspan.backends`."""
    q, k, v = part.q, part.k, part.v
    wide = _wide(q)
    alive = (part.bounds[..., 0] < part.bounds[..., 1]).any(-1)
    common = common_of(dout, out, dlse, alive, wide)
    dsinks = sinks_gradient(part.sinks, lse.real, common)
    want_dbias = want_dbias and part.bias_kind != 0
    if not (lse.size and k.shape[2]):
        dbias = jnp.zeros(part.bias.shape, wide) if want_dbias and part.bias is not None else None
        dq, dk, dv = (jnp.zeros(x.shape, result_dtype(x, part)) for x in (q, k, v))
        return dq, dk, dv, dbias, dsinks
    loops = _Loops(part)
    rest = tuple(grouped(x, loops.sizes) for x in (dout, lse, common))
    dbias = loops.bias.zeros() if want_dbias and loops.bias is not None else None
    turned = (jnp.zeros(loops.k_t.shape, wide), jnp.zeros(loops.v_t.shape, wide))
    start = (jnp.zeros(loops.q.shape, result_dtype(q, part)), *turned, dbias)
    dq, dk_t, dv_t, dbias = loops.run(
        loops.sizes.q_blocks, lambda i, state: loops.backward_rows(i, state, *rest), start
    )
    if dbias is not None and loops.bias is not None:
        dbias = loops.bias.finish(dbias)
    dk = (dk_t * part.scale).astype(result_dtype(k, part))
    dv = dv_t.astype(result_dtype(v, part))
    return ungrouped(dq), dk.swapaxes(2, 3), dv.swapaxes(2, 3), dbias, dsinks


def _wide(q: jax.Array) -> Any:
    return jnp.float64 if q.dtype == jnp.float64 else jnp.float32


class _QueryInputs(NamedTuple):
    """A block of queries and its incoming gradients. Arrays with `_t` have queries along the last axis.

    A weight is exp(x - top) * factor.
    """

    rows: QueryBlock
    q: jax.Array
    q_t: jax.Array
    dout: jax.Array
    dout_t: jax.Array
    top: jax.Array
    factor: jax.Array
    common: jax.Array


class _Loops:
    """The bodies of the loops over blocks of queries, and of the inner loops over blocks of keys."""

    def __init__(self, part: JaxPart) -> None:
        q, k, v = part.q, part.k, part.v
        self.sizes: Tiling = sizes_of(q, k)
        self.q, self.k, self.v = grouped(q, self.sizes), k, v
        # Transposed once, because transposing blocks or tiles in the loops costs as much as a product.
        self.k_t, self.v_t = k.swapaxes(2, 3), v.swapaxes(2, 3)
        self.part = part
        self.axes = axes_of(part)
        self.wide = _wide(q)
        # Weights and their gradients fit bfloat16's range, but not float16's.
        self.narrow = q.dtype if q.dtype == jnp.bfloat16 else self.wide
        self.bias: Bias | None = bias_of(part, self.sizes, self.wide)

    def run(self, blocks: Any, body: Any, start: Any) -> Any:
        """Run a loop over blocks. Inside `shard_map`, all that it carries varies as the arguments do."""
        return lax.fori_loop(jnp.int32(0), jnp.int32(blocks), body, spread(start, self.axes))

    def rows(self, i: jax.Array) -> QueryBlock:
        """Return the i-th block of queries."""
        rows = rows_of(i, self.part, self.sizes)
        return rows if self.bias is None else self.bias.placed(rows, self.part)

    def product(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return a product of two tiles, summed in float32 or wider."""
        precision = lax.Precision.DEFAULT if self.narrow == jnp.bfloat16 else lax.Precision.HIGHEST
        a, b = a.astype(self.narrow), b.astype(self.narrow)
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=self.wide)

    def scores(
        self, q: jax.Array, rows: QueryBlock, keys: KeyBlock
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return a tile's scores less the queries' bases, its visible pairs, and the softcap's derivative."""
        raw = self.product("bhgmd,bhdn->bhgmn", q, self.block(self.k_t, keys, 3)) * self.part.scale
        x, slope = capped(raw, self.part.softcap)
        visible = keys.visible
        if self.bias is not None:
            bias = self.bias.tile(rows, keys)
            x = x + bias
            if self.part.bias_kind == DENSE:
                visible = visible & ~(bias < HIDES)
        return x, visible, slope

    def block(self, x: jax.Array, keys: KeyBlock, axis: int) -> jax.Array:
        """Return a block of keys or values, with 0 for keys that no query of the tile sees."""
        seen = keys.seen[..., None] if axis == 2 else keys.seen[:, :, None]
        return jnp.where(seen, lax.dynamic_slice_in_dim(x, keys.start, self.sizes.block_k, axis), 0)

    def forward_rows(self, i: jax.Array, state: Any) -> Any:
        """Attend from the i-th block of queries."""
        out, lse = state
        rows = self.rows(i)
        q = lax.dynamic_slice_in_dim(self.q, rows.start, self.sizes.block_q, 3)
        sums = jnp.zeros((*q.shape[:4], self.v.shape[3]), self.wide)
        top, total, sums = self.run(
            rows.blocks, lambda t, s: self.forward_tile(t, s, rows, q), (*self.no_keys(rows, q), sums)
        )
        factor = scale_of_kept(self.part.dropout_p) if self.part.dropout_p else 1.0
        sums = (sums * (factor / jnp.where(total == 0, 1, total))).astype(out.dtype)
        logs = jnp.log(total)
        logs = _fine(top, logs) if jnp.iscomplexobj(lse) else top + logs
        if rows.base is not None:
            logs = _fine(rows.base, logs.real) + 1j * logs.imag if jnp.iscomplexobj(lse) else rows.base + logs
        logs = jnp.where(total == 0, -jnp.inf, logs)
        return self.write_rows(out, sums, rows), self.write_rows(lse, logs[..., 0], rows)

    def no_keys(self, rows: QueryBlock, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the maximum and the sum of a block's queries before the first key. Only the sink counts."""
        top, total = jnp.full((*q.shape[:4], 1), -jnp.inf, self.wide), jnp.zeros((*q.shape[:4], 1), self.wide)
        if self.part.sinks is None:
            return top, total
        sinks = self.part.sinks.astype(self.wide).reshape(1, *q.shape[1:3], 1, 1)
        sinks = sinks if rows.base is None else sinks - rows.base
        return jnp.broadcast_to(sinks, top.shape), jnp.where(sinks == -jnp.inf, total, 1)

    def sums_of_tile(self, state: Any, rows: QueryBlock, keys: KeyBlock, q: jax.Array) -> Any:
        """Return the maximum and the sum after one more tile, its weights, and the factor of earlier sums."""
        top, total = state
        x, visible, _ = self.scores(q, rows, keys)
        x = jnp.where(visible, x, -jnp.inf)
        new_top = jnp.maximum(top, x.max(-1, keepdims=True))
        # For a query without keys so far, exp(-inf - 0) is 0, but exp(-inf + inf) would be NaN.
        finite_top = jnp.where(new_top == -jnp.inf, 0, new_top)
        weights, fade = jnp.exp(x - finite_top), jnp.exp(top - finite_top)
        return (new_top, total * fade + weights.sum(-1, keepdims=True)), weights, fade

    def forward_tile(self, t: jax.Array, state: Any, rows: QueryBlock, q: jax.Array) -> Any:
        """Run one step of the online softmax. `top` is subtracted from all scores so far."""
        *state, sums = state
        keys = keys_of(t, rows, self.part, self.sizes)
        (new_top, total), weights, fade = self.sums_of_tile(state, rows, keys, q)
        if self.part.dropout_p:
            weights = jnp.where(kept_of(rows, keys, self.part), weights, 0)
        sums = sums * fade + self.product("bhgmn,bhne->bhgme", weights, self.block(self.v, keys, 2))
        return new_top, total, sums

    def backward_rows(
        self, i: jax.Array, state: Any, dout: jax.Array, lse: jax.Array, common: jax.Array
    ) -> Any:
        """Add the contributions of the i-th block of queries to every gradient."""
        dq, *rest = state
        rows = self.rows(i)
        q, dout, lse, common = (
            lax.dynamic_slice_in_dim(x, rows.start, self.sizes.block_q, 3)
            for x in (self.q, dout, lse[..., None], common[..., None])
        )
        # Inputs of queries that see no key become 0, because 0 * NaN would reach every key of the tile.
        q, dout = jnp.where(rows.alive, q, 0), jnp.where(rows.alive, dout, 0)
        top, factor = self.normalizers(rows, q, lse)
        given = _QueryInputs(rows, q, q.swapaxes(3, 4), dout, dout.swapaxes(3, 4), top, factor, common)
        start = (jnp.zeros(q.shape, self.wide), *rest)
        block, *rest = self.run(rows.blocks, lambda t, s: self.backward_tile(t, s, given), start)
        block = (block * self.part.scale).astype(dq.dtype)
        return self.write_rows(dq, block, rows), *rest

    def normalizers(self, rows: QueryBlock, q: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the normalizers of the scores: the lse, or new sums if the lse is too large.

        A large lse is not precise enough as a float.
        """
        lse, lost = lse.real, lse.imag if jnp.iscomplexobj(lse) else None
        large = jnp.abs(lse) > _MOST_LSE
        if rows.base is not None:
            large = large | (rows.base != 0)
        large = large & rows.alive & jnp.isfinite(lse)

        def tile(t: jax.Array, state: Any) -> Any:
            keys = keys_of(t, rows, self.part, self.sizes)
            return self.sums_of_tile(state, rows, keys, q)[0]

        top, total = self.run(jnp.where(large.any(), rows.blocks, 0), tile, self.no_keys(rows, q))
        return jnp.where(large, top, lse), jnp.where(large, 1 / total, 1 if lost is None else jnp.exp(-lost))

    def backward_tile(self, t: jax.Array, state: Any, given: _QueryInputs) -> Any:
        """Add the contributions of one tile."""
        dq, dk_t, dv_t, dbias = state
        rows = given.rows
        keys = keys_of(t, rows, self.part, self.sizes)
        x, visible, slope = self.scores(given.q, rows, keys)
        weights = jnp.exp(x - given.top) * given.factor
        dweights = self.product("bhgme,bhen->bhgmn", given.dout, self.block(self.v_t, keys, 3))
        keep = kept_of(rows, keys, self.part) if self.part.dropout_p else None
        rest: Any = {"visible": visible, "keep": keep, "slope": slope}
        met, dx, ds = gradients_of_scores(weights, dweights, given.common, self.part, **rest)
        if dbias is not None and self.bias is not None:
            dbias = self.bias.add(dbias, rows, keys, dx)
        dq = dq + self.product("bhgmn,bhnd->bhgmd", ds, self.block(self.k, keys, 2))
        dk_t = add_block(dk_t, self.product("bhgdm,bhgmn->bhdn", given.q_t, ds), keys.start, 3)
        dv_t = add_block(dv_t, self.product("bhgem,bhgmn->bhen", given.dout_t, met), keys.start, 3)
        return dq, dk_t, dv_t, dbias

    def write_rows(self, x: jax.Array, block: jax.Array, rows: QueryBlock) -> jax.Array:
        """Write a block of queries to `x` (B, Hkv, G, Sq, ...), except queries of the block before."""
        if rows.own is not None:
            old = lax.dynamic_slice_in_dim(x, rows.start, self.sizes.block_q, 3)
            own = rows.own.reshape(-1, *[1] * (x.ndim - 4))
            block = jnp.where(own, block, old)
        return lax.dynamic_update_slice_in_dim(x, block, rows.start, 3)
