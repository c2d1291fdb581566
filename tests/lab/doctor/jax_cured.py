"""Patients of `jax_patients` with the remedy that the doctor prints, by the name of the patient."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax_patients import (
    BATCH,
    HEADS,
    LENGTH,
    SIZE,
    attends,
    below,
    dense,
    mesh_of,
    model,
    qkv,
    sharded,
    tokens,
    variables,
)

from attnspan import causal
from attnspan.jax import attention
from attnspan.parallel import Layout
from attnspan_lab.doctor.jax import JaxSubject


@attends()
def sick_constant_mask(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, mask=causal(), layout="bshd")


@attends()
def sick_constant_mask_in_jax(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@attends()
def sick_mask_argument_in_jax(q: Any, k: Any, v: Any) -> Any:
    index = jnp.arange(q.shape[1])
    return dense(q, k, v, index[:, None] >= index)


def sick_mask_argument() -> JaxSubject:
    step = model(lambda q, k, v: attention(q, k, v, mask=causal(), layout="bshd"))
    return JaxSubject(step, [{"tokens": tokens()}], variables(), causal=True)


@attends()
def sick_norm(q: Any, k: Any, v: Any) -> Any:
    q = q - q.mean(-1, keepdims=True) * jnp.sign(jnp.arange(q.shape[1]))[:, None, None]
    q = q.at[:, 3].set(0)
    square = (q * q).sum(-1, keepdims=True)
    q = q / jnp.sqrt(jnp.where(square > 0, square, 1))
    return dense(q, k, v, below(q.shape[1]))


@attends(dtype=jnp.float16)
def sick_overflow(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * 60
    scores = jnp.where(below(q.shape[1]), scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", (weights / weights.sum(-1, keepdims=True)).astype(v.dtype), v)


@attends()
def sick_gradient_of_root(q: Any, k: Any, v: Any) -> Any:
    q = q * (jnp.arange(q.shape[1]) > 0)[:, None, None]
    square = (q * q).sum(-1, keepdims=True)
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 1)
    return dense(q / norm, k, v, below(q.shape[1]))


def sick_print() -> JaxSubject:
    def step(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mask=causal(), layout="bshd"), q.max()

    return JaxSubject(step, [qkv()], causal=True)


@attends()
def sick_callback(q: Any, k: Any, v: Any) -> Any:
    return attention(q * 2, k, v, mask=causal(), layout="bshd")


def sick_captured() -> JaxSubject:
    def step(table: Any, q: Any, k: Any, v: Any) -> Any:
        return dense(q + table.sum(0)[:SIZE], k, v, below(LENGTH))

    return JaxSubject(step, [qkv()], jnp.ones((4096, 128)), causal=True)


def sick_gathered() -> JaxSubject:
    """Batch elements are sharded instead of the sequence."""
    return sharded(model(lambda q, k, v: dense(q, k, v, below(LENGTH))), P("cp"))


def sick_gathered_with_a_plan() -> JaxSubject:
    """A plan sends the keys that are seen. Its layout orders the tokens."""
    mesh, mask = mesh_of(cp=2), causal()
    layout = Layout.of(mask, q_len=LENGTH, ranks=2, batch=BATCH)
    rows = layout.on(mesh, sequence="cp").shard({"tokens": np.asarray(tokens())})
    placed = layout.plan(mask, heads=(HEADS, HEADS)).on(mesh, rows=rows, sequence="cp")

    def step(w: Any, tokens: Any, position_index: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, mask=placed, layout="bshd", q_index=position_index)

        return model(attend)(w, tokens)

    def one(w: Any, tokens: Any, position_index: Any) -> Any:
        index = position_index.reshape(-1)
        return model(lambda q, k, v: dense(q, k, v, index[:, None] >= index))(w, tokens)

    batch = {"tokens": rows["tokens"], "position_index": rows["q_index"]}
    specs = {"tokens": P(None, "cp"), "position_index": rows["q_index"].sharding.spec}
    return JaxSubject(step, [batch], variables(), mesh=mesh, in_shardings=specs, one_device=one, causal=False)


def sick_constraint() -> JaxSubject:
    return sharded(model(lambda q, k, v: dense(q, k, v, below(LENGTH))), P("cp"))


def sick_whole_batch() -> JaxSubject:
    def step(w: Any, tokens: Any) -> Any:
        x = w["embed"][tokens]
        q, k, v = (jnp.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv")
        out = attention(q, k, v, mask=causal(), layout="bshd", backend="xla")
        return (x + out.reshape(x.shape)) @ w["head"]

    return sharded(step, P("cp"))


def exact(name: str) -> np.ndarray:
    """Compute the results of a patient whose own results are NaN, in float64 without JAX."""
    dtype = jnp.float16 if name == "sick_overflow" else jnp.float32
    w = {k: np.asarray(x, np.float64) for k, x in variables(dtype=dtype).items()}
    x = w["embed"][np.asarray(tokens())]
    q, k, v = (np.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv")
    scale = 60.0
    if name == "sick_norm":
        q = q - q.mean(-1, keepdims=True) * np.sign(np.arange(LENGTH))[:, None, None]
        q[:, 3] = 0
        norm = np.linalg.norm(q, axis=-1, keepdims=True)
        q, scale = q / np.where(norm > 0, norm, 1), 1 / math.sqrt(SIZE)
    scores = np.where(np.tri(LENGTH, dtype=bool), np.einsum("bqhd,bkhd->bhqk", q, k) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    return np.asarray((x + out.reshape(x.shape)) @ w["head"])
