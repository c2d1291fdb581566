"""Rows of global arrays in the order in which devices hold them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from ...errors import DtypeError, ShapeError
from .._parts import fill_of
from ..partition import Partition
from ._axes import Axes


class Deal(NamedTuple):
    """Who owns which rows, as arrays: a pytree.

    Attributes:
        rows: int32 (C * n,), the global number of each row, -1 for padding.
        place: int32 (length,), where each row of the whole lies.
    """

    rows: Any
    place: Any

    @classmethod
    def of(cls, partition: Partition, axes: Axes) -> Deal:
        """The arrays of a partition, on the devices.

        Example:
            >>> from attnspan import causal
            >>> from attnspan.parallel.partition import partition
            >>> axes = Axes.of(jax.make_mesh((1,), ("context",)), None, None, "context")
            >>> Deal.of(partition(causal(), 1, q_len=3), axes).place.tolist()
            [0, 1, 2]
        """
        rows = partition.rows.reshape(-1)
        real = np.flatnonzero(rows >= 0)
        place = np.empty(partition.q_len, np.int32)
        place[rows[real]] = real
        return cls(axes.place(rows, "sequence"), axes.place(place, None))

    @property
    def positions(self) -> jax.Array:
        """Global row number of each row, 0 for padding."""
        return jnp.maximum(self.rows, 0)

    @property
    def valid(self) -> jax.Array:
        """Which rows are no padding."""
        return jnp.greater_equal(self.rows, 0)


def shard(deal: Deal | None, axes: Axes, x: Any, axis: int, batch_axis: int | None, fill: Any) -> Any:
    """See `Sharded.shard`."""
    if isinstance(x, Mapping):
        return {
            name: shard(deal, axes, part, axis, batch_axis, fill_of(name, fill)) for name, part in x.items()
        }
    x, axis, dims = _dims("shard: x", x, axis, batch_axis)
    if deal is None:
        return axes.place(x, *dims)
    _check_rows("shard: x", x, axis, deal.place.shape[0], "the whole, in its own order")
    # NumPy's rows are taken on the host: no device ever holds the whole.
    xp = np if isinstance(x, np.ndarray) and not isinstance(deal.rows, jax.core.Tracer) else jnp
    rows = np.asarray(deal.rows) if xp is np else _whole(axes, deal.rows)
    taken = xp.take(_whole(axes, x), xp.maximum(rows, 0), axis=axis)
    real = (rows >= 0).reshape([-1 if at == axis else 1 for at in range(x.ndim)])
    return axes.place(xp.where(real, taken, xp.asarray(fill, dtype=taken.dtype)), *dims)


def unshard(deal: Deal | None, axes: Axes, x: Any, axis: int, batch_axis: int | None) -> jax.Array:
    """See `Sharded.unshard`."""
    x, axis, dims = _dims("unshard: x", x, axis, batch_axis)
    if deal is not None:
        _check_rows("unshard: x", x, axis, deal.rows.shape[0], "those of all devices, padding included")
        x = jnp.take(_whole(axes, jnp.asarray(x)), deal.place, axis=axis)
    dims[axis] = None
    return axes.place(x, *dims)


def _whole(axes: Axes, x: Any) -> Any:
    # Where shardings are types, rows cannot be taken along a dim that is split.
    return axes.place(x, *([None] * x.ndim)) if axes.explicit and isinstance(x, jax.Array) else x


def _dims(what: str, x: Any, axis: int, batch_axis: int | None) -> tuple[Any, int, list[str | None]]:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise DtypeError(what, expected="an array", got=type(x).__name__, remedy="Leave it out of the batch")
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(
            what, expected=f"rows along axis {axis}", got=f"shape {tuple(x.shape)}", remedy="Pass their axis"
        )
    axis %= x.ndim
    dims: list[str | None] = [None] * x.ndim
    if batch_axis is not None and batch_axis % x.ndim != axis:
        dims[batch_axis % x.ndim] = "batch"
    dims[axis] = "sequence"
    return x, axis, dims


def _check_rows(what: str, x: Any, axis: int, rows: int, words: str) -> None:
    if x.shape[axis] != rows:
        raise ShapeError(
            what,
            expected=f"{rows} rows along axis {axis}, {words}",
            got=f"shape {tuple(x.shape)}",
            remedy="Pass the axis of the rows, and a plan of this length",
        )
