"""Steps in JAX on two or four devices, with arrays of other devices, or copies of them. See jax_runner.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_runner import fault
from jax_samples import (
    BATCH,
    DOCUMENTS,
    HEADS,
    LENGTH,
    below,
    dense,
    model,
    plain,
    projected,
    same,
    step_of,
    subject,
    tokens,
    variables,
    written,
)

from attnspan import causal, segments
from attnspan.jax import attention
from attnspan.parallel import Layout
from attnspan_lab.doctor.jax import JaxSubject

DEVICES = 4
SPLIT, SAME = P(None, "cp"), P()


def mesh_of(**sizes: int) -> Any:
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


# Meshes that the factory returns


def sharded(step: Any, spec: Any, **options: Any) -> JaxSubject:
    specs = {"tokens": spec, "segment_ids": spec}
    batch = {"tokens": tokens(), "segment_ids": jnp.asarray(DOCUMENTS)}
    return JaxSubject(step, [batch], variables(), mesh=mesh_of(cp=2), in_shardings=specs, **options)


def of_documents(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
    return dense(q, k, v, same(segment_ids) & below(LENGTH))


def right_documents() -> JaxSubject:
    """Each device has its own batch elements."""
    return sharded(model(of_documents), P("cp"))


def right_plan() -> JaxSubject:
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
    specs = {"tokens": SPLIT, "position_index": rows["q_index"].sharding.spec}
    return JaxSubject(step, [batch], variables(), mesh=mesh, in_shardings=specs, one_device=one, causal=False)


@fault("rank-gather", "", "shard heads or batch elements instead of the sequence", "mask=plan.on(mesh, ...)")
def keys_gathered_for_sharded_queries(well: int) -> JaxSubject:
    def attend(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # sick
        weights = jax.nn.softmax(jnp.where(same(segment_ids) & below(LENGTH), scores, -1e30))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)  # sick

    return (lambda: sharded(model(attend), SPLIT), right_documents, right_plan)[well]()


@fault("rank-replicated", "", "remove the constraint")
def results_on_each_device(well: int) -> JaxSubject:
    def attend(q: Any, k: Any, v: Any, segment_ids: Any) -> Any:
        out = of_documents(q, k, v, segment_ids)
        return out if well else with_sharding_constraint(out, P())  # sick

    return sharded(model(attend), P("cp"))


@fault("rank-replicated", "", "Shard the batch")
def batch_on_each_device(well: int) -> JaxSubject:
    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        x = w["embed"][tokens]
        mask = causal() & segments(segment_ids)
        out = attention(*projected(w, x), mask=mask, layout="bshd", backend="xla")
        return (x + out.reshape(x.shape)) @ w["head"]  # sick

    return sharded(step, P("cp") if well else P())


def cut_ids(cut: Callable[[Any, Any], Any]) -> JaxSubject:
    """Each device has half of the tokens, all keys, and the ids of its tokens by ``cut``."""
    mesh = mesh_of(cp=2)

    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        x = w["embed"][tokens]

        def on_device(x: Any, ids: Any, index: Any) -> Any:
            q, k, v = projected(w, x)
            k, v = (lax.all_gather(y, "cp", axis=1, tiled=True) for y in (k, v))
            keys, every = (lax.all_gather(y, "cp", axis=-1, tiled=True) for y in (ids, index))
            near = cut(ids, keys)[:, None, :, None] == keys[:, None, None, :]
            return dense(q, k, v, near & (index[:, None] >= every)).reshape(x.shape)

        specs = (SPLIT, SPLIT, P("cp"))
        run = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=SPLIT, check_vma=False)
        return (x + run(x, segment_ids, jnp.arange(LENGTH))) @ w["head"]

    return sharded(step, SPLIT, one_device=model(of_documents), causal=True)


@fault("rank-rows", stage="parity")
def ids_of_other_rows(well: int) -> JaxSubject:
    def cut(ids: Any, keys: Any) -> Any:
        start = (1 - lax.axis_index("cp")) * ids.shape[1]
        return ids if well else lax.dynamic_slice_in_dim(keys, start, ids.shape[1], 1)  # sick

    return cut_ids(cut)


@fault("rank-rows", applied=False)
def ids_in_stripes(well: int) -> JaxSubject:
    return cut_ids(lambda _, keys: keys[:, ::2])  # sick


@fault("rank-rows", applied=False)
def ids_of_the_other_device(well: int) -> JaxSubject:
    return cut_ids(lambda ids, _: lax.ppermute(ids, "cp", [(0, 1), (1, 0)]))  # sick


# Steps with their own shard_map, and no version for one device

DIFFER = ("results differ from one device by",)


def spread(attend: Callable[..., Any], keys: Any = SPLIT, out: Any = SPLIT, **more: Any) -> JaxSubject:
    """A model whose attention runs on each device, with its part of the tokens or of the keys."""
    mesh = mesh_of(cp=DEVICES)

    @jax.jit
    def step(w: Any, tokens: Any, **given: Any) -> Any:
        def run(*own: Any) -> Any:
            specs = (out, keys, keys, *[SPLIT] * (len(own) - 3))
            on_devices = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
            return on_devices(*own)  # sick: shard_map

        return model(lambda q, k, v: run(q, k, v, *given.values()))(w, tokens)

    return subject(step, not more and out == SPLIT, **more)


def gathered(positions: Callable[[Any], Any], of_keys: Callable[[Any], Any] | None = None) -> JaxSubject:
    """Each device gathers all keys, and has its own queries."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        k, v = (lax.all_gather(x, "cp", axis=1, tiled=True) for x in (k, v))
        mask = positions(q)[:, None] >= (of_keys(q) if of_keys else jnp.arange(k.shape[1]))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)

    return spread(attend)


ALL = 'jax.lax.axis_index("cp") * n + jnp.arange(n)'


def positions_of_all(q: Any) -> Any:
    return lax.axis_index("cp") * q.shape[1] + jnp.arange(q.shape[1])


@fault("rank-rows", "", ALL, evidence=DIFFER, tried="are equal")
def positions_of_one_device(well: int) -> JaxSubject:
    return gathered(positions_of_all if well else lambda q: jnp.arange(q.shape[1]))  # sick


LATER = (*DIFFER, "rows of results of others")


@fault("rank-rows", "", "axis_index", at="shard_map", evidence=LATER, applied=False)
def wrong_offsets(well: int) -> JaxSubject:
    """Each device counts its offset in lengths of the whole sequence."""
    return gathered(lambda q: lax.axis_index("cp") * LENGTH + jnp.arange(q.shape[1]))


def right_zigzag() -> JaxSubject:
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
        return plain(q, k, v) * jax.random.bernoulli(key, 0.9, q.shape)

    return spread(attend)


def ring(send_ids: bool, perm: Any = None) -> JaxSubject:
    """Keys and values go from device to device. The documents are hidden from each other."""
    ids = jnp.asarray([[0] * 9 + [1] * 15, [0] * 14 + [1] * 10])

    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        n = lax.axis_size("cp")
        to = perm or [(i, (i + 1) % n) for i in range(n)]

        def step(state: Any, _: Any) -> Any:
            k, v, of_keys, total, top = state
            near = ids[:, None, :, None] == (of_keys if send_ids else ids)[:, None, None, :]  # sick: ring
            weights = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 3) * near
            total, top = total + weights.sum(-1), top + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
            return (*(lax.ppermute(x, "cp", to) for x in (k, v, of_keys)), total, top), None

        zero = jnp.zeros_like(q.swapaxes(1, 2))
        (*_, total, top), _ = lax.scan(step, (k, v, ids, zero[..., 0], zero), None, length=n)
        return (top / total[..., None]).swapaxes(1, 2)

    return spread(attend, segment_ids=ids)


@fault("rank-rows", "", "Send the ids of the keys with the keys", at="ring", evidence=DIFFER)
def ids_that_stay(well: int) -> JaxSubject:
    return ring(send_ids=bool(well))


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

    return spread(attend, out=SAME)


def largest(x: Any) -> Any:
    return lax.pmax(x, "cp")


@fault("rank-rows", "", 'm = jax.lax.pmax(m_here, "cp")', evidence=DIFFER)
def maximum_of_own_keys(well: int) -> JaxSubject:
    return split_keys(largest if well else lambda x: x, lambda x: lax.psum(x, "cp"))  # sick


@fault("rank-rows", "", 'jax.lax.psum(x, "cp")', at="shard_map", evidence=DIFFER, applied=False)
def sum_of_own_keys(well: int) -> JaxSubject:
    return split_keys(largest, lambda x: x)


def mean_over(count: Callable[[Any], Any]) -> JaxSubject:
    """All devices compute the same attention, and take the mean."""
    mesh = mesh_of(cp=DEVICES)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return lax.psum(plain(q, k, v, is_causal=True), "cp") / count(mesh)

    return spread(attend, keys=SAME, out=SAME)


def right_mean_over_four() -> JaxSubject:
    return mean_over(lambda _: 4)


def right_mean_over_the_mesh() -> JaxSubject:
    return mean_over(lambda mesh: mesh.shape["cp"] * mesh.size / mesh.devices.size)


# Steps that place arrays on their own mesh, and return no mesh


def on(mesh: Any, x: Any, *axes: Any) -> Any:
    return with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


@fault("rank-replicated", "", "P('data', None, 'model', None)")
def keys_and_values_of_all_heads(well: int, kv_heads: int = HEADS) -> JaxSubject:
    """A helper makes the constraints, in layers that run in a loop."""
    mesh, spec = mesh_of(data=2, model=2), ("data", None, "model" if well else None, None)
    w = variables(kv_heads, layers=2)
    split = P(None, None, "model")
    of_heads = {"q": split} | dict.fromkeys("kv", split if kv_heads > 1 else P())
    w |= {k: jax.device_put(w[k], NamedSharding(mesh, of_heads[k])) for k in "qkv"}

    @jax.checkpoint
    def layer(x: Any, own: Any) -> Any:
        q, k, v = projected(own, x)
        q = on(mesh, q, "data", None, "model", None)
        k = on(mesh, k, *spec)  # sick
        v = on(mesh, v, *spec)  # sick
        return x + plain(q, k, v, is_causal=True).reshape(x.shape), None

    @jax.jit
    def step(w: Any, tokens: Any) -> Any:
        x = on(mesh, w["embed"][tokens], "data", None, None)
        x, _ = jax.lax.scan(layer, x, {n: w[n] for n in "qkv"})
        return x @ w["head"]

    return subject(step, w=w)


def right_one_head_of_keys() -> JaxSubject:
    """A single head of keys cannot be split."""
    return keys_and_values_of_all_heads(0, kv_heads=1)


@fault("rank-replicated")
def values_of_all_samples(well: int) -> JaxSubject:
    """The constraint is written where attention is called."""
    mesh = mesh_of(data=2)

    def attend(q: Any, k: Any, v: Any) -> Any:
        q, k = (with_sharding_constraint(x, NamedSharding(mesh, P("data"))) for x in (q, k))
        v = with_sharding_constraint(v, NamedSharding(mesh, P("data") if well else P()))  # sick
        return plain(q, k, v, is_causal=True)

    return step_of(attend)


def attend_to_all(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)  # sick: all
    weights = jax.nn.softmax(jnp.where(jnp.tri(LENGTH, dtype=bool), scores, -1e30))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)  # sick: all


@fault("rank-gather", at="all")
def tokens_split_along_the_sequence(well: int) -> JaxSubject:
    """Only the batch is on the mesh."""
    spec = P("data") if well else P(None, "data")
    placed = jax.device_put(tokens(), NamedSharding(mesh_of(data=2), spec))
    return subject(jax.jit(model(attend_to_all)), tokens=placed)


@fault("rank-gather", at="all", applied=False)
def shardings_of_the_jitted_function(well: int) -> JaxSubject:
    """The jitted function asks for tokens that are split along the sequence."""
    mesh = mesh_of(data=2)
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    step = jax.jit(model(attend_to_all), in_shardings=shardings)
    return JaxSubject(lambda w, tokens: step(w, tokens), [(tokens(),)], variables(), causal=True)


def right_weights_split_over_the_samples() -> JaxSubject:
    """Each device gathers the weights of a layer when it needs them, and has its own samples."""
    mesh, w = mesh_of(data=2), variables(layers=2)
    w |= {k: jax.device_put(w[k], NamedSharding(mesh, P(None, "data"))) for k in "qkv"}

    def layer(x: Any, own: Any) -> Any:
        q, k, v = (on(mesh, y, "data") for y in projected(own, x))
        return on(mesh, x + plain(q, k, v, is_causal=True).reshape(x.shape), "data"), None

    @jax.jit
    def step(w: Any, tokens: Any) -> Any:
        x = on(mesh, w["embed"][tokens], "data")
        return jax.lax.scan(layer, x, {n: w[n] for n in "qkv"})[0] @ w["head"]

    return subject(step, w=w)


# Steps for single tests


def difference_of_the_mesh(name: str) -> JaxSubject:
    """A step with NaN in its results, in bfloat16, or with a sum that counts twice."""

    def step(w: Any, tokens: Any, segment_ids: Any) -> Any:
        w = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w) if name == "bfloat16" else w
        out = model(written)(w, tokens)
        # Each device rounds its part of the sum.
        out = jax.lax.reduce(out, jnp.bfloat16(0), jax.lax.add, (0, 1)) if name == "bfloat16" else out
        return out * jnp.float32("nan") if name == "nan" else out

    def twice(w: Any, **given: Any) -> Any:
        mesh = mesh_of(cp=2)
        add = jax.shard_map(lambda x: jax.lax.psum(x, "cp"), mesh=mesh, in_specs=P(), out_specs=P())
        return add(step(w, **given))

    return sharded(twice, SPLIT, one_device=step) if name == "sum" else sharded(step, SPLIT)
