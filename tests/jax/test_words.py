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


def test_philox_on_random_words():
    words = np.random.default_rng(0).integers(0, 2**32, (6, 4096))
    want = _dropout.philox(tuple(words[:4]), tuple(words[4:]))
    given = [jnp.asarray(word.astype(np.uint32)) for word in words]
    got = jax.jit(dropout.philox)(tuple(given[:4]), tuple(given[4:]))
    for left, right in zip(got, want, strict=True):
        assert left.dtype == jnp.uint32
        np.testing.assert_array_equal(np.asarray(left).astype(np.int64), right)


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_of_batch_rows_and_heads(seed):
    want = _dropout.dropout_seeds(seed, 3, 5)
    low, high = _pair(np.int64(seed))
    np.testing.assert_array_equal(dropout.split_seeds(low, high, 3, 5), _pair(want))


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999999])
def test_kept_of_every_seed_and_index(p):
    seeds = np.random.default_rng(1).integers(-(2**63), 2**63, (2, 3))
    seeds[0] = SEEDS[:3]
    got = jax.jit(lambda s, i, j: dropout.kept(p, s, i, j))(_pair(seeds), INDICES[None], INDICES[None])
    want = _dropout.kept(p, seeds, INDICES[None].astype(np.int64), INDICES[None].astype(np.int64))
    np.testing.assert_array_equal(got, want)


def test_kept_by_tiles_and_batch_rows():
    """A tile is a slice of the whole; each batch row has indices of its own."""
    random = np.random.default_rng(2)
    seeds = random.integers(-(2**63), 2**63, (2, 2))
    rows, keys = random.integers(-(2**31), 2**31, (2, 70)), random.integers(-(2**31), 2**31, (2, 90))
    want = _dropout.kept(0.3, seeds, rows, keys)
    assert 0.6 < want.mean() < 0.8
    tile = dropout.kept(0.3, _pair(seeds), jnp.int32(rows[:, 10:40]), jnp.int32(keys[:, 33:]))
    np.testing.assert_array_equal(tile, want[:, :, 10:40, 33:])
