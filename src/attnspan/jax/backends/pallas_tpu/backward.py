"""The backward kernels for TPUs: one for dq, one for dk and dv, and one for a dense bias.

Each recomputes the weights of its tiles from the lse (Dao 2023, FlashAttention-2, algorithm 2), writes its
results once, and adds in a fixed order: nothing is atomic. With p the weights, m what dropout multiplies them
by and delta = sum(dout * out) - dlse: dx = p * (m * (v . dout) - delta).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ...._dropout import scale_of_kept
from ....options import ALIBI, SIGNED_ALIBI
from .. import Operands, result_dtype
from . import lists as tables
from .launch import (
    Operand,
    by_row,
    launch,
    of_rows,
    operands,
    over_bias,
    over_keys,
    over_queries,
    padded_bounds,
)
from .tile import LOG2E, NN, NT, TN, Place, Refs, Tile, column, dot, only, some


class Inputs(NamedTuple):
    """What the three kernels read: the operands of the forward pass and what came of it.

    ``bounds`` are those of `clean`; ``lse`` is 0 where it was infinite, and ``delta`` in illegal rows.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    bounds: jax.Array
    lse: jax.Array
    delta: jax.Array
    given: Operands


class _Given(NamedTuple):
    blocks: tables.Blocks
    reads: dict[str, Operand]

    @property
    def full(self) -> tuple[jax.Array, jax.Array]:
        return self.blocks.full_lo.reshape(-1), self.blocks.full_hi.reshape(-1)


def _prepare(tile: Tile, x: Inputs) -> _Given:
    bounds = padded_bounds(tile, x.bounds)
    reads = operands(tile, x.q, x.k, x.v, bounds, x.given)
    reads["dout"] = of_rows(tile, x.dout)
    reads["sums"] = by_row(tile, jnp.stack([x.lse * np.float32(LOG2E), x.delta], 2))
    return _Given(tables.blocks(bounds, tile.k_len, tile.block_q, tile.block_k), reads)


def d_queries(tile: Tile, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """dq, and for slopes the sum over the keys of each row, float32 (B, Hq, Sq), of their gradient."""
    batch, heads, q_len, head_dim = x.q.shape
    blocks, reads = given = _prepare(tile, x)
    lists, slopes = blocks.of_queries, tile.static.bias_kind in (ALIBI, SIGNED_ALIBI)
    writes = {"dq": of_rows(tile, jax.ShapeDtypeStruct(x.q.shape, result_dtype(x.q, tile.static)))}
    scratch = {"dq_sums": (head_dim, tile.block_q)}
    if slopes:
        rows = jax.ShapeDtypeStruct((batch, heads, 1, tile.q_blocks * tile.block_q), jnp.float32)
        writes["dslopes"] = by_row(tile, rows)
        scratch["slope_sums"] = (1, tile.block_q)

    def add(refs: Refs, p: Place, masked: bool) -> None:
        k = refs["k"][0, 0]
        _, dx, ds, visible = _gradients(tile, refs, p, masked)
        k = k if visible is None else only(k, some(visible, 1))
        refs["dq_sums"][...] += dot(k, ds.astype(k.dtype), TN)
        if slopes:
            refs["slope_sums"][...] += (dx * tile.distance(refs, p)).sum(0, keepdims=True)

    def finish(refs: Refs) -> None:
        dq = refs["dq_sums"][...] * np.float32(tile.static.scale)
        refs["dq"][0, 0] = dq.T.astype(refs["dq"].dtype)
        if slopes:
            refs["dslopes"][0, 0] = refs["slope_sums"][...]

    def body(p: Place, at: Sequence[Any], scalars: Sequence[Any], refs: Refs) -> None:
        step, last = at[3], scalars[0][tables.place(lists.dims, p.b, p.h, p.i) + lists.dims[3] - 1]
        pl.when(step == 0)(partial(_zero, refs, scratch))
        whole = tile.whole((scalars[2], scalars[3]), lists.dims, p)
        _each(step < last, whole, partial(add, refs, p))
        pl.when(step == pl.num_programs(3) - 1)(partial(finish, refs))

    scalars = (*lists.flat(), *given.full)
    grid = over_keys(tile, batch, lists)
    found = launch("attnspan_dq", body, grid, scalars, reads, writes, scratch)
    return found["dq"], found["dslopes"][:, :, 0, :q_len] if slopes else None


def d_keys(tile: Tile, x: Inputs) -> tuple[jax.Array, jax.Array]:
    """dk and dv, each summed over the query heads that share a key head."""
    blocks, reads = given = _prepare(tile, x)
    lists, of_queries = blocks.of_keys(), blocks.of_queries
    writes = {
        "dk": _of_keys(tile, jax.ShapeDtypeStruct(x.k.shape, result_dtype(x.k, tile.static))),
        "dv": _of_keys(tile, jax.ShapeDtypeStruct(x.v.shape, result_dtype(x.v, tile.static))),
    }
    scratch = {
        "dk_sums": (tile.block_k, x.k.shape[3]),
        "dv_sums": (tile.block_k, x.v.shape[3]),
    }

    def add(refs: Refs, p: Place, masked: bool) -> None:
        q, dout = refs["q"][0, 0], refs["dout"][0, 0]
        weights, _, ds, visible = _gradients(tile, refs, p, masked)
        if visible is not None:
            seeing = column(jnp.where(visible, 1.0, 0.0).max(0, keepdims=True)) > 0
            q, dout = only(q, seeing), only(dout, seeing)
        refs["dv_sums"][...] += dot(weights.astype(dout.dtype), dout, NN)
        refs["dk_sums"][...] += dot(ds.astype(q.dtype), q, NN)

    def finish(refs: Refs) -> None:
        dk = refs["dk_sums"][...] * np.float32(tile.static.scale)
        refs["dk"][0, 0] = dk.astype(refs["dk"].dtype)
        refs["dv"][0, 0] = refs["dv_sums"][...].astype(refs["dv"].dtype)

    def body(p: Place, at: Sequence[Any], scalars: Sequence[Any], refs: Refs) -> None:
        member, step = at[3], at[4]
        last = scalars[0][tables.place(lists.dims, p.b, p.h, p.j) + lists.dims[3] - 1]
        # A list is the hull of what touches the block: it may have blocks between that do not.
        touched = tables.touches((scalars[4], scalars[5]), of_queries.dims, p.b, p.h, p.i, p.j)
        pl.when((member == 0) & (step == 0))(partial(_zero, refs, scratch))
        whole = tile.whole((scalars[2], scalars[3]), of_queries.dims, p)
        _each((step < last) & touched, whole, partial(add, refs, p))
        done = (member == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1)
        pl.when(done)(partial(finish, refs))

    scalars = (*lists.flat(), *given.full, *of_queries.flat())
    grid = over_queries(tile, x.q.shape[0], lists)
    found = launch("attnspan_dkv", body, grid, scalars, reads, writes, scratch)
    return found["dk"], found["dv"]


def d_bias(tile: Tile, x: Inputs) -> jax.Array:
    """The gradient of a dense bias, float32, in its shape; what shares an element adds up in order."""
    assert x.given.bias is not None
    blocks, reads = _prepare(tile, x)
    lists, shape = blocks.of_queries, x.given.bias.shape
    each_row = shape[2] != 1
    writes = {"dbias": reads["bias"]._replace(array=jax.ShapeDtypeStruct(shape, jnp.float32))}
    scratch = {"bias_sums": (tile.block_k, tile.block_q)}

    def add(refs: Refs, p: Place, masked: bool) -> None:
        _, dx, _, _ = _gradients(tile, refs, p, masked)
        refs["bias_sums"][...] += dx

    def finish(refs: Refs) -> None:
        sums = refs["bias_sums"][...].T
        refs["dbias"][0, 0] = sums if each_row else sums.sum(0, keepdims=True)

    def body(p: Place, at: Sequence[Any], scalars: Sequence[Any], refs: Refs) -> None:
        pl.when(at[4] == 0)(partial(_zero, refs, scratch))
        touched = tables.touches((scalars[0], scalars[1]), lists.dims, p.b, p.h, p.i, p.j)
        _each(touched, False, partial(add, refs, p))
        pl.when(at[4] == pl.num_programs(4) - 1)(partial(finish, refs))

    grid = over_bias(tile, x.q.shape[0], shape)
    return launch("attnspan_dbias", body, grid, lists.flat(), reads, writes, scratch)["dbias"]


def _gradients(tile: Tile, refs: Refs, p: Place, masked: bool) -> tuple[Any, Any, Any, Any]:
    """Weights as they met the values, dx, the gradient of the products but for the scale, what is visible."""
    q, k, v, dout = (refs[name][0, 0] for name in ("q", "k", "v", "dout"))
    lse, delta = refs["sums"][0, 0, 0:1, :], refs["sums"][0, 0, 1:2, :]
    x, slope, shown = tile.scores(refs, p, dot(k, q, NT))
    weights = jnp.exp2(x - lse)
    visible = None
    if masked:
        visible = tile.visible(refs, p)
        visible = visible if shown is None else visible & shown
        weights = jnp.where(visible, weights, 0)
    products = dot(v, dout, NT)
    met = weights
    if tile.static.dropout_p:
        keep, factor = tile.keep(refs, p), np.float32(scale_of_kept(tile.static.dropout_p))
        products = jnp.where(keep, products * factor, 0)
        met = jnp.where(keep, weights * factor, 0)
    dx = weights * (products - delta)
    if visible is not None:
        dx = jnp.where(visible, dx, 0)
    ds = dx if slope is None else dx * slope
    if visible is not None and slope is not None:
        ds = jnp.where(visible, ds, 0)  # the slope of a hidden score may be NaN
    return met, dx, ds, visible


def _each(active: Any, whole: Any, add: Any) -> None:
    """A tile that all rows see whole needs no mask."""
    if whole is not False:
        pl.when(active & whole)(partial(add, masked=False))
    pl.when(active & jnp.logical_not(whole))(partial(add, masked=True))


def _zero(refs: Refs, names: Any) -> None:
    for name in names:
        refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)


def _of_keys(tile: Tile, x: jax.ShapeDtypeStruct) -> Operand:
    return Operand(x, (1, 1, tile.block_k, x.shape[3]), lambda p: (p.b, p.kv, p.j, 0))
