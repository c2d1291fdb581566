"""The drop-in compared with jax.nn's own function, over its options; tests/peers has JAX's own cases."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from samples.mistakes import DROP_IN, Mistake, check, error_of, rows

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


def _by_ring(q: Any, k: Any, v: Any) -> Any:
    """Results for two halves of the keys, merged by their residuals."""
    parts = [
        dot_product_attention(q, k[:, i], v[:, i], return_residual=True)
        for i in (slice(0, 5), slice(5, None))
    ]
    outs, residuals = (jnp.stack(x) for x in zip(*parts, strict=True))
    out = (jax.nn.softmax(residuals, axis=0)[..., None] * outs).sum(0)
    return _weighed(out, jax.nn.logsumexp(residuals, axis=0))


def _whole(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return _weighed(*dot_product_attention(q, k, v, return_residual=True, **options))


@pytest.mark.slow
def test_the_gradient_of_a_residual() -> None:
    with jax.enable_x64(True):
        wide = [x.astype("float64") for x in QKV]
        exact = [np.asarray(x) for x in jax.grad(_by_formula, (0, 1, 2))(*wide)]
        slope = np.asarray(jax.jvp(_by_formula, wide, wide)[1])

    def mapped(*qkv: Any) -> Any:
        stacked = [jnp.stack([x, x]) for x in qkv]
        return [x[1] for x in jax.vmap(jax.grad(_whole, (0, 1, 2)))(*stacked)]

    gradients = [jax.grad(fn, (0, 1, 2)) for fn in (_whole, _by_ring, partial(_whole, implementation="xla"))]
    for results in jax.jit(lambda *qkv: [gradient(*qkv) for gradient in (*gradients, mapped)])(*QKV):
        for got, wanted in zip(results, exact, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * abs(wanted).max())
    math = partial(_whole, implementation="math")
    np.testing.assert_allclose(jax.jvp(math, QKV, QKV)[1], slope, rtol=1e-5)


def test_a_row_that_sees_nothing_is_zero() -> None:
    mask = jnp.asarray(VISIBLE).at[0, 1, 2].set(False)
    out, residual = dot_product_attention(*QKV, mask=mask, return_residual=True)
    assert not out[0, 2, 1].any()
    assert residual[0, 2, 1] == -jnp.inf
    assert theirs(*QKV, mask=mask)[0, 2, 1].any()


def _draw(seed: int) -> tuple[Any, dict[str, Any], Any, dict[str, Any]]:
    """Arrays, options, the rows that see a key (where a row sees none, the two differ), and a backend."""
    rng = np.random.default_rng(seed)
    heads, (b, t, s) = 2 * int(rng.integers(1, 3)), (int(rng.integers(1, 3)), *rng.choice([1, 5, 8, 11], 2))
    shape, (i, j) = (b, heads, int(t), int(s)), (np.arange(t)[:, None], np.arange(s))

    def some(offered: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in offered.items() if rng.random() < 0.4}

    def part() -> tuple[int, ...]:
        return tuple(n if rng.random() < 0.6 else 1 for n in shape)[
            int(rng.integers(0, 3)) if b == 1 else 0 :
        ]

    arrays = {n: rng.standard_normal((b, m, h, 8)) for n, m, h in (("query", t, heads), ("key", s, 2))}
    arrays |= {"value": rng.standard_normal((b, s, 2, 8)), **some({"bias": rng.standard_normal(part())})}
    left, right = map(int, rng.integers(0, 5, 2))
    offered = {
        "mask": (visible := rng.random(part()) < 0.7, visible),
        "is_causal": (True, j <= i),
        "local_window_size": ((left, right), (j >= i - left) & (j <= i + right)),
        "query_seq_lengths": (n := rng.integers(0, t + 2, b), (np.arange(t) < n[:, None])[:, None, :, None]),
        "key_value_seq_lengths": (m := rng.integers(0, s + 2, b), (j < m[:, None])[:, None, None]),
        "scale": (float(rng.uniform(0.1, 1)), True),
    }
    chosen, seen = some(offered), np.ones(shape, bool)
    for _, shown in chosen.values():
        seen = seen & shown
    options = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, (x, _) in chosen.items()}
    backend = {"implementation": rng.choice(["cpu", "xla", "math"])}
    return (
        {n: jnp.asarray(x, "float32") for n, x in arrays.items()},
        options,
        seen.any(-1).swapaxes(1, 2),
        backend,
    )


@pytest.mark.slow
def test_options_drawn_at_random() -> None:
    """Values, residuals and gradients of eight calls: one program."""

    def results(function: Any, arrays: Any, options: Any, rows: Any, given: Any) -> Any:
        def loss(arrays: Any) -> Any:
            out, residual = function(**arrays, **options, **given, return_residual=True)
            out, residual = jnp.where(rows[..., None], out, 0), jnp.where(rows, residual, 0)
            return (out * jnp.sin(jnp.arange(out.size)).reshape(out.shape)).sum(), (out, residual)

        return jax.grad(loss, has_aux=True)(arrays)

    drawn = [_draw(seed) for seed in range(8)]

    @jax.jit
    def both(all_arrays: Any) -> Any:
        rest = [call[1:] for call in drawn]
        calls = list(zip(all_arrays, rest, strict=True))
        ours = [results(dot_product_attention, x, o, rows, own) for x, (o, rows, own) in calls]
        return ours, [results(theirs, x, o, rows, {}) for x, (o, rows, _) in calls]

    for ours, other in zip(*both([call[0] for call in drawn]), strict=True):
        jax.tree.map(_close, ours, other)


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


@pytest.mark.parametrize("mistake", rows(DROP_IN), ids=repr)
def test_what_does_not_fit_is_named(mistake: Mistake) -> None:
    given = dict(zip(("query", "key", "value"), QKV, strict=True)) | eval(f"dict({mistake.code})", globals())
    check(error_of(lambda: dot_product_attention(**given)), mistake)


def test_an_array_that_is_no_argument_is_encoded_while_jit_traces():
    """With any number of runs, and without a program that XLA would fold for seconds."""
    q = jax.random.normal(jax.random.key(0), (1, 40, 2, 8))
    mask = (jnp.arange(40)[:, None] + jnp.arange(40)[None]) % 2 == 0  # 20 runs in each row
    wanted = jax.nn.dot_product_attention(q, q, q, mask=mask[None, None])
    step = jax.jit(lambda q: dot_product_attention(q, q, q, mask=mask))
    np.testing.assert_allclose(step(q), wanted, atol=2e-6)
    assert "reduce_min" not in str(jax.make_jaxpr(step)(q))
