"""Dropout in words of 32 bits, for JAX, where 64-bit integers are optional.

The module implements `attnspan.call.dropout` again. Kernels call only elementwise functions on uint32 arrays,
because their tiles support no others.
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

Words = tuple[Any, Any, Any, Any]

_HALF = np.uint32(16)
_LOW_HALF = np.uint32(0xFFFF)


@own_promotion
def dropout_seeds(seed: Array, batch: int, heads: int) -> Array:
    """Return the dropout seeds of every batch element and head, as `attention` derives them from one seed.

    Use it if you split batch elements or heads over devices yourself. Make the seeds for the whole batch and
    all heads, and pass each device its slice. The devices together then drop the weights that one device
    would drop, and that PyTorch drops.

    Args:
        seed: Integer array of shape (), or a typed `jax.random.key` of two words.
        batch: Size of the whole batch.
        heads: Number of all query heads.

    Returns:
        uint32 (batch, heads, 2), low and high words. Pass it (or a slice) as ``dropout_seed`` to `attention`.

    Raises:
        TypeError: The seed is neither an integer array nor a key of two words.
        ValueError: The seed does not have shape ().

    Example:
        >>> seeds = dropout_seeds(jnp.array(5), 2, 4)
        >>> bool((seeds[:, :2] == dropout_seeds(jnp.array(5), 2, 2)).all())
        True
    """
    check_seed(seed)
    return split_seeds(*_words_of(seed), batch, heads)


def check_seed(seed: Any, whole: tuple[int, ...] | None = None) -> None:
    """Raise unless a seed is an integer or a key of shape (), or has the shape `whole` of seeds."""
    check_plain("dropout_seed", seed)
    key = _is_key(seed)
    integer = (is_array(seed) or isinstance(seed, np.generic)) and jnp.issubdtype(seed.dtype, jnp.integer)
    wanted = "an integer array or a jax.random.key"
    remedy = "Pass jnp.array(seed), because jit would compile a number into the program"
    if kind_of(seed) == "Rngs":
        remedy = "Pass a key of it, such as rngs.dropout()"
    expect(key or integer, "dropout_seed", wanted, kind_of(seed), remedy, error=DtypeError)
    fits = not key or jax.random.key_data(seed).shape[-1] == 2
    wanted, remedy = (
        "a key of two words (threefry2x32)",
        'Make it with jax.random.key(seed, impl="threefry2x32")',
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
    """Return the seeds of all batch elements and heads, uint32 (B, H, 2), from a checked seed."""
    return jnp.asarray(seed, jnp.uint32) if seed.ndim == 3 else split_seeds(*_words_of(seed), batch, heads)


def _is_key(seed: Any) -> bool:
    return isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)


def _words_of(seed: Array) -> tuple[Array, Array]:
    """Return the low and the high word of a seed. The high word of a narrower seed extends its sign."""
    if _is_key(seed):
        words = jax.random.key_data(seed)
        return words[0], words[1]
    if isinstance(seed, np.ndarray | np.generic) and seed.dtype.itemsize == 8:  # JAX may lack int64.
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
    """Philox4x32-10 of four uint32 words and a key of two, as `attnspan.call.dropout.philox`."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even_high, even_low = _product(c0, 0xD2511F53)
        odd_high, odd_low = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = odd_high ^ c1 ^ k0, odd_low, even_high ^ c3 ^ k1, even_low
        k0, k1 = k0 + np.uint32(0x9E3779B9), k1 + np.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def _product(a: Any, factor: int) -> tuple[Any, Any]:
    """High and low word of a word times a constant, by halves, so that every sum stays below 2**32."""
    high, low = np.uint32(factor >> 16), np.uint32(factor & 0xFFFF)
    a_high, a_low = a >> _HALF, a & _LOW_HALF
    cross, other = a_low * high, a_high * low
    carry = (a_low * low >> _HALF) + (cross & _LOW_HALF) + (other & _LOW_HALF)
    top = a_high * high + (cross >> _HALF) + (other >> _HALF) + (carry >> _HALF)
    return top, a * np.uint32(factor)


def split_seeds(low: Array, high: Array, batch: int, heads: int) -> Array:
    """Return the seeds of batch elements and heads from 0 on, uint32 (B, H, 2), from one seed's words."""
    rows = jax.lax.broadcasted_iota(jnp.uint32, (batch, heads), 0)
    columns = jax.lax.broadcasted_iota(jnp.uint32, (batch, heads), 1)
    zero = jnp.zeros((batch, heads), jnp.uint32)
    counter = (rows, columns, zero, zero + np.uint32(1))
    first, second, _, _ = philox(counter, (zero + low, zero + high))
    return jnp.stack([first, second], -1)


def row_words(low: Any, high: Any, q_index: Any) -> tuple[Any, Any]:
    """Return the two words per query that `keeps` hashes with its keys, from uint32 words of the seeds."""
    row = q_index.astype(jnp.uint32)
    zero = row ^ row
    first, second, _, _ = philox((row, zero, zero, zero), (low + zero, high + zero))
    return first, second


def keeps(p: float, first: Any, second: Any, k_index: Any) -> Any:
    """Return whether each weight of a tile is kept, from its queries' words (`row_words`) and its keys."""
    key = k_index.astype(jnp.uint32)
    x = (key >> np.uint32(5) << np.uint32(4) | (key & np.uint32(15))) ^ first
    x = (x ^ x >> _HALF) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) + second
    x = x * np.uint32(0x846CA68B)
    x = x ^ x >> _HALF
    half = x >> ((key >> np.uint32(4) & np.uint32(1)) << np.uint32(4)) & _LOW_HALF
    return half >= np.uint32(threshold(p))


def kept(p: float, seeds: Array, q_index: Array, k_index: Array) -> Array:
    """Return whether each weight is kept, bool (B, H, m, n), as `attnspan.call.dropout.kept` does.

    Seeds are uint32 (B, H, 2). Global indices of queries are (B|1, m), of keys (B|1, n), in any order.
    """
    first, second = row_words(seeds[..., :1], seeds[..., 1:], q_index[:, None, :])
    kept: Array = keeps(p, first[..., None], second[..., None], k_index[:, None, None, :])
    return kept
