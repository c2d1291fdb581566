"""Rolls of global arrays: each device fetches the rows that it needs, by the exchange of keys.

Shapes of one device: H shifts, B batch elements, p planes (B or 1), n rows, W elements of a row, K rows that
the device needs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from attnspan.base.arrays import kind_of
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.parallel.rows import checked_fill

from .axes import Axes
from .exchange import fetch
from .route import Route

if TYPE_CHECKING:
    from .placed import PlacedPlan


def rolled(placed: PlacedPlan, x: Any, axis: int, fill: complex) -> tuple[Array, ...]:
    """See `attnspan.parallel.roll`."""
    axes, route = placed.axes, placed.route
    assert route is not None
    holds, remedy = isinstance(x, jax.Array | np.ndarray), "Roll one array at a time. Convert torch tensors"
    expect(holds, "roll: x", "a JAX or NumPy array", kind_of(x), remedy, error=DtypeError)
    x = jnp.asarray(x)
    axes.check_around(x)
    rows, planes = route.rows.shape[1], route.planes
    fits = -x.ndim <= axis < x.ndim and x.shape[axis] == rows
    wanted, remedy = "{} rows of all devices along axis {}", "Place it by placed.shard(...), and pass `dim`"
    expect(fits, "roll: x", wanted, x.shape, remedy, rows, axis, error=ShapeError)
    axis %= x.ndim
    fits = planes == 1 or (axis > 0 and x.shape[0] == planes)
    wanted, remedy = "{} batch elements as axis 0", "Pass the batch that the plan was made for"
    expect(fits, "roll: x", wanted, x.shape, remedy, planes, error=ShapeError)
    dims = ["sequence" if at == axis else "batch" if at == 0 else None for at in range(x.ndim)]
    axes.check_placed("roll: x", x, dims)
    if x.size == 0:
        return (x,) * len(placed.shifts)
    first = jnp.moveaxis(x, axis, 1) if axis else x[None]
    axes.check_divides("batch elements of x", first.shape[0], "batch")
    flat = first.reshape(*first.shape[:2], math.prod(first.shape[2:]))
    # As an array, so that another fill, or a NaN, does not recompile.
    value = np.asarray(checked_fill("fill of roll: x", fill, x), x.dtype)
    found = _roll(axes, placed.piece, value, flat, route)
    every = found.reshape(found.shape[0], *first.shape)
    return tuple([jnp.moveaxis(y, 1, axis) if axis else y[0] for y in every])


# With jit, eager calls reuse the compiled program.
@partial(jax.jit, static_argnums=(0, 1))
def _roll(axes: Axes, piece: int, fill: Array, x: Array, route: Route) -> Array:
    """Rows of each shift, (H, B, C * n, W), of global rows (B, C * n, W)."""
    specs = axes.spec(), axes.spec("batch", "sequence", None), route.specs(axes)
    if axes.explicit:  # Types contain shardings, so whole arrays are cut to the expected shardings.
        fill, x, route = jax.tree.map(axes.put, (fill, x, route), specs)
    run = partial(_on_device, axes, piece)
    found: Array = axes.on_each(run, specs, axes.spec(None, "batch", "sequence", None))(fill, x, route)
    return found


def _on_device(axes: Axes, piece: int, fill: Array, x: Array, route: Route) -> Array:
    lists, bounds = route.own().exchange, route.own().bounds[0, :, :, :, 0]
    rows = x[:, None]
    if lists is not None:
        rows, _ = fetch(rows, rows[..., :0], lists, piece, axes.sequence)
    # (H, p, n, 1), which broadcasts over the batch and the elements of a row.
    lo, hi = (jnp.moveaxis(bounds[..., side], 1, 0)[..., None] for side in (0, 1))
    found = jnp.take_along_axis(rows[None, :, 0], lo, axis=2, mode="clip")
    return jnp.where(hi > lo, found, fill)
