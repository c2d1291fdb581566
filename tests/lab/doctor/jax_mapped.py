"""Steps with their own shard_map, and no version for one device. A sick line ends in ``# sick``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax_patients import LENGTH, mesh_of, model, tokens, variables

from attnspan_lab.doctor.jax import JaxSubject

DEVICES = 4
SPLIT, SAME = P(None, "cp"), P()


def spread(attend: Callable[..., Any], keys: Any = SPLIT, out: Any = SPLIT, **more: Any) -> JaxSubject:
    """A model whose attention runs on each device, with its part of the tokens or of the keys."""
    mesh = mesh_of(cp=DEVICES)

    @jax.jit
    def step(w: Any, tokens: Any, **given: Any) -> Any:
        def run(*own: Any) -> Any:
            specs = (out, keys, keys, *[SPLIT] * (len(own) - 3))
            on_devices = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
            return on_devices(*own)  # map

        return model(lambda q, k, v: run(q, k, v, *given.values()))(w, tokens)

    batch = {"tokens": tokens()} | more
    return JaxSubject(step, [batch], variables(), causal=not more)


def gathered(positions: Callable[[Any], Any], of_keys: Callable[[Any], Any] | None = None) -> JaxSubject:
    """Each device gathers all keys, and has its own queries."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = (lax.all_gather(x, "cp", axis=1, tiled=True) for x in (k, v))
        mask = positions(q)[:, None] >= (of_keys(q) if of_keys else jnp.arange(k.shape[1]))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)

    return spread(attend)


def positions_of_one_device() -> JaxSubject:
    return gathered(lambda q: jnp.arange(q.shape[1]))  # sick


def positions_of_all() -> JaxSubject:
    return gathered(lambda q: lax.axis_index("cp") * q.shape[1] + jnp.arange(q.shape[1]))


def zigzag() -> JaxSubject:
    """The batch has its tokens in an order that balances the devices. The step has no other order."""

    def positions(q: Any) -> Any:
        n, own = lax.axis_size("cp"), q.shape[1] // 2
        first = lax.axis_index("cp") * own
        return jnp.concatenate([first + jnp.arange(own), (2 * n - 1) * own - first + jnp.arange(own)])

    return gathered(positions, lambda q: lax.all_gather(positions(q), "cp", axis=0, tiled=True))


def random_bits() -> JaxSubject:
    """Each device has its own random numbers."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index("cp"))
        return jax.nn.dot_product_attention(q, k, v) * jax.random.bernoulli(key, 0.9, q.shape)

    return spread(attend)


def wrong_offsets() -> JaxSubject:
    """Each device counts its offset in lengths of the whole sequence."""
    return gathered(lambda q: lax.axis_index("cp") * LENGTH + jnp.arange(q.shape[1]))


def ring(send_ids: bool, perm: Any = None) -> JaxSubject:
    """Keys and values go from device to device. The documents are hidden from each other."""
    ids = jnp.asarray([[0] * 9 + [1] * 15, [0] * 14 + [1] * 10])

    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        n = lax.axis_size("cp")
        to = perm or [(i, (i + 1) % n) for i in range(n)]

        def step(state: Any, _: Any) -> Any:
            k, v, of_keys, total, top = state
            same = ids[:, None, :, None] == (of_keys if send_ids else ids)[:, None, None, :]  # sick
            weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3) * same
            total, top = total + weights.sum(-1), top + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
            return (*(lax.ppermute(x, "cp", to) for x in (k, v, of_keys)), total, top), None

        zero = jnp.zeros_like(q.swapaxes(1, 2))
        (*_, total, top), _ = lax.scan(step, (k, v, ids, zero[..., 0], zero), None, length=n)
        return (top / total[..., None]).swapaxes(1, 2)

    return spread(attend, segment_ids=ids)


def ids_that_stay() -> JaxSubject:
    return ring(send_ids=False)


def ids_that_travel() -> JaxSubject:
    return ring(send_ids=True)


def ring_of_four() -> JaxSubject:
    """The ring names its devices by numbers."""
    return ring(send_ids=True, perm=[(0, 1), (1, 2), (2, 3), (3, 0)])


def split_keys(maximum: Callable[[Any], Any], add: Callable[[Any], Any]) -> JaxSubject:
    """Each device has all queries and a part of the keys."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        weights = jnp.exp(scores - maximum(scores.max(-1, keepdims=True)))
        top, total = add(jnp.einsum("bhqk,bkhd->bhqd", weights, v)), add(weights.sum(-1, keepdims=True))
        return (top / total).swapaxes(1, 2)

    subject = spread(attend, out=SAME)
    subject.causal = False
    return subject


def own_maximum() -> JaxSubject:
    return split_keys(lambda x: x, lambda x: lax.psum(x, "cp"))  # sick


def one_maximum() -> JaxSubject:
    return split_keys(lambda x: lax.pmax(x, "cp"), lambda x: lax.psum(x, "cp"))


def forgotten_sum() -> JaxSubject:
    return split_keys(lambda x: lax.pmax(x, "cp"), lambda x: x)


def mean_over(count: Callable[[Any], Any]) -> JaxSubject:
    """All devices compute the same attention, and take the mean."""
    mesh = mesh_of(cp=DEVICES)

    def attend(q: Any, k: Any, v: Any) -> Any:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return lax.psum(out, "cp") / count(mesh)

    return spread(attend, keys=SAME, out=SAME)


def mean_over_four() -> JaxSubject:
    return mean_over(lambda _: 4)


def mean_over_the_mesh() -> JaxSubject:
    return mean_over(lambda mesh: mesh.shape["cp"] * mesh.size / mesh.devices.size)
