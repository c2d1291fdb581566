"""Parts of small models in JAX: arguments, weights, layers, and attention that is written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attnspan import causal
from attnspan.jax import attention
from attnspan_lab.doctor.jax import JaxSubject

BATCH, LENGTH, HEADS, SIZE, VOCABULARY = 2, 24, 4, 8, 50
INDEX = np.arange(LENGTH)
LENGTHS = np.array([LENGTH, LENGTH - 7], np.int32)
VALID = LENGTHS[:, None] > INDEX
MASK = VALID.astype(np.int32)
DOCUMENTS = np.broadcast_to(INDEX // 9, (BATCH, LENGTH))
plain = jax.nn.dot_product_attention


def variables(kv_heads: int = HEADS, dtype: Any = jnp.float32, layers: int = 0) -> dict[str, Any]:
    """Make the weights of one layer, or of layers in a loop, which have different weights."""
    random = np.random.default_rng(0)
    wide = HEADS * SIZE
    shapes = {"embed": (VOCABULARY, wide), "q": (wide, HEADS, SIZE), "k": (wide, kv_heads, SIZE)}
    shapes |= {"v": (wide, kv_heads, SIZE), "head": (wide, VOCABULARY)}
    w = {k: jnp.asarray(random.standard_normal(x) / math.sqrt(x[0]), dtype) for k, x in shapes.items()}
    return w | {n: jnp.stack([w[n] / (1 + i) for i in range(layers)]) for n in "qkv" if layers}


def tokens(length: int = LENGTH, batch: int = BATCH) -> Any:
    return jnp.asarray(np.random.default_rng(1).integers(1, VOCABULARY, (batch, length)), jnp.int32)


def cached(length: int) -> Any:
    """Keys or values of earlier tokens."""
    return jnp.sin(jnp.arange(BATCH * length * HEADS * SIZE, dtype=float)).reshape(BATCH, length, HEADS, SIZE)


def qkv() -> Any:
    x = jnp.sin(jnp.arange(BATCH * LENGTH * HEADS * SIZE)).reshape(BATCH, LENGTH, HEADS, SIZE)
    return {"q": x, "k": x, "v": x}


def projected(w: Any, x: Any) -> list[Any]:
    """Compute q, k and v (B, S, H, D)."""
    return [jnp.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv"]


def model(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A model of one layer. q, k and v are (B, S, H, D)."""

    def step(w: Any, tokens: Any, **given: Any) -> Any:
        x = w["embed"][tokens]
        out = attend(*projected(w, x), **given)
        return (x + out.reshape(x.shape).astype(x.dtype)) @ w["head"]

    return step


def scanned(attend: Callable[..., Any], wrap: Callable[..., Any] = lambda x: x) -> Callable[..., Any]:
    """A model whose layers run in a scan."""

    def step(w: Any, tokens: Any, **given: Any) -> Any:
        def layer(x: Any, own: Any) -> Any:
            return x + attend(*projected(own, x), **given).reshape(x.shape), None

        x, _ = lax.scan(wrap(layer), w["embed"][tokens], {n: w[n] for n in "qkv"})
        return x @ w["head"]

    return step


def subject(step: Any, causal: bool | None = True, w: Any = None, **given: Any) -> JaxSubject:
    """Give a step its batch of tokens and more arguments, and weights."""
    arrays = {k: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for k, x in given.items()}
    return JaxSubject(step, [{"tokens": tokens()} | arrays], variables() if w is None else w, causal=causal)


def step_of(attend: Callable[..., Any], *options: Any, **given: Any) -> JaxSubject:
    """Make a model of one layer."""
    return subject(model(attend), *options, **given)


def below(length: int) -> Any:
    return jnp.tril(jnp.ones((length, length), bool))


def same(ids: Any) -> Any:
    """Show keys of the same document."""
    return ids[:, None, :, None] == ids[:, None, None, :]


def dense(q: Any, k: Any, v: Any, mask: Any, hidden: float = -1e30) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, hidden), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)  # sick: helper


def written(q: Any, k: Any, v: Any) -> Any:
    """Causal attention that is written out."""
    return dense(q, k, v, below(q.shape[1]))


def spans(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Attention of attnspan. Without a mask it is causal."""
    return attention(q, k, v, layout="bshd", mask=causal() if mask is None else mask)  # sick: helper


def heads(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Map a function of one head (S, D) over batch elements and heads of arrays (B, S, H, D)."""
    return jax.vmap(jax.vmap(attend, 1, 1))


def in_blocks(q: Any, k: Any, v: Any) -> Any:
    """Online softmax over blocks of keys: no tensor of all pairs."""
    block, index = 8, jnp.arange(q.shape[1])
    shape = (q.shape[0], q.shape[2], q.shape[1])
    cut = [x.reshape(x.shape[0], -1, block, *x.shape[2:]).swapaxes(0, 1) for x in (k, v)]

    def step(carry: Any, x: Any) -> Any:
        top, total, out = carry
        k, v, start = x
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        scores = jnp.where(index[:, None] >= start + jnp.arange(block), scores, -1e30)
        new = jnp.maximum(top, scores.max(-1))
        weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
        new_out = jnp.einsum("bhqk,bkhd->bhqd", weights, v)  # sick: in_blocks
        out = out * scale[..., None] + new_out
        return (new, total * scale + weights.sum(-1), out), None

    first = jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, q.shape[-1]))
    (_, total, out), _ = lax.scan(step, first, (*cut, jnp.arange(0, q.shape[1], block)))
    return (out / total[..., None]).swapaxes(1, 2)


BLOCK = 8


def online(q: Any, k: Any, v: Any, add: Callable[..., Any], loop: Callable[..., Any]) -> Any:
    """Online softmax of one head (S, D) over slices of keys.

    ``add`` gets the maximum, sum and result, the new maximum, the factor, weights and values. ``loop`` runs
    the step.
    """

    def step(start: Any, carry: Any) -> Any:
        own, values = (lax.dynamic_slice_in_dim(x, start, BLOCK) for x in (k, v))
        visible = start + jnp.arange(BLOCK) <= jnp.arange(len(q))[:, None]
        scores = jnp.where(visible, q @ own.T / math.sqrt(SIZE), -1e30)
        new = jnp.maximum(carry[0], scores.max(-1))
        weights, factor = jnp.exp(scores - new[:, None]), jnp.exp(carry[0] - new)
        return new, *add(*carry[1:], factor, weights, values)

    return loop(step, (jnp.full(len(q), -1e30), jnp.zeros(len(q)), jnp.zeros_like(q)))


def by_scan(step: Callable[..., Any], first: Any) -> Any:
    starts = jnp.arange(0, len(first[0]), BLOCK)
    return lax.scan(lambda carry, start: (step(start, carry), None), first, starts)[0]


def by_number(step: Callable[..., Any], first: Any) -> Any:
    return lax.fori_loop(0, len(first[0]) // BLOCK, lambda i, carry: step(i * BLOCK, carry), first)
