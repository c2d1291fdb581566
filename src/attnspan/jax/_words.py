"""Which weights dropout drops, in words of 32 bits: `attnspan._dropout` where 64-bit integers are optional.

Nothing but operations of one element on uint32 arrays, so kernels may call it on their tiles.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._dropout import threshold

Words = tuple[Any, Any, Any, Any]

_HALF = np.uint32(16)
_LOW_HALF = np.uint32(0xFFFF)


def philox(counter: Words, key: tuple[Any, Any]) -> Words:
    """Philox4x32-10, as `attnspan._dropout.philox`.

    Args:
        counter: four uint32 arrays or scalars that broadcast.
        key: two of them.

    Returns:
        Four uint32 arrays.

    Example:
        >>> zero = jnp.zeros(1, jnp.uint32)
        >>> [f"{int(word[0]):08x}" for word in philox((zero, zero, zero, zero), (zero, zero))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
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


def split_seeds(low: jax.Array, high: jax.Array, batch: int, heads: int) -> jax.Array:
    """The seeds of batch rows and heads, as `attnspan._dropout.split_seeds` of the rows and heads from 0.

    Args:
        low: uint32 (), low word of the seed.
        high: uint32 (), high word.
        batch: number of batch rows.
        heads: number of query heads.

    Returns:
        uint32 (B, H, 2), low and high words.

    Example:
        >>> word = jnp.uint32(7)
        >>> whole, part = split_seeds(word, word, 2, 4), split_seeds(word, word, 1, 2)
        >>> bool((whole[:1, :2] == part).all())
        True
    """
    rows = jax.lax.broadcasted_iota(jnp.uint32, (batch, heads), 0)
    columns = jax.lax.broadcasted_iota(jnp.uint32, (batch, heads), 1)
    zero = jnp.zeros((batch, heads), jnp.uint32)
    counter = (rows, columns, zero, zero + np.uint32(1))
    first, second, _, _ = philox(counter, (zero + low, zero + high))
    return jnp.stack([first, second], -1)


def row_words(low: Any, high: Any, q_index: Any) -> tuple[Any, Any]:
    """The two words of each query row that `keeps` hashes with its keys.

    Args:
        low: uint32, low words of the seeds; broadcasts with the others.
        high: uint32, high words.
        q_index: integer, global indices of the queries.

    Returns:
        Two uint32 arrays of the shape that the arguments broadcast to.

    Example:
        >>> words = row_words(jnp.uint32(3), jnp.uint32(0), jnp.arange(4))
        >>> [word.shape for word in words]
        [(4,), (4,)]
    """
    row = q_index.astype(jnp.uint32)
    zero = row ^ row
    first, second, _, _ = philox((row, zero, zero, zero), (low + zero, high + zero))
    return first, second


def keeps(p: float, first: Any, second: Any, k_index: Any) -> Any:
    """Which weights of a tile are kept, given the words of its rows.

    Args:
        p: probability of being dropped, in (0, 1).
        first: uint32, from `row_words`; broadcasts with the others.
        second: uint32, from `row_words`.
        k_index: integer, global indices of the keys.

    Returns:
        bool, of the shape that the arguments broadcast to.

    Example:
        >>> first, second = row_words(jnp.uint32(3), jnp.uint32(0), jnp.arange(4)[:, None])
        >>> keeps(0.5, first, second, jnp.arange(6)[None]).shape
        (4, 6)
    """
    key = k_index.astype(jnp.uint32)
    x = (key >> np.uint32(5) << np.uint32(4) | (key & np.uint32(15))) ^ first
    x = (x ^ x >> _HALF) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) + second
    x = x * np.uint32(0x846CA68B)
    x = x ^ x >> _HALF
    half = x >> ((key >> np.uint32(4) & np.uint32(1)) << np.uint32(4)) & _LOW_HALF
    return half >= np.uint32(threshold(p))


def kept(p: float, seeds: jax.Array, q_index: jax.Array, k_index: jax.Array) -> jax.Array:
    """Which weights are kept, as `attnspan._dropout.kept`.

    Args:
        p: probability of being dropped, in (0, 1).
        seeds: uint32 (B, H, 2), low and high words.
        q_index: integer (B|1, m), global indices of the queries.
        k_index: integer (B|1, n), global indices of the keys, in any order.

    Returns:
        bool (B, H, m, n).

    Example:
        >>> kept(0.5, jnp.zeros((1, 1, 2), jnp.uint32), jnp.arange(2)[None], jnp.arange(9)[None]).shape
        (1, 1, 2, 9)
    """
    first, second = row_words(seeds[..., :1], seeds[..., 1:], q_index[:, None, :])
    kept: jax.Array = keeps(p, first[..., None], second[..., None], k_index[:, None, None, :])
    return kept
