"""Small functions in JAX, each with one planted defect, and healthy twins.

The defect's line ends in ``# sick``.

A function ``sick_...`` returns the patient, ``well_...`` its twin. `KINDS` says what the doctor has to find.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from attnspan import causal, segments
from attnspan.jax import attention
from attnspan_lab.doctor.jax import JaxSubject

BATCH, LENGTH, HEADS, SIZE, VOCABULARY = 2, 24, 4, 8, 50

#: What is planted, by the name of the patient.
KINDS: dict[str, str] = {}
Attend = Callable[..., Any]


def variables(kv_heads: int = HEADS, dtype: Any = jnp.float32) -> dict[str, Any]:
    random = np.random.default_rng(0)
    wide = HEADS * SIZE
    shapes = {"embed": (VOCABULARY, wide), "q": (wide, HEADS, SIZE), "k": (wide, kv_heads, SIZE)}
    shapes |= {"v": (wide, kv_heads, SIZE), "head": (wide, VOCABULARY)}
    return {k: jnp.asarray(random.standard_normal(x) / math.sqrt(x[0]), dtype) for k, x in shapes.items()}


def tokens(length: int = LENGTH, batch: int = BATCH) -> Any:
    return jnp.asarray(np.random.default_rng(1).integers(1, VOCABULARY, (batch, length)), jnp.int32)


def model(attend: Attend) -> Callable[..., Any]:
    """A model of one layer. q, k and v are (B, S, H, D)."""

    def step(w: Any, tokens: Any, **given: Any) -> Any:
        x = w["embed"][tokens]
        q, k, v = (jnp.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv")
        out = attend(q, k, v, **given)
        return (x + out.reshape(x.shape).astype(x.dtype)) @ w["head"]

    return step


def attends(kind: str | None = None, *, given: Any = None, **options: Any) -> Callable[[Attend], Any]:
    """Make the factory of a model whose attention is the function; without a kind it is healthy."""
    weights = {k: options.pop(k) for k in ("kv_heads", "dtype") if k in options}

    def made(attend: Attend) -> Callable[[], JaxSubject]:
        @wraps(attend)
        def factory() -> JaxSubject:
            batch = {"tokens": tokens()} | (given() if given else {})
            return JaxSubject(model(attend), [batch], variables(**weights), **({"causal": True} | options))

        if kind is not None:
            KINDS[attend.__name__] = kind
        return factory

    return made


def sick(kind: str) -> Callable[[Any], Any]:
    def note(factory: Any) -> Any:
        KINDS[factory.__name__] = kind
        return factory

    return note


def documents() -> dict[str, Any]:
    return {"segment_ids": jnp.broadcast_to(jnp.arange(LENGTH) // 9, (BATCH, LENGTH))}


def padding() -> dict[str, Any]:
    return {
        "padding_mask": jnp.broadcast_to(jnp.arange(LENGTH) >= LENGTH - 5, (BATCH, LENGTH)).at[0].set(False)
    }


def below(length: int) -> Any:
    return jnp.tril(jnp.ones((length, length), bool))


def dense(q: Any, k: Any, v: Any, mask: Any, hidden: float = -1e30) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, hidden), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)  # sick: dense


@attends()
def well_causal(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, mask=causal(), layout="bshd")


# Scores that are stored


@attends("unfused")
def sick_written_out(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(below(q.shape[1]), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)  # sick


@attends("unfused")
def sick_library_attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)  # sick


@attends("unfused")
def sick_vmapped(q: Any, k: Any, v: Any) -> Any:
    """One head of one sequence, mapped over both, with a softmax by hand and a sink."""

    def head(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.where(below(len(q)), q @ k.T, -1e9)
        scores = jnp.concatenate([jnp.zeros((len(q), 1)), scores], axis=1)
        weights = jnp.exp(scores - scores.max(1, keepdims=True))
        return (weights / weights.sum(1, keepdims=True))[:, 1:] @ v  # sick

    return jax.vmap(jax.vmap(head, 1, 1))(q, k, v)


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
        new_out = jnp.einsum("bhqk,bkhd->bhqd", weights, v)  # sick: sick_blocks_of_documents
        out = out * scale[..., None] + new_out
        return (new, total * scale + weights.sum(-1), out), None

    first = jnp.full(shape, -1e30), jnp.zeros(shape), jnp.zeros((*shape, q.shape[-1]))
    (_, total, out), _ = lax.scan(step, first, (*cut, jnp.arange(0, q.shape[1], block)))
    return (out / total[..., None]).swapaxes(1, 2)


well_blocks = attends()(in_blocks)


# Dense masks


@attends("dense-mask")
def sick_constant_mask(q: Any, k: Any, v: Any) -> Any:
    mask = np.tril(np.ones((q.shape[1], q.shape[1]), bool))
    return dense(q, k, v, mask)  # sick


@sick("dense-mask")
def sick_mask_argument() -> JaxSubject:
    step = model(lambda q, k, v, mask: dense(q, k, v, mask))  # sick
    batch = {"tokens": tokens(), "mask": jnp.broadcast_to(below(LENGTH), (BATCH, 1, LENGTH, LENGTH))}
    return JaxSubject(step, [batch], variables(), causal=True)


@attends("dense-mask")
def sick_sorted_bias(q: Any, k: Any, v: Any) -> Any:
    """XLA does not compute a sort again inside of other loops."""
    index = jnp.arange(q.shape[1])
    bias = jnp.sort(-jnp.abs(index[:, None] - index).astype(q.dtype), axis=-1)  # sick
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + bias
    weights = jax.nn.softmax(jnp.where(below(q.shape[1]), scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


# Copies and conversions


@attends("kv-copy", kv_heads=2)
def sick_repeat(q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))  # sick
    return attention(q, k, v, mask=causal(), layout="bshd")


@attends("kv-copy", kv_heads=2)
def sick_head_map(q: Any, k: Any, v: Any) -> Any:
    heads = np.array([0, 0, 1, 1])
    k, v = k[:, :, heads], v[:, :, heads]  # sick
    return attention(q, k, v, mask=causal(), layout="bshd")


@attends("kv-copy", kv_heads=1)
def sick_broadcast(q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.broadcast_to(x, q.shape) for x in (k, v))  # sick
    return dense(q, k, v, below(q.shape[1]))


@attends(kv_heads=2)
def well_grouped(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, mask=causal(), layout="bshd")


@attends("upcast", dtype=jnp.bfloat16)
def sick_upcast(q: Any, k: Any, v: Any) -> Any:
    angle = jnp.arange(q.shape[1], dtype=jnp.float32)[:, None, None]
    q, k = q * jnp.cos(angle), k * jnp.cos(angle)  # sick
    return attention(q, k, v.astype(q.dtype), mask=causal(), layout="bshd")


@attends(dtype=jnp.bfloat16)
def well_half(q: Any, k: Any, v: Any) -> Any:
    angle = jnp.arange(q.shape[1], dtype=jnp.float32)[:, None, None]
    q, k = (x * jnp.cos(angle).astype(x.dtype) for x in (q, k))
    return attention(q, k, v, mask=causal(), layout="bshd")


# Masks


@attends("leak", given=documents)
def sick_no_documents(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    return attention(q, k, v, mask=causal(), layout="bshd")  # sick


@attends("leak", given=documents)
def sick_documents_of_keys(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    """The mask compares each document with the next one as well."""
    same = jnp.abs(segment_ids[:, None, :, None] - segment_ids[:, None, None, :]) < 2
    return dense(q, k, v, same & below(q.shape[1]))  # sick


@attends("leak", given=documents)
def sick_blocks_of_documents(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    return in_blocks(q, k, v)


@attends(given=documents)
def well_documents(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    return attention(q, k, v, mask=causal() & segments(segment_ids), layout="bshd")


@attends("causality-lost")
def sick_future(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v)  # sick


@attends("causality-lost")
def sick_one_too_far(q: Any, k: Any, v: Any) -> Any:
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool), 1)
    return dense(q, k, v, mask)  # sick


@attends("mask-lost", given=padding, causal=None)
def sick_padding(q: Any, k: Any, v: Any, padding_mask: Any) -> Any:
    return dense(q, k, v, below(q.shape[1]).T)  # sick


@attends(given=padding, causal=False)
def well_padding(q: Any, k: Any, v: Any, padding_mask: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, mask=~padding_mask[:, None, None, :])


@attends("hidden-rows", causal=None)
def sick_first_row(q: Any, k: Any, v: Any) -> Any:
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool), -1)
    return dense(q, k, v, mask)  # sick


@attends("hidden-rows", causal=None)
def sick_nan_row(q: Any, k: Any, v: Any) -> Any:
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool), -1)
    return dense(q, k, v, mask, -jnp.inf)  # sick


@attends(causal=None)
def well_first_row(q: Any, k: Any, v: Any) -> Any:
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool), -1)
    return jnp.where(mask.any(1)[:, None, None], dense(q, k, v, mask.at[0, 0].set(True)), 0)


@attends("nan")
def sick_norm(q: Any, k: Any, v: Any) -> Any:
    q = q - q.mean(-1, keepdims=True) * jnp.sign(jnp.arange(q.shape[1]))[:, None, None]
    q = q.at[:, 3].set(0)
    q = q / jnp.sqrt((q * q).sum(-1, keepdims=True))  # sick
    return dense(q, k, v, below(q.shape[1]))


@attends("nan", dtype=jnp.float16)
def sick_overflow(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    weights = jnp.exp(scores * 60)  # sick
    weights = jnp.where(below(q.shape[1]), weights, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


# Gradients


@attends("nan")
def sick_gradient_of_root(q: Any, k: Any, v: Any) -> Any:
    q = q * (jnp.arange(q.shape[1]) > 0)[:, None, None]
    norm = jnp.sqrt((q * q).sum(-1, keepdims=True))  # sick
    return dense(q / jnp.where(norm > 0, norm, 1), k, v, below(q.shape[1]))


@jax.custom_vjp
def _attend(q: Any, k: Any, v: Any) -> Any:
    return dense(q, k, v, below(q.shape[1]))


def _forward(q: Any, k: Any, v: Any) -> Any:
    return _attend(q, k, v), (q, k, v)


def _backward(kept: Any, grad: Any) -> Any:  # sick: sick_backward
    q, k, v = kept
    _, pull = jax.vjp(lambda q, k, v: dense(q, k, v, below(q.shape[1])), q, k, v)
    dq, dk, dv = pull(grad)
    return dq, dk * math.sqrt(q.shape[-1]), dv


_attend.defvjp(_forward, _backward)


@attends("parity")
def sick_backward(q: Any, k: Any, v: Any) -> Any:
    return _attend(q, k, v)


@jax.custom_vjp
def _attend_well(q: Any, k: Any, v: Any) -> Any:
    return dense(q, k, v, below(q.shape[1]))


_attend_well.defvjp(
    lambda *x: (_attend_well(*x), x),
    lambda kept, grad: jax.vjp(lambda q, k, v: dense(q, k, v, below(q.shape[1])), *kept)[1](grad),
)


@attends()
def well_backward(q: Any, k: Any, v: Any) -> Any:
    return _attend_well(q, k, v)


# Compilation


def scaled(q: Any, k: Any, v: Any, scale: Any = 1.0) -> Any:
    return attention(q * scale, k, v, mask=causal(), layout="bshd")


def qkv(length: int = LENGTH) -> Any:
    x = jnp.sin(jnp.arange(BATCH * length * HEADS * SIZE)).reshape(BATCH, length, HEADS, SIZE)
    return {"q": x, "k": x, "v": x}


@sick("recompile")
def sick_lengths() -> JaxSubject:
    def step(q: Any, k: Any, v: Any) -> Any:  # sick
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    return JaxSubject(step, [qkv(x) for x in (8, 9, 10, 11)], causal=True)


@sick("recompile")
def sick_weak_type() -> JaxSubject:
    def step(q: Any, k: Any, v: Any, scale: Any) -> Any:  # sick
        return jax.nn.dot_product_attention(q * scale, k, v, is_causal=True)

    scales = (1.0, jnp.float32(2))
    return JaxSubject(jax.jit(step), [qkv() | {"scale": x} for x in scales], causal=True)


@sick("recompile")
def sick_static_number() -> JaxSubject:
    def step(q: Any, k: Any, v: Any, window: int) -> Any:  # sick
        near = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH) < window
        return dense(q, k, v, near & below(LENGTH))

    return JaxSubject(
        jax.jit(step, static_argnames="window"), [qkv() | {"window": x} for x in (3, 4, 5)], causal=True
    )


@sick("recompile")
def sick_new_function() -> JaxSubject:
    def step(q: Any, k: Any, v: Any) -> Any:
        return jax.jit(lambda q, k, v: dense(q, k, v, below(LENGTH)))(q, k, v)  # sick

    return JaxSubject(step, [qkv()], causal=True)


def well_number() -> JaxSubject:
    return JaxSubject(jax.jit(scaled), [qkv() | {"scale": x} for x in (1.0, 2.0, 3.0)], causal=True)


@sick("compile-error")
def sick_branch() -> JaxSubject:
    def step(q: Any, k: Any, v: Any) -> Any:
        if q.max() > 1e4:  # sick
            q = q / q.max()
        return dense(q, k, v, below(LENGTH))

    return JaxSubject(step, [qkv()], causal=True)


@sick("compile-error")
def sick_size_argument() -> JaxSubject:
    def step(q: Any, k: Any, v: Any, length: Any) -> Any:
        mask = jnp.tril(jnp.ones((length, length), bool))  # sick
        return dense(q, k, v, mask)

    return JaxSubject(step, [qkv() | {"length": LENGTH}], causal=True)


@sick("sync")
def sick_print() -> JaxSubject:
    def step(q: Any, k: Any, v: Any) -> Any:
        jax.debug.print("{}", q.max())  # sick
        return attention(q, k, v, mask=causal(), layout="bshd")

    return JaxSubject(step, [qkv()], causal=True)


@attends("sync")
def sick_callback(q: Any, k: Any, v: Any) -> Any:
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)
    q = jax.pure_callback(lambda x: np.asarray(x) * 2, like, q)  # sick
    return attention(q, k, v, mask=causal(), layout="bshd")


@sick("constant")
def sick_captured() -> JaxSubject:
    table = jnp.ones((4096, 128))

    def step(q: Any, k: Any, v: Any) -> Any:
        return dense(q + table.sum(0)[:SIZE], k, v, below(LENGTH))  # sick

    return JaxSubject(step, [qkv()], causal=True)


# Meshes of two devices


def mesh_of(**sizes: int) -> Any:
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def sharded(step: Any, spec: Any, given: Any = None, **options: Any) -> JaxSubject:
    batch = {"tokens": tokens()} | (given() if given else {})
    specs = {"tokens": spec, **options.pop("specs", dict.fromkeys(batch, spec))}
    return JaxSubject(step, [batch], variables(), mesh=mesh_of(cp=2), in_shardings=specs, **options)


@sick("rank-gather")
def sick_gathered() -> JaxSubject:
    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # sick
        weights = jax.nn.softmax(jnp.where(below(LENGTH), scores, -1e30))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)  # sick

    return sharded(model(attend), P(None, "cp"))


def well_sharded() -> JaxSubject:
    def attend(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
        return dense(q, k, v, same & below(LENGTH))

    return sharded(model(attend), P("cp"), documents)


@sick("rank-replicated")
def sick_constraint() -> JaxSubject:
    def attend(q: Any, k: Any, v: Any) -> Any:
        out = dense(q, k, v, below(LENGTH))
        return lax.with_sharding_constraint(out, P())  # sick

    return sharded(model(attend), P("cp"))


@sick("rank-replicated")
def sick_whole_batch() -> JaxSubject:
    def step(w: Any, tokens: Any) -> Any:
        x = w["embed"][tokens]
        q, k, v = (jnp.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv")
        out = attention(q, k, v, mask=causal(), layout="bshd", backend="xla")
        return (x + out.reshape(x.shape)) @ w["head"]  # sick

    return sharded(step, P())


def mapped(cut: Callable[[Any, Any], Any]) -> JaxSubject:
    """Each device has half of the tokens, all keys, and the ids of its tokens by ``cut``."""
    mesh = mesh_of(cp=2)

    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        x = w["embed"][tokens]

        def on_device(x: Any, ids: Any, index: Any) -> Any:
            q, k, v = (jnp.einsum("bsw,whd->bshd", x, w[n]) for n in "qkv")
            k, v = (lax.all_gather(y, "cp", axis=1, tiled=True) for y in (k, v))
            keys, every = (lax.all_gather(y, "cp", axis=-1, tiled=True) for y in (ids, index))
            own = cut(ids, keys)
            same = own[:, None, :, None] == keys[:, None, None, :]
            return dense(q, k, v, same & (index[:, None] >= every)).reshape(x.shape)

        at = jnp.arange(LENGTH)
        specs = (P(None, "cp"), P(None, "cp"), P("cp"))
        run = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(None, "cp"), check_vma=False)
        return (x + run(x, segment_ids, at)) @ w["head"]

    def one(w: Any, tokens: Any, segment_ids: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
            return dense(q, k, v, (ids[:, None, :, None] == ids[:, None, None, :]) & below(LENGTH))

        return model(attend)(w, tokens, ids=segment_ids)

    batch = {"tokens": tokens()} | documents()
    specs = dict.fromkeys(batch, P(None, "cp"))
    return JaxSubject(step, [batch], variables(), mesh=mesh, in_shardings=specs, one_device=one, causal=True)


def well_mapped() -> JaxSubject:
    return mapped(lambda ids, _: ids)


@sick("rank-rows")
def sick_ids_of_other_rows() -> JaxSubject:
    def cut(ids: Any, keys: Any) -> Any:
        start = (1 - lax.axis_index("cp")) * ids.shape[1]
        return lax.dynamic_slice_in_dim(keys, start, ids.shape[1], 1)  # sick

    return mapped(cut)


@sick("rank-rows")
def sick_ids_in_stripes() -> JaxSubject:
    return mapped(lambda _, keys: keys[:, ::2])  # sick


@sick("rank-rows")
def sick_shifted_ids() -> JaxSubject:
    """The ids come from the other device."""
    return mapped(lambda ids, _: lax.ppermute(ids, "cp", [(0, 1), (1, 0)]))  # sick
