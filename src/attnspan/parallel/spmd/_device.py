"""What one device computes, forward and backward, with the collectives between the parts of the sequence.

Shapes of one device: B batch rows, H query heads, G key heads as they are held and g as they are attended
to, N rows, S keys that it holds, D and Dv head dims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp

from ...jax.backends import MODULES, Operands, Static
from ...jax.rules import batched, first_order
from ._axes import Axes
from ._exchange import fetch, give_back, shift
from ._route import Route


@dataclass(frozen=True)
class Work:
    """What is known of a call when it is traced; hashable.

    Attributes:
        axes: Who holds what.
        backend: The module of `attnspan.jax` that attends.
        static: What it is told.
        groups: Query heads of one key head.
        split_kv: Key heads are split as the query heads are; else each device holds all of them.
        bias_axes: Mesh axes over whose devices the bias is the same: each finds a part of its gradient.
        want_dbias: The bias has a gradient.
    """

    axes: Axes
    backend: ModuleType
    static: Static
    groups: int
    split_kv: bool
    bias_axes: tuple[str, ...] = ()
    want_dbias: bool = True


class Inputs(NamedTuple):
    """The arrays of a call beside q, k and v; a pytree.

    Attributes:
        given: Bias, sinks and seeds; bounds and indices as well where the sequence is not split.
        route: Where keys go, and the bounds, where it is.
    """

    given: Operands
    route: Route | None


class Done(NamedTuple):
    """What forward found, and the gradients that came in.

    Attributes:
        dout: Shape (B, H, N, Dv).
        dlse: Shape (B, H, N), or None.
        out: Shape (B, H, N, Dv).
        lse: Shape (B, H, N).
    """

    dout: Array
    dlse: Array | None
    out: Array
    lse: Array


def forward(work: Work, q: Array, k: Array, v: Array, inputs: Inputs) -> tuple[Array, Array]:
    """Attend: out (B, H, N, Dv) in q's dtype, lse (B, H, N)."""
    k, v = (take_heads(work, x, q.shape[1]) for x in (k, v))
    given = inputs.given
    if inputs.route is not None:
        lists = inputs.route.exchange
        if lists is None:
            return _forward_ring(work, q, k, v, inputs)
        given = _given(work, inputs, 0, lists.keys)
        k, v = fetch(k, v, lists, work.axes.sequence)
    out, lse = _attended(work, q, k, v, given)
    return out.astype(q.dtype), lse


def backward(
    work: Work, q: Array, k: Array, v: Array, inputs: Inputs, done: Done
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """The gradients of `forward`: those of q, k, v, the bias and the sinks, summed over devices."""
    if inputs.route is not None:
        # Else a compiler may find that forward has fetched these keys already, and keep them until now.
        k, v, done = lax.optimization_barrier((k, v, done))
    held = k, v
    k, v = (take_heads(work, x, q.shape[1]) for x in held)
    if inputs.route is None:
        dq, dk, dv, dbias, dsinks = _differentiate(work, q, k, v, inputs.given, done)
    elif inputs.route.exchange is None:
        dq, dk, dv, dbias, dsinks = _backward_ring(work, q, k, v, inputs, done)
    else:
        lists, axis = inputs.route.exchange, work.axes.sequence
        given = _given(work, inputs, 0, lists.keys)
        stage = fetch(k, v, lists, axis)
        dq, dk, dv, dbias, dsinks = _differentiate(work, q, *stage, given, done)
        dk, dv = give_back(dk, dv, k.shape[2], lists, axis)
    dk, dv = (put_heads(work, grad, like, q.shape[1]) for grad, like in zip((dk, dv), held, strict=True))
    return (
        dq.astype(q.dtype),
        dk,
        dv,
        None if dbias is None else _sum(dbias, work.bias_axes),
        None if dsinks is None else _sum(dsinks, (*work.axes.batch, *work.axes.sequence)),
    )


def take_heads(work: Work, x: Array, q_heads: int) -> Array:
    """The key heads that a device's query heads read, each as often as the kernels' groups need it."""
    if work.split_kv:
        return x
    return jnp.take(x, _kv_map(work, q_heads), axis=1, mode="clip")


def put_heads(work: Work, grad: Array, like: Array, q_heads: int) -> Array:
    """The gradient of what `take_heads` was given, in its dtype, summed over all that read a head."""
    if work.split_kv:
        return grad.astype(like.dtype)
    wide = grad.astype(jnp.promote_types(grad.dtype, jnp.float32))
    zeros = jnp.zeros((*like.shape[:1], like.shape[1], *grad.shape[2:]), wide.dtype)
    total = zeros.at[:, _kv_map(work, q_heads)].add(wide)
    return _sum(total, work.axes.heads).astype(like.dtype)


def _kv_map(work: Work, q_heads: int) -> Array:
    # Query heads of one key head must be as many for all, so a key head may be taken more than once.
    each = math.gcd(work.groups, q_heads)
    first = lax.axis_index(work.axes.heads) * q_heads
    return (first + each * jnp.arange(q_heads // each)) // work.groups


def _attended(work: Work, q: Array, k: Array, v: Array, given: Operands) -> Any:
    def run(q: Array, k: Array, v: Array, given: Operands) -> Any:
        return work.backend.forward(q, k, v, given, work.static)

    if getattr(work.backend, "OWN_DERIVATIVE", False):
        return run(q, k, v, given)
    name = next(n for n, module in MODULES.items() if work.backend.__name__.endswith(f".{module}"))
    return first_order(name, batched(run, work.static))(q, k, v, given)


def _differentiate(work: Work, q: Array, k: Array, v: Array, given: Operands, done: Done) -> Any:
    def run(
        dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, given: Operands, *done: Array
    ) -> Any:
        return work.backend.backward(dout, dlse, q, k, v, given, *done, work.static, work.want_dbias)

    mapped = batched(run, work.static, sums=True, want_dbias=work.want_dbias)
    return mapped(done.dout, done.dlse, q, k, v, given, done.out, done.lse)


def _given(work: Work, inputs: Inputs, stage: int | Array, keys: Array) -> Operands:
    """What the back end is given for a stage."""
    route = inputs.route
    assert route is not None
    given = inputs.given._replace(bounds=route.bounds[stage])
    if work.static.dropout_p == 0 and work.static.bias_kind == 0:
        return given
    return given._replace(q_index=route.q_index, k_index=keys)


class _Passing(NamedTuple):
    """Keys on their way round."""

    k: Array
    v: Array
    places: Array

    def on(self, work: Work) -> _Passing:
        """The same, of the part before this one."""
        return _pass(work, self)  # type: ignore[no-any-return]


def _pass(work: Work, tree: Any) -> Any:
    parts = work.axes.size("sequence")
    return jax.tree.map(lambda x: shift(x, parts, work.axes.sequence), tree)


def _forward_ring(work: Work, q: Array, k: Array, v: Array, inputs: Inputs) -> tuple[Array, Array]:
    """Keys go round once: while one part of them is attended to, the next ones travel."""
    assert inputs.route is not None
    sinks = inputs.given.sinks
    bare = _without_sinks(inputs)
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def attend(total: tuple[Array, Array], stage: Any, keys: _Passing) -> tuple[Array, Array]:
        given = _given(work, bare, stage, keys.places)
        return merge(*total, *_attended(work, q, keys.k, keys.v, given))

    def step(carry: Any, stage: Array) -> tuple[Any, None]:
        total, keys = carry
        coming = keys.on(work)
        return (attend(total, stage, keys), coming), None

    last = work.axes.size("sequence") - 1
    start = jnp.zeros((*q.shape[:3], v.shape[3]), wide), jnp.full(q.shape[:3], -jnp.inf, wide)
    keys = _Passing(k, v, inputs.route.own_keys)
    (total, keys), _ = lax.scan(step, (start, keys), jnp.arange(last))
    out, lse = attend(total, last, keys)
    if sinks is not None:
        out, lse = merge(out, lse, jnp.zeros_like(out), jnp.broadcast_to(sinks[:, None], lse.shape))
    return out.astype(q.dtype), lse


def _backward_ring(
    work: Work, q: Array, k: Array, v: Array, inputs: Inputs, done: Done
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Keys go round once more, and the sums of their gradients with them, which come home at last."""
    assert inputs.route is not None
    sinks = inputs.given.sinks
    bare = _without_sinks(inputs)
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def differentiate(sums: Any, stage: Any, keys: _Passing, grads: Any) -> tuple[Any, Any]:
        given = _given(work, bare, stage, keys.places)
        dq, dk, dv, dbias, _ = _differentiate(work, q, keys.k, keys.v, given, done)
        sums = jax.tree.map(jnp.add, sums, (dq.astype(wide), dbias))
        return sums, jax.tree.map(lambda total, x: total + x.astype(wide), grads, (dk, dv))

    def step(carry: Any, stage: Array) -> tuple[Any, None]:
        sums, keys, grads = carry
        coming = keys.on(work)
        sums, grads = differentiate(sums, stage, keys, grads)
        return (sums, coming, _pass(work, grads)), None

    last = work.axes.size("sequence") - 1
    bias = inputs.given.bias if work.want_dbias else None
    dbias = None if bias is None else jnp.zeros(bias.shape, jnp.promote_types(bias.dtype, jnp.float32))
    start = jnp.zeros(q.shape, wide), dbias
    grads = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    carry = start, _Passing(k, v, inputs.route.own_keys), grads
    (sums, keys, grads), _ = lax.scan(step, carry, jnp.arange(last))
    (dq, dbias), grads = differentiate(sums, last, keys, grads)
    dk, dv = _pass(work, grads)
    dsinks = None if sinks is None else _sink_gradients(sinks, done)
    return dq.astype(q.dtype), dk, dv, dbias, dsinks


def _without_sinks(inputs: Inputs) -> Inputs:
    """The inputs without sinks, which join once: at the end."""
    return inputs._replace(given=inputs.given._replace(sinks=None))


def merge(out: Array, lse: Array, more: Array, its_lse: Array) -> tuple[Array, Array]:
    """Two parts of a softmax over disjoint keys as one; Milakov and Gimelshein 2018, section 3.1.

    Example:
        >>> zero, one = jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1, 1))
        >>> [float(x.squeeze()) for x in merge(one, zero, 3 * one, zero - jnp.inf)]
        [1.0, 0.0]
    """
    total = jnp.logaddexp(lse, its_lse.astype(lse.dtype))
    return out * _weight(lse, total) + more * _weight(its_lse, total), total


def _weight(part: Array, total: Array) -> Array:
    """exp(part - total) as (B, H, N, 1); 0 for parts of nothing, whose difference may be NaN."""
    nothing = part == -jnp.inf
    # The second `where` keeps that NaN from derivatives as well.
    return jnp.where(nothing, 0.0, jnp.exp(jnp.where(nothing, 0.0, part - total)))[..., None]


def _sink_gradients(sinks: Array, done: Done) -> Array:
    """The gradient of a sink s is the sum over its rows of exp(s - lse) * (dlse - dout . out)."""
    wide = done.lse.dtype
    slack = -(done.dout.astype(wide) * done.out.astype(wide)).sum(-1)
    slack = slack if done.dlse is None else slack + done.dlse
    share = _weight(jnp.broadcast_to(sinks[:, None].astype(wide), done.lse.shape), done.lse)[..., 0]
    return (share * slack).sum((0, 2))


def _sum(x: Array, axis: tuple[str, ...]) -> Array:
    return lax.psum(x, axis) if axis else x
