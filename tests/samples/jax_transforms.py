"""Inputs that the tests of JAX's transformations share, small, and how results are compared."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnspan import causal, segments
from attnspan.jax import attention

KERNELS = ("cpu", "xla")
#: Where JAX's rules for a custom call are what may fail, which plain JAX has not.
MOSTLY_CPU = ("cpu", pytest.param("xla", marks=pytest.mark.long))
HEADS, KV_HEADS, LENGTH, DIM = 4, 2, 10, 8
IDS = np.array([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 3, 3]])


def normal(seed: int, *shape: int) -> Any:
    # Not jax.random, which compiles a program for each shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def inputs(*lead: int) -> tuple[Any, Any, Any]:
    return (
        normal(0, *lead, 2, HEADS, LENGTH, DIM),
        normal(1, *lead, 2, KV_HEADS, LENGTH, DIM),
        normal(2, *lead, 2, KV_HEADS, LENGTH, DIM),
    )


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of the outputs, each with a weight of its own."""

    def weighted(*arguments: Any) -> Any:
        out = function(*arguments)
        return (out * jnp.sin(jnp.arange(out.size).reshape(out.shape))).sum()

    return weighted


def attend(name: str, ids: Any = None, **keywords: Any) -> Callable[..., Any]:
    mask = causal() if ids is None else causal() & segments(ids)
    return functools.partial(attention, mask=mask, backend=name, **keywords)
