"""Rows of arrays taken by index, and batches that know their layout.

Shapes: L batch rows that are partitioned one by one, n rows of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, arrays_for

__all__ = ["Rows", "fill_of", "marked", "take"]

#: What padding rows are filled with, by name of the entry.
_FILLS = {"ids": -1, "segment_ids": -1}


class Rows(dict[str, Any]):
    """One rank's rows of a batch: a dict that knows its layout.

    ``rows["q_index"]`` holds the number of each row in the whole sequence, int64 (L, n), -1 for padding.

    Attributes:
        layout: Fingerprint of the layout.
        rank: Whose rows they are.
    """

    layout: int
    rank: int

    def to(self, *arguments: Any, **keywords: Any) -> Rows:
        """The same with every tensor's `to` called, as ``rows.to("cuda", non_blocking=True)``."""
        return self._each("to", arguments, keywords)

    def pin_memory(self) -> Rows:
        """The same in pinned memory; data loaders with ``pin_memory=True`` call it."""
        return self._each("pin_memory", (), {})

    def _each(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Rows:
        values = {
            name: getattr(x, method)(*arguments, **keywords) if hasattr(x, method) else x
            for name, x in self.items()
        }
        return marked(values, self.layout, self.rank)


def marked(values: Mapping[str, Any], layout: int, rank: int) -> Rows:
    rows = Rows(values)
    rows.layout, rows.rank = layout, rank
    return rows


def fill_of(name: str, fill: Any) -> Any:
    default = _FILLS.get(name, -100 if "label" in name or "target" in name else 0)
    if isinstance(fill, Mapping):
        return fill.get(name, default)
    return default if fill is None else fill


def take(x: Array, index: NDArray[Any], dim: int) -> Array:
    """Rows along `dim` by number, (L, n); with L > 1 dimension 0 of x is that of the planes."""
    arrays = arrays_for([x])
    if index.shape[0] == 1:
        return arrays.take(x, arrays.asarray(index[0].astype(np.int64), "int64"), dim)
    order = [0, dim % x.ndim, *(i for i in range(1, x.ndim) if i != dim % x.ndim)]
    moved = x.permute(*order) if hasattr(x, "permute") else x.transpose(*order)
    plane = arrays.asarray(np.arange(index.shape[0])[:, None], "int64")
    found = moved[plane, arrays.asarray(index.astype(np.int64), "int64")]
    back = [order.index(i) for i in range(x.ndim)]
    return found.permute(*back) if hasattr(x, "permute") else found.transpose(*back)
