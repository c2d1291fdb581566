"""Masks without data, lowered once for all calls: what `mask=causal()` means depends on lengths alone."""

from functools import lru_cache
from typing import Any

import torch

from .._expression import And, Or
from .._leaves import Causal, Full, GlobalKeys, Window
from ..masks import Mask, Prepared

_NUMBERS = (int, type(None))


def prepared(mask: Any, q_len: int, k_len: int) -> Prepared | None:
    """The mask lowered on the CPU, from a small cache; None for a mask that has data.

    Args:
        mask: What `attention` was given.
        q_len: Sq.
        k_len: Sk.

    Example:
        >>> prepared(Causal(), 4, 4) is prepared(Causal(), 4, 4)
        True
    """
    key = _key(mask)
    return None if key is None else _lower(key, q_len, k_len)


def _key(mask: Any) -> tuple[Any, ...] | None:
    """What two masks without data share exactly if they mean the same expression."""
    kind = type(mask)
    if kind is Causal or kind is Full:
        return (kind,)
    if kind is Window and type(mask.left) in _NUMBERS and type(mask.right) in _NUMBERS:
        return kind, mask.left, mask.right
    if kind is GlobalKeys and type(mask.n) is int:
        return kind, mask.n
    if kind is And or kind is Or:
        keys = tuple(_key(operand) for operand in mask.operands)
        return None if None in keys else (kind, keys)
    return None


def _mask(key: tuple[Any, ...]) -> Mask:
    kind, *rest = key
    if kind is And or kind is Or:
        return kind(tuple(_mask(operand) for operand in rest[0]))  # type: ignore[no-any-return]
    return kind(*rest)  # type: ignore[no-any-return]


# Bounds take 8 bytes for a row and run: 16 masks of 65,536 rows are 8 MiB.
@lru_cache(maxsize=16)
def _lower(key: tuple[Any, ...], q_len: int, k_len: int) -> Prepared:
    # An inference tensor could not be saved for a later call's backward.
    with torch.inference_mode(False):
        return _mask(key).prepare(q_len, k_len, like=torch.empty(0))
