"""What is said where arrays, dtypes, options or tracers do not fit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import attnspan as a  # noqa: E402
from attnspan.jax import attention, dropout_seeds  # noqa: E402

Q = jnp.zeros((2, 4, 7, 16))
K = jnp.zeros((2, 2, 9, 16))
SEED = jnp.array(11)
Bad = dict[str, tuple[dict[str, Any], type[Exception], str]]

INPUTS: Bad = {
    "list": ({"q": [[0.0]]}, TypeError, r"q: expected a JAX or NumPy array, got list"),
    "int": ({"q": Q.astype(int)}, TypeError, "q: expected a floating dtype .*got int32"),
    "complex": ({"k": K.astype(complex)}, TypeError, "k: expected a floating dtype .*got complex64"),
    "float8": ({"q": Q.astype(jnp.float8_e4m3fn)}, TypeError, "q: expected a floating dtype .*float8_e4m3fn"),
    "bool": ({"v": K.astype(bool)}, TypeError, "v: expected a floating dtype .*got bool"),
    "two dtypes": (
        {"k": K.astype(jnp.bfloat16)},
        TypeError,
        r"q, k and v: expected one dtype, got float32, bfloat16, float32\. Convert them .*\.astype",
    ),
    "rank": ({"q": Q[0]}, ValueError, r"q: expected 4 dims .* got \(4, 7, 16\)"),
    "layout": ({"layout": "sbhd"}, ValueError, "layout: expected one of bhsd, bshd, thd, got 'sbhd'"),
    "heads": ({"q": Q[:, :3]}, ValueError, "heads: expected a multiple of the key heads"),
    "keys": ({"v": K[:, :, :8]}, ValueError, "k_len: expected as many values as keys"),
    "batch": ({"q": Q[:1]}, ValueError, "batch: expected the same batch size"),
    "head dims": ({"q": Q[..., :8]}, ValueError, "head_dim: expected the same for q and k"),
    "backend": ({"backend": "flash"}, ValueError, "backend: expected None or one of .*got 'flash'"),
    "old name of the backend": (
        {"backend": "ffi"},
        ValueError,
        "backend: expected None or one of cpu, .*got 'ffi'",
    ),
    "backend of TPUs": (
        {"backend": "pallas"},
        ValueError,
        "backend='pallas': expected .* got pallas: it runs on TPUs, not on cpu",
    ),
    "mask": ({"mask": np.ones((7, 9), bool)}, TypeError, r"mask: expected a mask.*got ndarray.*from_dense"),
    "mask of other sizes": (
        {"mask": a.causal().prepare(8, 9)},
        ValueError,
        r"bounds: expected .*q_len=7, got \(",
    ),
    "mask of other keys": ({"mask": a.full().prepare(7, 8)}, ValueError, "mask: expected spans over k_len=9"),
    "packed": (
        {"q": Q[0, :, :2], "k": K[0, :, :2], "v": K[0, :, :2], "layout": "thd", "mask": a.causal()},
        ValueError,
        "mask with layout='thd': expected one that keeps packed documents apart",
    ),
}

OPTIONS: Bad = {
    "scale": ({"scale": jnp.array(0.5)}, TypeError, "scale: expected a Python number"),
    "scale nan": ({"scale": float("nan")}, ValueError, "scale: expected a finite float32 number, got nan"),
    "softcap 0": ({"softcap": 0.0}, ValueError, "softcap: expected a positive, finite number .* got 0.0"),
    "softcap array": ({"softcap": jnp.array(3.0)}, TypeError, "softcap: expected a Python number"),
    "sinks length": ({"sinks": jnp.zeros(3)}, ValueError, r"sinks: expected \(4,\): .* got \(3,\)"),
    "sinks dtype": ({"sinks": jnp.zeros(4, int)}, TypeError, "sinks: expected a floating array, got int32"),
    "sinks kind": ({"sinks": [0.0] * 4}, TypeError, "sinks: expected a floating array, got list"),
    "slopes": ({"bias": a.alibi(jnp.zeros(3))}, ValueError, r"slopes: expected \(4,\) or \(2, 4\)"),
    "table": ({"bias": a.relative(jnp.zeros((3, 9)))}, ValueError, r"relative: table: expected \(4, n\)"),
    "dense": ({"bias": jnp.zeros((7, 8))}, ValueError, r"dense bias: expected .*k_len=9, got \(7, 8\)"),
    "dense dtype": ({"bias": jnp.ones((7, 9), bool)}, TypeError, "dense_bias: expected a floating array"),
    "bias kind": ({"bias": lambda s, *_: s}, TypeError, "bias: expected an array, or what .* got function"),
    "dropout 1": (
        {"dropout_p": 1.0, "dropout_seed": SEED},
        ValueError,
        "dropout_p: expected at least 0 and below 1, got 1.0",
    ),
    "dropout array": ({"dropout_p": jnp.array(0.1)}, TypeError, "dropout_p: expected a Python number"),
    "no seed": ({"dropout_p": 0.5}, ValueError, "dropout_seed: expected an integer .* got None.*fold_in"),
    "seed number": (
        {"dropout_p": 0.5, "dropout_seed": 3},
        TypeError,
        r"dropout_seed: expected an integer array or a jax\.random\.key, got int",
    ),
    "seed float": ({"dropout_p": 0.5, "dropout_seed": jnp.array(1.0)}, TypeError, "dropout_seed: .*float32"),
    "seed shape": (
        {"dropout_p": 0.5, "dropout_seed": jnp.zeros((2, 4), int)},
        ValueError,
        r"dropout_seed: expected shape \(\) or uint32 \(B, H, 2\) = \(2, 4, 2\), got int32 \(2, 4\)",
    ),
    "key of four words": (
        {"dropout_p": 0.5, "dropout_seed": jax.random.key(0, impl="rbg")},
        TypeError,
        "dropout_seed: expected a key of two words",
    ),
    "indices unread": (
        {"mask": a.full().prepare(7, 9), "q_index": jnp.arange(7)},
        ValueError,
        "q_index, k_index: expected None with a mask that is already lowered",
    ),
    "bare spans": (
        {"mask": a.full().spans(7, 9).lowered, "bias": a.alibi(jnp.ones(4))},
        ValueError,
        "q_index: expected the rows' indices with bare spans",
    ),
}


@pytest.mark.parametrize("case", [*INPUTS, *OPTIONS])
def test_what_does_not_fit_is_named(case: str) -> None:
    given, kind, message = {**INPUTS, **OPTIONS}[case]
    arguments = {"q": Q, "k": K, "v": K, **given}
    if case == "rank":
        arguments |= {"k": K[0], "v": K[0]}
    with pytest.raises(kind, match=message):
        attention(**arguments)


@pytest.mark.parametrize("case", ["two dtypes", "heads", "softcap 0", "seed shape", "dense"])
def test_the_same_is_said_under_jit(case: str) -> None:
    given, kind, message = {**INPUTS, **OPTIONS}[case]
    arguments = {"q": Q, "k": K, "v": K, **given}
    arrays = {n: arguments.pop(n) for n in ("q", "k", "v")}
    with pytest.raises(kind, match=message):
        jax.jit(lambda arrays: attention(**arrays, **arguments))(arrays)


def test_seeds_of_rows_and_heads() -> None:
    with pytest.raises(ValueError, match=r"dropout_seed: expected shape \(\), got int32 \(2,\)"):
        dropout_seeds(jnp.zeros(2, int), 2, 4)


def test_numpy_arrays_are_taken_as_jax_takes_them() -> None:
    q, k = np.ones(Q.shape, np.float32), np.ones(K.shape, np.float32)
    out = attention(q, jnp.asarray(k), k)
    assert isinstance(out, jax.Array)
    np.testing.assert_allclose(out, 1, rtol=1e-6)


class TestTwoFrameworks:
    """Arrays of PyTorch here, and arrays of JAX there."""

    torch = pytest.importorskip("torch")

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_tensors_among_inputs(self, name: str) -> None:
        arguments = {"q": Q, "k": K, "v": K}
        arguments[name] = self.torch.zeros(arguments[name].shape)
        with pytest.raises(TypeError, match=rf"{name}: expected a JAX or NumPy array, got torch\.Tensor"):
            attention(**arguments)

    @pytest.mark.parametrize(
        ("name", "make"),
        [
            ("sinks", lambda t: t.zeros(4)),
            ("bias", lambda t: t.zeros(7, 9)),
            ("bias", lambda t: a.alibi(t.zeros(4))),
            ("dropout_seed", lambda t: t.tensor(1)),
            ("q_index", lambda t: t.arange(7)),
            ("mask", lambda t: a.segments(t.zeros(9, dtype=t.long))),
            ("mask", lambda t: a.full().prepare(7, 9, like=t.zeros(1))),
        ],
        ids=["sinks", "dense bias", "slopes", "seed", "q_index", "ids", "prepared"],
    )
    def test_tensors_among_options(self, name: str, make: Callable[[Any], Any]) -> None:
        given = {name: make(self.torch), **({"dropout_p": 0.5} if name == "dropout_seed" else {})}
        message = rf"{name}: expected arrays of JAX or NumPy, as q, k and v, got a torch\.Tensor"
        with pytest.raises(TypeError, match=message):
            attention(Q, K, K, **given)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"q": Q}, r"q: expected a torch\.Tensor, got ArrayImpl"),
            ({"sinks": jnp.zeros(4)}, "sinks: expected a floating tensor"),
            ({"bias": jnp.zeros((7, 9))}, "bias: expected a tensor, or what"),
            ({"bias": a.alibi(jnp.zeros(4))}, "expected arrays of one framework"),
            (
                {"mask": a.segments(jnp.zeros(9, int))},
                "mask: expected an array of torch or NumPy, got one of jax",
            ),
            (
                {"mask": a.full().prepare(7, 9, like=Q)},
                "mask: expected an array of torch or NumPy, got one of jax",
            ),
            (
                {"mask": a.full().spans(7, 9, like=Q)},
                "mask: expected an array of torch or NumPy, got one of jax",
            ),
        ],
        ids=["q", "sinks", "dense bias", "slopes", "ids", "prepared", "spans"],
    )
    def test_arrays_of_jax_in_torch(self, given: dict[str, Any], message: str) -> None:
        from attnspan.torch import attention as torchs

        q, k = self.torch.zeros(Q.shape), self.torch.zeros(K.shape)
        with pytest.raises((TypeError, ValueError), match=message):
            torchs(**{"q": q, "k": k, "v": k, **given})


class TestTracers:
    """Where values decide a shape, or are asked for, a traced array has none."""

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            (
                lambda s: s.compact(),
                r"Spans\.compact: expected an array whose values can be read, got one that",
            ),
            (lambda s: s.validate(), r"Spans\.validate: expected an array whose values can be read"),
            (lambda s: s.coverage(), r"Spans\.coverage: expected an array whose values can be read"),
        ],
        ids=["compact", "validate", "coverage"],
    )
    def test_spans(self, use: Callable[[Any], Any], message: str) -> None:
        spans = a.causal().spans(4, 4, like=Q)
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda bounds: use(a.Spans(bounds, 4)))(spans.bounds)

    @pytest.mark.parametrize("use", [lambda m: m.prepare(4, 4), lambda m: m.show(4)], ids=["prepare", "show"])
    def test_masks(self, use: Callable[[Any], Any]) -> None:
        with pytest.raises(ValueError, match=r"being traced.*Call it outside the compiled function"):
            jax.jit(lambda ids: use(a.segments(ids)))(jnp.zeros(4, int))
        jax.jit(lambda ids: a.segments(ids).spans(4, 4).bounds)(jnp.zeros(4, int))

    def test_more_runs_than_are_static(self) -> None:
        """8 runs where none are said; a row with more is an error of the CPU kernel, NaN elsewhere."""
        visible = jnp.tile(jnp.array([True, False]), 9)[None].repeat(7, 0)
        k = jnp.zeros((2, 2, 18, 16))
        call = jax.jit(
            lambda visible, b: attention(Q, k, k, mask=a.from_dense(visible), backend=b), static_argnums=1
        )
        with pytest.raises(Exception, match="span"):
            jax.block_until_ready(call(visible, "cpu"))
        assert jnp.isnan(call(visible, "xla")).all()
