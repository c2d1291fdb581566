"""Steps that place arrays on their own mesh, and return no mesh. A sick line ends in ``# sick``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import with_sharding_constraint
from jax.nn import dot_product_attention
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_patients import LENGTH, mesh_of, model, tokens, variables

from attnspan_lab.doctor.jax import JaxSubject


def on(mesh: Any, x: Any, *axes: Any) -> Any:
    return with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


def keys_and_values_of_all_heads(*spec: Any, kv_heads: int = 4) -> JaxSubject:
    """A helper makes the constraints, in layers that run in a loop."""
    mesh, spec = mesh_of(data=2, model=2), spec or ("data", None, None, None)
    w = variables(kv_heads)
    split = P(None, None, "model")
    heads = {"q": split} | dict.fromkeys("kv", split if kv_heads > 1 else P())
    w |= {k: jax.device_put(jnp.stack([w[k], w[k]]), NamedSharding(mesh, heads[k])) for k in "qkv"}

    @jax.checkpoint
    def layer(x: Any, own: Any) -> Any:
        q = on(mesh, jnp.einsum("bsw,whd->bshd", x, own["q"]), "data", None, "model", None)
        k = on(mesh, jnp.einsum("bsw,whd->bshd", x, own["k"]), *spec)  # sick
        v = on(mesh, jnp.einsum("bsw,whd->bshd", x, own["v"]), *spec)  # sick
        return x + dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), None

    @jax.jit
    def step(w: Any, tokens: Any) -> Any:
        x = on(mesh, w["embed"][tokens], "data", None, None)
        x, _ = jax.lax.scan(layer, x, {n: w[n] for n in "qkv"})
        return x @ w["head"]

    return JaxSubject(step, [{"tokens": tokens()}], w, causal=True)


def split_keys_and_values() -> JaxSubject:
    return keys_and_values_of_all_heads("data", None, "model", None)


def one_head_of_keys() -> JaxSubject:
    """A single head of keys cannot be split."""
    return keys_and_values_of_all_heads(kv_heads=1)


def values_of_all_samples() -> JaxSubject:
    """The constraint is written where attention is called."""
    mesh = mesh_of(data=2)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k = (with_sharding_constraint(x, NamedSharding(mesh, P("data"))) for x in (q, k))
        v = with_sharding_constraint(v, NamedSharding(mesh, P()))  # sick
        return dot_product_attention(q, k, v, is_causal=True)

    return JaxSubject(model(attend), [{"tokens": tokens()}], variables(), causal=True)


def tokens_split_along_the_sequence() -> JaxSubject:
    """Only the batch is on the mesh."""
    placed = jax.device_put(tokens(), NamedSharding(mesh_of(data=2), P(None, "data")))

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # sick
        weights = jax.nn.softmax(jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -1e30))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)  # sick

    return JaxSubject(jax.jit(model(attend)), [{"tokens": placed}], variables(), causal=True)


def jitted_with_shardings() -> JaxSubject:
    """The jitted function asks for tokens that are split along the sequence."""
    mesh, subject = mesh_of(data=2), tokens_split_along_the_sequence()
    given = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    step = jax.jit(lambda w, tokens: subject.fn(w, tokens), in_shardings=given)
    return JaxSubject(step, [(tokens(),)], variables(), causal=True)


def samples_on_two_devices() -> JaxSubject:
    placed = jax.device_put(tokens(), NamedSharding(mesh_of(data=2), P("data")))
    step = model(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True))
    return JaxSubject(jax.jit(step), [{"tokens": placed}], variables(), causal=True)


def weights_split_over_the_samples() -> JaxSubject:
    """Each device gathers the weights of a layer when it needs them, and has its own samples."""
    mesh, w = mesh_of(data=2), variables()
    w |= {k: jax.device_put(jnp.stack([w[k], w[k]]), NamedSharding(mesh, P(None, "data"))) for k in "qkv"}

    def layer(x: Any, own: Any) -> Any:
        q, k, v = (on(mesh, jnp.einsum("bsw,whd->bshd", x, own[n]), "data") for n in "qkv")
        return on(mesh, x + dot_product_attention(q, k, v, is_causal=True).reshape(x.shape), "data"), None

    @jax.jit
    def step(w: Any, tokens: Any) -> Any:
        x = on(mesh, w["embed"][tokens], "data")
        return jax.lax.scan(layer, x, {n: w[n] for n in "qkv"})[0] @ w["head"]

    return JaxSubject(step, [{"tokens": tokens()}], w, causal=True)
