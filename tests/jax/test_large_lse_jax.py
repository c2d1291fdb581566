"""A bias that all keys of a row share changes nothing but the lse, however large it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnspan import causal, dense_bias, relative
from attnspan.jax import attention


def _arrays() -> tuple[jax.Array, ...]:
    random = np.random.default_rng(3)
    shapes = [(1, 4, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16), (1, 4, 40, 16)]
    return tuple(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)


def _bias(kind: str, depth: float) -> object:
    if kind == "table":
        return relative(jnp.full((4, 41), depth))
    return dense_bias(jnp.full((1, 4, 40, 40), depth))


def _gradients(kind: str, depth: float, backend: str) -> list[jax.Array]:
    q, k, v, dout = _arrays()
    bias = _bias(kind, depth)
    out, pull = jax.vjp(
        lambda q, k, v: attention(q, k, v, mask=causal(), bias=bias, backend=backend), q, k, v
    )
    return [out, *pull(dout)]


@pytest.mark.parametrize("depth", [-1e6, -1e9])
@pytest.mark.parametrize("kind", ["table", "dense"])
@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_results_are_those_without_it(backend: str, kind: str, depth: float) -> None:
    for got, plain in zip(_gradients(kind, depth, backend), _gradients(kind, 0.0, backend), strict=True):
        assert float(jnp.linalg.norm(got - plain)) <= 2e-6 * float(jnp.linalg.norm(plain))


@pytest.mark.parametrize("depth", [-1e6, -1e9])
@pytest.mark.parametrize("kind", ["table", "dense"])
def test_weights_of_the_back_end_without_a_kernel_sum_to_1(kind: str, depth: float) -> None:
    # It adds the bias to float32 scores, as plain code does; the sum of what is left is still 1.
    q, k, v, _ = _arrays()
    bias = _bias(kind, depth)
    _, pull = jax.vjp(lambda v: attention(q, k, v, mask=causal(), bias=bias, backend="xla"), v)
    (dv,) = pull(jnp.ones(q.shape))
    np.testing.assert_allclose(dv.sum(2), 2 * 40, rtol=1e-5)
