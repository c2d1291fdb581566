"""Computation of one device, forward and backward, with the collectives between the parts of the sequence.

Shapes of one device: B batch elements, H query heads, G key heads that it holds, g key heads that it attends
to, N queries, S keys that it holds, D and Dv head dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax import numpy as jnp

from attnspan.backends import Backend
from attnspan.jax import backends
from attnspan.jax.part import Gradients, JaxPart
from attnspan.jax.rules import batched, first_order

from .axes import Axes
from .exchange import fetch, give_back
from .route import Route


@dataclass(frozen=True)
class Work:
    """Static facts of a call, known at trace time and hashable.

    Attributes:
        axes: Mesh axes.
        backend: The backend.
        groups: Query heads per key head.
        split_kv: Whether key heads are split like query heads. If not, each device holds all of them.
        piece: Most rows between two parts of the sequence.
    """

    axes: Axes
    backend: Backend
    groups: int
    split_kv: bool
    piece: int


def forward(work: Work, part: JaxPart, route: Route | None) -> tuple[Array, Array]:
    """Compute out (B, H, N, Dv) in q's dtype and lse (B, H, N)."""
    part = _with_heads(work, part)
    if route is not None:
        route = route.own()
        if route.exchange is None:
            return _forward_ring(work, part, route)
        fetched = fetch(part.k, part.v, route.exchange, work.piece, work.axes.sequence)
        part = _at_stage(part, *fetched, route, 0, route.exchange.keys)
    out, lse = _attended(work, part)
    return out.astype(part.q.dtype), lse


def backward(
    work: Work,
    want_dbias: bool,
    bias_axes: tuple[str, ...],
    held: JaxPart,
    out: Array,
    lse: Array,
    dout: Array,
    dlse: Array | None,
    route: Route | None,
) -> Gradients:
    """Gradients of `forward`, summed over devices.

    The bias's gradient is summed over `bias_axes`, and computed only if `want_dbias`.
    """
    if route is not None:
        route = route.own()
        # Without the barrier, a compiler may reuse the keys that forward fetched, and keep them until here.
        k, v, dout, out, lse = lax.optimization_barrier((held.k, held.v, dout, out, lse))
        held = replace(held, k=k, v=v)
    part = _with_heads(work, held)

    def differentiate(part: JaxPart) -> Any:
        def run(*args: Any) -> Any:
            return backends.backward(work.backend, *args, want_dbias)  # type: ignore[call-arg]

        return batched(run, sums=True, want_dbias=want_dbias)(part, out, lse, dout, dlse)

    if route is None:
        dq, dk, dv, dbias, dsinks = differentiate(part)
    elif route.exchange is None:
        dq, dk, dv, dbias = _backward_ring(work, differentiate, part, route)
        dsinks = None if part.sinks is None else _sink_gradients(part.sinks, out, lse, dout, dlse)
    else:
        lists, axis = route.exchange, work.axes.sequence
        fetched = fetch(part.k, part.v, lists, work.piece, axis)
        dq, dk, dv, dbias, dsinks = differentiate(_at_stage(part, *fetched, route, 0, lists.keys))
        dk, dv = give_back(dk, dv, part.k_len, lists, work.piece, axis)
    heads, like = part.q.shape[1], (held.k, held.v)
    dk, dv = (_put_heads(work, grad, x, heads) for grad, x in zip((dk, dv), like, strict=True))
    dbias = _sum(dbias, bias_axes) if want_dbias else None
    dsinks = None if dsinks is None else _sum(dsinks, (*work.axes.batch, *work.axes.sequence))
    return dq.astype(part.q.dtype), dk, dv, dbias, dsinks


def _with_heads(work: Work, part: JaxPart) -> JaxPart:
    """Part with the key heads that a device's query heads read, repeated as groups need it."""
    if work.split_kv:
        return part
    heads = _kv_map(work, part.q.shape[1])
    k, v = (jnp.take(x, heads, axis=1, mode="clip") for x in (part.k, part.v))
    return replace(part, k=k, v=v)


def _put_heads(work: Work, grad: Array, like: Array, q_heads: int) -> Array:
    """Gradient of the heads that `_with_heads` got, in their dtype, summed over all readers of a head."""
    if work.split_kv:
        return grad.astype(like.dtype)
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    reads = jnp.arange(like.shape[1])[:, None] == _kv_map(work, q_heads)
    total = jnp.where(reads[:, :, None, None], wide[:, None], 0).sum(2)
    return _sum(total, work.axes.heads).astype(like.dtype)


def _kv_map(work: Work, q_heads: int) -> Array:
    # All key heads need equally many query heads, so a key head may occur more than once.
    each = math.gcd(work.groups, q_heads)
    first = lax.axis_index(work.axes.heads) * q_heads
    return (first + each * jnp.arange(q_heads // each)) // work.groups


def _attended(work: Work, part: JaxPart) -> Any:
    def run(part: JaxPart) -> tuple[Array, Array]:
        return backends.forward(work.backend, part)

    return run(part) if work.backend.backward is None else first_order(batched(run))(part)


def _at_stage(part: JaxPart, k: Array, v: Array, route: Route, stage: Any, keys: Array) -> JaxPart:
    """Part with a stage's keys and values, whose indices are `keys`."""
    part = replace(part, k=k, v=v, bounds=route.bounds[stage])
    if part.dropout_p == 0 and part.bias_kind == 0:
        return part
    return replace(part, q_index=route.q_index, k_index=keys)


def _round(work: Work, step: Callable[..., Any], total: Any, k: Array, v: Array, route: Route) -> Any:
    """Send keys round once. While one part of them is computed, the next one travels.

    ``step(total, grads, stage, k, v, places)`` returns a new total, and new grads, which travel on with their
    keys. `total` has the initial values of both.
    """
    parts, axis = work.axes.size("sequence"), work.axes.sequence
    place = work.axes.places("sequence")
    turned = list(zip(place, [*place[1:], *place[:1]], strict=True))

    def passed(tree: Any) -> Any:
        return jax.tree.map(lambda x: x if parts == 1 else lax.ppermute(x, axis, turned), tree)

    def turn(carry: Any, stage: Array) -> tuple[Any, None]:
        (total, grads), keys = carry
        coming = passed(keys)
        total, grads = step(total, grads, stage, *keys)
        return ((total, passed(grads)), coming), None

    last = parts - 1
    keys = k, v, jnp.maximum(route.keys, 0)
    ((total, grads), keys), _ = lax.scan(turn, (total, keys), jnp.arange(last))
    total, grads = step(total, grads, last, *keys)
    return total, passed(grads)


def _forward_ring(work: Work, part: JaxPart, route: Route) -> tuple[Array, Array]:
    bare = replace(part, sinks=None)  # Sinks are added once, at the end.
    wide = jnp.promote_types(part.q.dtype, jnp.float32)

    def step(total: Any, none: None, stage: Any, k: Array, v: Array, places: Array) -> Any:
        found = _attended(work, _at_stage(bare, k, v, route, stage, places))
        return _merge(*total, *found), none

    rows = part.q.shape[:3]
    start = jnp.zeros((*rows, part.v.shape[3]), wide), jnp.full(rows, -jnp.inf, wide)
    (out, lse), _ = _round(work, step, (start, None), part.k, part.v, route)
    if part.sinks is not None:
        sinks = jnp.broadcast_to(part.sinks[:, None], lse.shape)
        out, lse = _merge(out, lse, jnp.zeros_like(out), sinks)
    return out.astype(part.q.dtype), lse


def _backward_ring(work: Work, differentiate: Any, part: JaxPart, route: Route) -> Any:
    """Compute dq, dk, dv and dbias. The sums of dk and dv travel with their keys, and end at their owner."""
    bare = replace(part, sinks=None)

    def step(sums: Any, grads: Any, stage: Any, k: Array, v: Array, places: Array) -> Any:
        dq, dk, dv, dbias, _ = differentiate(_at_stage(bare, k, v, route, stage, places))
        add = partial(jax.tree.map, lambda total, x: total + x.astype(total.dtype))
        return add(sums, (dq, dbias)), add(grads, (dk, dv))

    def zeros(x: Array | None) -> Any:
        return None if x is None else jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    k, v = part.k, part.v
    *_, dbias, _ = jax.eval_shape(differentiate, _at_stage(bare, k, v, route, 0, route.keys))
    start = (zeros(part.q), zeros(dbias)), (zeros(k), zeros(v))
    (dq, dbias), (dk, dv) = _round(work, step, start, k, v, route)
    return dq, dk, dv, dbias


def _merge(out: Array, lse: Array, more: Array, its_lse: Array) -> tuple[Array, Array]:
    """Merge two parts of a softmax over disjoint keys (Milakov and Gimelshein 2018, section 3.1)."""
    total = jnp.logaddexp(lse, its_lse.astype(lse.dtype))
    return out * _weight(lse, total) + more * _weight(its_lse, total), total


def _weight(part: Array, total: Array) -> Array:
    """Weight exp(part - total) as (B, H, N, 1), and 0 for empty parts, whose difference may be NaN."""
    nothing = part == -jnp.inf
    # The second `where` keeps that NaN from derivatives as well.
    return jnp.where(nothing, 0.0, jnp.exp(jnp.where(nothing, 0.0, part - total)))[..., None]


def _sink_gradients(sinks: Array, out: Array, lse: Array, dout: Array, dlse: Array | None) -> Array:
    """Gradient of each sink s: the sum over its queries of exp(s - lse) * (dlse - dout . out)."""
    slack = -(dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1)
    slack = slack if dlse is None else slack + dlse
    share = _weight(jnp.broadcast_to(sinks[:, None].astype(lse.dtype), lse.shape), lse)[..., 0]
    return (share * slack).sum((0, 2)).astype(sinks.dtype)


def _sum(x: Array, axis: tuple[str, ...]) -> Array:
    return lax.psum(x, axis) if axis else x
