"""Rows of arrays and tensors, taken and joined along any dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from ..arrays import Array, Arrays, arrays_for, is_array
from ..errors import DtypeError, ShapeError

FILLS = {"ids": -1, "segment_ids": -1, "labels": -100, "targets": -100}
"""What padding rows of a batch's entries are filled with by default. Names that contain "label" or "target"
get -100, all others 0."""


def fill_of(name: str, fill: Any) -> Any:
    default = FILLS.get(name, FILLS["labels"] if "label" in name or "target" in name else 0)
    if isinstance(fill, Mapping):
        return fill.get(name, default)
    return fill or default


def checked(what: str, x: Any, dim: int, rows: int) -> Arrays:
    if not is_array(x):
        raise DtypeError(
            what, expected="an array or a tensor", got=type(x).__name__, remedy="Leave it out of the batch"
        )
    if not -x.ndim <= dim < x.ndim or x.shape[dim] != rows:
        raise ShapeError(
            what,
            expected=f"{rows} rows along dimension {dim}",
            got=str(tuple(x.shape)),
            remedy="Pass the dimension of the rows as `dim`, or leave out what has no rows",
        )
    return arrays_for([x])


def take(arrays: Arrays, x: Array, index: NDArray[Any], dim: int) -> Array:
    return arrays.take(x, arrays.asarray(index, "int64"), dim)


def concat(arrays: Arrays, parts: Sequence[Array], dim: int) -> Array:
    if arrays.name == "torch":
        return arrays.xp.cat(list(parts), dim)
    return arrays.xp.concatenate(list(parts), axis=dim)


def filled(arrays: Arrays, like: Array, shape: Sequence[int], fill: Any) -> Array:
    if arrays.name == "torch":
        return like.new_full(tuple(shape), fill)
    return arrays.xp.full(tuple(shape), fill, dtype=like.dtype)
