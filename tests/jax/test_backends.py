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
import torch
from covering import everything
from samples.jax_problems import cotangents_of, part_of
from samples.parts import Case
from samples.problems import EXPONENTIAL, Problem, check, make

from attnspan.backends import table
from attnspan.experimental.pallas import backend as pallas
from attnspan.jax import backends
from attnspan.jax.backends import xla, xla_tiles
from attnspan.jax.backends.tiles import interpreted
from attnspan.jax.part import JaxPart

pytestmark = pytest.mark.below_promotion

#: A problem of several tiles, the last ones ragged.
PLAIN = Case(
    batch=2, heads=4, kv_heads=2, q_len=21, k_len=37, head_dim=8, v_dim=12, runs=2, mask_batch=1, mask_heads=1
)
BASE = {
    "xla": PLAIN,
    "math": PLAIN,
    "pallas": replace(PLAIN, q_len=150, k_len=300, head_dim=16, v_dim=24, mask_batch=2),
}
# Programs run once or twice here: optimising them would take most of the time.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")
GIVEN = ("queries given", "keys given")
ALL = ("softcap", "sinks, one none", "dropout", *GIVEN)
BF16, HALF = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_tiles, "_Q_BLOCK", 8)
    monkeypatch.setattr(xla_tiles, "_K_BLOCK", 16)
    monkeypatch.setattr(pallas, "default", lambda *_: (128, 128))


@cache
def _program(name: str) -> Any:
    backend = table("jax")[name]

    def by_backward(part: JaxPart, dout: Any, dlse: Any) -> Any:
        out, lse = backends.forward(backend, part)
        alive = jnp.isfinite(lse)
        read, unread = (alive | (part.sinks is not None), jnp.nan) if name == "xla" else (alive, 0)
        return (
            out,
            lse,
            *backends.backward(backend, part, out, lse, dout, jnp.where(read, dlse, unread), True),
        )

    def by_jax(part: JaxPart, dout: Any, dlse: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
            return backends.forward(backend, replace(part, q=q, k=k, v=v, bias=bias, sinks=sinks))

        (out, lse), pull = jax.vjp(attend, part.q, part.k, part.v, part.bias, part.sinks)
        return out, lse, *pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0)))

    return jax.jit(by_jax if backend.backward is None else by_backward, compiler_options=QUICKLY)


def run(name: str, problem: Problem) -> dict[str, np.ndarray]:
    """Results and gradients, in their dtypes, whatever is not there left out."""
    with interpreted() if "pallas" in name else nullcontext():
        part, (dout, dlse) = part_of(problem), cotangents_of(problem)
        found = _program(name)(part, dout, dlse)
    results = {n: x for n, x in zip(NAMES, found, strict=True) if x is not None}
    for n, x in results.items():
        wanted = (part.q if n in ("out", "dq", "dk", "dv") else dlse).dtype
        assert x.dtype == wanted or name == "math", n
    return {n: np.asarray(x) for n, x in results.items()}


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


# The first case holds what the others do. tests/conformance has those of one tile, and of each backend.
CASES = [
    ("xla", (*ALL, "distance table"), {}),
    long("xla", ("dense, all heads, float32",), {"mask_heads": 4, "dtype": HALF}),
    long("pallas", (*ALL, "alibi, signed, per batch row"), {}),
    long("xla", ("long distance table",), {"q_len": 40, "k_len": 17, "runs": 3, "dtype": BF16}),
    long("xla", (), {}),
    long("xla", ("alibi, signed, per batch row", *GIVEN), {"mask_batch": 2, "mask_heads": 4}),
    long("xla", ("one distance", "sinks, one none"), {"kv_heads": 4}),
    long("xla", ("dense with holes", "softcap", "sinks, one none", "dropout"), {}),
    long("xla", ("dense, per key and head, float32", "dropout by seeds"), {"dtype": BF16, "kv_heads": 1}),
    long("math", (*ALL, "distance table"), {"mask_heads": 4}),
    long("math", ("alibi, signed, per batch row", *GIVEN), {"mask_batch": 2, "mask_heads": 4}),
    long("math", ("dense, per key and head, float32",), {"kv_heads": 1, "dtype": HALF}),
    long("pallas", (*ALL, "dense with holes"), {}),
    long("pallas", ("alibi",), {"dtype": BF16, "kv_heads": 4, "head_dim": 37, "v_dim": 21, "runs": 11}),
    long("pallas", ("dense, per key, all heads",), {"runs": 11, "k_len": 600}),
    long("pallas", ("distance table",), {}),
]


@pytest.mark.slow
@pytest.mark.covering(3)
@pytest.mark.parametrize(("name", "options", "sizes"), CASES, ids=str)
def test_against_the_oracle(name: str, options: tuple[str, ...], sizes: dict[str, Any]) -> None:
    # An interpreted kernel takes a second for each; illegal rows have the second mask.
    masks = ["random", "first key and window"]
    for mask in masks[: 1 if name == "pallas" and not everything() else 2]:
        problem = make(replace(BASE[name], options=options, mask=mask, **sizes))
        check(problem, run(name, problem), exponential=EXPONENTIAL[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xla", long("pallas")])
def test_what_no_row_of_a_tile_sees_may_hold_anything(name: str) -> None:
    """Keys behind the last visible one, in the middle of a tile that is computed; rows that see nothing."""
    problem = make(replace(BASE[name], mask_batch=2))
    q_len, k_len, bounds = problem.case.q_len, problem.case.k_len, torch.zeros_like(problem.bounds)
    lengths = k_len - 12, k_len - 5
    for b, length in enumerate(lengths):
        bounds[b, 0, :, 0, 1] = (torch.arange(q_len) + k_len - q_len).clamp(max=length)
    bounds[:, :, 7] = 0
    problem.bounds = bounds
    clean = run(name, problem)
    assert (clean["out"][:, :, 7] == 0).all()
    assert (clean["lse"][:, :, 7] == -np.inf).all()
    for b, length in enumerate(lengths):
        problem.k[b, :, length:], problem.v[b, :, length:] = np.nan, np.inf
    problem.q[:, :, 7], problem.dout[:, :, 7] = np.nan, np.nan
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xla", long("math"), long("pallas")])
def test_illegal_rows_are_nan_and_leave_the_others_alone(name: str) -> None:
    problem = make(replace(BASE[name], mask="first key and window", mask_batch=2))
    rows = np.arange(len(ILLEGAL)) * 3
    problem.bounds[:, :, rows] = 0
    exact = problem.oracle()
    problem.bounds[:, :, rows] = torch.tensor(ILLEGAL, dtype=torch.int32)
    found, others = run(name, problem), np.setdiff1d(np.arange(problem.case.q_len), rows)
    for n in ("out", "lse"):
        assert np.isnan(found[n][:, :, rows]).all()
        np.testing.assert_allclose(found[n][:, :, others], exact[n][:, :, others], atol=2e-5)
    for n in () if name in ("xla", "math") else ("dq", "dk", "dv"):
        assert np.linalg.norm(found[n] - exact[n]) < 1e-5 * np.linalg.norm(exact[n]), n


def _step(q: Any, k: Any, v: Any, dout: Any, bounds: Any) -> Any:
    part = JaxPart(q, k, v, bounds, 0.25)
    out, lse = xla.forward(part)
    return out, xla.backward(part, out, lse, dout, None, True)[:3]


def _shapes(length: int) -> list[jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((1, 1, length, 16), jnp.float32)
    return [x] * 4 + [jax.ShapeDtypeStruct((1, 1, length, 1, 2), jnp.int32)]


@pytest.mark.slow
def test_memory_of_xla_is_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 65,536 the scores alone would take 16 GiB."""
    monkeypatch.undo()
    half, whole = (
        jax.jit(_step).lower(*_shapes(length)).compile().memory_analysis().temp_size_in_bytes
        for length in (32768, 65536)
    )
    assert half < whole <= 2 * half
    assert whole < 16 * 2**20


@pytest.mark.long
def test_float64() -> None:
    with jax.enable_x64(True):
        options = ("softcap", "alibi", "dropout")
        problem = make(replace(PLAIN, dtype=torch.float64, mask_batch=2, options=options))
        check(problem, run("xla", problem))
