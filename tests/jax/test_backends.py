"""What every backend but the compiled kernel promises, against the oracle, in many small tiles."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import everything
from samples.jax_problems import Case, Problem, causal_window, check, make, oracle, random_bounds

from attnspan.jax.backends import BACKENDS, pallas_tpu, xla, xla_tiles
from attnspan.jax.backends.tiles import interpreted
from attnspan.jax.part import JaxPart, Static

pytestmark = pytest.mark.below_promotion

#: A problem of several tiles, the last ones ragged.
BASE = {
    "xla": Case(),
    "math": Case(),
    "pallas": Case(q_len=150, k_len=300, head_dim=16, v_dim=24, lead=(2, 1)),
}
KERNELS = ("xla", "pallas")
# Programs run once or twice here: optimising them would take most of the time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
ALL = {"softcap": 2.0, "sinks": True, "dropout_p": 0.3, "placed": True}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_tiles, "_Q_BLOCK", 8)
    monkeypatch.setattr(xla_tiles, "_K_BLOCK", 16)
    monkeypatch.setattr(pallas_tpu, "default", lambda *_: (128, 128))


@cache
def _program(name: str) -> Any:
    backend = BACKENDS[name]

    def by_backward(part: JaxPart, dout: Any, dlse: Any) -> Any:
        out, lse = backend.forward(part)
        alive = jnp.isfinite(lse)
        read, unread = (alive | (part.sinks is not None), jnp.nan) if name == "xla" else (alive, 0)
        dlse = jnp.where(read, dlse, unread)
        return out, lse, *backend.backward(part, out, lse, dout, dlse, True)

    def by_jax(part: JaxPart, dout: Any, dlse: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
            return backend.forward(replace(part, q=q, k=k, v=v, bias=bias, sinks=sinks))

        (out, lse), pull = jax.vjp(attend, part.q, part.k, part.v, part.bias, part.sinks)
        return out, lse, *pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0)))

    return jax.jit(by_jax if backend.own_derivative else by_backward, compiler_options=QUICKLY)


def run(name: str, problem: Problem) -> dict[str, np.ndarray]:
    """Results and gradients, in their dtypes, whatever is not there left out."""
    with interpreted() if "pallas" in name else nullcontext():
        found = _program(name)(problem.part, problem.arrays["dout"], problem.arrays["dlse"])
    results = {n: x for n, x in zip(NAMES, found, strict=True) if x is not None}
    wide = problem.arrays["dlse"].dtype
    for n, x in results.items():
        assert (
            x.dtype == (problem.case.dtype if n in ("out", "dq", "dk", "dv") else wide) or name == "math"
        ), n
    return {n: np.asarray(x) for n, x in results.items()}


# Of each backend, the first cases hold what the others do.
CASES: dict[str, list[dict[str, Any]]] = {
    "xla": [
        {**ALL, "bias": "table"},
        {"bias": "table", "reach": 60, "q_len": 40, "k_len": 17, "runs": 3, "dtype": "bfloat16"},
        {
            "lead": (1, 4),
            "bias": "dense",
            "bias_shape": (2, 1, 21, 37),
            "dtype": "float16",
            "wide_bias": True,
        },
    ],
    "math": [
        {**ALL, "lead": (1, 4), "bias": "table"},
        {"lead": (2, 1), "bias": "dense", "bias_shape": (2, 1, 21, 37), "runs": 3, "dtype": "bfloat16"},
    ],
    "pallas": [{**ALL, "bias": "signed alibi", "bias_shape": (2, 4)}],
}
MORE: dict[str, list[dict[str, Any]]] = {
    "xla": [
        {},
        {"lead": (2, 4), "bias": "signed alibi", "bias_shape": (2, 4), "placed": True},
        {"bias": "table", "reach": 0, "sinks": True, "kv_heads": 4},
        {"bias": "dense", "bias_shape": (2, 4, 21, 37), "softcap": 2.0, "sinks": True, "dropout_p": 0.3},
        {"bias": "dense", "bias_shape": (1, 4, 1, 37), "dtype": "bfloat16", "kv_heads": 1, "dropout_p": 0.5},
    ],
    "math": [
        {},
        {"lead": (2, 1), "softcap": 1.5, "sinks": True, "dtype": "bfloat16"},
        {"lead": (2, 4), "bias": "signed alibi", "bias_shape": (2, 4), "placed": True},
        {"bias": "table", "runs": 3, "dtype": "float16"},
        {"bias": "dense", "bias_shape": (1, 4, 1, 37), "kv_heads": 1},
    ],
    "pallas": [
        {**ALL, "bias": "dense", "bias_shape": (1, 4, 150, 300)},
        {"dtype": "bfloat16", "kv_heads": 4, "head_dim": 37, "v_dim": 21, "runs": 11, "bias": "alibi"},
        {"runs": 11, "k_len": 600, "bias": "dense", "bias_shape": (2, 1, 1, 600)},
        {"bias": "table"},
    ],
}


def _cells() -> list[Any]:
    short = [(name, case) for name, cases in CASES.items() for case in cases]
    long = [(name, case) for name, cases in MORE.items() for case in cases] * everything()
    return [
        pytest.param(n, replace(BASE[n], **c), id=f"{n}-{replace(BASE[n], **c)}") for n, c in short + long
    ]


@pytest.mark.parametrize(("name", "case"), _cells())
def test_against_the_oracle(name: str, case: Case) -> None:
    for bounds in (causal_window(case), random_bounds(case)):
        problem = make(case, bounds)
        check(problem, run(name, problem))


@pytest.mark.parametrize("name", KERNELS)
def test_what_no_row_of_a_tile_sees_may_hold_anything(name: str) -> None:
    """Keys behind the last visible one, in the middle of a tile that is computed; rows that see nothing."""
    case = BASE[name]
    bounds = np.zeros((2, 1, case.q_len, 2, 2), np.int32)
    rows, lengths = np.arange(case.q_len), (case.k_len - 12, case.k_len - 5)
    for b, length in enumerate(lengths):
        bounds[b, 0, :, 0, 1] = np.minimum(rows + case.k_len - case.q_len, length)
    bounds[:, :, 7] = 0
    problem = make(replace(case, lead=(2, 1)), bounds)
    clean = run(name, problem)
    assert (clean["out"][:, :, 7] == 0).all()
    assert (clean["lse"][:, :, 7] == -np.inf).all()
    for b, length in enumerate(lengths):
        problem.arrays["k"][b, :, length:] = np.nan
        problem.arrays["v"][b, :, length:] = np.inf
    problem.arrays["q"][:, :, 7] = problem.arrays["dout"][:, :, 7] = np.nan
    found = run(name, problem)
    for n, x in clean.items():
        assert np.isfinite(x).all() or n == "lse", n
        np.testing.assert_array_equal(x, found[n], err_msg=n)


ILLEGAL = [
    [[-1, 5], [0, 0]],
    [[4, 3], [0, 0]],
    [[0, 0], [3, 10**6]],
    [[2, 6], [5, 8]],
    [[7, 9], [1, 2]],
    [[0, -1], [0, -1]],
    [[-(2**31), 2**31 - 1], [0, 0]],
]


@pytest.mark.parametrize("name", BASE)
def test_illegal_rows_are_nan_and_leave_the_others_alone(name: str) -> None:
    case = BASE[name]
    bounds, rows = causal_window(case).copy(), np.arange(len(ILLEGAL)) * 3
    bounds[..., rows, :, :] = 0
    problem = make(case, bounds.copy())
    exact, _ = oracle(problem)
    problem.bounds[:, :, rows] = ILLEGAL
    found, others = run(name, problem), np.setdiff1d(np.arange(case.q_len), rows)
    for n in ("out", "lse"):
        assert np.isnan(found[n][:, :, rows]).all()
        np.testing.assert_allclose(found[n][:, :, others], exact[n][:, :, others], atol=2e-5)
    for n in () if name in ("xla", "math") else ("dq", "dk", "dv"):
        assert np.linalg.norm(found[n] - exact[n]) < 1e-5 * np.linalg.norm(exact[n]), n


@pytest.mark.parametrize("sizes", [{"q_len": 0}, {"k_len": 0}, {"batch": 0}], ids=str)
@pytest.mark.parametrize("name", ["xla", "math"])
def test_nothing_to_do(name: str, sizes: dict[str, int]) -> None:
    case = Case(**sizes, sinks=True, bias="table")
    problem = make(case, np.zeros((1, 1, case.q_len, 2, 2), np.int32))
    got = run(name, problem)
    assert got["out"].shape == problem.arrays["dout"].shape
    assert (got["lse"] == problem.arrays["sinks"][:, None]).all()
    assert not any(got[n].any() for n in ("out", "dq", "dk", "dv", "dbias"))
    # A sink alone is the lse of its row.
    alone = problem.arrays["dlse"].sum((0, 2)) * (problem.arrays["sinks"] > -np.inf)
    np.testing.assert_allclose(got["dsinks"], alone, rtol=1e-5)


@pytest.mark.long
def test_float64() -> None:
    with jax.enable_x64(True):
        case = Case(dtype="float64", lead=(2, 1), softcap=2.0, bias="alibi", dropout_p=0.2)
        problem = make(case, random_bounds(case))
        check(problem, run("xla", problem))


def test_a_block_of_queries_visits_the_blocks_that_it_touches() -> None:
    case = Case(lead=(2, 4), k_len=150, q_len=24)
    bounds = causal_window(case)
    part = make(case, bounds).part
    sizes = xla_tiles.sizes_of(part.q, part.k)
    keys = np.arange(160)
    seen = ((keys >= bounds[..., :1]) & (keys < bounds[..., 1:])).any((0, 1, 3))
    want = seen.reshape(3, 8, 10, 16).any((1, 3))
    assert not want.all()
    for i in range(3):
        rows = xla_tiles.rows_of(jnp.int32(i), part, sizes)
        assert rows.order[: int(rows.blocks)].tolist() == np.flatnonzero(want[i]).tolist()


def _step(q: Any, k: Any, v: Any, dout: Any, bounds: Any) -> Any:
    part = JaxPart(q, k, v, bounds, static=Static(0.25))
    out, lse = xla.forward(part)
    return out, xla.backward(part, out, lse, dout, None, True)[:3]


def _shapes(length: int) -> list[jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((1, 1, length, 16), jnp.float32)
    return [x] * 4 + [jax.ShapeDtypeStruct((1, 1, length, 1, 2), jnp.int32)]


def test_memory_of_xla_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 65,536 the scores alone would take 16 GiB."""
    monkeypatch.undo()
    half, whole = (
        jax.jit(_step).lower(*_shapes(length)).compile().memory_analysis().temp_size_in_bytes
        for length in (32768, 65536)
    )
    assert half < whole <= 2 * half
    assert whole < 16 * 2**20
