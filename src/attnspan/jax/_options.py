"""Dropout seeds of JAX: their checks, and the words of the seeds of every batch row and head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..arrays import is_array, kind_of, own
from ..errors import DtypeError, ShapeError, expect
from ._words import split_seeds


def dropout_seeds(seed: Array, batch: int, heads: int) -> Array:
    """The seeds of every batch row and head, which `attention` makes of a single one.

    Where batch rows or heads are split over devices, make them of the whole and hand each its slice: what is
    dropped is then what one device alone would drop, and what PyTorch drops.

    Args:
        seed: Integer array of shape (), or a typed `jax.random.key` of two words.
        batch: Number of batch rows, of the whole.
        heads: Number of query heads, of the whole.

    Returns:
        Shape (batch, heads, 2), uint32: low and high words; a ``dropout_seed`` for `attention`.

    Raises:
        TypeError: The seed is neither.
        ValueError: It is not of shape ().

    Example:
        >>> seeds = dropout_seeds(jnp.array(5), 2, 4)
        >>> bool((seeds[:, :2] == dropout_seeds(jnp.array(5), 2, 2)).all())
        True
    """
    check_seed(seed)
    return split_seeds(*_words_of(seed), batch, heads)


def check_seed(seed: Any, whole: tuple[int, ...] | None = None) -> None:
    """Raise unless a seed is an integer or a key of shape (), or has the words of a `whole` of seeds."""
    key = _is_key(seed)
    integer = (is_array(seed) or isinstance(seed, np.generic)) and jnp.issubdtype(seed.dtype, jnp.integer)
    wanted, remedy = (
        "an integer array or a jax.random.key",
        "Pass jnp.array(seed): under jit a number would be a constant",
    )
    expect(key or integer, "dropout_seed", wanted, kind_of(seed), remedy, error=DtypeError)
    wanted, remedy = (
        "a key of two words (threefry2x32)",
        'Make it by jax.random.key(seed, impl="threefry2x32")',
    )
    fits = not key or jax.random.key_data(seed).shape[-1] == 2
    expect(fits, "dropout_seed", wanted, kind_of(seed), remedy, error=DtypeError)
    remedy = "Pass one seed for all, or dropout_seeds(seed, batch, heads)"
    if seed.shape == (2,) and seed.dtype == jnp.uint32:
        remedy = "If it is a raw key of jax.random.PRNGKey, pass jax.random.wrap_key_data(key)"
    fits = seed.ndim == 0 or (whole is not None and seed.shape == whole and seed.dtype == jnp.uint32)
    wanted = "shape ()" if whole is None else f"shape () or uint32 (B, H, 2) = {whole}"
    got = f"{seed.dtype} {tuple(seed.shape)}"
    expect(fits, "dropout_seed", wanted, got, remedy, error=ShapeError)


def lower_seed(seed: Any, batch: int, heads: int) -> Array:
    """The seeds of all batch rows and heads, uint32 (B, H, 2), of a checked seed."""
    return jnp.asarray(seed, jnp.uint32) if seed.ndim == 3 else split_seeds(*_words_of(seed), batch, heads)


def _is_key(seed: Any) -> bool:
    return isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)


def _words_of(seed: Array) -> tuple[Array, Array]:
    """The low and the high word of a seed, whose sign goes on in the high one."""
    if _is_key(seed):
        words = jax.random.key_data(seed)
        return words[0], words[1]
    if isinstance(seed, np.ndarray | np.generic) and seed.dtype.itemsize == 8:  # JAX may have no 64 bits.
        low, high = np.uint32(int(seed) & 0xFFFFFFFF), np.uint32(int(seed) >> 32 & 0xFFFFFFFF)
        return jnp.asarray(low), jnp.asarray(high)
    seed = jnp.asarray(own(seed))
    if seed.dtype.itemsize == 8:
        return seed.astype(jnp.uint32), (seed >> 32).astype(jnp.uint32)
    signed = jnp.issubdtype(seed.dtype, jnp.signedinteger)
    low = seed.astype(jnp.int32).astype(jnp.uint32) if signed else seed.astype(jnp.uint32)
    high = jnp.where(seed < 0, np.uint32(0xFFFFFFFF), np.uint32(0)) if signed else jnp.zeros((), jnp.uint32)
    return low, high.astype(jnp.uint32)
