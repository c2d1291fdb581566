"""The blockwise back end against the oracle, with tiles so small that every problem has several."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_cases import Case, Problem, causal_window, check, make, random_bounds

from attnspan.jax import _blockwise, _blockwise_tiles
from attnspan.jax._contract import Operands, Static

B, H, S, K = 2, 4, 21, 37
CASES = [
    Case(),
    Case(lead=(B, 1), softcap=1.5, sinks=True),
    Case(lead=(1, H), bias="alibi", dtype="float16"),
    Case(lead=(B, H), bias="signed alibi", bias_shape=(B, H), placed=True),
    Case(bias="table", runs=3),
    Case(bias="table", reach=60, q_len=40, k_len=17, dtype="bfloat16"),
    Case(bias="table", reach=0, sinks=True, kv_heads=4),
    Case(lead=(B, 1), bias="table", placed=True, softcap=2.0, sinks=True, dropout_p=0.1),
    Case(bias="dense", bias_shape=(B, H, S, K), softcap=2.0, sinks=True, dropout_p=0.3),
    Case(bias="dense", bias_shape=(1, H, 1, K), dtype="bfloat16"),
    Case(bias="dense", bias_shape=(B, 1, S, K), dtype="float16", wide_bias=True),
    Case(dropout_p=0.5, dtype="bfloat16", placed=True, kv_heads=1),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blockwise_tiles, "_Q_BLOCK", 8)
    monkeypatch.setattr(_blockwise_tiles, "_K_BLOCK", 16)


@partial(jax.jit, static_argnames="static")
def _run(arrays, given, static):
    q, k, v = (arrays[name] for name in "qkv")
    out, lse = _blockwise.forward(q, k, v, given, static)
    dlse = jnp.where(
        jnp.isfinite(lse), arrays["dlse"], jnp.nan
    )  # what a row that sees nothing gets is not read
    if given.sinks is not None:
        dlse = arrays["dlse"]
    grads = _blockwise.backward(arrays["dout"], dlse, q, k, v, given, out, lse, static, want_dbias=True)
    results = (out, lse, *grads)
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"), results, strict=True))


def _results(problem: Problem) -> dict[str, np.ndarray]:
    found = _run(problem.arrays, problem.given, problem.case.static)
    for name, x in found.items():
        want = problem.case.dtype if name in ("out", "dq", "dk", "dv") else problem.arrays["dlse"].dtype
        assert x is None or x.dtype == want, name
    return {name: np.asarray(x) for name, x in found.items() if x is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case) -> None:
    for bounds in (causal_window(case), random_bounds(case)):
        problem = make(case, bounds)
        check(problem, _results(problem))
