"""Healthy models in JAX as users write them: two of flax.linen, one of flax.nnx, and a plain GPT."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax_patients import documents, tokens, variables

WIDTH, VOCABULARY = 32, 50


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
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        return self.head(x + self.attend(self.norm(x), mask=nnx.make_causal_mask(tokens) * same))


def decoder() -> Any:
    batches = [{"tokens": tokens()}, {"tokens": tokens(16)}]
    module = Decoder()
    return module.bind(jax.jit(module.init)(jax.random.key(0), **batches[0])), batches, {"causal": True}


def encoder() -> Any:
    batch = {"tokens": tokens(), "attention_mask": jnp.ones((2, 24), jnp.int32).at[1, 18:].set(0)}
    module = Encoder()
    return module.bind(jax.jit(module.init)(jax.random.key(0), **batch)), [batch], {"causal": False}


def layers() -> Any:
    return Layers(nnx.Rngs(0)), [{"tokens": tokens()} | documents()], {"causal": True}


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


def training_step() -> Any:
    @jax.jit
    def step(weights: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda x, y: x - 0.1 * y, weights, grads), value

    own = np.asarray(tokens(25))
    batch = {"inputs": own[:, :-1], "targets": own[:, 1:]}
    return step, [(batch,)], {"causal": True, "variables": variables()}


MODELS = (decoder, encoder, layers, training_step)
