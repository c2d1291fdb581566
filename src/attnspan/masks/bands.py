"""Masks that kernels of other libraries know: a band around the diagonal, of the whole row or by document."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Band"]


class Band(NamedTuple):
    """Reach of each query, from the key at its own place.

    Attributes:
        left: Keys before it, None for all.
        right: Keys after it, None for all.
        cu_q: Where documents start and the last one ends; of the queries where ``cu_k`` is given.
        cu_k: Of the keys; a document's last query then has the place of its last key.
    """

    left: int | None = None
    right: int | None = None
    cu_q: Any = None
    cu_k: Any = None

    def __and__(self, other: Band) -> Band | None:
        """The intersection; None where it is not a band, as with two sets of documents."""
        if self.cu_q is not None and other.cu_q is not None:
            return None
        documents = other if self.cu_q is None else self
        return Band(_less(self.left, other.left), _less(self.right, other.right), *documents[2:])

    @property
    def name(self) -> str:
        """In a word: full, causal, window or documents."""
        if self.cu_q is not None:
            return "documents"
        if self.left is not None or self.right not in (None, 0):
            return "window"
        return "full" if self.right is None else "causal"


def _less(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
