"""Rows of arrays taken by index, and batches that know their layout.

Shapes: L batch rows that are partitioned one by one, n rows of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Array, arrays_for, is_array, is_integer, kind_of
from ..checks import count
from ..errors import ShapeError, expect

__all__ = ["Rows", "checked_rows", "fill_of", "marked", "take"]

#: What padding rows of integers are filled with, by name of the entry.
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


def fill_of(name: Any, fill: Any, x: Array) -> Any:
    """The value of padding rows of an entry. Marks by name are for integers: others have no invalid value."""
    marks = is_array(x) and is_integer(x)
    given = fill.get(name) if isinstance(fill, Mapping) else fill
    if given is None:
        ignored = "label" in str(name) or "target" in str(name)
        given = 0 if not marks else _FILLS.get(name, -100 if ignored else 0)
    if marks:
        kind = kind_of(x).removeprefix("torch.")
        fits = isinstance(given, (int, np.integer)) and np.iinfo(kind).min <= given <= np.iinfo(kind).max
        remedy = "Convert it to int64, or pass another fill"
        expect(fits, f"fill of {name}", f"a value of {kind}", str(given), remedy)
    else:
        expect(isinstance(given, Number), f"fill of {name}", "a number", repr(given), "Pass one")
    return given


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


def checked_rows(q_len: int, rows: Any) -> NDArray[np.int32]:
    """The rows of each rank as int32. A row without an owner, or with two, would be silently wrong."""
    count("Layout: q_len", q_len)
    fits = isinstance(rows, np.ndarray) and rows.ndim == 3 and rows.dtype.kind == "i"
    what, wanted = "Layout: rows", "an integer array (ranks, batch rows, rows of a rank) of NumPy"
    got = f"{kind_of(rows)} of shape {np.shape(rows)}"
    expect(fits, what, wanted, got, "Stack the rows of all ranks, padded by -1", error=ShapeError)
    ends = np.where(rows < 0, q_len, rows)
    ascend = (np.diff(ends, axis=2) > 0) | (ends[:, :, 1:] == q_len)
    expect(
        ascend.all(), what, "ascending rows, -1 behind them", "another order", "Sort the rows of each rank"
    )
    found = np.sort(ends.transpose(1, 0, 2).reshape(rows.shape[1], -1), axis=1)
    each = found.shape[1] >= q_len and (found[:, :q_len] == np.arange(q_len)).all()
    whole = each and (found[:, q_len:] == q_len).all()
    wanted, remedy = f"each of {q_len} rows once", "Give every row one owner, and pad with -1"
    expect(whole, what, wanted, "rows that are missing, come twice or are beyond", remedy)
    checked: NDArray[np.int32] = np.maximum(rows, -1).astype(np.int32)
    return checked
