"""Right models in JAX that could look sick. The doctor must find nothing "wrong" in them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax_patients import BATCH, LENGTH, SIZE, below, documents, model, tokens, variables

from attnspan_lab.doctor.jax import JaxSubject

#: The factories by name.
RIGHT: dict[str, Callable[[], Any]] = {}
INDEX = np.arange(LENGTH)
LENGTHS = np.array([LENGTH, LENGTH - 7], np.int32)
VALID = LENGTHS[:, None] > INDEX


def right(attend: Any = None, **options: Any) -> Any:
    """Note a model whose attention is the function. ``given`` are more arguments of the batch."""
    if attend is None:
        return functools.partial(right, **options)
    given = options.pop("given", {})

    def made() -> JaxSubject:
        batch = {"tokens": tokens()} | {k: jnp.asarray(x) for k, x in given.items()}
        return JaxSubject(model(attend), [batch], variables(), **({"causal": True} | options))

    RIGHT[attend.__name__] = made
    return attend


def factory(made: Any) -> Any:
    RIGHT[made.__name__] = made
    return made


def plain(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, **options)


@right(causal=None)
def prefix_lm(q: Any, k: Any, v: Any) -> Any:
    return plain(q, k, v, mask=(below(LENGTH) | (jnp.arange(LENGTH) < 6))[None, None])


@right(causal=False)
def encoder(q: Any, k: Any, v: Any) -> Any:
    return plain(q, k, v)


@right
def one_sided_window(q: Any, k: Any, v: Any) -> Any:
    return plain(q, k, v, local_window_size=(5, 0))


@right
def causal_window(q: Any, k: Any, v: Any) -> Any:
    return plain(q, k, v, is_causal=True, local_window_size=5)


@right
def alibi(q: Any, k: Any, v: Any) -> Any:
    slopes = 2.0 ** -jnp.arange(1, 5)[:, None, None]
    return plain(q, k, v, bias=(-slopes * jnp.abs(INDEX[:, None] - INDEX))[None], is_causal=True)


@right(given={"attention_mask": VALID.astype(np.int32)}, causal=False)
def mask_of_queries_and_keys(q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
    """Padding sees nothing, and its results are the mean of all values. No other result uses them."""
    valid = attention_mask > 0
    return plain(q, k, v, mask=valid[:, None, :, None] & valid[:, None, None, :])


@right(given={"attention_mask": VALID.astype(np.int32)}, causal=False)
def added_mask(q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
    return plain(q, k, v, bias=(1.0 - attention_mask[:, None, None, :]) * jnp.finfo(q.dtype).min)


@right(given={"lengths": LENGTHS}, causal=False)
def lengths_of_both(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return plain(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths)


@right(given={"lengths": LENGTHS})
def lengths_of_keys(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return plain(q, k, v, key_value_seq_lengths=lengths, is_causal=True)


@right(given={"segment_ids": np.broadcast_to(np.r_[np.repeat([1, 2, 0], [10, 9, 5])], (BATCH, LENGTH))})
def padding_is_document_0(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return plain(q, k, v, mask=same & (segment_ids > 0)[:, None, None, :], is_causal=True)


@right(given=documents())
def vmapped(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    def one(q: Any, k: Any, v: Any, ids: Any) -> Any:
        mask = (ids[:, None] == ids) & below(LENGTH)
        return jnp.where(mask, q @ k.T / math.sqrt(SIZE), -jnp.inf), v

    def head(q: Any, k: Any, v: Any, ids: Any) -> Any:
        scores, v = one(q, k, v, ids)
        return jax.nn.softmax(scores) @ v

    return jax.vmap(jax.vmap(head, (1, 1, 1, None), 1))(q, k, v, segment_ids)


@right(given=documents())
def remat(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.checkpoint(lambda q, k, v: plain(q, k, v, mask=same, is_causal=True))(q, k, v)


@right(given=documents())
def kernel_of_pallas(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    """Splash attention works on 128 tokens, so the arrays are padded. The padding is document -1."""
    size = ((0, 128 - LENGTH), (0, 0), (0, 128 - SIZE))
    run = splash.make_splash_mha(
        splash_mask.MultiHeadMask([splash_mask.CausalMask((128, 128))] * 4),
        head_shards=1,
        q_seq_shards=1,
        interpret=True,
    )

    def one(q: Any, k: Any, v: Any, ids: Any) -> Any:
        long = jnp.pad(ids, (0, 128 - LENGTH), constant_values=-1).astype(jnp.int32)
        q, k, v = (jnp.pad(x, size).swapaxes(0, 1) for x in (q / math.sqrt(SIZE), k, v))
        out = run(q, k, v, splash.SegmentIds(long, long))
        return out.swapaxes(0, 1)[:LENGTH, :, :SIZE]

    return jax.vmap(one)(q, k, v, segment_ids)


@factory
def targets_of_the_same_tokens() -> JaxSubject:
    """The loss of each token depends on the next token, which is its target."""

    def step(w: Any, tokens: Any) -> Any:
        logits = model(lambda q, k, v: plain(q, k, v, is_causal=True))(w, tokens)
        logs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logs, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]

    return JaxSubject(step, [{"tokens": tokens()}], variables(), causal=True)


@factory
def all_but_the_last_token() -> JaxSubject:
    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        ids = segment_ids[:, :-1]
        same = ids[:, None, :, None] == ids[:, None, None, :]
        logits = model(lambda q, k, v: plain(q, k, v, mask=same, is_causal=True))(w, tokens[:, :-1])
        logs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
        return -(logs * (ids == segment_ids[:, 1:])).mean()

    return JaxSubject(step, [{"tokens": tokens()} | documents()], variables(), causal=True)


@factory
def padding_by_value() -> JaxSubject:
    """The step finds padding by the value of tokens, so that other tokens there are no padding."""

    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        del attention_mask
        return model(lambda q, k, v: plain(q, k, v, mask=(tokens > 0)[:, None, None, :]))(w, tokens)

    batch = {"tokens": tokens() * VALID, "attention_mask": VALID.astype(np.int32)}
    return JaxSubject(step, [batch], variables(), causal=False)


@factory
def layers_in_a_scan() -> JaxSubject:
    w = variables()
    w |= {x: jnp.stack([w[x], w[x] * 0.5]) for x in "qkv"}

    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        mask = below(LENGTH) & (attention_mask > 0)[:, None, None, :]

        def layer(x: Any, own: Any) -> Any:
            q, k, v = (jnp.einsum("bsw,whd->bshd", x, own[n]) for n in "qkv")
            return x + plain(q, k, v, mask=mask).reshape(x.shape), None

        x, _ = lax.scan(jax.checkpoint(layer), w["embed"][tokens], {n: w[n] for n in "qkv"})
        return x @ w["head"]

    batch = {"tokens": tokens(), "attention_mask": VALID.astype(np.int32)}
    return JaxSubject(step, [batch], w, causal=True)


@factory
def cross_attention() -> JaxSubject:
    """Decoder tokens see frames of which some are padding. Both have the same length."""

    def step(w: Any, tokens: Any, frames: Any, frame_mask: Any) -> Any:
        x = w["embed"][tokens]
        memory = plain(*[frames.reshape(*frames.shape[:2], 4, -1)] * 3, mask=frame_mask[:, None, None, :])
        q, k, v = (jnp.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv")
        x = plain(q, k, v, is_causal=True)
        return (
            plain(x, memory, memory, mask=frame_mask[:, None, None, :]).reshape(*tokens.shape, -1) @ w["head"]
        )

    frames = jnp.sin(jnp.arange(BATCH * LENGTH * 32.0)).reshape(BATCH, LENGTH, 32)
    batch = {"tokens": tokens(), "frames": frames, "frame_mask": jnp.asarray(VALID)}
    return JaxSubject(step, [batch], variables(), causal=True)


@factory
def decoding_with_a_cache() -> JaxSubject:
    def step(w: Any, tokens: Any, cache_k: Any, cache_v: Any, index: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            k, v = (lax.dynamic_update_slice_in_dim(x, y, index, 1) for x, y in ((cache_k, k), (cache_v, v)))
            mask = jnp.arange(k.shape[1]) <= index + jnp.arange(q.shape[1])[:, None]
            return plain(q, k, v, mask=mask[None, None])

        return model(attend)(w, tokens)

    cache = jnp.zeros((BATCH, 32, 4, SIZE))
    batches = [
        {"tokens": tokens(n), "cache_k": cache, "cache_v": cache, "index": i}
        for n, i in ((4, 0), (1, 4), (1, 5))
    ]
    return JaxSubject(jax.jit(step), batches, variables(), causal=True)


@factory
def donated() -> JaxSubject:
    def step(w: Any, tokens: Any) -> Any:
        def loss(w: Any) -> Any:
            return (model(lambda q, k, v: plain(q, k, v, is_causal=True))(w, tokens) ** 2).mean()

        return jax.tree.map(lambda x, y: x - 0.1 * y, w, jax.grad(loss)(w))

    return JaxSubject(jax.jit(step, donate_argnums=0), [{"tokens": tokens()}], variables(), causal=True)


class Linen(nn.Module):
    """Padding is found in the tokens: its queries see no key."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(50, 32)(tokens)
        mask = nn.combine_masks(nn.make_attention_mask(tokens > 0, tokens > 0), nn.make_causal_mask(tokens))
        return nn.Dense(50)(x + nn.MultiHeadDotProductAttention(4)(x, mask=mask))


@factory
def linen() -> Any:
    module, batch = Linen(), {"tokens": tokens() * VALID}
    return module.bind(module.init(jax.random.key(0), **batch)), [batch], {"causal": True}


class Dropped(nnx.Module):
    """Dropout makes random keys in the step."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.drop = nnx.Embed(50, 32, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)

    def __call__(self, tokens: Any, segment_ids: Any) -> Any:
        x = self.embed(tokens)
        same = nnx.make_attention_mask(segment_ids, segment_ids, jnp.equal)
        return x + self.drop(self.attend(x, mask=nnx.combine_masks(nnx.make_causal_mask(tokens), same)))


@factory
def nnx_with_dropout() -> Any:
    return Dropped(nnx.Rngs(0)), [{"tokens": tokens()} | documents()], {"causal": True}
