"""The back end of plain JAX against the oracle, and what only it has: every order of derivative."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import everything
from oracle_cases import Case, Problem, causal_window, check, make, random_bounds

from attnspan.jax.backends import Operands, Static, math, products

B, H, S, K = 2, 4, 21, 37
# The first two hold what the others do.
CASES = [
    Case(lead=(1, H), bias="table", placed=True, softcap=2.0, sinks=True, dropout_p=0.1),
    Case(lead=(B, 1), bias="dense", bias_shape=(B, 1, S, K), runs=3, dtype="bfloat16"),
]
MORE_CASES = [
    Case(),
    Case(lead=(B, 1), softcap=1.5, sinks=True, dtype="bfloat16"),
    Case(lead=(B, H), bias="signed alibi", bias_shape=(B, H), placed=True),
    Case(bias="table", runs=3, dtype="float16"),
    Case(bias="dense", bias_shape=(1, H, 1, K), kv_heads=1),
]


# Most of the time of these tests is the compiler's, which need not try hard.
QUICK = {"xla_backend_optimization_level": 0}


@partial(jax.jit, static_argnames="static", compiler_options=QUICK)
def _run(arrays, given, static):
    def attend(arrays, parameters):
        options = given._replace(bias=parameters["bias"], sinks=parameters["sinks"])
        return math.forward(*(arrays[name] for name in "qkv"), options, static)

    parameters = {"bias": given.bias, "sinks": given.sinks}
    (out, lse), pull = jax.vjp(attend, {name: arrays[name] for name in "qkv"}, parameters)
    dlse = jnp.where(jnp.isfinite(lse), arrays["dlse"], 0)
    gradients, more = pull((arrays["dout"], dlse))
    return {"out": out, "lse": lse} | {f"d{name}": x for name, x in {**gradients, **more}.items()}


def _results(problem: Problem) -> dict[str, np.ndarray]:
    found = _run(problem.arrays, problem.given, problem.case.static)
    return {name: np.asarray(x) for name, x in found.items() if x is not None}


@pytest.mark.parametrize("case", CASES + MORE_CASES * everything(), ids=str)
def test_against_the_oracle(case: Case) -> None:
    for bounds in (causal_window(case), random_bounds(case)):
        problem = make(case, bounds)
        check(problem, _results(problem))


def _seen(bounds: np.ndarray, keys: int) -> np.ndarray:
    """The dense mask (B|1, H|1, Sq, Sk)."""
    at = np.arange(keys)
    return ((bounds[..., :1] <= at) & (at < bounds[..., 1:])).any(-2)


@pytest.mark.parametrize("name", ["k", "v"])
def test_a_bad_key_reaches_the_rows_that_see_it_and_no_other(name: str) -> None:
    case = Case(lead=(B, 1), softcap=1.5, dropout_p=0.2)
    problem = make(case, random_bounds(case))
    clean = _results(problem)
    problem.arrays[name][1, 1, 9] = np.nan
    got = _results(problem)
    rows = np.zeros((B, H, S), bool)
    rows[1, 2:] = _seen(problem.bounds, K)[1, :, :, 9]  # heads 2 and 3 share key head 1
    assert rows.any()
    for result in ("out", "dq") if name == "k" else ("out",):
        assert np.isnan(got[result][rows]).any(-1).all(), result
        np.testing.assert_array_equal(got[result][~rows], clean[result][~rows])
    # The gradients of a key: those of its rows.
    keys = (rows[:, :, :, None] & _seen(problem.bounds, K)).reshape(B, 2, 2 * S, K).any(2)
    for result in ("dk", "dv") if name == "k" else ("dk",):
        assert np.isnan(got[result][keys]).any(-1).all(), result
        np.testing.assert_array_equal(got[result][~keys], clean[result][~keys])


def test_a_bad_gradient_reaches_the_keys_that_its_row_sees_and_no_other() -> None:
    case = Case(lead=(B, 1))
    problem = make(case, random_bounds(case))
    clean = _results(problem)
    problem.arrays["dout"][0, 3, 7] = np.nan
    got = _results(problem)
    keys = np.zeros((B, 2, K), bool)
    keys[0, 1] = _seen(problem.bounds, K)[0, 0, 7]
    assert 0 < keys.sum() < K
    for name in ("dk", "dv"):
        assert np.isnan(got[name][keys]).all()
        np.testing.assert_array_equal(got[name][~keys], clean[name][~keys])
    others = np.arange(S) != 7
    np.testing.assert_array_equal(got["dq"][:, :, others], clean["dq"][:, :, others])


@pytest.mark.long
@pytest.mark.parametrize("product", [products.pair_product, products.row_product])
def test_products_read_visible_pairs_only_in_every_derivative(product) -> None:
    """A masked pair is 0 however bad what it would multiply; pair (1, 2) is the masked one."""
    visible = jnp.ones((3, 4), bool).at[1, 2].set(False)
    left = jnp.where(visible, 1.0, 0.0) if product is products.row_product else jnp.ones((3, 4))
    right = jnp.ones((4, 2)) if product is products.row_product else jnp.ones((4, 4))

    def run(left, right):
        return product(left, right, visible)

    bad_right = right.at[2].set(jnp.nan)
    shape = jax.eval_shape(run, left, right)
    from_right = jax.vjp(run, left, bad_right)[1](jnp.ones(shape.shape))[0]
    bad = jnp.ones(shape.shape).at[1].set(jnp.nan)
    to_right = jax.vjp(run, left, right)[1](bad)[1]
    tangents = jnp.zeros_like(left), jnp.zeros_like(right).at[2].set(jnp.nan)
    forward = jax.jvp(run, (left, right), tangents)[1]
    if product is products.row_product:
        assert jnp.argwhere(~jnp.isnan(from_right[:, 2])).tolist() == [[1]]
        assert jnp.argwhere(~jnp.isnan(forward).any(-1)).tolist() == [[1]]
        masked = jnp.zeros_like(left).at[1, 2].set(jnp.nan)
        assert jnp.isfinite(jax.jvp(run, (left, right), (masked, jnp.zeros_like(right)))[1]).all()
    else:
        assert jnp.isfinite(from_right[1]).all()
        assert jnp.argwhere(jnp.isnan(forward)).tolist() == [[0, 2], [2, 2]]
    assert jnp.argwhere(jnp.isfinite(to_right).all(-1)).tolist() == [[2]]


def test_rows_that_see_nothing_and_illegal_ones() -> None:
    case = Case(sinks=True)
    bounds = causal_window(case).copy()
    bounds[0, 0, 3] = 0
    bounds[0, 0, 4] = [[0, 5], [4, 9]]
    problem = make(case, bounds)
    problem.arrays["dlse"][:] = 0
    problem.arrays["q"][:, :, 3] = np.nan
    got = _results(problem)
    assert (got["out"][:, :, 3] == 0).all()
    assert (got["lse"][:, :, 3] == problem.arrays["sinks"]).all()
    assert (got["dq"][:, :, 3] == 0).all()
    assert np.isfinite(got["dk"]).all()
    assert np.isfinite(got["dsinks"]).all()
    for name in ("out", "lse"):
        assert np.isnan(got[name][:, :, 4]).all()
        assert np.isfinite(got[name][:, 1:, [2, 5]]).all()


@pytest.mark.parametrize("sizes", [{"q_len": 0}, {"k_len": 0}], ids=str)
def test_nothing_to_do(sizes: dict[str, int]) -> None:
    case = Case(**sizes, softcap=2.0)
    got = _results(make(case, np.zeros((1, 1, case.q_len, 2, 2), np.int32)))
    assert got["out"].shape == (B, H, case.q_len, case.v_dim)
    assert all((x == 0).all() for name, x in got.items() if name != "lse")
    assert (got["lse"] == -np.inf).all()


EVERYTHING = {"softcap": 2.0, "bias": "table", "sinks": True, "dropout_p": 0.2}
SMALL = Case("float64", 1, 2, 1, q_len=6, k_len=8, head_dim=3, v_dim=2, **EVERYTHING)


def test_second_derivatives_in_every_mode() -> None:
    """Against differences of gradients, which the oracle has checked, in float64."""
    with jax.enable_x64(True):
        problem = make(SMALL, random_bounds(SMALL))
        problem.arrays["sinks"][0] = 0.3
        names = ("q", "k", "v", "bias", "sinks")
        point = {name: jnp.asarray(problem.arrays[name], "float64") for name in names}
        along = {name: jnp.cos(1.0 + jnp.arange(x.size)).reshape(x.shape) for name, x in point.items()}

        def loss(x):
            given = problem.given._replace(bias=x["bias"], sinks=x["sinks"])
            out, lse = math.forward(x["q"], x["k"], x["v"], given, SMALL.static)
            lse = jnp.where(jnp.isfinite(lse), lse, 0)
            return (out * problem.arrays["dout"]).sum() + (lse * problem.arrays["dlse"]).sum()

        slope, step = jax.grad(loss), 1e-5

        @partial(jax.jit, compiler_options=QUICK)
        def every_mode(x):
            ends = jnp.array([step, -step])
            near = jax.lax.map(lambda end: slope(jax.tree.map(lambda x, d: x + end * d, x, along)), ends)
            want = jax.tree.map(lambda a: (a[0] - a[1]) / (2 * step), near)
            return want, {
                "forward over reverse": jax.jvp(slope, (x,), (along,))[1],
                "reverse over forward": jax.grad(lambda x: jax.jvp(loss, (x,), (along,))[1])(x),
                "reverse over reverse": jax.vjp(slope, x)[1](along)[0],
            }

        want, found = every_mode(point)
        for mode, got in found.items():
            for name in names:
                where = f"{mode}, {name}"
                assert jnp.abs(want[name]).max() > 0.01, where
                np.testing.assert_allclose(got[name], want[name], rtol=1e-6, atol=1e-7, err_msg=where)


def test_vmap_over_everything() -> None:
    case = Case(batch=3, heads=2, kv_heads=1, q_len=5, k_len=7, lead=(3, 1))
    problem = make(case, random_bounds(case))
    q, k, v = (problem.arrays[name] for name in "qkv")
    problem.arrays["v"][2, 0, 3] = np.nan

    def one(q, k, v, bounds):
        def loss(q, k, v):
            return math.forward(q, k, v, Operands(bounds), Static(0.3))[0].sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    rows = [x[:, None] for x in (q, k, v, problem.bounds)]
    found = jax.jit(jax.vmap(one))(*rows)
    single = jax.jit(one)
    for i in range(3):
        want = single(*(x[i] for x in rows))
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6), found, want)
