"""The blockwise back end against the oracle, with tiles so small that every problem has several."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import everything
from oracle_cases import Case, Problem, causal_window, check, make, random_bounds

from attnspan.jax.backends import Operands, Static, xla, xla_tiles

B, H, S, K = 2, 4, 21, 37
# The first three hold what the others do.
CASES = [
    Case(lead=(B, 1), bias="table", placed=True, softcap=2.0, sinks=True, dropout_p=0.1),
    Case(bias="table", reach=60, q_len=40, k_len=17, runs=3, dtype="bfloat16"),
    Case(lead=(1, H), bias="dense", bias_shape=(B, 1, S, K), dtype="float16", wide_bias=True),
]
MORE_CASES = [
    Case(),
    Case(lead=(B, 1), softcap=1.5, dropout_p=0.3),
    Case(lead=(B, H), bias="signed alibi", bias_shape=(B, H), placed=True),
    Case(bias="table", reach=0, sinks=True, kv_heads=4),
    Case(bias="dense", bias_shape=(B, H, S, K), softcap=2.0, sinks=True, dropout_p=0.3),
    Case(bias="dense", bias_shape=(1, H, 1, K), dtype="bfloat16", kv_heads=1, dropout_p=0.5),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_tiles, "_Q_BLOCK", 8)
    monkeypatch.setattr(xla_tiles, "_K_BLOCK", 16)


# Most of the time of these tests is the compiler's, which need not try hard.
@partial(jax.jit, static_argnames="static", compiler_options={"xla_backend_optimization_level": 0})
def _run(arrays, given, static):
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = xla.forward(q, k, v, given, static)
    dlse = jnp.where(
        jnp.isfinite(lse), arrays["dlse"], jnp.nan
    )  # what a row that sees nothing gets is not read
    if given.sinks is not None:
        dlse = arrays["dlse"]
    grads = xla.backward(arrays["dout"], dlse, q, k, v, given, out, lse, static, want_dbias=True)
    results = (out, lse, *grads)
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"), results, strict=True))


def _results(problem: Problem) -> dict[str, np.ndarray]:
    found = _run(problem.arrays, problem.given, problem.case.static)
    for name, x in found.items():
        want = problem.case.dtype if name in ("out", "dq", "dk", "dv") else problem.arrays["dlse"].dtype
        assert x is None or x.dtype == want, name
    return {name: np.asarray(x) for name, x in found.items() if x is not None}


@pytest.mark.parametrize("case", CASES + MORE_CASES * everything(), ids=str)
def test_against_the_oracle(case: Case) -> None:
    for bounds in (causal_window(case), random_bounds(case)):
        problem = make(case, bounds)
        check(problem, _results(problem))


def _plain(case: Case, bounds: np.ndarray) -> tuple[Problem, dict[str, np.ndarray]]:
    problem = make(case, bounds)
    return problem, _results(problem)


@pytest.mark.long
def test_float64() -> None:
    with jax.enable_x64(True):
        case = Case(dtype="float64", lead=(B, 1), softcap=2.0, bias="alibi", dropout_p=0.2)
        check(*_plain(case, random_bounds(case)))


def test_keys_that_no_row_of_a_tile_sees_may_hold_anything() -> None:
    """Of the rows of one tile, and of the keys of one: the others may see them."""
    case = Case()
    bounds = causal_window(case, left=2)
    bounds[..., 0, :] = 0  # not the first key
    problem, clean = _plain(case, bounds)
    assert all(np.isfinite(x).all() for x in clean.values())
    keys = [0, K - 1]  # nobody sees the first; only the last row sees the last
    for name, value in (("k", np.nan), ("v", np.inf)):
        problem.arrays[name][:, :, keys] = value
    got = _results(problem)
    last_tile = 13  # the last 8 of 21 rows
    for name in ("out", "lse", "dq"):
        np.testing.assert_array_equal(got[name][:, :, :last_tile], clean[name][:, :, :last_tile])
        assert np.isnan(got[name][:, :, -1]).all(), name
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(got[name][:, :, :16], clean[name][:, :, :16])


def test_rows_that_see_nothing_neither_get_nor_give() -> None:
    case = MORE_CASES[1]
    bounds = random_bounds(case)
    problem, clean = _plain(case, bounds)
    nothing = np.broadcast_to((bounds[..., 0] == bounds[..., 1]).all(-1), (B, H, S))
    assert nothing.any()
    assert (clean["out"][nothing] == 0).all()
    assert (clean["lse"][nothing] == -np.inf).all()
    assert (clean["dq"][nothing] == 0).all()
    problem.arrays["q"][nothing] = np.nan
    problem.arrays["dout"][nothing] = np.nan
    for name, x in _results(problem).items():
        np.testing.assert_array_equal(x, clean[name])


ILLEGAL = [
    [[-1, 5], [0, 0]],
    [[4, 3], [0, 0]],
    [[0, 0], [3, K + 1]],
    [[2, 6], [5, 8]],
    [[7, 9], [1, 2]],
    [[0, -1], [0, -1]],
    [[-(2**31), 2**31 - 1], [0, 0]],
]


def test_illegal_bounds_give_nan_in_their_row_and_nowhere_else() -> None:
    case = Case()
    bounds = causal_window(case)
    _, clean = _plain(case, bounds)
    bounds = bounds.copy()
    rows = np.arange(len(ILLEGAL)) * 3
    bounds[0, 0, rows] = ILLEGAL
    got = _plain(case, bounds)[1]
    others = np.setdiff1d(np.arange(S), rows)
    for name in ("out", "lse"):
        assert np.isnan(got[name][:, :, rows]).all()
        np.testing.assert_array_equal(got[name][:, :, others], clean[name][:, :, others])


@pytest.mark.parametrize("sizes", [{"q_len": 0}, {"k_len": 0}, {"batch": 0}], ids=str)
def test_nothing_to_do(sizes: dict[str, int]) -> None:
    case = Case(**sizes, sinks=True, bias="table")
    bounds = np.zeros((1, 1, case.q_len, 2, 2), np.int32)
    problem, got = _plain(case, bounds)
    assert got["out"].shape == problem.arrays["dout"].shape
    assert (got["out"] == 0).all()
    assert (got["lse"] == problem.arrays["sinks"][:, None]).all()
    for name in ("q", "k", "v", "bias"):
        assert got[f"d{name}"].shape == problem.arrays[name].shape
        assert (got[f"d{name}"] == 0).all()
    # A sink alone is the lse of its row.
    alone = problem.arrays["dlse"].sum((0, 2)) * (problem.arrays["sinks"] > -np.inf)
    np.testing.assert_allclose(got["dsinks"], alone, rtol=1e-5)


def test_a_block_of_queries_visits_the_blocks_that_it_touches() -> None:
    case = Case(lead=(B, H), k_len=150, q_len=24)
    bounds = causal_window(case)
    sizes = xla_tiles.sizes_of(jnp.zeros((B, H, 24, 8)), jnp.zeros((B, 2, 150, 8)))
    seen = np.zeros((24, 160), bool)
    for i in range(24):
        for lo, hi in bounds[:, :, i].reshape(-1, 2):
            seen[i, lo:hi] = True
    want = seen.reshape(3, 8, 10, 16).any((1, 3))
    assert not want.all()
    for i in range(3):
        rows = xla_tiles.rows_of(jnp.int32(i), Operands(jnp.asarray(bounds)), Static(1.0), sizes)
        assert rows.order[: int(rows.blocks)].tolist() == np.flatnonzero(want[i]).tolist()


def _step(q, k, v, dout, bounds):
    given, static = Operands(bounds), Static(0.25)
    out, lse = xla.forward(q, k, v, given, static)
    return out, xla.backward(dout, None, q, k, v, given, out, lse, static, True)[:3]


def _shapes(length: int, dtype=jnp.float32) -> list[jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((1, 1, length, 16), dtype)
    return [x] * 4 + [jax.ShapeDtypeStruct((1, 1, length, 1, 2), jnp.int32)]


def test_memory_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 65,536 the scores alone would take 16 GiB."""
    monkeypatch.undo()
    half, whole = (
        jax.jit(_step).lower(*_shapes(length)).compile().memory_analysis().temp_size_in_bytes
        for length in (32768, 65536)
    )
    assert half < whole <= 2 * half
    assert whole < 16 * 2**20


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_it_lowers_for_every_platform(dtype) -> None:
    exported = jax.export.export(jax.jit(_step), platforms=["cpu", "cuda", "tpu"])(*_shapes(100, dtype))
    assert "custom_call" not in exported.mlir_module()
    assert exported.platforms == ("cpu", "cuda", "tpu")
