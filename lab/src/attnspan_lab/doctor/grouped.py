"""Items by a key, such as attention calls by their line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["grouped"]

K = TypeVar("K")
T = TypeVar("T")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by their key, in the order of the first item of each key.

    Example:
        >>> grouped([1, 2, 3], lambda x: x % 2)
        {1: [1, 3], 0: [2]}
    """
    found: dict[K, list[T]] = {}
    for x in items:
        found.setdefault(key(x), []).append(x)
    return found
