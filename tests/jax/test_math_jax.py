"""The back end of plain JAX against the oracle, and what only it has: every order of derivative."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_cases import Case, Problem, causal_window, check, make, random_bounds

from attnspan.jax import _math
from attnspan.jax._contract import Operands, Static

B, H, S, K = 2, 4, 21, 37
CASES = [
    Case(),
    Case(lead=(B, 1), softcap=1.5, sinks=True, dtype="bfloat16"),
    Case(lead=(B, H), bias="signed alibi", bias_shape=(B, H), placed=True),
    Case(bias="table", runs=3, dtype="float16"),
    Case(lead=(1, H), bias="table", placed=True, softcap=2.0, sinks=True, dropout_p=0.1),
    Case(bias="dense", bias_shape=(B, 1, S, K), softcap=2.0, sinks=True, dropout_p=0.3),
    Case(bias="dense", bias_shape=(1, H, 1, K), kv_heads=1),
]


@partial(jax.jit, static_argnames="static")
def _run(arrays, given, static):
    def attend(arrays, parameters):
        options = given._replace(bias=parameters["bias"], sinks=parameters["sinks"])
        return _math.forward(*(arrays[name] for name in "qkv"), options, static)

    parameters = {"bias": given.bias, "sinks": given.sinks}
    (out, lse), pull = jax.vjp(attend, {name: arrays[name] for name in "qkv"}, parameters)
    dlse = jnp.where(jnp.isfinite(lse), arrays["dlse"], 0)
    gradients, more = pull((arrays["dout"], dlse))
    return {"out": out, "lse": lse} | {f"d{name}": x for name, x in {**gradients, **more}.items()}


def _results(problem: Problem) -> dict[str, np.ndarray]:
    found = _run(problem.arrays, problem.given, problem.case.static)
    return {name: np.asarray(x) for name, x in found.items() if x is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case) -> None:
    for bounds in (causal_window(case), random_bounds(case)):
        problem = make(case, bounds)
        check(problem, _results(problem))
