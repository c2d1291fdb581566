"""The drop-in compared with jax.nn's own function, over its options; tests/peers has JAX's own cases."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from covering import few
from samples.mistakes import DROP_IN, Mistake, check, error_of, rows

jax = pytest.importorskip("jax")
jnp = jax.numpy

from attnspan import causal, key_padding, segments  # noqa: E402
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
ALL_CASES: dict[str, dict[str, Any]] = {
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


CASES = {name: ALL_CASES[name] for name in few(ALL_CASES, 10)}


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


def test_a_residual_has_the_axes_of_the_inputs() -> None:
    _, residual = dot_product_attention(*(x[0] for x in QKV), return_residual=True)
    assert residual.shape == (T, N)


def _weighed(out: Any, residual: Any) -> Any:
    return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum() + (residual**2).sum()


def _by_formula(q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    return _weighed(out, jax.nn.logsumexp(scores, -1).swapaxes(1, 2))


def _whole(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return _weighed(*dot_product_attention(q, k, v, return_residual=True, **options))


@pytest.mark.long  # tests/conformance has the gradients of lse.
def test_the_gradient_of_a_residual() -> None:
    with jax.enable_x64(True):
        wide = [x.astype("float64") for x in QKV]
        exact = [np.asarray(x) for x in jax.grad(_by_formula, (0, 1, 2))(*wide)]
        slope = np.asarray(jax.jvp(_by_formula, wide, wide)[1])

    def mapped(*qkv: Any) -> Any:
        stacked = [jnp.stack([x, x]) for x in qkv]
        return [x[1] for x in jax.vmap(jax.grad(_whole, (0, 1, 2)))(*stacked)]

    gradients = [jax.grad(fn, (0, 1, 2)) for fn in (_whole, partial(_whole, implementation="xla"))]
    for results in jax.jit(lambda *qkv: [gradient(*qkv) for gradient in (*gradients, mapped)])(*QKV):
        for got, wanted in zip(results, exact, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * abs(wanted).max())
    math = partial(_whole, implementation="math")
    np.testing.assert_allclose(jax.jit(partial(jax.jvp, math))(QKV, QKV)[1], slope, rtol=1e-5)


@pytest.mark.slow
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


@pytest.mark.parametrize("mistake", rows(DROP_IN), ids=repr)
def test_what_does_not_fit_is_named(mistake: Mistake) -> None:
    given = dict(zip(("query", "key", "value"), QKV, strict=True)) | eval(f"dict({mistake.code})", globals())
    check(error_of(lambda: dot_product_attention(**given)), mistake)
