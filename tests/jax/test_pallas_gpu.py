"""The Pallas kernels for GPUs as plain JAX, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle_cases as cases
import pytest
from covering import few
from oracle_cases import Case

import attnspan as a
from attnspan.call import Problem
from attnspan.jax.backends import Operands, Static
from attnspan.jax.backends import pallas_gpu as kernels
from attnspan.jax.backends.tiles import legal
from attnspan.jax.backends.visits import key_visits, query_visits
from attnspan.options import DISTANCE

SMALL = Case(q_len=75, k_len=90, head_dim=16, v_dim=24, lead=(2, 1))
DOCUMENTS = np.repeat(np.arange(4), [20, 1, 29, 40])
MASKS = {
    "full": a.full(),
    "causal": a.causal(),
    "window": a.causal() & a.window(9),
    "documents": a.causal() & a.segments(DOCUMENTS),
    "global and window": a.causal() & (a.window(3) | a.global_keys(5)),
    "prefix": a.causal() | a.prefix(np.array([40, 7])),
    "nothing in one row of the batch": a.key_padding(np.array([60, 0])),
}
# Interpreted kernels are large programs that run once: optimising them would take the time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems of many tiles: empty ones, masked ones and those that every row sees."""
    tiling = kernels._Tiling(32, 16, 4)
    monkeypatch.setattr(kernels, "_tiling", lambda *_, **__: tiling)


def bounds_of(mask: a.Mask) -> np.ndarray:
    """For the small case, with empty spans up to two: masks of one shape are one compilation."""
    lowered = mask.spans(q_len=SMALL.q_len, k_len=SMALL.k_len, batch=SMALL.batch, heads=SMALL.heads)
    bounds = np.asarray(lowered.bounds)
    bounds = np.broadcast_to(bounds, (SMALL.batch, *bounds.shape[1:]))
    return np.pad(bounds, [(0, 0)] * 3 + [(0, 2 - bounds.shape[3]), (0, 0)])


@partial(jax.jit, static_argnames="static", compiler_options=QUICKLY)
def _both(arrays: dict[str, Any], given: Operands, static: Static) -> tuple[Any, Any, Any]:
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = kernels.forward(q, k, v, given, static)
    dlse = jnp.where(jnp.isfinite(lse), arrays["dlse"], 0)
    return out, lse, kernels.backward(arrays["dout"], dlse, q, k, v, given, out, lse, static, True)


def run(problem: cases.Problem) -> dict[str, np.ndarray]:
    arrays = {name: jnp.asarray(x) for name, x in problem.arrays.items()}
    with kernels.interpreted():
        out, lse, gradients = _both(arrays, problem.given, problem.case.static)
    named = dict(zip(("dq", "dk", "dv", "dbias", "dsinks"), gradients, strict=True))
    results = {"out": out, "lse": lse, **{name: x for name, x in named.items() if x is not None}}
    for name, x in results.items():
        assert x.dtype == (problem.case.dtype if name in ("out", "dq", "dk", "dv") else "float32"), name
    return {name: np.asarray(x, np.float64) for name, x in results.items()}


@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize("mask", few(MASKS, 3))
def test_masks(mask: str) -> None:
    problem = cases.make(SMALL, bounds_of(MASKS[mask]))
    cases.check(problem, run(problem))


@pytest.mark.usefixtures("narrow_tiles")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            replace(SMALL, softcap=1.5, sinks=True, bias="signed alibi", bias_shape=(2, 4), placed=True),
            marks=pytest.mark.long,
        ),
        replace(
            SMALL,
            bias="dense",
            bias_shape=(1, 4, 75, 90),
            softcap=2.0,
            sinks=True,
            dropout_p=0.3,
            placed=True,
        ),
    ],
    ids=str,
)
def test_options(case: Case) -> None:
    problem = cases.make(case, cases.random_bounds(case))
    cases.check(problem, run(problem))


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case("bfloat16", 2, 4, 1, 33, 70, 37, 53, lead=(2, 4), runs=3, bias="alibi", dropout_p=0.2),
        Case("float16", 2, 3, 3, 70, 20, 8, 16, lead=(1, 3), runs=1, bias="dense", bias_shape=(2, 1, 1, 20)),
    ],
    ids=str,
)
def test_dtypes_and_shapes(case: Case) -> None:
    problem = cases.make(case, cases.random_bounds(case))
    cases.check(problem, run(problem))


@pytest.mark.usefixtures("narrow_tiles")
def test_what_nobody_sees_may_be_anything() -> None:
    lengths = 50, 61
    problem = cases.make(SMALL, bounds_of(a.causal() & a.key_padding(np.array(lengths))))
    clean = run(problem)
    for b, length in enumerate(lengths):
        problem.arrays["k"][b, :, length:] = np.nan
        problem.arrays["v"][b, :, length:] = np.inf
    found = run(problem)
    for name, x in clean.items():
        assert np.array_equal(x, found[name]), name


@pytest.mark.usefixtures("narrow_tiles")
def test_illegal_rows_are_nan_and_leave_the_others_alone() -> None:
    wrong = {3: [[-1, 4], [4, 5]], 20: [[5, 3], [0, 0]], 40: [[0, 5], [7, 91]], 60: [[0, 9], [8, 12]]}
    bounds = bounds_of(a.causal()).copy()
    bounds[1, :, list(wrong)] = 0
    exact = cases.oracle(cases.make(SMALL, bounds.copy()))[0]
    for row, spans in wrong.items():
        bounds[1, :, row] = spans
    found, rows = run(cases.make(SMALL, bounds)), list(wrong)
    assert np.isnan(found["out"][1, :, rows]).all()
    assert np.isnan(found["lse"][1, :, rows]).all()
    assert np.isnan(found["out"]).sum() == len(rows) * SMALL.heads * SMALL.v_dim
    for name in ("dq", "dk", "dv"):
        assert cases.error(found[name], exact[name]) < 1e-5, name


@jax.jit
def _visits(bounds: Any) -> tuple[Any, Any]:
    visits = key_visits(legal(bounds, 90), 90, 8, 4)
    return visits, query_visits(visits, 23)


def test_visits_cover_what_is_visible_once() -> None:
    bounds = cases.random_bounds(replace(SMALL, lead=(2, 4), runs=3))
    visits, q_visits = (np.asarray(x) for x in _visits(jnp.asarray(bounds)))
    keys = np.arange(92)[:, None]
    visible = ((keys >= bounds[..., None, :, 0]) & (keys < bounds[..., None, :, 1])).any(-1)
    visible = np.pad(visible, ((0, 0), (0, 0), (0, 5), (0, 0)))
    tiles = visible.reshape(2, 4, 10, 8, 23, 4)
    seen = np.zeros((2, 4, 10, 23), int)
    for place in np.ndindex(2, 4, 10):
        for first, end, all_first, all_end in visits[place]:
            seen[(*place, slice(first, end))] += 1
            assert first <= all_first <= all_end <= end
            inside = tiles[place][:, all_first:all_end].all(0)
            assert inside.all() or place[2] == 9  # whose last rows are nobody's
    assert seen.max() == 1
    assert (seen[tiles.any((3, 5))] == 1).all()
    for b, h, j in np.ndindex(2, 4, 23):
        at = np.nonzero(seen[b, h, :, j])[0]
        expected = [at[0], at[-1] + 1] if len(at) else [0, 0]
        assert q_visits[b, h, j].tolist() == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"device": "tpu"}, "not on tpu"),
        ({"dtype": "float64"}, "not float64"),
        ({"head_dim": 320}, "not 320 and 64"),
        ({"k_len": 0}, "no empty arrays"),
        ({"runs": 20}, "not 20"),
    ],
)
def test_refusals(change: dict[str, Any], reason: str | None) -> None:
    problem = replace(Problem(1, 2, 1, 8, 8, 64, 64, 1, "bfloat16", "gpu"), **change)
    found = kernels.supports(problem, Static(scale=1.0))
    assert found is None if reason is None else reason in str(found)


def test_tables_by_distance_are_refused() -> None:
    problem = Problem(1, 2, 1, 8, 8, 64, 64, 1, "bfloat16", "gpu")
    assert "by distance" in str(kernels.supports(problem, Static(scale=1.0, bias_kind=DISTANCE)))
