"""What is said of arrays that lie apart, of remedies that another framework has, and of calls from inside."""

import os
import subprocess
import sys
from typing import Any

import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import attnspan as a  # noqa: E402
from attnspan.jax import attention, dot_product_attention, dropout_seeds, explain, shard  # noqa: E402

Q = jnp.zeros((2, 4, 6, 8))


class TestRemedies:
    def test_raw_keys(self) -> None:
        raw = jax.random.PRNGKey(0)
        message = r"got uint32 \(2,\)\. If it is a raw key of .*, pass jax\.random\.wrap_key_data\(key\)\.$"
        with pytest.raises(ValueError, match=message):
            attention(Q, Q, Q, dropout_p=0.5, dropout_seed=raw)
        with pytest.raises(ValueError, match=message):
            dropout_seeds(raw, 2, 4)
        attention(Q, Q, Q, dropout_p=0.5, dropout_seed=jax.random.wrap_key_data(raw))
        with pytest.raises(ValueError, match="Pass one seed for all, or dropout_seeds"):
            attention(Q, Q, Q, dropout_p=0.5, dropout_seed=jnp.zeros(2, jnp.int32))

    def test_explaining_what_is_spread(self) -> None:
        sharded = shard(jax.make_mesh((1,), ("data",)), batch="data", mask=a.causal())
        message = r"explain: mask: expected .* got Sharded, which .*Call explain\(\) of the mask"
        with pytest.raises(TypeError, match=message):
            explain(Q, Q, Q, mask=sharded)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": jnp.array(0.3)}, "scale: expected a Python number, got .*Multiply q by it"),
        ({"bias": jnp.zeros((1, 1, 4, 4), int)}, "dense_bias: expected a floating array, got int32"),
        ({"local_window_size": (-1, 3)}, "window: left: expected 0 to 2147483647, got -1"),
        ({"local_window_size": (3, -1)}, "window: right: expected 0 to 2147483647, got -1"),
    ],
    ids=["scale", "bias", "left", "right"],
)
def test_what_only_the_function_of_jax_takes(given: dict[str, Any], message: str) -> None:
    jax.eval_shape(lambda x: jax.nn.dot_product_attention(x, x, x, **given), Q)
    with pytest.raises((TypeError, ValueError), match=message):
        dot_product_attention(Q, Q, Q, **given)


class TestJaxInTorch:
    """Arrays of JAX next to tensors are called by the name of their argument."""

    torch = pytest.importorskip("torch")

    @pytest.mark.parametrize("name", ["q_index", "k_index"])
    @pytest.mark.parametrize("mask", [a.causal(), a.segments([0] * 6), a.full().prepare(6, 6)], ids=str)
    def test_indices(self, name: str, mask: Any) -> None:
        from attnspan.torch import attention as torchs

        q = self.torch.zeros(Q.shape)
        message = rf"^{name}: expected an array of torch or NumPy, got one of jax\. Convert it"
        with pytest.raises(TypeError, match=message):
            torchs(q, q, q, mask=mask, bias=a.alibi([0.5] * 4), **{name: jnp.arange(6)})

    def test_indices_elsewhere(self) -> None:
        from attnspan.torch import attention as torchs

        q = self.torch.zeros(Q.shape)
        with pytest.raises(ValueError, match=r"^q_index: expected device cpu \(as q\), got meta"):
            torchs(q, q, q, q_index=self.torch.arange(6, device="meta"))

    @pytest.mark.parametrize(
        "bias",
        [a.alibi(jnp.zeros(4)), a.relative(jnp.zeros((4, 9))), a.dense_bias(jnp.zeros((6, 6)))],
        ids=["slopes", "table", "dense"],
    )
    def test_biases(self, bias: a.Bias) -> None:
        from attnspan.torch import attention as torchs

        q = self.torch.zeros(Q.shape)
        message = (
            r"^bias: expected arrays of one framework on one device, got torch on cpu and jax\. Move them"
        )
        with pytest.raises(ValueError, match=message):
            torchs(q, q, q, bias=bias)

    def test_table_and_buckets(self) -> None:
        with pytest.raises(
            ValueError, match=r"^relative: table and buckets: expected arrays of one framework"
        ):
            a.relative(self.torch.zeros(4, 32), jnp.asarray(a.t5_buckets()))

    def test_masks(self) -> None:
        mask = a.segments(jnp.zeros(6, int)) & a.key_padding(self.torch.tensor([2, 3]))
        with pytest.raises(
            a.errors.DeviceError, match=r"^mask: expected arrays of one framework on one device"
        ):
            mask.spans(6, 6, batch=2)

    def test_explaining_what_is_spread(self) -> None:
        from attnspan.torch import explain as torchs
        from attnspan.torch.dtensor import ShardedMask

        q = self.torch.zeros(Q.shape)
        with pytest.raises(
            TypeError, match=r"explain: mask: .*got ShardedMask, which .*Call its own explain\(\)"
        ):
            torchs(q, q, q, mask=ShardedMask())


DEVICES = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import attnspan as a
from attnspan.jax import attention

first, second = jax.devices()
free = jnp.zeros((2, 4, 6, 8))
there = lambda x: jax.device_put(x, second)
one = jax.device_put(free, first)
ids, seed, index = jnp.zeros((2, 6), int), jax.random.key(0), jnp.arange(6)


def say(name, q, **options):
    try:
        print(name, attention(q, q, q, **options).shape == q.shape)
    except ValueError as error:
        print(name, type(error).__name__, error)


alibi = {"bias": a.alibi([0.5] * 4)}
say("ids", one, mask=a.segments(there(ids)))
try:
    attention(one, there(one), there(one))
except ValueError as error:
    print("keys", type(error).__name__, error)
say("bounds", one, mask=a.Spans(there(a.causal().spans(6, 6).bounds), 6))
say("bias", one, bias=there(jnp.zeros((6, 6))))
say("slopes", one, bias=a.alibi(there(jnp.zeros(4))))
say("sinks", one, sinks=there(jnp.zeros(4)))
say("seed", one, dropout_p=0.5, dropout_seed=there(seed))
say("q_index", one, q_index=there(index), **alibi)
say("k_index", one, k_index=there(index))
say("beside each other", free, mask=a.segments(jax.device_put(ids, first)), sinks=there(jnp.zeros(4)))
say("not put anywhere", one, mask=a.segments(ids), sinks=jnp.zeros(4), dropout_p=0.5, dropout_seed=seed)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
    split, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (("d",), ()))
    with jax.set_mesh(mesh):
        q = jax.device_put(free, split)
        say("split", q, mask=a.segments(jax.device_put(ids, split)), **alibi)
        say("whole", q, mask=a.segments(jax.device_put(ids, whole)))
        say("one of two", q, mask=a.segments(there(ids)))
closing = jax.jit(lambda q: attention(q, q, q, mask=a.segments(there(ids))))
print("closed over", closing(one).shape == one.shape)

mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
x = jax.random.normal(seed, (1, 2, 6, 8))
rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "d")))
for backend in ("math", "xla"):
    call = jax.jit(lambda q: attention(q, q, q, mask=a.causal(), backend=backend))
    try:
        print("split rows,", backend, bool(jnp.allclose(call(rows), call(x), atol=1e-6)))
    except Exception as error:
        print("split rows,", backend, "refused", "no other axis, got axis 2 over 'd'" in str(error))
"""
ONE = "expected arrays on ['cpu:0'] (as q, k and v), got one on ['cpu:1']. Move its arrays by jax.device_put."
TWO = (
    "expected arrays on ['cpu:0', 'cpu:1'] (as q, k and v), got one on ['cpu:1']. "
    "Move its arrays by jax.device_put(x, NamedSharding(mesh, PartitionSpec())), to all devices of the mesh."
)
KEYS = (
    "keys DeviceError q, k and v: expected one device, or one set of devices, got ['cpu:0'] and ['cpu:1']. "
    "Move them by jax.device_put."
)
SAID = f"""\
ids DeviceError mask: {ONE}
{KEYS}
bounds DeviceError mask: {ONE}
bias DeviceError bias: {ONE}
slopes DeviceError bias: {ONE}
sinks DeviceError sinks: {ONE}
seed DeviceError dropout_seed: {ONE}
q_index DeviceError q_index: {ONE}
k_index DeviceError k_index: {ONE}
beside each other DeviceError sinks: {ONE.replace("q, k and v", "mask")}
not put anywhere True
split True
whole True
one of two DeviceError mask: {TWO}
split True
whole True
one of two DeviceError mask: {TWO}
closed over True
split rows, math True
split rows, xla refused True
"""


@pytest.mark.long
def test_arrays_on_other_devices_are_named() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    code = [sys.executable, "-c", DEVICES]
    done = subprocess.run(code, env={**os.environ, **flags}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == SAID
