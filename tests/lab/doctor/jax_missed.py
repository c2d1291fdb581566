"""Faults in JAX that look like a result: sums of weights, clamped slices, rounded positions, reused keys.

Each fault is a function with a switch. The switch applies the remedy. The faulty line ends in ``# sick``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax_patients import BATCH, HEADS, LENGTH, SIZE, below, model, tokens, variables
from jax_right import VALID

from attnspan_lab.doctor.jax import JaxSubject

#: Kind, words of the cause, and words of the remedy, by the name of the fault.
FAULTS: dict[str, tuple[str, str, str]] = {}
MADE: dict[str, Callable[[bool], JaxSubject]] = {}
BLOCK = 8


def fault(kind: str, cause: str, remedy: str) -> Any:
    def note(made: Any) -> Any:
        FAULTS[made.__name__], MADE[made.__name__] = (kind, cause, remedy), made
        return made

    return note


def attends(kind: str, cause: str, remedy: str, length: int = LENGTH, **options: Any) -> Any:
    """Note a model whose attention is the function (well, q, k, v)."""

    def note(attend: Any) -> Any:
        def made(well: bool) -> JaxSubject:
            step, w = model(partial(attend, well)), variables(**options)
            return JaxSubject(step, [{"tokens": tokens(length)}], w, causal=True)

        FAULTS[attend.__name__], MADE[attend.__name__] = (kind, cause, remedy), made
        return attend

    return note


# Weights that do not add up to 1


def empty(q: Any) -> Any:
    return jnp.full(len(q), -1e30), jnp.zeros(len(q)), jnp.zeros_like(q)


def heads(attend: Any) -> Any:
    """Map a function of one head (S, D) over batch elements and heads of arrays (B, S, H, D)."""
    return jax.vmap(jax.vmap(attend, 1, 1))


_RESCALE = "before you add the next block"


@attends("weight-sum", "weights times values is not multiplied", _RESCALE)
def results_not_rescaled(well: bool, q: Any, k: Any, v: Any) -> Any:
    """In a scan, with a backward rule of its own that is right."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        def step(carry: Any, start: Any) -> Any:
            top, total, out = carry
            own, values = (lax.dynamic_slice_in_dim(x, start, BLOCK) for x in (k, v))
            scores = q @ own.T / math.sqrt(SIZE)
            visible = start + jnp.arange(BLOCK) <= jnp.arange(len(q))[:, None]
            scores = jnp.where(visible, scores, -1e30)
            new = jnp.maximum(top, scores.max(-1))
            weights, factor = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
            out = out * factor[:, None] if well else out
            out = out + weights @ values  # sick
            return (new, total * factor + weights.sum(-1), out), None

        (top, total, out), _ = lax.scan(step, empty(q), jnp.arange(0, len(k), BLOCK))
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
def sum_not_rescaled(well: bool, q: Any, k: Any, v: Any) -> Any:
    def head(q: Any, k: Any, v: Any) -> Any:
        def step(i: Any, carry: Any) -> Any:
            top, total, out = carry
            own, values = (lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK) for x in (k, v))
            scores = q @ own.T / math.sqrt(SIZE)
            visible = i * BLOCK + jnp.arange(BLOCK) <= jnp.arange(len(q))[:, None]
            scores = jnp.where(visible, scores, -1e30)
            new = jnp.maximum(top, scores.max(-1))
            weights, factor = jnp.exp(scores - new[:, None]), jnp.exp(top - new)
            total = total * factor if well else total
            total = total + weights.sum(-1)  # sick
            return new, total, out * factor[:, None] + weights @ values

        _, total, out = lax.fori_loop(0, len(k) // BLOCK, step, empty(q))
        return out / total[:, None]

    return heads(head)(q, k, v)


@attends("weight-sum", "by a sum of other weights", "the same weights in both sums")
def sum_of_halves(well: bool, q: Any, k: Any, v: Any) -> Any:
    """The sum counts each weight half."""
    scores = jnp.where(below(q.shape[1]), jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE), -1e30)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True) * (1 if well else 0.5)
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, v)
    return (out / total).swapaxes(1, 2)  # sick


_KEYS = "Run the softmax over the axis of the keys"


@attends("softmax-axis", "weights that add up to 1", _KEYS)
def softmax_over_queries(well: bool, q: Any, k: Any, v: Any) -> Any:
    scores = jnp.where(below(q.shape[1]), jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE), -1e30)
    weights = jax.nn.softmax(scores, axis=-1 if well else -2)  # sick
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@attends("softmax-axis", "weights that add up to 1", _KEYS)
def softmax_over_heads(well: bool, q: Any, k: Any, v: Any) -> Any:
    scores = jnp.where(below(q.shape[1]), jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(SIZE), -1e30)
    weights = jax.nn.softmax(scores, axis=-1 if well else 1)  # sick
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@attends("softmax-axis", "weights that add up to 1", _KEYS)
def softmax_by_hand(well: bool, q: Any, k: Any, v: Any) -> Any:
    def head(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.where(below(len(q)), q @ k.T / math.sqrt(SIZE), -1e30)
        weights = jnp.exp(scores - scores.max())
        return weights / weights.sum(1 if well else 0, keepdims=True) @ v  # sick

    return heads(head)(q, k, v)


# Slices that do not fit

_LONG = "Make the array long enough"
_MOVED = "move a slice that does not fit"


def decode(length: int, steps: int, loop: Any) -> JaxSubject:
    def step(w: Any, tokens: Any) -> Any:
        shape = (BATCH, length, HEADS, SIZE)

        def one(i: Any, cache: Any) -> Any:
            x = w["embed"][lax.dynamic_index_in_dim(tokens, i, 1)]
            q, k, v = (jnp.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv")
            keys, values = (
                lax.dynamic_update_slice_in_dim(x, y, i, 1)  # sick: decode
                for x, y in zip(cache, (k, v), strict=True)
            )
            seen = (jnp.arange(length) <= i)[None, None, None]
            out = jax.nn.dot_product_attention(q, keys, values, mask=seen)
            return (keys, values), (x + out.reshape(x.shape)) @ w["head"]

        return loop(one, steps, (jnp.zeros(shape), jnp.zeros(shape)))

    return JaxSubject(step, [{"tokens": tokens(steps)}], variables(), causal=True)


@fault("clamped-slice", _MOVED, _LONG)
def cache_in_a_scan(well: bool) -> JaxSubject:
    def loop(one: Any, steps: int, cache: Any) -> Any:
        return lax.scan(lambda c, i: one(i, c), cache, jnp.arange(steps))[1][:, :, 0].swapaxes(0, 1)

    return decode(6 if well else 4, 6, loop)


@fault("clamped-slice", _MOVED, _LONG)
def cache_in_a_while_loop(well: bool) -> JaxSubject:
    def loop(one: Any, steps: int, cache: Any) -> Any:
        def body(state: Any) -> Any:
            i, cache, out = state
            cache, row = one(i, cache)
            return i + 1, cache, lax.dynamic_update_slice_in_dim(out, row, i, 1)

        first = 0, cache, jnp.zeros((BATCH, steps, 50))
        return lax.while_loop(lambda x: x[0] < steps, body, first)[2]

    return decode(6 if well else 5, 6, loop)


@fault("clamped-slice", _MOVED, _LONG)
def results_that_do_not_fit(well: bool) -> JaxSubject:
    """A step that decodes 4 tokens behind 6 cached keys, into 8 slots."""

    def step(w: Any, tokens: Any, cache: Any, index: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            k, v = (lax.dynamic_update_slice(cache, x, (0, index, 0, 0)) for x in (k, v))  # sick
            seen = jnp.arange(k.shape[1]) <= index + jnp.arange(q.shape[1])[:, None]
            return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])

        return model(attend)(w, tokens)

    cache = jnp.sin(jnp.arange(BATCH * 10.0 * HEADS * SIZE)).reshape(BATCH, 10, HEADS, SIZE)
    batch = {"tokens": tokens(4), "cache": cache if well else cache[:, :8], "index": 6}
    return JaxSubject(step, [batch], variables(), causal=True)


# Positions in a 16-bit float

_COUNT = "Count positions as integers, and compute angles in float32"
_TO_256 = "bfloat16 counts to 256, and float16 to 2048"


def turned(x: Any, angle: Any) -> Any:
    angle = angle[:, None]
    a, b = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)  # sick: turned
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


RATES = 100.0 ** -(jnp.arange(0, SIZE, 2) / SIZE)


def rotary(positions: Any, q: Any, k: Any, v: Any) -> Any:
    q, k = (turned(x, positions[:, None] * RATES) for x in (q, k))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@attends("positions", _TO_256, _COUNT, length=300)
def positions_in_bfloat16(well: bool, q: Any, k: Any, v: Any) -> Any:
    positions = jnp.arange(q.shape[1], dtype=jnp.int32 if well else jnp.bfloat16)  # sick
    return rotary(positions, q, k, v)


@attends("positions", _TO_256, _COUNT, length=300)
def positions_that_are_converted(well: bool, q: Any, k: Any, v: Any) -> Any:
    positions = jnp.arange(q.shape[1])
    positions = positions if well else positions.astype(jnp.bfloat16)  # sick
    return rotary(positions, q, k, v)


@attends("positions", "Large angles are computed or stored", _COUNT, length=300)
def angles_in_bfloat16(well: bool, q: Any, k: Any, v: Any) -> Any:
    angle = jnp.arange(q.shape[1])[:, None] * RATES
    q, k = (turned(x, angle if well else angle.astype(jnp.bfloat16)) for x in (q, k))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


# Keys that are used again

_SPLIT = "Make a key for each draw"
_SAME = "the same numbers for the same key"


def dropped(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)  # sick: dropped


def layers(run: Any, causal: bool = True) -> JaxSubject:
    w = variables()
    w |= {n: jnp.stack([w[n]] * 3) for n in "qkv"}

    def step(w: Any, tokens: Any, key: Any) -> Any:
        def layer(x: Any, own: Any, key: Any) -> Any:
            q, k, v = (jnp.einsum("bsw,whd->bshd", x, own[n]) for n in "qkv")
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
            return x + dropped(key, out.reshape(x.shape))

        return run(layer, w["embed"][tokens], {n: w[n] for n in "qkv"}, key) @ w["head"]

    return JaxSubject(step, [{"tokens": tokens(), "key": jax.random.key(0)}], w, causal=causal)


@fault("reused-key", _SAME, _SPLIT)
def one_key_in_a_scan(well: bool) -> JaxSubject:
    def run(layer: Any, x: Any, w: Any, key: Any) -> Any:
        keys = jax.random.split(key, 3) if well else jnp.stack([key] * 3)
        return lax.scan(lambda x, own: (layer(x, *own), None), x, (w, keys))[0]

    return layers(run)


@fault("reused-key", _SAME, _SPLIT)
def one_key_in_python(well: bool) -> JaxSubject:
    def run(layer: Any, x: Any, w: Any, key: Any) -> Any:
        for i in range(3):
            own = jax.random.fold_in(key, i) if well else key
            x = layer(x, {n: y[i] for n, y in w.items()}, own)
        return x

    return layers(run)


@fault("reused-key", _SAME, _SPLIT)
def one_key_in_a_checkpointed_loop(well: bool) -> JaxSubject:
    """The backward pass draws again, with the same keys, on purpose."""

    def run(layer: Any, x: Any, w: Any, key: Any) -> Any:
        keys = jax.random.split(key, 3)
        keys = keys if well else keys[jnp.zeros(3, int)]
        body = jax.checkpoint(lambda x, own: (layer(x, *own), None))
        y, pull = jax.vjp(lambda x: lax.scan(body, x, (w, keys))[0], x)
        return y + pull(y)[0]

    return layers(run, causal=False)


# Padding of another sequence

_FRAMES = "mask=keys(frame_mask != 0) to attnspan.jax.attention"


def cross(masked: Callable[..., Any]) -> JaxSubject:
    """Decoder tokens see frames of the same length. Some frames are padding."""

    def step(w: Any, tokens: Any, frames: Any, frame_mask: Any) -> Any:
        x = w["embed"][tokens]
        q = jnp.einsum("bsw,whd->bshd", x, w["q"])
        k, v = (jnp.einsum("bsw,whd->bshd", frames, w[n]) for n in "kv")
        out = jax.nn.dot_product_attention(q, k, v, mask=masked(frame_mask))  # sick: cross
        return (x + out.reshape(x.shape)) @ w["head"]

    frames = jnp.sin(jnp.arange(BATCH * LENGTH * 32.0)).reshape(BATCH, LENGTH, 32)
    batch = {"tokens": tokens(), "frames": frames, "frame_mask": jnp.asarray(VALID)}
    return JaxSubject(step, [batch], variables(), causal=False)


def on_keys(mask: Any) -> Any:
    return mask[:, None, None, :]


@fault("mask-lost", "hides queries instead of keys", _FRAMES)
def mask_on_queries(well: bool) -> JaxSubject:
    return cross(on_keys if well else lambda mask: mask[:, None, :, None])


@fault("mask-lost", "No mask that is made from frame_mask", _FRAMES)
def no_mask_of_frames(well: bool) -> JaxSubject:
    return cross(on_keys if well else lambda _: None)


@fault("mask-lost", "still shows these keys", _FRAMES)
def mask_that_is_shifted(well: bool) -> JaxSubject:
    return cross(on_keys if well else lambda mask: jnp.roll(mask, 3, 1)[:, None, None, :])


@fault("mask-lost", "hides queries instead of keys", "mask=(attention_mask != 0)[:, None, None, :]")
def own_mask_on_queries(well: bool) -> JaxSubject:
    def attend(q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
        mask = (attention_mask != 0)[:, None, None, :] if well else (attention_mask != 0)[:, None, :, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask)  # sick

    batch = {"tokens": tokens(), "attention_mask": jnp.asarray(VALID)}
    return JaxSubject(model(attend), [batch], variables(), causal=False)


# Heads that are split without a transpose


def split(well: bool, x: Any) -> Any:
    x = x.reshape(*x.shape[:2], -1)  # Features of a token, as after a linear layer.
    if well:
        return x.reshape(*x.shape[:2], HEADS, SIZE).swapaxes(1, 2)
    return x.reshape(x.shape[0], HEADS, x.shape[1], SIZE)  # sick: split


def over_tokens(q: Any, k: Any, v: Any) -> Any:
    out = jax.nn.softmax(q @ k.swapaxes(2, 3) / math.sqrt(SIZE)) @ v
    return out.swapaxes(1, 2)


def encoder(attend: Any) -> JaxSubject:
    return JaxSubject(model(attend), [{"tokens": tokens()}], variables(), causal=False)


_SWAP = "x.reshape(B, S, H, D).swapaxes(1, 2)"
_MEMORY = "keeps the order of numbers in memory"


@fault("token-axis", _MEMORY, _SWAP)
def split_without_transpose(well: bool) -> JaxSubject:
    return encoder(lambda *qkv: over_tokens(*(split(well, x) for x in qkv)))


@fault("token-axis", _MEMORY, _SWAP)
def split_before_positions(well: bool) -> JaxSubject:
    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (split(well, x) for x in (q, k, v))
        angle = jnp.arange(LENGTH)[:, None] * RATES
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        q, k = (
            jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
            for a, b in (jnp.split(x, 2, -1) for x in (q, k))
        )
        return over_tokens(q, k, v)

    return encoder(attend)


@fault("token-axis", _MEMORY, _SWAP)
def split_with_scaled_queries(well: bool) -> JaxSubject:
    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (split(well, x) for x in (q, k, v))
        scores = jnp.einsum("bhqd,bhkd->bhqk", q * SIZE**-0.5, k)
        return jnp.einsum("bhqk,bhkd->bqhd", jax.nn.softmax(scores), v)

    return encoder(attend)


# Attention that is thrown away


def kinds_of_layers(choose: Any) -> JaxSubject:
    w = variables()
    w |= {n: jnp.stack([w[n]] * 3) for n in "qkv"}

    def near(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=3)

    def far(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def step(w: Any, tokens: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            w, is_near = own
            qkv = [jnp.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv"]
            return x + choose(is_near, near, far, *qkv).reshape(x.shape), None

        flags = jnp.array([True, True, False])
        return lax.scan(layer, w["embed"][tokens], ({n: w[n] for n in "qkv"}, flags))[0] @ w["head"]

    return JaxSubject(step, [{"tokens": tokens()}], w, causal=True)


def only_one(condition: Any, one: Any, other: Any, *qkv: Any) -> Any:
    return lax.cond(condition, one, other, *qkv)


def by_where(condition: Any, one: Any, other: Any, *qkv: Any) -> Any:
    return jnp.where(condition, one(*qkv), other(*qkv))  # sick


def by_select(condition: Any, one: Any, other: Any, *qkv: Any) -> Any:
    return lax.select(condition, one(*qkv), other(*qkv))  # sick


def by_where_of_merged_heads(condition: Any, one: Any, other: Any, *qkv: Any) -> Any:
    first, second = (x(*qkv).reshape(BATCH, LENGTH, -1) for x in (one, other))
    return jnp.where(condition, first, second)  # sick


DISCARDING = (by_where, by_select, by_where_of_merged_heads)
