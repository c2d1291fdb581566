"""Models in JAX with wrong numbers: sums, axes, slices, positions, keys, NaN. See jax_runner.py."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax_runner import attends, fault
from jax_samples import (
    BATCH,
    HEADS,
    LENGTH,
    SIZE,
    below,
    by_number,
    by_scan,
    cached,
    heads,
    model,
    online,
    plain,
    projected,
    subject,
    tokens,
    variables,
    written,
)

from attnspan_lab.doctor.jax import JaxSubject

# Weights that do not add up to 1

_RESCALE = "before you add the next block"


def scores_of(q: Any, k: Any) -> Any:
    return jnp.where(below(q.shape[1]), jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE), -1e30)


@attends("weight-sum", "weights times values is not multiplied", _RESCALE)
def results_not_rescaled(well: int, q: Any, k: Any, v: Any) -> Any:
    """In a scan, with a backward rule of its own that is right."""

    def add(total: Any, out: Any, factor: Any, weights: Any, values: Any) -> Any:
        out = out * factor[:, None] if well else out
        out = out + weights @ values  # sick
        return total * factor + weights.sum(-1), out

    def forward(q: Any, k: Any, v: Any) -> Any:
        top, total, out = online(q, k, v, add, by_scan)
        out = out / total[:, None]
        return out, (q, k, v, out, top + jnp.log(total))

    def backward(kept: Any, grad: Any) -> Any:
        q, k, v, out, lse = kept
        scores = jnp.where(below(len(q)), q @ k.T / math.sqrt(SIZE), -1e30)
        p = jnp.exp(scores - lse[:, None])
        ds = p * (grad @ v.T - (grad * out).sum(-1, keepdims=True)) / math.sqrt(SIZE)
        return ds @ k, ds.T @ q, p.T @ grad

    flash = jax.custom_vjp(lambda *x: forward(*x)[0])
    flash.defvjp(forward, backward)
    return heads(flash)(q, k, v)


@attends("weight-sum", "This sum of weights is not multiplied", _RESCALE)
def sum_not_rescaled(well: int, q: Any, k: Any, v: Any) -> Any:
    def add(total: Any, out: Any, factor: Any, weights: Any, values: Any) -> Any:
        total = total * factor if well else total
        total = total + weights.sum(-1)  # sick
        return total, out * factor[:, None] + weights @ values

    def head(q: Any, k: Any, v: Any) -> Any:
        _, total, out = online(q, k, v, add, by_number)
        return out / total[:, None]

    return heads(head)(q, k, v)


@attends("weight-sum", "by a sum of other weights", "the same weights in both sums")
def sum_of_halves(well: int, q: Any, k: Any, v: Any) -> Any:
    """The sum counts each weight half."""
    scores = scores_of(q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True) * (1 if well else 0.5)
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, v)
    return (out / total).swapaxes(1, 2)  # sick


def softmax_axis(attend: Any) -> Any:
    # A softmax over queries also shows later tokens, which is no other fault.
    words = "weights that add up to 1", "Run the softmax over the axis of the keys"
    return attends("softmax-axis", *words)(attend)


@softmax_axis
def softmax_over_queries(well: int, q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(scores_of(q, k), axis=-1 if well else -2)  # sick
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@softmax_axis
def softmax_over_heads(well: int, q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(scores_of(q, k), axis=-1 if well else 1)  # sick
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@softmax_axis
def softmax_by_hand(well: int, q: Any, k: Any, v: Any) -> Any:
    def head(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.where(below(len(q)), q @ k.T / math.sqrt(SIZE), -1e30)
        weights = jnp.exp(scores - scores.max())
        return weights / weights.sum(1 if well else 0, keepdims=True) @ v  # sick

    return heads(head)(q, k, v)


# Slices that do not fit

_MOVED, _LONG = "move a slice that does not fit", "Make the array long enough"


def decode(length: int, steps: int, loop: Any) -> JaxSubject:
    def step(w: Any, tokens: Any) -> Any:
        shape = (BATCH, length, HEADS, SIZE)

        def one(i: Any, cache: Any) -> Any:
            x = w["embed"][lax.dynamic_index_in_dim(tokens, i, 1)]
            q, *new = projected(w, x)
            keys, values = (
                lax.dynamic_update_slice_in_dim(x, y, i, 1)  # sick: decode
                for x, y in zip(cache, new, strict=True)
            )
            seen = (jnp.arange(length) <= i)[None, None, None]
            return (keys, values), (x + plain(q, keys, values, mask=seen).reshape(x.shape)) @ w["head"]

        return loop(one, steps, (jnp.zeros(shape), jnp.zeros(shape)))

    return subject(step, tokens=tokens(steps))


@fault("clamped-slice", _MOVED, _LONG, at="decode")
def cache_in_a_scan(well: int) -> JaxSubject:
    def loop(one: Any, steps: int, cache: Any) -> Any:
        return lax.scan(lambda c, i: one(i, c), cache, jnp.arange(steps))[1][:, :, 0].swapaxes(0, 1)

    return decode(6 if well else 4, 6, loop)


@fault("clamped-slice", _MOVED, _LONG, at="decode")
def cache_in_a_while_loop(well: int) -> JaxSubject:
    def loop(one: Any, steps: int, cache: Any) -> Any:
        def body(state: Any) -> Any:
            i, cache, out = state
            cache, row = one(i, cache)
            return i + 1, cache, lax.dynamic_update_slice_in_dim(out, row, i, 1)

        first = 0, cache, jnp.zeros((BATCH, steps, 50))
        return lax.while_loop(lambda x: x[0] < steps, body, first)[2]

    return decode(6 if well else 5, 6, loop)


@fault("clamped-slice", _MOVED, _LONG, also=("causality-lost",))
def results_that_do_not_fit(well: int) -> JaxSubject:
    """A step that decodes 4 tokens behind 6 cached keys, into 8 slots."""

    def step(w: Any, tokens: Any, cache: Any, index: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            k, v = (lax.dynamic_update_slice(cache, x, (0, index, 0, 0)) for x in (k, v))  # sick
            seen = jnp.arange(k.shape[1]) <= index + jnp.arange(q.shape[1])[:, None]
            return plain(q, k, v, mask=seen[None, None])

        return model(attend)(w, tokens)

    return subject(step, tokens=tokens(4), cache=cached(10)[:, : 10 if well else 8], index=6)


# Positions in a 16-bit float

_COUNT = "Count positions as integers, and compute angles in float32"
_TO_256 = "bfloat16 counts to 256, and float16 to 2048"
RATES = 100.0 ** -(jnp.arange(0, SIZE, 2) / SIZE)


def turned(x: Any, angle: Any) -> Any:
    angle = angle[:, None]
    a, b = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)  # sick: turned
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rotary(angle: Any, q: Any, k: Any, v: Any) -> Any:
    q, k = (turned(x, angle) for x in (q, k))
    return plain(q, k, v, is_causal=True)


@attends("positions", _TO_256, _COUNT, length=300)
def positions_in_bfloat16(well: int, q: Any, k: Any, v: Any) -> Any:
    positions = jnp.arange(q.shape[1], dtype=jnp.int32 if well else jnp.bfloat16)  # sick
    return rotary(positions[:, None] * RATES, q, k, v)


@attends("positions", _TO_256, _COUNT, length=300)
def positions_that_are_converted(well: int, q: Any, k: Any, v: Any) -> Any:
    positions = jnp.arange(q.shape[1])
    positions = positions if well else positions.astype(jnp.bfloat16)  # sick
    return rotary(positions[:, None] * RATES, q, k, v)


@attends("positions", "Large angles are computed or stored", _COUNT, length=300, at="turned")
def angles_in_bfloat16(well: int, q: Any, k: Any, v: Any) -> Any:
    angle = jnp.arange(q.shape[1])[:, None] * RATES
    return rotary(angle if well else angle.astype(jnp.bfloat16), q, k, v)


# Keys that are used again


def one_key(run: Any) -> Any:
    """Note a model whose layers drop features. ``run`` gets the number, layer, x, weights and key."""

    def made(well: int) -> JaxSubject:
        def step(w: Any, tokens: Any, key: Any) -> Any:
            def layer(x: Any, own: Any, key: Any) -> Any:
                out = plain(*projected(own, x), is_causal=True)
                return x + dropped(key, out.reshape(x.shape))

            return run(well, layer, w["embed"][tokens], {n: w[n] for n in "qkv"}, key) @ w["head"]

        causal = run.__name__ != "one_key_in_a_checkpointed_loop"  # It returns gradients.
        return subject(step, causal, variables(layers=3), key=jax.random.key(0))

    made.__name__, made.__wrapped__ = run.__name__, run  # type: ignore[attr-defined]
    words = "the same numbers for the same key", "Make a key for each draw"
    return fault("reused-key", *words, at="dropped")(made)


def dropped(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)  # sick: dropped


@one_key
def one_key_in_a_scan(well: int, layer: Any, x: Any, w: Any, key: Any) -> Any:
    keys = jax.random.split(key, 3) if well else jnp.stack([key] * 3)
    return lax.scan(lambda x, own: (layer(x, *own), None), x, (w, keys))[0]


@one_key
def one_key_in_python(well: int, layer: Any, x: Any, w: Any, key: Any) -> Any:
    for i in range(3):
        own = jax.random.fold_in(key, i) if well else key
        x = layer(x, {n: y[i] for n, y in w.items()}, own)
    return x


@one_key
def one_key_in_a_checkpointed_loop(well: int, layer: Any, x: Any, w: Any, key: Any) -> Any:
    """The backward pass draws again, with the same keys, on purpose."""
    keys = jax.random.split(key, 3)
    keys = keys if well else keys[jnp.zeros(3, int)]
    body = jax.checkpoint(lambda x, own: (layer(x, *own), None))
    y, pull = jax.vjp(lambda x: lax.scan(body, x, (w, keys))[0], x)
    return y + pull(y)[0]


# Heads that are split without a transpose


def split(well: int, x: Any) -> Any:
    x = x.reshape(*x.shape[:2], -1)  # Features of a token, as after a linear layer.
    if well:
        return x.reshape(*x.shape[:2], HEADS, SIZE).swapaxes(1, 2)
    return x.reshape(x.shape[0], HEADS, x.shape[1], SIZE)  # sick: split


def split_heads(attend: Any) -> Any:
    """Note an encoder whose attention gets q, k and v (B, H, S, D)."""

    def of_tokens(well: int, *qkv: Any) -> Any:
        return attend(*(split(well, x) for x in qkv)).swapaxes(1, 2)

    of_tokens.__name__, of_tokens.__wrapped__ = attend.__name__, attend  # type: ignore[attr-defined]
    words = "keeps the order of numbers in memory", "x.reshape(B, S, H, D).swapaxes(1, 2)"
    return attends("token-axis", *words, at="split", causal=False)(of_tokens)


@split_heads
def split_without_transpose(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.swapaxes(2, 3) / math.sqrt(SIZE)) @ v


@split_heads
def split_before_positions(q: Any, k: Any, v: Any) -> Any:
    angle = jnp.arange(LENGTH)[:, None] * RATES
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    q, k = (
        jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        for a, b in (jnp.split(x, 2, -1) for x in (q, k))
    )
    return jax.nn.softmax(q @ k.swapaxes(2, 3) / math.sqrt(SIZE)) @ v


@split_heads
def split_with_scaled_queries(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q * SIZE**-0.5, k)
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), v)


# NaN


@attends("nan", "", "Check the range of this line's inputs")
def norm_of_zero(well: int, q: Any, k: Any, v: Any) -> Any:
    q = q - q.mean(-1, keepdims=True) * jnp.sign(jnp.arange(q.shape[1]))[:, None, None]
    q = q.at[:, 3].set(0)
    square = (q * q).sum(-1, keepdims=True)
    q = q / jnp.sqrt(jnp.where(square > 0, square, 1) if well else square)  # sick
    return written(q, k, v)


@attends("nan", "", "Check the range of this line's inputs", weights={"dtype": jnp.float16})
def overflow_of_float16(well: int, q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    if well:
        scores = jnp.where(below(q.shape[1]), scores.astype(jnp.float32) * 60, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    weights = jnp.exp(scores * 60)  # sick
    weights = jnp.where(below(q.shape[1]), weights, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


@attends("nan", "", "jnp.where must select safe inputs before the operator", stage="parity")
def gradient_of_a_root(well: int, q: Any, k: Any, v: Any) -> Any:
    """The results are right, and gradients are NaN."""
    q = q * (jnp.arange(q.shape[1]) > 0)[:, None, None]
    square = (q * q).sum(-1, keepdims=True)
    norm = jnp.sqrt(jnp.where(square > 0, square, 1) if well else square)  # sick
    return written(q / jnp.where(square > 0, norm, 1), k, v)


# Gradients


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(well: int, q: Any, k: Any, v: Any) -> Any:
    return written(q, k, v)


def _backward(well: int, kept: Any, grad: Any) -> Any:  # sick: _backward
    dq, dk, dv = jax.vjp(written, *kept)[1](grad)
    return dq, dk if well else dk * math.sqrt(SIZE), dv


_attend.defvjp(lambda well, *x: (_attend(well, *x), x), _backward)


@attends("parity", at="_backward")
def backward_without_the_scale(well: int, q: Any, k: Any, v: Any) -> Any:
    return _attend(well, q, k, v)
