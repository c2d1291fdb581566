"""Arrays sharded under jit: computed where they are by batch row and head, refused by name otherwise."""

import functools

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from virtual_devices import on_devices

from attnspan import alibi, causal, relative, segments
from attnspan.errors import DeviceError
from attnspan.jax import attention

pytestmark = pytest.mark.slow

BATCH, HEADS, KV_HEADS, LENGTH, DIM = 4, 8, 4, 32, 16
SPECS = {"batch x heads": P("x", "y"), "batch": P(("x", "y")), "heads": P(None, "y")}
PARTS = {"batch x heads": (2, 4, 32, 16), "batch": (1, 8, 32, 16), "heads": (4, 4, 32, 16)}
#: Norm of a difference over the norm of the result.
ALIKE = 2e-6


def mesh_of(axes="Auto", devices=(2, 2)):
    return jax.make_mesh(devices, ("x", "y"), axis_types=(AxisType[axes],) * 2)


def put(mesh, spec, *arrays):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]


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


def check(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        alike = ALIKE if a.ndim else 5 * ALIKE  # the loss: XLA adds its floats in an order of its own
        assert np.linalg.norm(a - b) < alike * max(np.linalg.norm(b), 1e-30)


@functools.cache
def of_one_device(option, layout="bhsd"):
    """Values and gradients of one device, by the backend that is chosen there."""
    arrays, ids = inputs()
    return jax.jit(jax.value_and_grad(lambda x, ids: loss(x, ids, option, layout, None)))(arrays, ids)


def compare(axes, spec, option, layout="bhsd", backend=None):
    """Values and gradients are those of one device, nothing is gathered, and dq lies where q does."""
    arrays, ids = inputs()
    mesh, where = mesh_of(axes), SPECS[spec]
    run = jax.value_and_grad(lambda x, ids: loss(x, ids, option, layout, backend))
    with jax.set_mesh(mesh):
        placed = {n: put(mesh, where, x)[0] if n in "qkv" else x for n, x in arrays.items()}
        (ids,) = put(mesh, P(where[0]), ids)
        compiled = jax.jit(run).lower(placed, ids).compile()
        got = compiled(placed, ids)
    check(got, of_one_device(option))
    text, dq = compiled.as_text(), got[1]["q"]
    # On explicit meshes a gradient of slopes goes back to where the slopes were: a number for each head.
    assert text.count(" all-gather(") <= (axes == "Explicit" and "alibi" in option)
    assert " all-to-all(" not in text
    assert " collective-permute(" not in text
    assert dq.sharding.shard_shape(dq.shape) == PARTS[spec]


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "case",
    [
        ("Explicit", "batch x heads", "alibi, sinks", "bshd"),
        ("Auto", "batch", "alibi, sinks"),
        ("Auto", "heads", "dense, dropout"),
        long(("Auto", "batch x heads", "table, sinks", "bhsd", "xla")),
        long(("Auto", "batch x heads", "none", "bshd")),
        long(("Explicit", "batch x heads", "none", "bshd")),
        long(("Auto", "heads", "alibi, sinks")),
        long(("Auto", "batch x heads", "table, sinks")),
    ],
    ids=", ".join,
)
@on_devices
def test_equal_to_one_device_where_arrays_lie(case):
    compare(*case)


@pytest.mark.covering(1)
@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
@on_devices
def test_what_needs_keys_of_other_devices_is_refused(axes, jit, axis):
    spec = [None] * 4
    spec[axis] = "x"
    (x,) = put(mesh_of(axes), P(*spec), np.ones((4, 4, 32, 8), "float32"))
    run = jax.jit(lambda x: attention(x, x, x)) if jit else lambda x: attention(x, x, x)
    with pytest.raises(
        Exception, match=rf"got axis {axis} over 'x'.*layout.plan\(\.\.\.\).on\(mesh, rows=rows, sequence="
    ):
        run(x).block_until_ready()


@pytest.mark.parametrize("backend", ["cpu", long("xla"), long("math")])
@on_devices
def test_inside_shard_map_gradients_of_shared_parameters_are_summed(backend):
    # A step of data parallelism: gradients of arrays, and of parameters that all devices share.
    arrays, ids = inputs()
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    own = {n: arrays[n] for n in ("q", "k", "v", "slopes", "sinks")}
    run = functools.partial(loss, option="alibi, sinks", layout="bhsd", backend=backend)
    specs = {n: P("x") if n in "qkv" else P() for n in own}
    parts = jax.shard_map(
        lambda x, ids: jax.lax.psum(run(x, ids), "x"), mesh=mesh, in_specs=(specs, P("x")), out_specs=P()
    )
    value, gradients = of_one_device("alibi, sinks")
    check(jax.jit(jax.value_and_grad(parts))(own, ids), (value, {n: gradients[n] for n in own}))


@pytest.mark.parametrize("spec", ["batch x heads", long("heads")])
@on_devices
def test_one_key_head_is_of_every_device(spec):
    arrays, ids = inputs()
    arrays = {n: x[:, :1] if n in "kv" else x for n, x in arrays.items()}
    run = jax.jit(jax.value_and_grad(lambda x, ids: loss(x, ids, "sinks", "bhsd", None)))
    mesh, where = mesh_of(), SPECS[spec]
    (q,), (k, v) = put(mesh, where, arrays["q"]), put(mesh, P(where[0]), arrays["k"], arrays["v"])
    check(run({**arrays, "q": q, "k": k, "v": v}, ids), run(arrays, ids))


@pytest.mark.parametrize("axes", ["Auto", "Explicit"])
@on_devices
def test_a_shard_map_over_some_axes_is_refused_where_others_split_heads(axes):
    arrays, _ = inputs()
    mesh = mesh_of(axes)
    with jax.set_mesh(mesh):
        how = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x"), "axis_names": {"x"}}
        run = jax.jit(jax.shard_map(attention, **how))
        with pytest.raises(
            Exception, match=r"pass mask=attnspan.jax.shard\(mesh, mask=\.\.\., heads=\.\.\.\)"
        ):
            run(*put(mesh, P("x", "y"), *(arrays[n] for n in "qkv"))).block_until_ready()


@on_devices
def test_key_heads_that_the_mesh_does_not_divide_and_one_axis_for_two_uses_are_refused():
    q, k, _, *_ = inputs()[0].values()
    heads = put(mesh_of(), P(None, ("x", "y")), q) + put(mesh_of(), P(), k[:, :2])
    twice = put(mesh_of(), P("x"), q) + put(mesh_of(), P(None, "x"), k)
    for (q, k), text in (
        (heads, r"expected parts that divide the 2 key heads, got 4 parts.*attnspan.jax.shard\(mesh, heads="),
        (twice, "expected batch and heads over different mesh axes, got both over 'x'"),
    ):
        with pytest.raises(Exception, match=text):
            jax.jit(attention)(q, k, k).block_until_ready()


@on_devices
def test_arrays_on_two_devices_are_refused():
    a, b = (jax.device_put(jnp.ones((1, 1, 4, 8)), device) for device in jax.devices()[:2])
    with pytest.raises(DeviceError, match="q, k and v: expected one device"):
        attention(a, b, b)


@on_devices
def test_ids_that_lie_elsewhere_than_q_are_brought():
    arrays, ids = inputs()
    qkv = [arrays[n] for n in "qkv"]

    def run(ids, *qkv):
        return attention(*qkv, mask=causal() & segments(ids))

    there = put(mesh_of(), P("x", "y"), ids) + put(mesh_of(), P("x"), *qkv)
    check(jax.jit(run)(*there), run(ids, *qkv))


@on_devices
def test_a_vmap_whose_inner_batch_is_spread_gathers_nothing():
    arrays, _ = inputs()
    qkv = [arrays[n] for n in "qkv"]
    stacked = put(mesh_of(), P(None, "x", "y"), *(np.stack([x] * 3) for x in qkv))
    compiled = jax.jit(jax.vmap(lambda q, k, v: attention(q, k, v, mask=causal()))).lower(*stacked).compile()
    assert " all-gather(" not in compiled.as_text()
    check(compiled(*stacked)[2], attention(*qkv, mask=causal()))
