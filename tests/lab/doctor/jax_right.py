"""Right models in JAX that could look sick, and healthy models as users write them."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax_runner import factory, right
from jax_samples import (
    BATCH,
    DOCUMENTS,
    HEADS,
    INDEX,
    LENGTH,
    LENGTHS,
    MASK,
    SIZE,
    VALID,
    VOCABULARY,
    below,
    model,
    plain,
    qkv,
    same,
    scanned,
    spans,
    subject,
    tokens,
    variables,
    written,
)

from attnspan_lab.doctor.jax import JaxSubject

PADDED, IDS = {"attention_mask": MASK}, {"segment_ids": DOCUMENTS}


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


@right(given=PADDED, causal=False)
def mask_of_queries_and_keys(q: Any, k: Any, v: Any, attention_mask: Any) -> Any:
    """Padding sees nothing, and its results are the mean of all values. No other result uses them."""
    valid = attention_mask > 0
    return plain(q, k, v, mask=valid[:, None, :, None] & valid[:, None, None, :])


@right(given=PADDED, causal=False)
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
    return plain(q, k, v, mask=same(segment_ids) & (segment_ids > 0)[:, None, None, :], is_causal=True)


@right(given=IDS)
def vmapped(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    def head(q: Any, k: Any, v: Any, ids: Any) -> Any:
        mask = (ids[:, None] == ids) & below(LENGTH)
        return jax.nn.softmax(jnp.where(mask, q @ k.T / math.sqrt(SIZE), -jnp.inf)) @ v

    return jax.vmap(jax.vmap(head, (1, 1, 1, None), 1))(q, k, v, segment_ids)


@right(given=IDS)
def remat(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    return jax.checkpoint(lambda q, k, v: plain(q, k, v, mask=same(segment_ids), is_causal=True))(q, k, v)


@right(given=IDS)
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


def hidden(q: Any, k: Any) -> Any:
    return jnp.where(below(LENGTH), jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e30)


@right
def with_sinks(q: Any, k: Any, v: Any) -> Any:
    scores = hidden(q, k)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, v)
    return (out / (weights.sum(-1, keepdims=True) + jnp.exp(0.5 - top))).swapaxes(1, 2)


@right
def with_dropout(q: Any, k: Any, v: Any) -> Any:
    scores = hidden(q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    kept = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.8, weights.shape), weights / 0.8, 0)
    return (jnp.einsum("bhqk,bkhd->bhqd", kept, v) / weights.sum(-1, keepdims=True)).swapaxes(1, 2)


@right
def with_sigmoid(q: Any, k: Any, v: Any) -> Any:
    scores = hidden(q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.sigmoid(scores), v)


@right
def with_positions(q: Any, k: Any, v: Any) -> Any:
    """Distances of a bias in bfloat16 are no angles. Few positions fit."""
    index = jnp.arange(LENGTH, dtype=jnp.bfloat16)
    q = q * jnp.sin(index)[:, None, None].astype(q.dtype)
    return written(q, k, v)


@right
def with_two_keys(q: Any, k: Any, v: Any) -> Any:
    key = jax.random.key(1)
    q = jnp.where(jax.random.bernoulli(key, 0.9, q.shape), q, 0)
    return written(q, jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 1), 0.9, k.shape), k, 0), v)


@right
def with_an_unused_slice(q: Any, k: Any, v: Any) -> Any:
    """The slice that does not fit is computed, and no result uses it."""
    far = lax.dynamic_slice_in_dim(v, jnp.int32(LENGTH - 2), 4, 1)
    return written(q, k, v) + jnp.where(False, far.sum(), 0.0)


@right
def with_a_gate(q: Any, k: Any, v: Any) -> Any:
    scores = hidden(q, k)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    out = jnp.einsum("bhqk,bkhd->bhqd", weights, v) * jax.nn.sigmoid(q.swapaxes(1, 2))
    return (out / weights.sum(-1, keepdims=True)).swapaxes(1, 2)


@right(causal=False)
def normalized_over_both(q: Any, k: Any, v: Any) -> Any:
    """Slot attention: a softmax over queries, then a weighted mean over keys."""
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=2) + 1e-8
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


@right
def with_a_key_through_loops(q: Any, k: Any, v: Any) -> Any:
    def drop(carry: Any, _: Any) -> Any:
        x, key = carry
        key, own = jax.random.split(key)
        return (jnp.where(jax.random.bernoulli(own, 0.9, x.shape), x, 0), key), None

    q, key = lax.scan(drop, (q, jax.random.key(1)), None, 3)[0]
    k = lax.fori_loop(0, 3, lambda _, x: drop(x, None)[0], (k, key))[0]
    return written(q, k, v)


@right(length=HEADS)
def as_many_heads_as_tokens(q: Any, k: Any, v: Any) -> Any:
    return written(*(x.reshape(*x.shape[:2], -1).reshape(*x.shape[:2], HEADS, SIZE) for x in (q, k, v)))


@factory
def targets_of_the_same_tokens() -> JaxSubject:
    """The loss of each token depends on the next token, which is its target."""

    def step(w: Any, tokens: Any) -> Any:
        logits = model(lambda q, k, v: plain(q, k, v, is_causal=True))(w, tokens)
        logs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logs, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]

    return subject(step)


@factory
def all_but_the_last_token() -> JaxSubject:
    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        ids = segment_ids[:, :-1]
        logits = model(lambda q, k, v: plain(q, k, v, mask=same(ids), is_causal=True))(w, tokens[:, :-1])
        logs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
        return -(logs * (ids == segment_ids[:, 1:])).mean()

    return subject(step, **IDS)


@factory
def padding_by_value() -> JaxSubject:
    """The step finds padding by the value of tokens, so that other tokens there are no padding."""

    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        del attention_mask
        return model(lambda q, k, v: plain(q, k, v, mask=(tokens > 0)[:, None, None, :]))(w, tokens)

    return subject(step, False, tokens=tokens() * VALID, attention_mask=MASK)


@factory
def layers_in_a_scan() -> JaxSubject:
    def step(w: Any, tokens: Any, attention_mask: Any) -> Any:
        mask = below(LENGTH) & (attention_mask > 0)[:, None, None, :]
        return scanned(lambda q, k, v: plain(q, k, v, mask=mask), jax.checkpoint)(w, tokens)

    return subject(step, w=variables(layers=2), **PADDED)


@factory
def numbers_of_one_type() -> JaxSubject:
    step = jax.jit(lambda q, k, v, scale: spans(q * scale, k, v))
    return JaxSubject(step, [qkv() | {"scale": x} for x in (1.0, 2.0, 3.0)], causal=True)


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
    return subject(step, frames=frames, frame_mask=VALID)


@factory
def decoding_with_a_cache() -> JaxSubject:
    def step(w: Any, tokens: Any, cache_k: Any, cache_v: Any, index: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            k, v = (lax.dynamic_update_slice_in_dim(x, y, index, 1) for x, y in ((cache_k, k), (cache_v, v)))
            mask = jnp.arange(k.shape[1]) <= index + jnp.arange(q.shape[1])[:, None]
            return plain(q, k, v, mask=mask[None, None])

        return model(attend)(w, tokens)

    cache = jnp.zeros((BATCH, 32, HEADS, SIZE))
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

    return subject(jax.jit(step, donate_argnums=0))


# Whole models

WIDTH = 32


class Block(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(nn.LayerNorm()(x), mask=mask)
        y = nn.gelu(nn.Dense(2 * WIDTH, dtype=self.dtype)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(y)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any, train: bool = False) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens) + nn.Embed(64, WIDTH)(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            x = Block()(x, mask)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


class Encoder(nn.Module):
    """Layers in a scan, checkpointed, in bfloat16, with padding."""

    @nn.compact
    def __call__(self, tokens: Any, attention_mask: Any) -> Any:
        def layer(block: Any, x: Any, mask: Any) -> Any:
            return block(x, mask), None

        x = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16)(tokens)
        mask = nn.make_attention_mask(attention_mask > 0, attention_mask > 0, dtype=bool)
        split: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        scanned = nn.scan(nn.remat(layer), in_axes=nn.broadcast, length=2, **split)
        x, _ = scanned(Block(jnp.bfloat16), x, mask)
        return x


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.norm = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: Any, segment_ids: Any) -> Any:
        x = self.embed(tokens)
        mask = nnx.make_causal_mask(tokens) * same(segment_ids)
        return self.head(x + self.attend(self.norm(x), mask=mask))


@factory
def whole_decoder() -> Any:
    batches = [{"tokens": tokens()}, {"tokens": tokens(16)}]
    module = Decoder()
    return module.bind(jax.jit(module.init)(jax.random.key(0), **batches[0])), batches, {"causal": True}


@factory
def padded_encoder() -> Any:
    batch = {"tokens": tokens(), "attention_mask": MASK}
    module = Encoder()
    return module.bind(jax.jit(module.init)(jax.random.key(0), **batch)), [batch], {"causal": False}


@factory
def layers() -> Any:
    return (
        Layers(nnx.Rngs(0)),
        [{"tokens": tokens(), "segment_ids": jnp.asarray(DOCUMENTS)}],
        {"causal": True},
    )


def forward(weights: Any, inputs: Any) -> Any:
    x = weights["embed"][inputs]
    q, k, v = (jnp.einsum("bsw,whd->bhsd", x, weights[n]) for n in "qkv")
    scores = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[-1])
    later = jnp.tril(jnp.ones(scores.shape[2:])) == 0
    weights_of = jax.nn.softmax(jnp.where(later, -jnp.inf, scores), axis=-1)
    return (x + (weights_of @ v).swapaxes(1, 2).reshape(x.shape)) @ weights["head"]


def loss(weights: Any, batch: Any) -> Any:
    logs = jax.nn.log_softmax(forward(weights, batch["inputs"]))
    return -jnp.take_along_axis(logs, batch["targets"][..., None], -1).mean()


@factory
def training_step() -> Any:
    @jax.jit
    def step(weights: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda x, y: x - 0.1 * y, weights, grads), value

    own = np.asarray(tokens(25))
    batch = {"inputs": own[:, :-1], "targets": own[:, 1:]}
    return step, [(batch,)], {"causal": True, "variables": variables()}


WHOLE = ("whole_decoder", "padded_encoder", "layers", "training_step")
