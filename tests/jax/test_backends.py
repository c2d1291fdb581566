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
KERNELS = ("xla", "pallas")
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


# Of each backend, the first cases hold what the others do.
CASES: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {
    "xla": [
        ((*ALL, "distance table"), {}),
        (("long distance table",), {"q_len": 40, "k_len": 17, "runs": 3, "dtype": BF16}),
        (("dense, all heads, float32",), {"mask_heads": 4, "dtype": HALF}),
    ],
    "math": [
        ((*ALL, "distance table"), {"mask_heads": 4}),
        (("dense, all heads",), {"mask_batch": 2, "runs": 3, "dtype": BF16}),
    ],
    "pallas": [((*ALL, "alibi, signed, per batch row"), {})],
}
MORE: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {
    "xla": [
        ((), {}),
        (("alibi, signed, per batch row", *GIVEN), {"mask_batch": 2, "mask_heads": 4}),
        (("one distance", "sinks, one none"), {"kv_heads": 4}),
        (("dense with holes", "softcap", "sinks, one none", "dropout"), {}),
        (("dense, per key and head, float32", "dropout by seeds"), {"dtype": BF16, "kv_heads": 1}),
    ],
    "math": [
        ((), {}),
        (("softcap", "sinks, one none"), {"mask_batch": 2, "dtype": BF16}),
        (("alibi, signed, per batch row", *GIVEN), {"mask_batch": 2, "mask_heads": 4}),
        (("distance table",), {"runs": 3, "dtype": HALF}),
        (("dense, per key and head, float32",), {"kv_heads": 1}),
    ],
    "pallas": [
        ((*ALL, "dense with holes"), {}),
        (("alibi",), {"dtype": BF16, "kv_heads": 4, "head_dim": 37, "v_dim": 21, "runs": 11}),
        (("dense, per key, all heads",), {"runs": 11, "k_len": 600}),
        (("distance table",), {}),
    ],
}
CELLS = [
    (name, replace(BASE[name], options=options, **sizes))
    for table in (CASES, MORE if everything() else {})
    for name, cases in table.items()
    for options, sizes in cases
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), CELLS, ids=str)
def test_against_the_oracle(name: str, case: Case) -> None:
    # An interpreted kernel takes a second for each; illegal rows have the second mask.
    masks = ["random", "first key and window"]
    for mask in masks[: 1 if name == "pallas" and not everything() else 2]:
        problem = make(replace(case, mask=mask))
        check(problem, run(name, problem), exponential=EXPONENTIAL[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
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
@pytest.mark.parametrize("name", BASE)
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


@pytest.mark.parametrize("sizes", [{"q_len": 0}, {"k_len": 0}, {"batch": 0}], ids=str)
@pytest.mark.parametrize("name", ["xla", "math"])
def test_nothing_to_do(name: str, sizes: dict[str, int]) -> None:
    problem = make(replace(PLAIN, **sizes, options=("sinks, one none", "distance table")))
    problem.bounds[:] = 0
    got, sinks = run(name, problem), problem.options.sinks.numpy()
    assert got["out"].shape == problem.dout.shape
    assert (got["lse"] == sinks[:, None]).all()
    assert not any(got[n].any() for n in ("out", "dq", "dk", "dv", "dbias"))
    # A sink alone is the lse of its row.
    alone = problem.dlse.numpy().sum((0, 2)) * (sinks > -np.inf)
    np.testing.assert_allclose(got["dsinks"], alone, rtol=1e-5)


@pytest.mark.long
def test_float64() -> None:
    with jax.enable_x64(True):
        options = ("softcap", "alibi", "dropout")
        problem = make(replace(PLAIN, dtype=torch.float64, mask_batch=2, options=options))
        check(problem, run("xla", problem))


def test_a_block_of_queries_visits_the_blocks_that_it_touches() -> None:
    part = part_of(make(replace(PLAIN, mask="first key and window", k_len=150, q_len=24)))
    bounds = np.broadcast_to(part.bounds, (2, 4, *part.bounds.shape[2:]))
    part = replace(part, bounds=jnp.asarray(bounds))
    sizes = xla_tiles.sizes_of(part.q, part.k)
    keys = np.arange(160)
    seen = ((keys >= bounds[..., :1]) & (keys < bounds[..., 1:])).any((0, 1, 3))
    want = seen.reshape(3, 8, 10, 16).any((1, 3))
    assert not want.all()
    for i in range(3):
        rows = xla_tiles.rows_of(jnp.int32(i), part, sizes)
        assert rows.order[: int(rows.blocks)].tolist() == np.flatnonzero(want[i]).tolist()


def _step(q: Any, k: Any, v: Any, dout: Any, bounds: Any) -> Any:
    part = JaxPart(q, k, v, bounds, 0.25)
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
