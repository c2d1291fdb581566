"""Wrong calls of `attention` in JAX: of arrays, seeds, devices and tracers."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from covering import few
from samples import mistakes
from samples.mistakes import Mistake, call, check, error_of, rows
from virtual_devices import on_devices

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import attnspan as a  # noqa: E402
from attnspan.jax import attention, dropout_seeds, explain, shard  # noqa: E402

RAW_KEY = jax.random.PRNGKey(0)
MADE = {
    "zeros": lambda *shape: jnp.zeros(shape),
    "ones": lambda *shape: jnp.ones(shape),
    "ids": lambda *shape: jnp.zeros(shape, int),
    "arange": jnp.arange,
    "array": jnp.array,
}
NAMES = mistakes.namespace(**MADE, jax=jax, jnp=jnp, RAW_KEY=RAW_KEY)
Q, K = NAMES["Q"], NAMES["K"]
CASES = rows(mistakes.CALLS) + rows(mistakes.ARRAYS)


@pytest.mark.parametrize("mistake", CASES, ids=repr)
def test_a_wrong_call_says_what_how_and_why(mistake: Mistake) -> None:
    check(error_of(call(mistake, attention, NAMES)), mistake, "array")


@pytest.mark.parametrize("mistake", [x for x in CASES if x.mark == "*"], ids=repr)
def test_the_same_is_said_under_jit(mistake: Mistake) -> None:
    def traced(q: Any, k: Any) -> Any:
        return call(mistake, attention, NAMES | {"Q": q, "K": k})()

    check(error_of(jax.eval_shape, traced, Q, K), mistake, "array")


@pytest.mark.slow
def test_seeds_of_rows_and_heads() -> None:
    with pytest.raises(ValueError, match=r"dropout_seed: expected shape \(\), got int32 \(2,\)"):
        dropout_seeds(jnp.zeros(2, int), 2, 4)
    with pytest.raises(ValueError, match="wrap_key_data"):
        dropout_seeds(RAW_KEY, 2, 4)
    attention(Q, K, K, dropout_p=0.5, dropout_seed=jax.random.wrap_key_data(RAW_KEY))


def test_numpy_arrays_are_taken_as_jax_takes_them() -> None:
    q, k = np.ones(Q.shape, np.float32), np.ones(K.shape, np.float32)
    out = attention(q, jnp.asarray(k), k)
    assert isinstance(out, jax.Array)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


def test_explaining_what_is_spread() -> None:
    sharded = shard(jax.make_mesh((1,), ("data",)), batch="data", mask=a.causal())
    message = r"explain: mask: expected .* got Sharded, a mask.*Call the mask's own explain\(\)"
    with pytest.raises(TypeError, match=message):
        explain(Q, K, K, mask=sharded)


INDICES = "expected an array of torch or NumPy, got one of jax. Convert it"
FRAMEWORKS = "bias: expected arrays of one framework on one device, got torch on cpu and jax. Move them"
#: Keywords whose arrays are the other framework's, and what PyTorch says. JAX names the last keyword.
FOREIGN = {
    "sinks=zeros(4)": "sinks: expected a floating tensor",
    "bias=zeros(7, 9)": "bias: expected a tensor, or the result of",
    "bias=a.alibi(zeros(4))": FRAMEWORKS,
    "bias=a.relative(zeros(4, 9))": FRAMEWORKS,
    "dropout_p=0.5, dropout_seed=array(1)": "dropout_seed: expected",
    "mask=a.segments(ids(9))": f"mask: {INDICES}",
    "mask=a.full().prepare(7, 9, like=zeros(1))": f"mask: {INDICES}",
    "bias=a.alibi([0.5] * 4), q_index=arange(7)": f"q_index: {INDICES}",
    "mask=PREPARED, bias=a.alibi([0.5] * 4), k_index=arange(9)": f"k_index: {INDICES}",
}


class TestTwoFrameworks:
    """Arrays of PyTorch here, and arrays of JAX there, are called by the name of their argument."""

    torch = pytest.importorskip("torch")

    @pytest.mark.parametrize("code", FOREIGN)
    def test_arrays_of_the_other_one(self, code: str) -> None:
        from attnspan.torch import attention as torchs

        torch = self.torch
        ours = {"zeros": torch.zeros, "ones": torch.ones, "arange": torch.arange, "array": torch.tensor}
        ours["ids"] = lambda *shape: torch.zeros(shape, dtype=torch.int64)
        given = eval(f"dict({code})", mistakes.namespace(**ours))
        said = rf"^{[*given][-1]}: expected JAX or NumPy arrays, as q, k and v, got a torch\.Tensor"
        with pytest.raises(TypeError, match=said):
            attention(Q, K, K, **given)
        q, k = torch.zeros(Q.shape), torch.zeros(K.shape)
        found = error_of(lambda: torchs(q, k, k, **eval(f"dict({code})", NAMES)))
        assert str(found).startswith(FOREIGN[code])

    def test_inputs_of_the_other_one(self) -> None:
        from attnspan.torch import attention as torchs

        with pytest.raises(TypeError, match=r"v: expected a JAX or NumPy array, got torch\.Tensor"):
            attention(Q, K, self.torch.zeros(K.shape))
        with pytest.raises(TypeError, match=r"q: expected a torch\.Tensor, got ArrayImpl"):
            torchs(Q, *[self.torch.zeros(K.shape)] * 2)

    def test_a_mask_and_a_bias_of_both(self) -> None:
        message = r"^relative: table and buckets: expected arrays of one framework"
        with pytest.raises(ValueError, match=message):
            a.relative(self.torch.zeros(4, 32), jnp.asarray(a.t5_buckets()))
        mask = a.segments(jnp.zeros(6, int)) & a.key_padding(self.torch.tensor([2, 3]))
        with pytest.raises(a.errors.DeviceError, match=r"^mask: expected arrays of one framework"):
            mask.spans(6, 6, batch=2)

    def test_explaining_what_is_spread_in_torch(self) -> None:
        from attnspan.torch import explain as torch_explain
        from attnspan.torch.dtensor import ShardedMask

        q = self.torch.zeros(2, 4, 6, 8)
        with pytest.raises(TypeError, match=r"explain: mask: .*got ShardedMask, .*its own explain\(\)"):
            torch_explain(q, q, q, mask=ShardedMask())


class TestTracers:
    """Where values decide a shape, or are asked for, a traced array has none."""

    @pytest.mark.parametrize("name", ["compact", "validate", "coverage"])
    def test_spans(self, name: str) -> None:
        spans = a.causal().spans(4, 4, like=Q)
        message = rf"Spans\.{name}: expected an array whose values can be read, got a traced array"
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda bounds: getattr(a.Spans(bounds, 4), name)())(spans.bounds)

    @pytest.mark.parametrize("use", [lambda m: m.prepare(4, 4), lambda m: m.show(4)], ids=["prepare", "show"])
    def test_masks(self, use: Callable[[Any], Any]) -> None:
        with pytest.raises(ValueError, match=r"got a traced array.*Call it outside the compiled function"):
            jax.jit(lambda ids: use(a.segments(ids)))(jnp.zeros(4, int))

    @pytest.mark.slow
    def test_more_runs_than_are_static(self) -> None:
        """8 runs where none are said; a row with more is an error of the CPU kernel, NaN elsewhere."""
        visible = jnp.tile(jnp.array([True, False]), 9)[None].repeat(7, 0)
        k = jnp.zeros((2, 2, 18, 16))
        call = jax.jit(
            lambda visible, b: attention(Q, k, k, mask=a.from_dense(visible), backend=b), static_argnums=1
        )
        with pytest.raises(Exception, match="pass max_runs to what made it"):
            jax.block_until_ready(call(visible, "cpu"))
        assert jnp.isnan(call(visible, "xla")).all()


ONE = re.escape("expected arrays on ['cpu:0'] (as q, k and v), got an array on ['cpu:1']. Move its arrays")
TWO = re.escape(
    "mask: expected arrays on ['cpu:0', 'cpu:1'] (as q, k and v), got an array on ['cpu:1']. Move its arrays "
    "with jax.device_put(x, NamedSharding(mesh, PartitionSpec())), to all devices of the mesh."
)


@pytest.mark.slow
@on_devices
def test_arrays_on_other_devices_are_named() -> None:
    first, second = jax.devices()[:2]
    free, ids, seed = jnp.zeros((2, 4, 6, 8)), jnp.zeros((2, 6), int), jax.random.key(0)
    one, there = jax.device_put(free, first), lambda x: jax.device_put(x, second)
    kept = a.segments(jax.device_put(ids, first))
    for q, given, text in (
        (one, {"mask": a.segments(there(ids))}, f"mask: {ONE}"),
        (one, {"mask": a.Spans(there(a.causal().spans(6, 6).bounds), 6)}, f"mask: {ONE}"),
        (one, {"bias": a.alibi(there(jnp.zeros(4)))}, f"bias: {ONE}"),
        (one, {"dropout_p": 0.5, "dropout_seed": there(seed)}, f"dropout_seed: {ONE}"),
        (
            free,
            {"mask": kept, "sinks": there(jnp.zeros(4))},
            r"expected arrays on .* \(as (mask|sinks)\), got",
        ),
    ):
        with pytest.raises(a.errors.DeviceError, match=text):
            attention(q, q, q, **given)
    with pytest.raises(a.errors.DeviceError, match=r"q, k and v: expected one device, .* got .*cpu:0.*cpu:1"):
        attention(one, there(one), one)
    attention(one, one, one, mask=a.segments(ids), sinks=jnp.zeros(4), dropout_p=0.5, dropout_seed=seed)
    jax.jit(lambda q: attention(q, q, q, mask=a.segments(there(ids))))(one)
    for kind in few((AxisType.Explicit, AxisType.Auto), 1):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=[first, second])
        split, whole = (NamedSharding(mesh, PartitionSpec(*x)) for x in (("d",), ()))
        with jax.set_mesh(mesh):
            q = jax.device_put(free, split)
            attention(q, q, q, mask=a.segments(jax.device_put(ids, split)), bias=a.alibi([0.5] * 4))
            attention(q, q, q, mask=a.segments(jax.device_put(ids, whole)))
            with pytest.raises(a.errors.DeviceError, match=TWO):
                attention(q, q, q, mask=a.segments(there(ids)))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=[first, second])
    x = jax.random.normal(seed, (1, 2, 6, 8))
    rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "d")))
    by_math = jax.jit(lambda q: attention(q, q, q, mask=a.causal(), backend="math"))
    np.testing.assert_allclose(by_math(rows), by_math(x), atol=1e-6)
