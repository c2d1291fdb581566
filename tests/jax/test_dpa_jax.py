"""The drop-in compared with jax.nn's own function, over its options; tests/peers has JAX's own cases."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from attnspan import causal, from_dense, key_padding, segments  # noqa: E402
from attnspan.jax import dot_product_attention  # noqa: E402

theirs = jax.nn.dot_product_attention


def _normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


B, T, S, N, K, H = 2, 6, 9, 4, 2, 16
QKV = (_normal(0, B, T, N, H), _normal(1, B, S, K, H), _normal(2, B, S, K, H))
VISIBLE = np.random.default_rng(0).random((B, N, T, S)) < 0.6
VISIBLE[..., 0] = True  # where a row sees nothing, the two differ
SQUARE = tuple(x[:, :T] for x in QKV)

#: Keywords for both; where T differs from S, rows count from 0 as keys do.
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "window": {"local_window_size": 2},
    "uneven window": {"local_window_size": (3, 1)},
    "causal window": {"is_causal": True, "local_window_size": (2, 4)},
    "key lengths": {"key_value_seq_lengths": jnp.array([9, 4])},
    "query lengths": {"query_seq_lengths": jnp.array([6, 3])},
    "both lengths, causal": {
        "is_causal": True,
        "query_seq_lengths": jnp.array([4, 6]),
        "key_value_seq_lengths": jnp.array([9, 3]),
    },
    "lengths beyond the end": {"key_value_seq_lengths": jnp.array([20, 2])},
    "mask": {"mask": jnp.asarray(VISIBLE)},
    "mask of all heads": {"mask": jnp.asarray(VISIBLE[:, :1])},
    "mask of two axes": {"mask": jnp.asarray(VISIBLE[0, 0])},
    "mask by key": {"mask": jnp.asarray(VISIBLE[:, :1, :1])},
    "mask by query, causal": {"mask": jnp.ones((B, 1, T, 1), bool), "is_causal": True},
    "bias": {"bias": _normal(3, B, N, T, S)},
    "bias of all rows": {"bias": _normal(3, 1, N, 1, S)},
    "bias by query": {"bias": _normal(3, B, 1, T, 1)},
    "bias of three axes": {"bias": _normal(3, N, T, S)},
    "bias, mask, causal": {"bias": _normal(3, 1, 1, T, S), "mask": jnp.asarray(VISIBLE), "is_causal": True},
}


def _close(ours: Any, other: Any) -> None:
    assert ours.dtype == other.dtype
    np.testing.assert_allclose(ours, other, rtol=0, atol=3e-6)


@cache
def _of_all_cases() -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs and gradients of both functions in every case: one program."""

    def results(function: Any, qkv: Any, given: Any) -> Any:
        def loss(q: Any, k: Any, v: Any, case: str) -> Any:
            flags = {n: x for n, x in CASES[case].items() if n not in given[case]}
            out = function(q, k, v, **flags, **given[case])
            return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

        return {n: jax.grad(partial(loss, case=n), (0, 1, 2), has_aux=True)(*qkv) for n in CASES}

    given = {n: {m: x for m, x in c.items() if isinstance(x, jax.Array)} for n, c in CASES.items()}
    both = jax.jit(lambda *x: (results(dot_product_attention, *x), results(theirs, *x)))
    return both(QKV, given)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_as_jax_nn(case: str) -> None:
    ours, other = (jax.tree.leaves(x[case]) for x in _of_all_cases())
    for x, y in zip(ours, other, strict=True):
        _close(x, y)


def test_a_residual_has_the_axes_of_the_inputs_and_no_gradient() -> None:
    _, residual = dot_product_attention(*(x[0] for x in QKV), return_residual=True)
    assert residual.shape == (T, N)
    gradient = jax.grad(lambda q: dot_product_attention(q, *QKV[1:], return_residual=True)[1].sum())(QKV[0])
    assert not gradient.any()  # as there


def test_a_row_that_sees_nothing_is_zero() -> None:
    mask = jnp.asarray(VISIBLE).at[0, 1, 2].set(False)
    out, residual = dot_product_attention(*QKV, mask=mask, return_residual=True)
    assert not out[0, 2, 1].any()
    assert residual[0, 2, 1] == -jnp.inf
    assert theirs(*QKV, mask=mask)[0, 2, 1].any()


@pytest.mark.slow
def test_masks_of_attnspan() -> None:
    ids = jnp.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    same = (ids[:, None, :, None] == ids[:, None, None, :]) & np.tri(T, dtype=bool)[None, None]
    other = theirs(*SQUARE, mask=same)
    mask = causal() & segments(ids)
    _close(dot_product_attention(*SQUARE, mask=mask), other)
    prepared = mask.prepare(T, T, batch=B, like=SQUARE[0])
    _close(dot_product_attention(*SQUARE, mask=prepared), other)
    _close(dot_product_attention(*SQUARE, mask=prepared.lowered), other)
    lengths = jnp.array([4, 6])
    both = same & (jnp.arange(T)[None, None, None] < lengths[:, None, None, None])
    limited = dot_product_attention(*SQUARE, mask=prepared.lowered, key_value_seq_lengths=lengths)
    _close(limited[:, :4], theirs(*SQUARE, mask=both)[:, :4])
    _close(limited, dot_product_attention(*SQUARE, mask=mask & key_padding(lengths)))


def test_under_jit_and_vmap() -> None:
    lengths = jnp.array([[9, 4], [2, 5]])
    stacked = [jnp.stack([x, x[::-1]]) for x in QKV]

    def run(function: Any) -> Any:
        return jax.jit(
            jax.vmap(lambda q, k, v, n: function(q, k, v, is_causal=True, key_value_seq_lengths=n))
        )(*stacked, lengths)

    _close(run(dot_product_attention), run(theirs))


def test_more_runs_under_jit_than_static() -> None:
    mask = jnp.tile(jnp.array([True, False]), 10)[None].repeat(20, 0)
    q = _normal(5, 1, 20, 1, H)
    ours = jax.jit(lambda q, mask: dot_product_attention(q, q, q, mask=from_dense(mask, max_runs=10)))(
        q, mask
    )
    _close(ours, theirs(q, q, q, mask=mask))


#: Keywords, of which query, key and value are those above by default; the error.
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "list": ({"query": [[1.0]]}, TypeError, "query: expected a JAX or NumPy array, got list"),
    "rank": ({"query": QKV[0][0, 0]}, ValueError, r"query: expected \(batch, .*got shape \(4, 16\)"),
    "mask dtype": (
        {"mask": jnp.zeros((T, S))},
        TypeError,
        "mask: expected a boolean array or a mask of attnspan, got float32.*as bias",
    ),
    "mask kind": ({"mask": "causal"}, TypeError, "mask: expected a boolean array.*got str"),
    "mask shape": (
        {"mask": jnp.ones((T, S + 1), bool)},
        ValueError,
        r"mask: expected a shape that broadcasts to .*\(2, 4, 6, 9\), got \(1, 1, 6, 10\)",
    ),
    "mask twice": (
        {"mask": causal(), "is_causal": True},
        ValueError,
        "mask: expected no is_causal .* Combine masks with causal",
    ),
    "bias shape": ({"bias": jnp.zeros((3, T, S))}, ValueError, "bias: expected a shape that broadcasts"),
    "window ahead": ({"local_window_size": (-1, 3)}, ValueError, "window: left: expected 0 to .*got -1"),
    "bias kind": ({"bias": 1.0}, TypeError, "bias: expected an array, got float"),
    "lengths shape": (
        {"query_seq_lengths": jnp.zeros(3, int)},
        ValueError,
        r"query_seq_lengths: expected \(2,\), got shape \(3,\)",
    ),
    "lengths dtype": (
        {"key_value_seq_lengths": jnp.zeros(2)},
        TypeError,
        "key_value_seq_lengths: expected int32, got float32",
    ),
    "implementation": ({"implementation": "flash"}, ValueError, "backend: .*got 'flash'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(case: str) -> None:
    given, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        dot_product_attention(**dict(zip(("query", "key", "value"), QKV, strict=True)) | given)


def test_an_array_that_is_no_argument_is_encoded_while_jit_traces():
    """With any number of runs, and without a program that XLA would fold for seconds."""
    q = jax.random.normal(jax.random.key(0), (1, 40, 2, 8))
    mask = (jnp.arange(40)[:, None] + jnp.arange(40)[None]) % 2 == 0  # 20 runs in each row
    wanted = jax.nn.dot_product_attention(q, q, q, mask=mask[None, None])
    step = jax.jit(lambda q: dot_product_attention(q, q, q, mask=mask))
    np.testing.assert_allclose(step(q), wanted, atol=2e-6)
    assert "reduce_min" not in str(jax.make_jaxpr(step)(q))
