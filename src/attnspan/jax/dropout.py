"""Dropout in words of 32 bits: `attnspan.call.dropout` where 64-bit integers are optional.

What kernels call is operations of one element on uint32 arrays, which their tiles have too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnspan.base.arrays import is_array, kind_of, own
from attnspan.base.plain import check_plain
from attnspan.call.dropout import threshold
from attnspan.errors import DtypeError, ShapeError, expect

from .promotion import own_promotion

__all__ = ["check_seed", "dropout_seeds", "keeps", "kept", "lower_seed", "philox", "row_words", "split_seeds"]

Words = tuple[Any, Any, Any, Any]

_HALF = np.uint32(16)
_LOW_HALF = np.uint32(0xFFFF)


@own_promotion
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
    check_plain("dropout_seed", seed)
    key = _is_key(seed)
    integer = (is_array(seed) or isinstance(seed, np.generic)) and jnp.issubdtype(seed.dtype, jnp.integer)
    wanted = "an integer array or a jax.random.key"
    remedy = "Pass jnp.array(seed): under jit a number would be a constant"
    expect(key or integer, "dropout_seed", wanted, kind_of(seed), remedy, error=DtypeError)
    fits = not key or jax.random.key_data(seed).shape[-1] == 2
    wanted, remedy = (
        "a key of two words (threefry2x32)",
        'Make it by jax.random.key(seed, impl="threefry2x32")',
    )
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
    """The low and the high word of a seed; the high word of a narrower one extends its sign."""
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


def philox(counter: Words, key: tuple[Any, Any]) -> Words:
    """Philox4x32-10, as `attnspan.call.dropout.philox`, of four uint32 words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even_high, even_low = _product(c0, 0xD2511F53)
        odd_high, odd_low = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = odd_high ^ c1 ^ k0, odd_low, even_high ^ c3 ^ k1, even_low
        k0, k1 = k0 + np.uint32(0x9E3779B9), k1 + np.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def _product(a: Any, factor: int) -> tuple[Any, Any]:
    """High and low word of the product of a word and a constant, by halves: every sum stays below 2**32."""
    high, low = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    a_high, a_low = a >> _HALF, a & _LOW_HALF
    cross, other = a_low * high, a_high * low
    carry = (a_low * low >> _HALF) + (cross & _LOW_HALF) + (other & _LOW_HALF)
    top = a_high * high + (cross >> _HALF) + (other >> _HALF) + (carry >> _HALF)
    return top, a * np.uint32(factor)


def split_seeds(low: Array, high: Array, batch: int, heads: int) -> Array:
    """The seeds of batch rows and heads from 0 on, uint32 (B, H, 2), of the two words of one seed."""
    rows = jax.lax.broadcasted_iota(jnp.uint32, (batch, heads), 0)
    columns = jax.lax.broadcasted_iota(jnp.uint32, (batch, heads), 1)
    zero = jnp.zeros((batch, heads), jnp.uint32)
    counter = (rows, columns, zero, zero + np.uint32(1))
    first, second, _, _ = philox(counter, (zero + low, zero + high))
    return jnp.stack([first, second], -1)


def row_words(low: Any, high: Any, q_index: Any) -> tuple[Any, Any]:
    """The two words of each query row that `keeps` hashes with its keys, of uint32 words of the seeds."""
    row = q_index.astype(jnp.uint32)
    zero = row ^ row
    first, second, _, _ = philox((row, zero, zero, zero), (low + zero, high + zero))
    return first, second


def keeps(p: float, first: Any, second: Any, k_index: Any) -> Any:
    """Return whether each weight of a tile is kept, bool, from its rows' words (`row_words`) and its keys."""
    key = k_index.astype(jnp.uint32)
    x = (key >> np.uint32(5) << np.uint32(4) | (key & np.uint32(15))) ^ first
    x = (x ^ x >> _HALF) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) + second
    x = x * np.uint32(0x846CA68B)
    x = x ^ x >> _HALF
    half = x >> ((key >> np.uint32(4) & np.uint32(1)) << np.uint32(4)) & _LOW_HALF
    return half >= np.uint32(threshold(p))


def kept(p: float, seeds: Array, q_index: Array, k_index: Array) -> Array:
    """Return whether each weight is kept, bool (B, H, m, n), as `attnspan.call.dropout.kept`.

    From uint32 seeds (B, H, 2), and global indices of queries (B|1, m) and keys (B|1, n), these in any order.
    """
    first, second = row_words(seeds[..., :1], seeds[..., 1:], q_index[:, None, :])
    kept: Array = keeps(p, first[..., None], second[..., None], k_index[:, None, None, :])
    return kept
