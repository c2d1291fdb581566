"""Dropout as a function of the seed, the batch index, the head and the two global indices.

No number is drawn in sequence, so every tiling, thread count and shard of one problem drops the same weights.
Words of 32 bits are stored in int64, in NumPy or torch. No product exceeds int64. In the C++ code that
torch.compile writes, the overflow of a signed product is undefined, and g++ returns other words than the
processor does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attnspan.base.arrays import Array

_WORD = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.

    Args:
        counter: Four words: int64 arrays or ints from 0 to 2**32 - 1, which broadcast.
        key: Two words.

    Returns:
        Four words from 0 to 2**32 - 1.

    Example:
        >>> zero = np.zeros(1, np.int64)
        >>> [f"{int(word[0]):08x}" for word in philox((zero, zero, zero, zero), (zero, zero))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (even_high, even_low), (odd_high, odd_low) = _product(c0, 0xD2511F53), _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = odd_high ^ c1 ^ k0, odd_low, even_high ^ c3 ^ k1, even_low
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _product(a: Any, factor: int) -> tuple[Any, Any]:
    """High and low word of the product of a word and a constant, computed from the constant's halves."""
    low = a * (factor & 0xFFFF)
    rest = a * (factor >> 16) + (low >> 16)
    return rest >> 16, (rest & 0xFFFF) << 16 | low & 0xFFFF


def mixed(key: Any, first: Any, second: Any) -> Any:
    """Hash of the words of keys with the two words of their queries: its low or high half decides for a key.

    One hash gives 16 bits to key j and 16 bits to key j + 16. The kernels hold both keys in one vector.
    """
    x = ((key >> 5) << 4 | (key & 15)) ^ first
    x = ((x ^ x >> 16) * 0x7FEB352D) & _WORD
    x = ((x ^ x >> 15) + second) & _WORD
    # The factor is 0x846CA68B minus 2**32, so that the product stays within int64. The low word is the same.
    x = (x * (0x846CA68B - 2**32)) & _WORD
    x = x ^ x >> 16
    return x >> ((key >> 4 & 1) << 4) & 0xFFFF


def split_seeds(seed: Array, batch_index: Array, head_index: Array) -> Array:
    """Seeds of batch elements and heads, int64 (B, H).

    Args:
        seed: int64, shape () or any shape that broadcasts with the indices.
        batch_index: int64, shape (B, 1): global indices of the batch elements.
        head_index: int64, shape (1, H): global indices of the query heads.
    """
    low, high, _, _ = philox((batch_index, head_index, 0, 1), (seed & _WORD, seed >> 32 & _WORD))
    return low | high << 32


def threshold(p: float) -> int:
    """Number of the 65,536 equally likely numbers that are dropped, at most 65,535, for p in (0, 1).

    Example:
        >>> threshold(0.1), threshold(1e-9)
        (6554, 0)
    """
    return min(65535, round(p * 65536))


def kept(p: float, seeds: Array, q_index: Array, k_index: Array) -> Array:
    """Return whether each weight is kept, bool (B, H, Sq, Sk). Multiply kept weights by `scale_of_kept`.

    Args:
        p: Probability that a weight is dropped, in (0, 1).
        seeds: int64, shape (B, H): any seeds, such as the result of `split_seeds`.
        q_index: Integer, shape (B|1, Sq): global indices of the queries.
        k_index: Integer, shape (B|1, Sk): global indices of the keys, in any order.
    """
    seeds = seeds[:, :, None]
    zero = seeds * 0  # int64. The indices may have another dtype
    row = (q_index[:, None, :] + zero) & _WORD
    first, second, _, _ = philox((row, 0, 0, 0), (seeds & _WORD, seeds >> 32 & _WORD))
    key = (k_index[:, None, None, :] + zero[..., None]) & _WORD
    half = mixed(key, first[..., None], second[..., None])
    return half >= threshold(p)


def scale_of_kept(p: float) -> float:
    """Factor of kept weights. It keeps the weights' expectation."""
    return 65536 / (65536 - threshold(p))


def dropout_seeds(seed: int, batch: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Seeds for each batch element and head. A shard slices them: see `attnspan.torch.dropout_seeds`.

    Args:
        seed: Any int64.
        batch: Batch size.
        heads: Number of query heads.

    Returns:
        int64, shape (batch, heads).

    Example:
        >>> dropout_seeds(1, 2, 4)[:1, 2:].tolist() == dropout_seeds(1, 1, 4)[:, 2:].tolist()
        True
    """
    return np.asarray(split_seeds(np.int64(seed), np.arange(batch)[:, None], np.arange(heads)[None]))
