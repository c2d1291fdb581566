"""Bands around the diagonal, for the whole sequence or each document. Other libraries' kernels have them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Band(NamedTuple):
    """Reach of each query, counted from the key at its own place.

    Attributes:
        left: Number of keys before it. None means all.
        right: Number of keys after it. None means all.
        cu_q: Start of each document and end of the last one. With ``cu_k``, they are offsets of queries.
        cu_k: The same offsets for keys. The last query of a document then has the place of its last key.
    """

    left: int | None = None
    right: int | None = None
    cu_q: Any = None
    cu_k: Any = None

    def __and__(self, other: Band) -> Band | None:
        """The intersection, or None if it is not a band. Two sets of documents give None."""
        if self.cu_q is not None and other.cu_q is not None:
            return None
        documents = other if self.cu_q is None else self
        return Band(_less(self.left, other.left), _less(self.right, other.right), *documents[2:])

    @property
    def name(self) -> str:
        """Name of the band: full, causal, window or documents."""
        if self.cu_q is not None:
            return "documents"
        if self.left is not None or self.right not in (None, 0):
            return "window"
        return "full" if self.right is None else "causal"


def _less(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
