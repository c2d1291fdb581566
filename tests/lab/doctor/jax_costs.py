"""Slow models in JAX: stored scores, copies, compilations, waits, caches. See jax_runner.py."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax_runner import attends, fault, marked
from jax_samples import (
    BATCH,
    HEADS,
    LENGTH,
    SIZE,
    below,
    dense,
    heads,
    model,
    plain,
    projected,
    qkv,
    spans,
    subject,
    tokens,
    variables,
    written,
)

from attnspan_lab.doctor.jax import JaxSubject

# Scores that are stored


@attends("unfused", "", "mask=causal() shows the same pairs")
def scores_written_out(well: int, q: Any, k: Any, v: Any) -> Any:
    if well:
        return spans(q, k, v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(below(q.shape[1]), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)  # sick


@attends("unfused", "", "mask=causal() shows the same pairs", applied=False)
def attention_of_jax(well: int, q: Any, k: Any, v: Any) -> Any:
    return plain(q, k, v, is_causal=True)  # sick


@attends("unfused", applied=False)
def mapped_with_a_sink(well: int, q: Any, k: Any, v: Any) -> Any:
    """One head of one sequence, mapped over both, with a softmax by hand and a sink."""

    def head(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.where(below(len(q)), q @ k.T, -1e9)
        scores = jnp.concatenate([jnp.zeros((len(q), 1)), scores], axis=1)
        weights = jnp.exp(scores - scores.max(1, keepdims=True))
        return (weights / weights.sum(1, keepdims=True))[:, 1:] @ v  # sick

    return heads(head)(q, k, v)


# Copies and conversions


@attends("kv-copy", weights={"kv_heads": 2}, parity=True)
def keys_repeated(well: int, q: Any, k: Any, v: Any) -> Any:
    if not well:
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))  # sick
    return spans(q, k, v)


@attends("kv-copy", weights={"kv_heads": 2}, applied=False)
def keys_gathered(well: int, q: Any, k: Any, v: Any) -> Any:
    groups = np.array([0, 0, 1, 1])
    k, v = k[:, :, groups], v[:, :, groups]  # sick
    return spans(q, k, v)


@attends("kv-copy", weights={"kv_heads": 2}, applied=False)
def keys_tiled(well: int, q: Any, k: Any, v: Any) -> Any:
    """As einops.repeat does."""
    k, v = (jnp.tile(x[:, :, :, None], (1, 1, 1, 2, 1)).reshape(q.shape) for x in (k, v))  # sick
    return written(q, k, v)


@attends("kv-copy", weights={"kv_heads": 1}, applied=False)
def keys_broadcast(well: int, q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.broadcast_to(x, q.shape) for x in (k, v))  # sick
    return written(q, k, v)


@attends("upcast", weights={"dtype": jnp.bfloat16}, parity=True)
def angles_in_float32(well: int, q: Any, k: Any, v: Any) -> Any:
    angle = jnp.cos(jnp.arange(q.shape[1], dtype=jnp.float32)[:, None, None])
    angle = angle.astype(q.dtype) if well else angle
    q, k = q * angle, k * angle  # sick
    return spans(q, k, v.astype(q.dtype))


# Compilation


@fault("recompile", tried="with all batches padded to 11: 0 recompilations instead of 3", applied=False)
def four_lengths(well: int) -> JaxSubject:
    def step(q: Any, k: Any, v: Any) -> Any:  # sick
        return plain(q, k, v, is_causal=True)

    batches = [{name: x[:, :n] for name, x in qkv().items()} for n in (8, 9, 10, 11)]
    return JaxSubject(step, batches, causal=True)


SAME_RESULTS = "0 recompilations instead of {}, the same results"


@fault(
    "recompile",
    "",
    "jnp.asarray(x, dtype)",
    tried="with scale as an array of float32: " + SAME_RESULTS.format(1),
)
def number_of_a_weak_type(well: int = 0) -> JaxSubject:
    def step(q: Any, k: Any, v: Any, scale: Any) -> Any:  # sick
        return plain(q * scale, k, v, is_causal=True)

    scales = (jnp.asarray(1.0, jnp.float32) if well else 1.0, jnp.float32(2))
    return JaxSubject(jax.jit(step), [qkv() | {"scale": x} for x in scales], causal=True)


@fault("recompile", tried="with window as an array of int32: " + SAME_RESULTS.format(2))
def number_that_is_static(well: int) -> JaxSubject:
    def step(q: Any, k: Any, v: Any, window: int) -> Any:  # sick
        near = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH) < window
        return dense(q, k, v, near & below(LENGTH))

    run = jax.jit(step, static_argnames=() if well else "window")
    return JaxSubject(run, [qkv() | {"window": x} for x in (3, 4, 5)], causal=True)


@fault("recompile", "static value", "Pass the value as an array")
def step_number_that_is_static(well: int) -> JaxSubject:
    """The factory declares the static argument."""

    @functools.partial(jax.jit, static_argnames=() if well else "step")  # sick
    def run(w: Any, tokens: Any, step: int) -> Any:
        return model(functools.partial(plain, is_causal=True))(w, tokens) * (0.1 + step)

    batches = [{"tokens": tokens(), "step": jnp.int32(i) if well else i} for i in range(3)]
    return JaxSubject(run, batches, variables(), causal=True, static=() if well else ("step",))


@fault("recompile")
def new_function_in_each_call(well: int) -> JaxSubject:
    made = jax.jit(written)

    def step(q: Any, k: Any, v: Any) -> Any:
        return (made if well else jax.jit(lambda q, k, v: written(q, k, v)))(q, k, v)  # sick

    return JaxSubject(step, [qkv()], causal=True)


@fault("compile-error", stage="eager")
def branch_on_a_value(well: int) -> JaxSubject:
    def step(q: Any, k: Any, v: Any) -> Any:
        if well:
            q = jnp.where(q.max() > 1e4, q / q.max(), q)
        elif q.max() > 1e4:  # sick
            q = q / q.max()
        return written(q, k, v)

    return JaxSubject(step, [qkv()], causal=True)


@fault("compile-error", tried='with static_argnames=("length",): the step can be traced')
def size_that_is_an_argument(well: int) -> JaxSubject:
    def step(q: Any, k: Any, v: Any, length: Any) -> Any:
        mask = jnp.tril(jnp.ones((length, length), bool))  # sick
        return dense(q, k, v, mask)

    step = jax.jit(step, static_argnames="length") if well else step
    return JaxSubject(step, [qkv() | {"length": LENGTH}], causal=True)


@fault("sync", "", "Return the value from the step")
def printed(well: int) -> JaxSubject:
    def step(q: Any, k: Any, v: Any) -> Any:
        if not well:
            jax.debug.print("{}", q.max())  # sick
        return spans(q, k, v), q.max()

    return JaxSubject(step, [qkv()], causal=True)


@attends("sync", "", "compute it with jax.numpy")
def callback(well: int, q: Any, k: Any, v: Any) -> Any:
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    q = q * 2 if well else jax.pure_callback(lambda x: np.asarray(x) * 2, like, q)  # sick
    return spans(q, k, v)


@fault("constant", "", "Pass the arrays as arguments")
def table_that_is_captured(well: int) -> JaxSubject:
    captured = jnp.ones((4096, 128))

    def step(table: Any, q: Any, k: Any, v: Any) -> Any:
        return written(q + (table if well else captured).sum(0)[:SIZE], k, v)  # sick

    return JaxSubject(step, [qkv()], captured if well else 0.0, causal=True)


@fault("constant", "arrays that are not its arguments", "Pass the arrays as arguments", applied=False)
def table_of_a_jitted_function(well: int) -> JaxSubject:
    table = jnp.ones((20_000, 32))
    attend = functools.partial(plain, is_causal=True)
    step = jax.jit(lambda w, tokens: model(attend)(w, tokens) + table[tokens].sum())  # sick
    return subject(step)


# Attention that is thrown away


def chosen(choose: Any) -> Any:
    """Note a model with two kinds of layers. ``choose`` gets the condition, both kinds, q, k and v."""

    def made(well: int) -> JaxSubject:
        near = functools.partial(plain, is_causal=True, local_window_size=3)
        far = functools.partial(plain, is_causal=True)

        def step(w: Any, tokens: Any) -> Any:
            def layer(x: Any, own: Any) -> Any:
                w, is_near = own
                out = (lax.cond if well else choose)(is_near, near, far, *projected(w, x))
                return x + out.reshape(x.shape), None

            flags = jnp.array([True, True, False])
            return lax.scan(layer, w["embed"][tokens], ({n: w[n] for n in "qkv"}, flags))[0] @ w["head"]

        return subject(step, w=variables(layers=3))

    made.__name__, made.__wrapped__ = choose.__name__, choose  # type: ignore[attr-defined]
    remedy = "jax.lax.cond(condition, one, other, q, k, v)"
    return fault("discarded", "", remedy, at=choose, count=3, applied=choose.__name__ == "by_where")(made)


@chosen
def by_where(condition: Any, one: Any, other: Any, *qkv: Any) -> Any:
    return jnp.where(condition, one(*qkv), other(*qkv))  # sick


@chosen
def by_select(condition: Any, one: Any, other: Any, *qkv: Any) -> Any:
    return lax.select(condition, one(*qkv), other(*qkv))  # sick


@chosen
def by_where_of_merged_heads(condition: Any, one: Any, other: Any, *qkv: Any) -> Any:
    first, second = (x(*qkv).reshape(BATCH, LENGTH, -1) for x in (one, other))
    return jnp.where(condition, first, second)  # sick


# Steps that copy their cache

ROOM = 128  # keys of the cache


def empty(*layers: int) -> dict[str, Any]:
    shape = (*layers, BATCH, ROOM, HEADS, SIZE)
    return {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "length": jnp.zeros((), jnp.int32)}


def decode(w: Any, cache: Any, token: Any) -> Any:
    """Write the token's keys and values, and return the cache and the logits."""
    x, at = w["embed"][token], cache["length"]
    q, k, v = projected(w, x[:, None])
    keys = lax.dynamic_update_slice_in_dim(cache["k"], k, at, 1)  # sick: write
    values = cache["v"].at[:, at].set(v[:, 0])  # sick: write
    lengths = jnp.full(BATCH, at + 1)
    out = plain(q, keys, values, key_value_seq_lengths=lengths)
    return {"k": keys, "v": values, "length": at + 1}, (x + out.reshape(x.shape)) @ w["head"]


def loop(step: Callable[..., Any], again: bool = False) -> JaxSubject:
    """The examined function calls the jitted step for each token, or each time with the first cache."""

    def score(w: Any, tokens: Any) -> Any:
        cache, logits = empty(), []
        for i in range(3):
            new, out = step(w, cache, tokens[:, i])
            cache = cache if again and i else new
            logits.append(out)
        return jnp.stack(logits, 1)

    return subject(score, tokens=tokens(3))


def given(step: Callable[..., Any], *layers: int) -> JaxSubject:
    """The batch has the cache and one token."""
    batch = {"cache": empty(*layers), "token": tokens(1)[:, 0]}
    return JaxSubject(step, [batch], variables(), causal=True)


def copies(count: int, size: str = "64.0 KiB") -> Any:
    return fault(
        "copy",
        "",
        'donate_argnames=("cache",)',
        count=count,
        evidence=(f"{size} in 2 arrays", "the compiled program writes 0 B of its results into arguments"),
        tried=f"writes {size} into arguments, and results on made-up arrays are equal",
    )


@copies(3)
def cache_of_a_jitted_function(well: int) -> JaxSubject:
    return loop(jax.jit(decode, donate_argnums=1) if well else jax.jit(decode))  # sick


@copies(1)
def cache_of_a_decorated_function(well: int) -> JaxSubject:
    @functools.partial(jax.jit, donate_argnames="cache" if well else ())  # sick
    def step(w: Any, cache: Any, token: Any) -> Any:
        return decode(w, cache, token)

    return given(step)


@copies(1, "128 KiB")
def cache_of_layers_in_a_loop(well: int) -> JaxSubject:
    @functools.partial(jax.jit, donate_argnames="cache" if well else ())  # sick
    def layers(w: Any, cache: Any, token: Any) -> Any:
        def layer(total: Any, own: Any) -> Any:
            own, out = decode(w, own | {"length": cache["length"]}, token)
            return total + out, {"k": own["k"], "v": own["v"]}

        total = jnp.zeros((BATCH, w["head"].shape[1]))
        total, made = lax.scan(layer, total, {"k": cache["k"], "v": cache["v"]})
        return made | {"length": cache["length"] + 1}, total

    return given(layers, 2)


def lines_of_writes() -> set[int]:
    return marked(decode, "write")


def one_argument_for_all() -> JaxSubject:
    """Weights and cache are one argument, and the caller needs the weights again."""

    @jax.jit  # sick: one argument
    def step(state: Any, token: Any) -> Any:
        cache, out = decode(state["w"], state["cache"], token)
        return {"cache": cache}, out

    batch = {"state": {"w": variables(), "cache": empty()}, "token": tokens(1)[:, 0]}
    return JaxSubject(step, [batch], causal=True)


def not_jitted() -> JaxSubject:
    return given(decode)


def cache_that_is_read() -> JaxSubject:
    return given(jax.jit(lambda w, cache, token: decode(w, cache, token)[1]))


def cache_that_is_used_twice() -> JaxSubject:
    """Two candidates start from the same cache."""
    return loop(jax.jit(lambda *x: decode(*x)), again=True)


def cache_that_is_returned_too() -> JaxSubject:
    """The caller gets the old cache as well."""
    return given(jax.jit(lambda w, cache, token: (*decode(w, cache, token), cache)))


def new_weights() -> JaxSubject:
    """A training step returns new weights, which it does not write into the old ones."""
    step = jax.jit(lambda w, tokens: jax.tree.map(lambda x: x * (1 + tokens.sum()), w))
    return subject(step, None, variables() | {"more": jnp.ones((128, 128))})


KEPT = (cache_that_is_read, cache_that_is_used_twice, cache_that_is_returned_too, new_weights)
