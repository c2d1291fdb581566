"""What test_partitioning.py asks of a process with four virtual devices: a JSON object on standard output."""

import functools
import json
import os
import sys

if __name__ == "__main__":  # Not where tests are collected: their process has one device.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnspan import alibi, causal, relative, segments
from attnspan.jax import attention

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 4, 8, 4, 32, 16
SPECS = {"batch x heads": P("x", "y"), "batch": P(("x", "y")), "heads": P(None, "y")}
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def inputs():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype("float32")

    kv = (BATCH, KV_HEADS, LENGTH, DIM)
    return {
        "q": normal(BATCH, HEADS, LENGTH, DIM),
        "k": normal(*kv),
        "v": normal(*kv),
        "slopes": normal(HEADS) ** 2,
        "table": normal(HEADS, 2 * LENGTH + 1),
        "dense": normal(1, 1, LENGTH, LENGTH),
        "sinks": normal(HEADS),
    }, np.sort(rng.integers(0, 3, (BATCH, LENGTH)))


def loss(x, ids, option, layout, backend):
    biases = {
        "alibi": lambda: alibi(x["slopes"]),
        "table": lambda: relative(x["table"]),
        "dense": lambda: x["dense"],
    }
    bias = next((make() for name, make in biases.items() if name in option), None)
    q, k, v = (x[n].swapaxes(1, 2) if layout == "bshd" else x[n] for n in "qkv")
    out, lse = attention(
        *(q, k, v),
        mask=causal() & segments(ids),
        bias=bias,
        sinks=x["sinks"] if "sinks" in option else None,
        dropout_p=0.1 if "dropout" in option else 0.0,
        dropout_seed=jnp.array(7) if "dropout" in option else None,
        layout=layout,
        return_lse=True,
        backend=backend,
    )
    return (out**2).sum() + lse.sum()


def difference(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


@functools.cache
def of_one_device(option, layout="bhsd"):
    """Values and gradients of one device, by the backend that is chosen there."""
    arrays, ids = inputs()
    return jax.jit(jax.value_and_grad(lambda x, ids: loss(x, ids, option, layout, None)))(arrays, ids)


def compare(axis_type, spec, option, layout="bhsd", backend=None):
    """The largest norm-wise difference to one device, the collectives, and where dq lies."""
    arrays, ids = inputs()
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    run = jax.value_and_grad(lambda x, ids: loss(x, ids, option, layout, backend))
    want = of_one_device(option)
    with jax.set_mesh(mesh):
        put = {
            n: jax.device_put(x, NamedSharding(mesh, spec)) if n in "qkv" else x for n, x in arrays.items()
        }
        compiled = jax.jit(run).lower(put, jax.device_put(ids, NamedSharding(mesh, P(spec[0])))).compile()
        got = compiled(put, jax.device_put(ids, NamedSharding(mesh, P(spec[0]))))
    text = compiled.as_text()
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return {
        "difference": max(difference(a, b) for a, b in pairs),
        "gathers": text.count(" all-gather("),
        "exchanges": text.count(" all-to-all(") + text.count(" collective-permute("),
        "dq": str(got[1]["q"].sharding.shard_shape(got[1]["q"].shape)),
    }


def refusal(axis_type, jit, axis):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    spec = [None] * 4
    spec[axis] = "x"
    x = jax.device_put(np.ones((4, 4, 32, 8), "float32"), NamedSharding(mesh, P(*spec)))
    run = jax.jit(lambda x: attention(x, x, x)) if jit else lambda x: attention(x, x, x)
    try:
        run(x).block_until_ready()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def inside_shard_map(backend):
    """A step of data parallelism: gradients of arrays, and of parameters that all devices share."""
    arrays, ids = inputs()
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    own = {n: arrays[n] for n in ("q", "k", "v", "slopes", "sinks")}
    run = functools.partial(loss, option="alibi, sinks", layout="bhsd", backend=backend)
    specs = {n: P("x") if n in "qkv" else P() for n in own}
    parts = jax.shard_map(
        lambda x, ids: jax.lax.psum(run(x, ids), "x"), mesh=mesh, in_specs=(specs, P("x")), out_specs=P()
    )
    got, want = jax.jit(jax.value_and_grad(parts))(own, ids), of_one_device("alibi, sinks")
    want = want[0], {n: want[1][n] for n in own}
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(difference(a, b) for a, b in pairs)


def one_key_head(spec):
    """The same as `compare`, where all query heads share a key head."""
    arrays, ids = inputs()
    arrays = {n: x[:, :1] if n in "kv" else x for n, x in arrays.items()}
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    run = jax.value_and_grad(lambda x, ids: loss(x, ids, "sinks", "bhsd", None))
    want = jax.jit(run)(arrays, ids)
    put = {**arrays, "q": jax.device_put(arrays["q"], NamedSharding(mesh, spec))}
    rest = NamedSharding(mesh, P(spec[0]))
    put |= {n: jax.device_put(arrays[n], rest) for n in "kv"}
    got = jax.jit(run)(put, ids)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(difference(a, b) for a, b in pairs)


def unfit(k_spec, devices=(2, 2)):
    """What is said of key heads that the mesh does not divide, or of one axis for two uses."""
    arrays, _ = inputs()
    mesh = jax.make_mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    q = jax.device_put(arrays["q"], NamedSharding(mesh, P("x") if k_spec else P(None, ("x", "y"))))
    k = arrays["k"] if k_spec else arrays["k"][:, :2]
    k = jax.device_put(k, NamedSharding(mesh, k_spec or P()))
    try:
        jax.jit(attention)(q, k, k).block_until_ready()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def some_axes(axis_type):
    """What is said inside of a shard_map over one of two axes, where the other splits heads."""
    arrays, _ = inputs()
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    q, k, v = (jax.device_put(arrays[n], NamedSharding(mesh, P("x", "y"))) for n in "qkv")
    with jax.set_mesh(mesh):
        how = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}
        try:
            jax.jit(jax.shard_map(attention, **how))(q, k, v).block_until_ready()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "not refused"


def split_ids():
    """Ids that lie elsewhere than the rows of q: they are brought, q is not."""
    arrays, ids = inputs()
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    q, k, v = (jax.device_put(arrays[n], NamedSharding(mesh, P("x"))) for n in "qkv")
    there = jax.device_put(ids, NamedSharding(mesh, P("x", "y")))

    def run(ids, *qkv):
        return attention(*qkv, mask=causal() & segments(ids))

    return difference(jax.jit(run)(there, q, k, v), run(ids, arrays["q"], arrays["k"], arrays["v"]))


def mapped():
    """The gathers of a vmap whose inner batch is spread."""
    arrays, _ = inputs()
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(None, "x", "y"))
    q, k, v = (jax.device_put(np.stack([arrays[n]] * 3), sharding) for n in "qkv")
    compiled = jax.jit(jax.vmap(lambda q, k, v: attention(q, k, v, mask=causal()))).lower(q, k, v).compile()
    alone = attention(arrays["q"], arrays["k"], arrays["v"], mask=causal())
    return compiled.as_text().count(" all-gather("), difference(compiled(q, k, v)[2], alone)


def mixed_devices():
    a, b = (jax.device_put(jnp.ones((1, 1, 4, 8)), device) for device in jax.devices()[:2])
    try:
        attention(a, b, b)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def main():
    cases = [
        (AxisType.Explicit, "batch x heads", "alibi, sinks", "bshd", None),
        (AxisType.Auto, "batch", "alibi, sinks", "bhsd", None),
        (AxisType.Auto, "heads", "dense, dropout", "bhsd", None),
        (AxisType.Auto, "batch x heads", "table, sinks", "bhsd", "xla"),
        (AxisType.Auto, "batch x heads", "none", "bshd", None),
        (AxisType.Explicit, "batch x heads", "none", "bshd", None),
        (AxisType.Auto, "heads", "alibi, sinks", "bhsd", None),
        (AxisType.Auto, "batch x heads", "table, sinks", "bhsd", None),
    ]
    cases = cases if sys.argv[1] == "all" else cases[:4]
    compared = {
        f"{axes.name.lower()}, {spec}, {option}, {layout}, {backend}": compare(
            axes, SPECS[spec], option, layout, backend
        )
        for axes, spec, option, layout, backend in cases
    }
    refused = {
        f"{axes}, {'jit' if jit else 'eager'}, axis {axis}": refusal(AXES[axes], jit, axis)
        for axes in AXES
        for jit in (True, False)
        for axis in (2, 3)
    }
    found = {
        "compared": compared,
        "refused": refused,
        "mixed": mixed_devices(),
        "shard_map": {backend: inside_shard_map(backend) for backend in ("cpu", "xla", "math")},
        "one key head": {name: one_key_head(SPECS[name]) for name in ("batch x heads", "heads")},
        "key heads": unfit(None),
        "one axis twice": unfit(P(None, "x")),
        "some axes": [some_axes(kind) for kind in AXES.values()],
        "split ids": split_ids(),
        "mapped": mapped(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
