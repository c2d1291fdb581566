"""Order of key heads that a copy gives to the query heads that share them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

__all__ = ["HeadMap", "head_map"]

_SHOWN = 32


@dataclass(frozen=True)
class HeadMap:
    """Key heads of the query heads.

    Args:
        heads: Number of the key head of each query head.
        count: Number of key heads.
    """

    heads: tuple[int, ...]
    count: int

    @property
    def text(self) -> str:
        """Write the key heads of the first query heads."""
        shown = self.heads[:_SHOWN]
        return f"query heads 0 to {len(shown) - 1}: {', '.join(map(str, shown))}"

    @property
    def group(self) -> int:
        """Number of query heads for each key head."""
        return len(self.heads) // self.count

    @property
    def is_grouped(self) -> bool:
        """Whether neighbouring query heads share a key head, as kernels for shared heads assume."""
        return self.heads == _grouped(len(self.heads), self.count)

    @property
    def is_tiled(self) -> bool:
        """Whether query head i uses key head i % count."""
        return self.heads == _tiled(len(self.heads), self.count)

    @property
    def is_even(self) -> bool:
        """Whether each key head has the same number of query heads."""
        return len({Counter(self.heads)[x] for x in range(self.count)}) == 1

    @property
    def order(self) -> list[int]:
        """Query heads in the order in which they are grouped by their key heads."""
        return sorted(range(len(self.heads)), key=lambda i: self.heads[i])


def head_map(x: Tensor, source: Tensor, batch: int) -> HeadMap | None:
    """Compare the heads of copied keys with the heads before the copy.

    Args:
        x: Keys or values as attention gets them: (B, H, S, D), (B, H, D, S), or with B and H in one dim.
        source: The tensor that was copied, in any order of dims.
        batch: Batch size.

    Returns:
        The map, or None if a head is not a copy of one head of ``source``.
    """
    source = source[tuple(0 if st == 0 else slice(None) for st in source.stride())]
    x = x.reshape(batch, -1, *x.shape[1:]) if x.dim() == 3 and x.shape[0] % batch == 0 else x
    if x.dim() != 4 or x.dtype != source.dtype:
        return None
    while source.dim() > 4 and 1 in source.shape:
        source = source.squeeze(source.shape.index(1))
    source = source[(None,) * (4 - source.dim())] if source.dim() < 4 else source
    for order in permutations(range(4)) if source.dim() == 4 else ():
        y = source.permute(order)
        fits = y.shape[0] == x.shape[0] and y.shape[2:] == x.shape[2:] and 0 < y.shape[1] < x.shape[1]
        found = _compared(x, y) if fits else None
        if found is not None:
            return found
    return None


def _compared(x: Tensor, y: Tensor) -> HeadMap | None:
    equal = [[bool(torch.equal(a, b)) for b in y.unbind(1)] for a in x.unbind(1)]
    if not all(any(row) for row in equal):
        return None
    many, count = len(equal), y.shape[1]
    usual = [_grouped(many, count), _tiled(many, count)]
    first = tuple(row.index(True) for row in equal)  # Equal heads of the source have several maps.
    fits = (heads for heads in usual if all(equal[i][j] for i, j in enumerate(heads)))
    return HeadMap(next(fits, first), count)


def _grouped(many: int, count: int) -> tuple[int, ...]:
    return tuple(i * count // many for i in range(many))


def _tiled(many: int, count: int) -> tuple[int, ...]:
    return tuple(i % count for i in range(many))
