"""What only the backend "math" has: every order of derivative, values that reach only who sees them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from covering import everything
from samples.jax_problems import cotangents_of, part_of
from samples.parts import ALL, Case
from samples.problems import make
from test_backends import PLAIN, QUICKLY, run

from attnspan.jax.backends import math

pytestmark = pytest.mark.below_promotion

B, H, S, K = 2, 4, 21, 37


def _seen(bounds: torch.Tensor) -> np.ndarray:
    """The dense mask (B|1, H|1, Sq, Sk)."""
    bounds, at = bounds.numpy(), np.arange(K)
    return ((bounds[..., :1] <= at) & (at < bounds[..., 1:])).any(-2)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_bad_key_reaches_the_rows_that_see_it_and_no_other(name: str) -> None:
    problem = make(replace(PLAIN, mask_batch=B, options=("softcap", "dropout")))
    clean = run("math", problem)
    getattr(problem, name)[1, 1, 9] = np.nan
    got = run("math", problem)
    rows = np.zeros((B, H, S), bool)
    rows[1, 2:] = _seen(problem.bounds)[1, :, :, 9]  # heads 2 and 3 share key head 1
    # The gradients of a key: those of its rows.
    keys = (rows[:, :, :, None] & _seen(problem.bounds)).reshape(B, 2, 2 * S, K).any(2)
    bad = {"out": rows, "dq": rows, "dk": keys, "dv": keys} if name == "k" else {"out": rows, "dk": keys}
    for result, where in bad.items():
        assert where.any()
        assert np.isnan(got[result][where]).any(-1).all(), result
        np.testing.assert_array_equal(got[result][~where], clean[result][~where])


def test_a_bad_gradient_reaches_the_keys_that_its_row_sees_and_no_other() -> None:
    problem = make(replace(PLAIN, mask_batch=B))
    clean = run("math", problem)
    problem.dout[0, 3, 7] = np.nan
    got = run("math", problem)
    keys = np.zeros((B, 2, K), bool)
    keys[0, 1] = _seen(problem.bounds)[0, 0, 7]
    assert 0 < keys.sum() < K
    for name in ("dk", "dv"):
        assert np.isnan(got[name][keys]).all()
        np.testing.assert_array_equal(got[name][~keys], clean[name][~keys])
    others = np.arange(S) != 7
    np.testing.assert_array_equal(got["dq"][:, :, others], clean["dq"][:, :, others])


SMALL = Case(ALL, dtype=torch.float64, kv_heads=1, q_len=6, k_len=8, head_dim=3, v_dim=2, runs=2)


@pytest.mark.slow
def test_second_derivatives_in_every_mode() -> None:
    """Against differences of gradients, which the oracle has checked, in float64."""
    with jax.enable_x64(True):
        problem = make(SMALL)
        part, (dout, dlse) = part_of(problem), cotangents_of(problem)
        names = ("q", "k", "v", "bias", "sinks")
        point = {name: jnp.asarray(getattr(part, name), "float64") for name in names}
        along = {name: jnp.cos(1.0 + jnp.arange(x.size)).reshape(x.shape) for name, x in point.items()}

        def loss(x: Any) -> Any:
            out, lse = math.forward(replace(part, **x))
            lse = jnp.where(jnp.isfinite(lse), lse, 0)
            return (out * dout).sum() + (lse * dlse).sum()

        slope, step = jax.grad(loss), 1e-5

        @partial(jax.jit, compiler_options=QUICKLY)
        def every_mode(x: Any) -> Any:
            ends = jnp.array([step, -step])
            near = jax.lax.map(lambda end: slope(jax.tree.map(lambda x, d: x + end * d, x, along)), ends)
            want = jax.tree.map(lambda a: (a[0] - a[1]) / (2 * step), near)
            found = {
                "forward over reverse": jax.jvp(slope, (x,), (along,))[1],
                "reverse over reverse": jax.vjp(slope, x)[1](along)[0],
            }
            if everything():
                found["reverse over forward"] = jax.grad(lambda x: jax.jvp(loss, (x,), (along,))[1])(x)
            return want, found

        want, found = every_mode(point)
        for mode, got in found.items():
            for name in names:
                where = f"{mode}, {name}"
                assert jnp.abs(want[name]).max() > 0.01, where
                np.testing.assert_allclose(got[name], want[name], rtol=1e-6, atol=1e-7, err_msg=where)
