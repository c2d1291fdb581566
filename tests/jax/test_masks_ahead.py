"""Masks are arguments of programs that are compiled ahead of their calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnspan import causal, segments, window
from attnspan.jax import attention  # registers the masks

IDS = jnp.array([[0, 0, 1, 1]])
MASKS = [
    causal().prepare(4, 4, like=jnp.ones(1)),
    causal() & segments(IDS),
    segments(IDS, IDS) | window(1),
]


def _call(x, mask):
    return attention(x, x, x, mask=mask)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_a_program_compiled_ahead_takes_the_mask_that_it_was_lowered_with(mask):
    x = jnp.arange(32.0).reshape(1, 1, 4, 8) / 32
    compiled = jax.jit(_call).lower(x, mask).compile()
    np.testing.assert_allclose(compiled(x, mask), _call(x, mask), atol=1e-6)


def test_shapes_stand_for_the_arrays_of_a_mask():
    mask = causal() & segments(IDS)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), mask)
    x = jnp.ones((1, 1, 4, 8))
    compiled = jax.jit(_call).lower(x, shapes).compile()
    np.testing.assert_allclose(compiled(x, mask), _call(x, mask), atol=1e-6)
