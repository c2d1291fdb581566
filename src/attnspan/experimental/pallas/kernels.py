"""The TPU kernels: forward, dq, dk with dv, and the gradient of a dense bias.

The forward kernel is an online softmax over the listed blocks of keys of each block of queries. The other
kernels recompute the weights of their tiles from the lse (Dao 2023, FlashAttention-2, algorithm 2). They
write their results once and add in a fixed order, without atomics.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from attnspan.call.dropout import scale_of_kept
from attnspan.call.options import ALIBI, SIGNED_ALIBI
from attnspan.jax.backends.tiles import LN2, LOG2E, gradients_of_scores
from attnspan.jax.part import JaxPart, result_dtype

from . import lists as tables
from .launch import (
    Operand,
    by_row,
    launch,
    of_keys,
    of_rows,
    operands,
    over_bias,
    over_keys,
    over_queries,
    padded_bounds,
)
from .tile import NN, NT, TN, Place, Refs, Tile, column, dot, only, some

# Value of hidden scores, and maximum of no scores. It is below every possible score, and finite, so that the
# difference of two of them is not NaN.
_LEAST = np.finfo(np.float32).min


def forward(tile: Tile, part: JaxPart) -> tuple[jax.Array, jax.Array]:
    """Attend over `legal` bounds. Returns out (B, Hq, Sq, Dv) in q's dtype and lse float32 (B, Hq, Sq)."""
    (batch, heads, q_len, _), v_dim = part.q.shape, part.v.shape[3]
    bounds = padded_bounds(tile, part.bounds)
    blocks = tables.blocks(bounds, tile.k_len, tile.block_q, tile.block_k)
    reads = operands(tile, part, bounds)
    if part.sinks is not None:
        reads["sinks"] = Operand(part.sinks.astype(jnp.float32))
    out = jax.ShapeDtypeStruct((batch, heads, q_len, v_dim), result_dtype(part.q, tile.part))
    lse = jax.ShapeDtypeStruct((batch, heads, 1, tile.q_blocks * tile.block_q), jnp.float32)

    results = {"out": of_rows(tile, out), "lse": by_row(tile, lse)}
    scratch = {"top": (1, tile.block_q), "total": (1, tile.block_q), "sums": (v_dim, tile.block_q)}
    phases = _begin, partial(_add, tile), partial(_finish, tile)
    found = _by_queries("attnspan_forward", tile, batch, blocks, phases, reads, results, scratch)
    return found["out"], found["lse"][:, :, 0, :q_len]


def _by_queries(
    name: str,
    tile: Tile,
    batch: int,
    blocks: tables.Blocks,
    phases: Sequence[Any],
    reads: dict[str, Operand],
    writes: dict[str, Operand],
    scratch: Mapping[str, tuple[int, ...]],
) -> dict[str, jax.Array]:
    """Run a kernel by blocks of queries: it begins, adds each listed block of keys, and finishes."""
    (begin, add, finish), lists = phases, blocks.of_queries

    def body(p: Place, at: Sequence[Any], scalars: Sequence[Any], refs: Refs) -> None:
        step, last = at[3], _length(scalars, lists, p.b, p.h, p.i)
        pl.when(step == 0)(partial(begin, refs, p))
        whole = tile.whole((scalars[2], scalars[3]), lists.dims, p)
        _each(step < last, whole, partial(add, refs, p))
        pl.when(step == pl.num_programs(3) - 1)(partial(finish, refs))

    scalars = (*lists.flat(), *_flat(blocks.full))
    return launch(name, body, over_keys(tile, batch, lists), scalars, reads, writes, scratch)


def _begin(refs: Refs, p: Place) -> None:
    top, total = refs["top"], refs["total"]
    refs["sums"][...] = jnp.zeros(refs["sums"].shape, jnp.float32)
    if "sinks" not in refs:
        top[...] = jnp.full(top.shape, _LEAST)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        return
    # A sink counts as a key without a value that has already been seen.
    sink = jnp.full(top.shape, refs["sinks"][p.h]) * np.float32(LOG2E)
    none = sink == -jnp.inf
    top[...] = jnp.where(none, _LEAST, sink)
    total[...] = jnp.where(none, 0.0, 1.0)


def _add(tile: Tile, refs: Refs, p: Place, masked: bool) -> None:
    """Add one tile: Dao et al. 2022, algorithm 1, lines 9 to 12, transposed."""
    v = refs["v"][0, 0]
    x, _, shown = tile.scores(refs, p, dot(refs["k"][0, 0], refs["q"][0, 0], NT))
    if masked:
        visible = _visible(tile, refs, p, shown)
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
    if tile.part.dropout_p:
        weights = jnp.where(tile.keep(refs, p), weights, 0)
    refs["sums"][...] = shrink * refs["sums"][...] + dot(v, weights.astype(v.dtype), TN)


def _finish(tile: Tile, refs: Refs) -> None:
    top, total = refs["top"][...], refs["total"][...]
    empty = total == 0
    factor = np.float32(scale_of_kept(tile.part.dropout_p) if tile.part.dropout_p else 1)
    out = refs["sums"][...] * jnp.where(empty, 0, factor / jnp.where(empty, 1, total))
    lse = top * np.float32(LN2) + jnp.log(jnp.where(empty, 1, total))
    lse = jnp.where(empty, -jnp.inf, lse)
    illegal = refs["rows"][0, 0, 0:1, :] < 0
    refs["out"][0, 0] = jnp.where(illegal, jnp.nan, out).T.astype(refs["out"].dtype)
    refs["lse"][0, 0] = jnp.where(illegal, jnp.nan, lse)


class Inputs(NamedTuple):
    """Operands of the three backward kernels: the forward pass's operands and results.

    The bounds are `legal`. ``lse`` is 0 where it was infinite, and ``common`` is 0 for illegal queries.
    """

    part: JaxPart
    dout: jax.Array
    lse: jax.Array
    common: jax.Array


def _prepare(tile: Tile, x: Inputs) -> tuple[tables.Blocks, dict[str, Operand]]:
    bounds = padded_bounds(tile, x.part.bounds)
    reads = operands(tile, x.part, bounds)
    reads["dout"] = of_rows(tile, x.dout)
    reads["sums"] = by_row(tile, jnp.stack([x.lse * np.float32(LOG2E), x.common], 2))
    return tables.blocks(bounds, tile.k_len, tile.block_q, tile.block_k), reads


def d_queries(tile: Tile, x: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """Return dq, and for slopes their gradient summed over each query's keys, float32 (B, Hq, Sq)."""
    batch, heads, q_len, head_dim = x.part.q.shape
    blocks, reads = _prepare(tile, x)
    slopes = tile.part.bias_kind in (ALIBI, SIGNED_ALIBI)
    writes = {"dq": of_rows(tile, jax.ShapeDtypeStruct(x.part.q.shape, result_dtype(x.part.q, tile.part)))}
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
        dq = refs["dq_sums"][...] * np.float32(tile.part.scale)
        refs["dq"][0, 0] = dq.T.astype(refs["dq"].dtype)
        if slopes:
            refs["dslopes"][0, 0] = refs["slope_sums"][...]

    phases = partial(_zero, names=scratch), add, finish
    found = _by_queries("attnspan_dq", tile, batch, blocks, phases, reads, writes, scratch)
    return found["dq"], found["dslopes"][:, :, 0, :q_len] if slopes else None


def d_keys(tile: Tile, x: Inputs) -> tuple[jax.Array, jax.Array]:
    """Return dk and dv, each summed over the query heads that share a key head."""
    blocks, reads = _prepare(tile, x)
    lists, of_queries = blocks.of_keys, blocks.of_queries
    writes = {
        "dk": of_keys(tile, jax.ShapeDtypeStruct(x.part.k.shape, result_dtype(x.part.k, tile.part))),
        "dv": of_keys(tile, jax.ShapeDtypeStruct(x.part.v.shape, result_dtype(x.part.v, tile.part))),
    }
    scratch = {
        "dk_sums": (tile.block_k, x.part.k.shape[3]),
        "dv_sums": (tile.block_k, x.part.v.shape[3]),
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
        dk = refs["dk_sums"][...] * np.float32(tile.part.scale)
        refs["dk"][0, 0] = dk.astype(refs["dk"].dtype)
        refs["dv"][0, 0] = refs["dv_sums"][...].astype(refs["dv"].dtype)

    def body(p: Place, at: Sequence[Any], scalars: Sequence[Any], refs: Refs) -> None:
        member, step = at[3], at[4]
        last = _length(scalars, lists, p.b, p.h, p.j)
        # A list is a range of blocks. Some of them may not touch this block.
        touched = tables.touches((scalars[4], scalars[5]), of_queries.dims, p.b, p.h, p.i, p.j)
        pl.when((member == 0) & (step == 0))(partial(_zero, refs, p, scratch))
        whole = tile.whole((scalars[2], scalars[3]), of_queries.dims, p)
        _each((step < last) & touched, whole, partial(add, refs, p))
        done = (member == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1)
        pl.when(done)(partial(finish, refs))

    scalars = (*lists.flat(), *_flat(blocks.full), *of_queries.flat())
    grid = over_queries(tile, x.part.q.shape[0], lists)
    found = launch("attnspan_dkv", body, grid, scalars, reads, writes, scratch)
    return found["dk"], found["dv"]


def d_bias(tile: Tile, x: Inputs) -> jax.Array:
    """Return the gradient of a dense bias, float32, in its shape. Shared elements are summed in order."""
    assert x.part.bias is not None
    blocks, reads = _prepare(tile, x)
    lists, shape = blocks.of_queries, x.part.bias.shape
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
        pl.when(at[4] == 0)(partial(_zero, refs, p, scratch))
        touched = tables.touches((scalars[0], scalars[1]), lists.dims, p.b, p.h, p.i, p.j)
        _each(touched, False, partial(add, refs, p))
        pl.when(at[4] == pl.num_programs(4) - 1)(partial(finish, refs))

    grid = over_bias(tile, x.part.q.shape[0], shape)
    return launch("attnspan_dbias", body, grid, lists.flat(), reads, writes, scratch)["dbias"]


def _gradients(tile: Tile, refs: Refs, p: Place, masked: bool) -> tuple[Any, Any, Any, Any]:
    """Apply `gradients_of_scores` to a tile. Also return the visible pairs."""
    q, k, v, dout = (refs[name][0, 0] for name in ("q", "k", "v", "dout"))
    lse, common = refs["sums"][0, 0, 0:1, :], refs["sums"][0, 0, 1:2, :]
    x, slope, shown = tile.scores(refs, p, dot(k, q, NT))
    visible = _visible(tile, refs, p, shown) if masked else None
    keep = tile.keep(refs, p) if tile.part.dropout_p else None
    rest: Any = {"visible": visible, "keep": keep, "slope": slope}
    found = gradients_of_scores(jnp.exp2(x - lse), dot(v, dout, NT), common, tile.part, **rest)
    return *found, visible


def _visible(tile: Tile, refs: Refs, p: Place, shown: Any) -> Any:
    visible = tile.visible(refs, p)
    return visible if shown is None else visible & shown


def _flat(tables: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(table.reshape(-1) for table in tables)


def _length(scalars: Sequence[Any], lists: tables.Lists, b: Any, h: Any, i: Any) -> Any:
    """Return the number of blocks in the list of block i."""
    return scalars[0][tables.place(lists.dims, b, h, i) + lists.dims[3] - 1]


def _each(active: Any, whole: Any, add: Any) -> None:
    """Add a tile, without a mask if all of its queries see all of its keys."""
    if whole is not False:
        pl.when(active & whole)(partial(add, masked=False))
    pl.when(active & jnp.logical_not(whole))(partial(add, masked=True))


def _zero(refs: Refs, _: Place, names: Any) -> None:
    for name in names:
        refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)
