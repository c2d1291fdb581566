"""A small GPT in JAX with mistakes, for ``attnspan doctor examples/ailing_gpt_jax.py:factory``.

Its packed documents see each other, it repeats keys and values for the heads that share them, and it compiles
again for a Python number.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, HEADS, KV_HEADS, VOCABULARY, LENGTH = 64, 8, 2, 500, 48


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@jax.jit
def step(weights: Any, tokens: jax.Array, segment_ids: jax.Array, temperature: Any) -> jax.Array:
    x = weights["embed"][tokens] * (segment_ids >= 0)[..., None]
    q, k, v = (jnp.einsum("bsw,whd->bshd", x, weights[name]) for name in "qkv")
    x = x + attend(q, k, v).reshape(x.shape)
    return x @ weights["head"] / temperature


def factory() -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """The function, batches of packed documents, and the function's parameters."""
    random = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, WIDTH), "q": (WIDTH, HEADS, WIDTH // HEADS), "head": (WIDTH, VOCABULARY)}
    shapes |= dict.fromkeys("kv", (WIDTH, KV_HEADS, WIDTH // HEADS))
    weights = {
        k: jnp.asarray(random.standard_normal(x) / x[0] ** 0.5, jnp.float32) for k, x in shapes.items()
    }
    tokens = jnp.asarray(random.integers(VOCABULARY, size=(2, LENGTH)))
    segment_ids = jnp.broadcast_to(jnp.arange(LENGTH) // 20, (2, LENGTH))
    batches = [
        {"tokens": tokens, "segment_ids": segment_ids, "temperature": x} for x in (1.0, jnp.float32(0.7))
    ]
    return step, batches, {"causal": True, "variables": weights}
