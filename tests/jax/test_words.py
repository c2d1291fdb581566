"""Dropout in words of 32 bits drops what `attnspan.call.dropout` drops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnspan.call import dropout as _dropout
from attnspan.jax import dropout

WORD = 2**32 - 1
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF]
INDICES = np.array([0, 1, 15, 16, 17, 31, 32, 33, 1000, 2**31 - 1, -1, -(2**31)], np.int32)


def _pair(seeds):
    """int64 seeds as low and high words."""
    return jnp.asarray(np.stack([seeds & WORD, seeds >> 32 & WORD], -1).astype(np.uint32))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999999])
def test_kept_of_every_seed_and_index(p):
    seeds = np.random.default_rng(1).integers(-(2**63), 2**63, (2, 3))
    seeds[0] = SEEDS[:3]
    got = jax.jit(lambda s, i, j: dropout.kept(p, s, i, j))(_pair(seeds), INDICES[None], INDICES[None])
    want = _dropout.kept(p, seeds, INDICES[None].astype(np.int64), INDICES[None].astype(np.int64))
    np.testing.assert_array_equal(got, want)
