"""Steps that update a cache. A sick line ends in ``# sick``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import dot_product_attention
from jax_patients import BATCH, HEADS, SIZE, tokens, variables

from attnspan_lab.doctor.jax import JaxSubject

ROOM = 128  # keys of the cache


def empty(*layers: int) -> dict[str, Any]:
    shape = (*layers, BATCH, ROOM, HEADS, SIZE)
    return {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "length": jnp.zeros((), jnp.int32)}


def decode(w: Any, cache: Any, token: Any) -> Any:
    """Write the token's keys and values, and return the cache and the logits."""
    x, at = w["embed"][token], cache["length"]
    q, k, v = (jnp.einsum("bw,whd->bhd", x, w[n])[:, None] for n in "qkv")
    keys = lax.dynamic_update_slice_in_dim(cache["k"], k, at, 1)  # write
    values = cache["v"].at[:, at].set(v[:, 0])  # write
    lengths = jnp.full(BATCH, at + 1)
    out = dot_product_attention(q, keys, values, key_value_seq_lengths=lengths)
    return {"k": keys, "v": values, "length": at + 1}, (x + out.reshape(x.shape)) @ w["head"]


def loop(step: Callable[..., Any]) -> JaxSubject:
    """The examined function calls the jitted step for each token."""

    def score(w: Any, tokens: Any) -> Any:
        cache, logits = empty(), []
        for i in range(3):
            cache, out = step(w, cache, tokens[:, i])
            logits.append(out)
        return jnp.stack(logits, 1)

    return JaxSubject(score, [{"tokens": tokens(3)}], variables(), causal=True)


def given(step: Callable[..., Any]) -> JaxSubject:
    """The batch has the cache and one token."""
    return JaxSubject(step, [{"cache": empty(), "token": tokens(1)[:, 0]}], variables(), causal=True)


def jitted_by_a_call(**options: Any) -> JaxSubject:
    return loop(jax.jit(decode, **options))  # sick


def jitted_by_a_decorator(**options: Any) -> JaxSubject:
    @partial(jax.jit, **options)  # sick
    def step(w: Any, cache: Any, token: Any) -> Any:
        return decode(w, cache, token)

    return given(step)


def layers_in_a_loop(**options: Any) -> JaxSubject:
    @partial(jax.jit, **options)  # sick
    def layers(w: Any, cache: Any, token: Any) -> Any:
        def layer(total: Any, own: Any) -> Any:
            own, out = decode(w, own | {"length": cache["length"]}, token)
            return total + out, {"k": own["k"], "v": own["v"]}

        total = jnp.zeros((BATCH, w["head"].shape[1]))
        total, made = lax.scan(layer, total, {"k": cache["k"], "v": cache["v"]})
        return made | {"length": cache["length"] + 1}, total

    batch = {"cache": empty(2), "token": tokens(1)[:, 0]}
    return JaxSubject(layers, [batch], variables(), causal=True)


def one_argument_for_all() -> JaxSubject:
    """Weights and cache are one argument, and the caller needs the weights again."""

    @jax.jit  # sick
    def step(state: Any, token: Any) -> Any:
        cache, out = decode(state["w"], state["cache"], token)
        return {"cache": cache}, out

    batch = {"state": {"w": variables(), "cache": empty()}, "token": tokens(1)[:, 0]}
    return JaxSubject(step, [batch], causal=True)


def donated_by_number() -> JaxSubject:
    return loop(jax.jit(decode, donate_argnums=1))


def donated_by_name() -> JaxSubject:
    return jitted_by_a_decorator(donate_argnames="cache")


def layers_of_a_donated_cache() -> JaxSubject:
    return layers_in_a_loop(donate_argnames="cache")


def read_only() -> JaxSubject:
    @jax.jit
    def step(w: Any, cache: Any, token: Any) -> Any:
        return decode(w, cache, token)[1]

    return given(step)


def used_twice() -> JaxSubject:
    """Two candidates start from the same cache."""

    @jax.jit
    def step(w: Any, cache: Any, token: Any) -> Any:
        return decode(w, cache, token)

    def score(w: Any, tokens: Any) -> Any:
        cache, _ = step(w, empty(), tokens[:, 0])
        return jnp.stack([step(w, cache, tokens[:, i])[1] for i in (1, 2)], 1)

    return JaxSubject(score, [{"tokens": tokens(3)}], variables(), causal=True)


def returned_too() -> JaxSubject:
    """The caller gets the old cache as well."""

    @jax.jit
    def step(w: Any, cache: Any, token: Any) -> Any:
        return (*decode(w, cache, token), cache)

    return given(step)


def new_weights() -> JaxSubject:
    """A training step returns new weights, which it does not write into the old ones."""

    @jax.jit
    def step(w: Any, tokens: Any) -> Any:
        return jax.tree.map(lambda x: x * (1 + tokens.sum()), w)

    return JaxSubject(step, [{"tokens": tokens()}], variables() | {"more": jnp.ones((128, 128))})


def not_jitted() -> JaxSubject:
    return given(decode)
