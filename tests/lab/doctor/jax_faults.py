"""Faults that people reported for models in JAX. The line of the fault ends in ``# sick``.

Sources: google/flax#5591, google/flax#4505, AI-Hypercomputer/maxtext#4476, jax-ml/jax#32300, jax-ml/jax#4712.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import dot_product_attention as plain
from jax_patients import BATCH, HEADS, LENGTH, SIZE, below, documents, model, tokens, variables
from jax_right import LENGTHS, VALID

from attnspan_lab.doctor.jax import JaxSubject

#: Kind, words of the cause, and words of the remedy, by the name of the fault.
FAULTS: dict[str, tuple[str, str, str]] = {}
#: Class that holds the sick line, if it is not in the factory.
CLASSES: dict[str, type] = {}
MASK = VALID.astype(np.int32)


def fault(kind: str, cause: str, remedy: str, at: type | None = None) -> Any:
    def note(made: Any) -> Any:
        FAULTS[made.__name__] = kind, cause, remedy
        CLASSES.update({made.__name__: at} if at is not None else {})
        return made

    return note


def step_of(attend: Any, causal: bool | None = True, **given: Any) -> JaxSubject:
    batch = {"tokens": tokens()} | {k: jnp.asarray(x) for k, x in given.items()}
    return JaxSubject(model(attend), [batch], variables(), causal=causal)


@fault("causal-alignment", "their own keys have higher numbers", "mask=causal()")
def causal_with_a_cache() -> JaxSubject:
    cache = jnp.sin(jnp.arange(BATCH * 16.0 * HEADS * SIZE)).reshape(BATCH, 16, HEADS, SIZE)

    def step(w: Any, tokens: Any, cache: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            k, v = (jnp.concatenate([cache, x], 1) for x in (k, v))
            return plain(q, k, v, is_causal=True)  # sick

        return model(attend)(w, tokens)

    return JaxSubject(step, [{"tokens": tokens(4), "cache": cache}], variables(), causal=True)


@fault("causality-lost", "up to 6 later tokens", "window(6)")
def window_to_both_sides() -> JaxSubject:
    return step_of(lambda q, k, v: plain(q, k, v, local_window_size=6))  # sick


@fault("leak", "takes the first axis of a mask with 3 axes as heads", "segments(segment_ids)")
def mask_of_three_axes() -> JaxSubject:
    ids = np.stack([np.arange(LENGTH) // n for n in (5, 7, 11, LENGTH)])

    def attend(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        mask = segment_ids[:, :, None] == segment_ids[:, None, :]
        return plain(q, k, v, mask=mask, is_causal=True)  # sick

    batch = {"tokens": tokens(batch=4), "segment_ids": jnp.asarray(ids)}
    return JaxSubject(model(attend), [batch], variables(), causal=True)


@fault("mask-lost", "are added to the scores", "Pass it as a boolean mask")
def padding_of_0_and_1_is_added() -> JaxSubject:
    def attend(q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
        return plain(q, k, v, bias=attention_mask[:, None, None, :].astype(q.dtype))  # sick

    return step_of(attend, causal=False, attention_mask=MASK)


@fault("mask-lost", "is inverted: only padding is visible", "Invert the mask")
def padding_mask_is_inverted() -> JaxSubject:
    def attend(q: Any, k: Any, v: Any, padding_mask: Any) -> Any:
        return plain(q, k, v, mask=padding_mask[:, None, None, :])  # sick

    return step_of(attend, causal=False, padding_mask=np.stack([~VALID[1], ~VALID[1]]))


@fault("mask-lost", "A mask made from lengths reaches this call", "keys(valid)")
def lengths_of_queries_only() -> JaxSubject:
    def attend(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return plain(q, k, v, query_seq_lengths=lengths)  # sick

    return step_of(attend, causal=False, lengths=LENGTHS)


@fault("leak", "A mask made from segment_ids reaches this call", "segments(segment_ids)")
def ids_of_the_next_token() -> JaxSubject:
    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        ids = segment_ids[:, 1:]
        mask = (ids[:, :, None] == ids[:, None, :])[:, None]
        return model(lambda q, k, v: plain(q, k, v, mask=mask, is_causal=True))(w, tokens[:, :-1])  # sick

    return JaxSubject(step, [{"tokens": tokens()} | documents()], variables(), causal=True)


@fault("recompile", "static value", "Pass the value as an array")
def static_step() -> JaxSubject:
    @functools.partial(jax.jit, static_argnames="step")  # sick
    def run(w: Any, tokens: Any, step: int) -> Any:
        return model(lambda q, k, v: plain(q, k, v, is_causal=True))(w, tokens) * (0.1 + step)

    batches = [{"tokens": tokens(), "step": i} for i in range(3)]
    return JaxSubject(run, batches, variables(), causal=True, static=("step",))


@fault("constant", "arrays that are not its arguments", "Pass the arrays as arguments")
def captured_by_a_jitted_function() -> JaxSubject:
    table = jnp.ones((20_000, 32))
    attend = functools.partial(plain, is_causal=True)
    step = jax.jit(lambda w, tokens: model(attend)(w, tokens) + table[tokens].sum())  # sick
    return JaxSubject(step, [{"tokens": tokens()}], variables(), causal=True)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x, valid = nn.Embed(50, 32)(tokens), tokens > 0
        for _ in range(2):
            mask = nn.make_attention_mask(valid, valid)
            x = x + nn.MultiHeadDotProductAttention(4)(x, mask=mask)  # sick
        return nn.Dense(50)(x)


@fault("causality-lost", "The call has no causal mask", "causal()", at=Encoder)
def encoder_as_a_decoder() -> Any:
    module, batch = Encoder(), {"tokens": tokens() * VALID[[1, 1]]}
    return module.bind(module.init(jax.random.key(0), **batch)), [batch], {"causal": True}


@fault("hidden-rows", "If all scores are -inf", "see its own key")
def left_padding_in_a_scan() -> JaxSubject:
    w = variables()
    w |= {x: jnp.stack([w[x], w[x]]) for x in "qkv"}

    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            q, k, v = (jnp.einsum("bsw,whd->bshd", x, own[n]) for n in "qkv")
            mask = below(LENGTH) & (attention_mask > 0)[:, None, None, :]
            scores = jnp.where(mask, jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
            return x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape), None  # sick

        x, _ = jax.lax.scan(layer, w["embed"][tokens], {n: w[n] for n in "qkv"})
        return jnp.where(attention_mask[..., None] > 0, x @ w["head"], 0)

    return JaxSubject(step, [{"tokens": tokens(), "attention_mask": MASK[:, ::-1]}], w, causal=True)


class Dropped(nnx.Module):
    """Dropout makes random keys in the step."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.drop = nnx.Embed(50, 32, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)

    def __call__(self, tokens: Any, segment_ids: Any) -> Any:
        del segment_ids
        x = self.embed(tokens)
        return x + self.drop(self.attend(x, mask=nnx.make_causal_mask(tokens)))  # sick


@fault("leak", "No mask that separates documents", "segments(segment_ids)", at=Dropped)
def causal_mask_of_flax_only() -> Any:
    return Dropped(nnx.Rngs(0)), [{"tokens": tokens()} | documents()], {"causal": True}


LONGEST = 1024
CAUSAL = jnp.tril(jnp.ones((1, 1, LONGEST, LONGEST), bool))
FUTURE = ~np.tri(LONGEST, dtype=bool)


@fault("constant", "arrays that are not its arguments", "is_causal=True")
def mask_of_the_longest_context() -> JaxSubject:
    w = variables()
    w |= {x: jnp.stack([w[x], w[x]]) for x in "qkv"}

    @jax.checkpoint
    def layer(x: Any, own: Any) -> Any:
        n = x.shape[1]
        q, k, v = (jnp.einsum("bsw,whd->bshd", x, own[n]) for n in "qkv")
        return x + plain(q, k, v, mask=CAUSAL[:, :, :n, :n]).reshape(x.shape), None  # sick

    @jax.jit
    def step(w: Any, tokens: Any) -> Any:
        x, _ = jax.lax.scan(layer, w["embed"][tokens], {n: w[n] for n in "qkv"})
        return x @ w["head"]

    return JaxSubject(step, [{"tokens": tokens()}], w, causal=True)


@fault("constant", "arrays that are not its arguments", "is_causal=True")
def mask_of_later_tokens() -> JaxSubject:
    def attend(q: Any, k: Any, v: Any) -> Any:
        hidden = jax.lax.dynamic_slice(FUTURE, (0, 0), (q.shape[1], q.shape[1]))  # sick
        scores = jnp.where(hidden, -1e30, jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return step_of(jax.vmap(lambda *x: attend(*(y[None] for y in x))[0]))


@fault("constant", "arrays that are not its arguments", "is_causal=True")
def window_longer_than_the_batch() -> JaxSubject:
    near = CAUSAL & ~jnp.tri(LONGEST, k=-101, dtype=bool)

    def attend(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        mask = near[:, :, : q.shape[1], : q.shape[1]]  # sick
        return plain(q, k, v, mask=mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None]))

    return JaxSubject(model(attend), [{"tokens": tokens()} | documents()], variables(), causal=True)
