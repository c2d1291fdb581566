"""Reordering of global arrays to the order of the devices, and back.

Shapes: L batch elements that are partitioned one by one (1 if they share a layout), C * n rows of all
devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.parallel.layout import Layout
from attnspan.parallel.rows import Evidence, Marks, Rows, check_evidence, fill_of, marked

from .axes import Axes, AxisNames
from .route import flat_rows, place_table

# As a pytree, a marked batch is a plain dict. Marks change at each step and must not recompile.
jax.tree_util.register_pytree_with_keys(
    Rows,
    lambda x: ([(jax.tree_util.DictKey(name), y) for name, y in x.items()], tuple(x)),  # type: ignore[arg-type, return-value]
    lambda names, values: dict(zip(names, values, strict=True)),  # type: ignore[arg-type, return-value]
)


@dataclass(frozen=True)
class Placing:
    """Placement of rows on a mesh.

    Attributes:
        axes: Mesh axes.
        rows: int32 (L, C * n), index of each row of the devices. None if the order does not change.
        length: Rows of the whole problem, S. 0 if the order does not change.
        layout: Layout of the rows. None if only the devices have it.
    """

    axes: Axes
    rows: Any = None
    length: int = 0
    layout: Layout | None = None

    @classmethod
    def of(
        cls,
        layout: Layout,
        mesh: Any,
        *,
        sequence: AxisNames = None,
        batch: AxisNames = None,
        heads: AxisNames = None,
    ) -> Placing:
        """See `Layout.on`."""
        axes = Axes.of(mesh, batch=batch, heads=heads, sequence=sequence)
        axes.check_ranks(layout.ranks)
        return cls(axes, place_table(axes, flat_rows(layout)), layout.q_len, layout)

    def shard(self, x: Any, axis: int = 1, batch_axis: int | None = 0, fill: Any = None) -> Any:
        """See `Sharded.shard`."""
        if isinstance(x, Mapping):
            return self._shard_each(x, axis, batch_axis, fill)
        axis, dims = self._dims("shard: x", x, axis, batch_axis, self.length)
        if self.rows is None:
            return self.axes.place(x, *dims)
        if self.layout is None or not isinstance(x, np.ndarray):
            x = _filled(jnp, self._whole(jnp.asarray(x)), self._whole(self.rows), axis, fill)
            return self.axes.place(x, *dims)
        # Each host takes the rows of its own devices from NumPy arrays.
        table = flat_rows(self.layout)

        def part(index: Any) -> Any:
            own = tuple(slice(None) if at == axis else of for at, of in enumerate(index))
            planes = index[0] if len(table) > 1 else slice(None)
            return _filled(np, x[own], table[planes, index[axis]], axis, fill)

        shape = (*x.shape[:axis], table.shape[1], *x.shape[axis + 1 :])
        self.axes.check_dims(shape, dims)
        return jax.make_array_from_callback(shape, self.axes.sharding(*dims), part)

    def _shard_each(self, x: Mapping[str, Any], axis: int, batch_axis: int | None, fill: Any) -> Any:
        # Without padding no fill is needed, so it is not checked.
        padded = self.rows is not None and self.rows.shape[1] > self.length
        fills = {name: fill_of(name, fill, y) if padded else None for name, y in x.items()}
        found = {name: self.shard(y, axis, batch_axis, fills[name]) for name, y in x.items()}
        if self.rows is None:
            return found
        remedy = "Rename it, because shard stores the q_index of these rows for attention there"
        expect("q_index" not in x, "shard: x", "no entry 'q_index'", "one", remedy)
        found["q_index"] = self.rows
        return found if self.layout is None else marked(found, Marks(self.layout.fingerprint, -1))

    def unshard(self, x: Any, axis: int = 1, batch_axis: int | None = 0) -> Any:
        """See `Sharded.unshard`."""
        length = 0 if self.rows is None else self.rows.shape[1]
        axis, dims = self._dims("unshard: x", x, axis, batch_axis, length)
        if self.rows is not None:
            rows = self._whole(self.rows)
            order = jnp.argsort(jnp.where(rows < 0, self.length, rows), axis=1, stable=True)
            x = _filled(jnp, self._whole(jnp.asarray(x)), order[:, : self.length], axis, 0)
        dims[axis] = None
        return self.axes.place(x, *dims)

    def _whole(self, x: Any) -> Any:
        # With explicit axes, JAX cannot take rows along a dim that is split.
        return self.axes.place(x, *([None] * x.ndim)) if self.axes.explicit else x

    def _dims(self, what: str, x: Any, axis: int, batch_axis: int | None, length: int) -> tuple[int, Any]:
        """Axis of the rows, counted from 0, and the split of each dim."""
        is_array, kind = hasattr(x, "shape") and hasattr(x, "dtype"), type(x).__name__
        expect(is_array, what, "an array", kind, "Leave it out of the batch", error=DtypeError)
        fits = -x.ndim <= axis < x.ndim and length in (0, x.shape[axis])
        wanted = f"{length or 'any number of'} rows along axis {axis}"
        expect(fits, what, wanted, tuple(x.shape), "Pass the axis of the rows", error=ShapeError)
        dims: list[str | None] = [None] * x.ndim
        if batch_axis is not None:
            dims[batch_axis] = "batch"
        dims[axis] = "sequence"
        planes = 1 if self.rows is None else self.rows.shape[0]
        fits = planes == 1 or (dims[0] == "batch" and x.shape[0] == planes)
        wanted, remedy = f"{planes} batch elements as axis 0, each with its layout", "Pass the whole batch"
        expect(fits, what, wanted, tuple(x.shape), remedy, error=ShapeError)
        return axis % x.ndim, dims


def check_placed_rows(rows: Evidence, layout: Layout) -> None:
    """Raise unless `rows` belong to a layout, either all devices' rows or the rows of one rank."""
    marks = rows if isinstance(rows, Marks) else getattr(rows, "marks", None)
    rank = -1 if marks is None else marks.rank
    mine = layout.rows[rank] if 0 <= rank < layout.ranks else flat_rows(layout)
    check_evidence(rows, mine, Marks(layout.fingerprint, rank))


def _filled(xp: Any, x: Any, rows: Any, axis: int, fill: Any) -> Any:
    """Take rows of an array by index, (L, m), with `fill` for index -1. Axis 0 is the batch."""
    shape = [rows.shape[1] if at == axis else 1 for at in range(x.ndim)]
    if len(rows) > 1:
        shape[0] = len(rows)
    index = rows.reshape(shape)
    if len(rows) == 1:
        found = xp.take(x, xp.maximum(rows[0], 0), axis=axis)
    else:
        found = xp.take_along_axis(x, xp.maximum(index, 0), axis=axis)
    return xp.where(index >= 0, found, xp.asarray(0 if fill is None else fill, dtype=found.dtype))
