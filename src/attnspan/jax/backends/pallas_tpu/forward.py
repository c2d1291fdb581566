"""The forward kernel for TPUs: online softmax over the listed blocks of keys of each block of queries."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ...._dropout import scale_of_kept
from .. import Operands, result_dtype
from . import lists as tables
from .launch import Operand, by_row, launch, of_rows, operands, over_keys, padded_bounds
from .tile import NT, TN, Place, Refs, Tile, dot, only, some

# What hidden scores are, and the maximum of no scores: below every finite score, and finite, so that the
# difference of two of them is no NaN.
_LEAST = np.finfo(np.float32).min


def forward(
    tile: Tile, q: jax.Array, k: jax.Array, v: jax.Array, bounds: jax.Array, given: Operands
) -> tuple[jax.Array, jax.Array]:
    """Attend over bounds of `clean`; out (B, Hq, Sq, Dv) in q's dtype, lse float32 (B, Hq, Sq)."""
    batch, heads, q_len, _ = q.shape
    bounds = padded_bounds(tile, bounds)
    blocks = tables.blocks(bounds, tile.k_len, tile.block_q, tile.block_k)
    lists = blocks.of_queries
    reads = operands(tile, q, k, v, bounds, given)
    if given.sinks is not None:
        reads["sinks"] = Operand(given.sinks.astype(jnp.float32))
    out = jax.ShapeDtypeStruct((batch, heads, q_len, v.shape[3]), result_dtype(q, tile.static))
    lse = jax.ShapeDtypeStruct((batch, heads, 1, tile.q_blocks * tile.block_q), jnp.float32)

    def body(p: Place, at: Sequence[Any], scalars: Sequence[Any], refs: Refs) -> None:
        step, last = at[3], scalars[0][tables.place(lists.dims, p.b, p.h, p.i) + lists.dims[3] - 1]
        whole = tile.whole((scalars[2], scalars[3]), lists.dims, p)
        pl.when(step == 0)(lambda: _begin(refs, p))
        if whole is not False:
            pl.when((step < last) & whole)(lambda: _add(tile, refs, p, masked=False))
        pl.when((step < last) & jnp.logical_not(whole))(lambda: _add(tile, refs, p, masked=True))
        pl.when(step == pl.num_programs(3) - 1)(lambda: _finish(tile, refs))

    found = launch(
        "attnspan_forward",
        body,
        over_keys(tile, batch, lists),
        (*lists.flat(), blocks.full_lo.reshape(-1), blocks.full_hi.reshape(-1)),
        reads,
        {"out": of_rows(tile, out), "lse": by_row(tile, lse)},
        {"top": (1, tile.block_q), "total": (1, tile.block_q), "sums": (v.shape[3], tile.block_q)},
    )
    return found["out"], found["lse"][:, :, 0, :q_len]


def _begin(refs: Refs, p: Place) -> None:
    top, total = refs["top"], refs["total"]
    refs["sums"][...] = jnp.zeros(refs["sums"].shape, jnp.float32)
    if "sinks" not in refs:
        top[...] = jnp.full(top.shape, _LEAST)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        return
    # A sink is a key that has been seen already, without a value.
    sink = jnp.full(top.shape, refs["sinks"][p.h]) * np.float32(np.log2(np.e))
    none = sink == -jnp.inf
    top[...] = jnp.where(none, _LEAST, sink)
    total[...] = jnp.where(none, 0.0, 1.0)


def _add(tile: Tile, refs: Refs, p: Place, masked: bool) -> None:
    """One tile more: Dao et al. 2022, algorithm 1, lines 9 to 12, transposed."""
    v = refs["v"][0, 0]
    x, _, shown = tile.scores(refs, p, dot(refs["k"][0, 0], refs["q"][0, 0], NT))
    if masked:
        visible = tile.visible(refs, p)
        visible = visible if shown is None else visible & shown
        x = jnp.where(visible, x, _LEAST)
        v = only(v, some(visible, 1))
    before = refs["top"][...]
    top = jnp.maximum(before, x.max(0, keepdims=True))
    weights = jnp.exp2(x - top)
    if masked:
        weights = jnp.where(visible, weights, 0)
    shrink = jnp.exp2(before - top)
    refs["top"][...] = top
    refs["total"][...] = shrink * refs["total"][...] + weights.sum(0, keepdims=True)
    if tile.static.dropout_p:
        weights = jnp.where(tile.keep(refs, p), weights, 0)
    refs["sums"][...] = shrink * refs["sums"][...] + dot(v, weights.astype(v.dtype), TN)


def _finish(tile: Tile, refs: Refs) -> None:
    top, total = refs["top"][...], refs["total"][...]
    empty = total == 0
    factor = np.float32(scale_of_kept(tile.static.dropout_p) if tile.static.dropout_p else 1)
    out = refs["sums"][...] * jnp.where(empty, 0, factor / jnp.where(empty, 1, total))
    lse = top * np.float32(np.log(2)) + jnp.log(jnp.where(empty, 1, total))
    lse = jnp.where(empty, -jnp.inf, lse)
    illegal = refs["rows"][0, 0, 0:1, :] < 0
    refs["out"][0, 0] = jnp.where(illegal, jnp.nan, out).T.astype(refs["out"].dtype)
    refs["lse"][0, 0] = jnp.where(illegal, jnp.nan, lse)
