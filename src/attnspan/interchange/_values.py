"""Read arrays of any framework as NumPy arrays, and return results in the framework of the input."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array, Arrays, arrays_for
from attnspan.base.mistakes import not_a_mask
from attnspan.errors import expect
from attnspan.masks import Mask, Prepared, Spans, SpansLargerThanMask, spans

Host = np.ndarray[Any, Any]


def integers(what: str, x: Any, ranks: tuple[int, ...]) -> tuple[Host, Arrays]:
    """Return the values of an integer array, as int64, and the array functions of its framework."""
    x = checks.integers(what, x, ranks)
    return values(what, x).astype(np.int64), arrays_for([x], what=what)


def values(what: str, x: Array) -> Host:
    """Return the values of an array. A traced array raises an error, because it has no values yet."""
    arrays = arrays_for([x], what=what)
    expected, remedy = "an array whose values can be read", "Call it outside the compiled function"
    expect(not _is_traced(arrays, x), what, expected, "a traced array", remedy)
    return arrays.to_numpy(x)


def _is_traced(arrays: Arrays, x: Array) -> bool:
    if arrays.name == "jax":
        return isinstance(x, arrays.jax.core.Tracer)  # type: ignore[attr-defined]
    # A tensor on a device has values too. Reading them synchronizes.
    on_device = arrays.name == "torch" and x.device.type not in ("cpu", "meta")
    return arrays.tracing() or not (on_device or arrays.concrete(x))


def as_mask(what: str, bounds: Host, k_len: int, arrays: Arrays) -> Mask:
    """Return the mask of computed bounds (B|1, H|1, q_len, R, 2), in the framework of the input."""
    q_len, runs = bounds.shape[2:4]
    if 8 * runs > k_len and 8 * runs * q_len > 1 << 20:
        warnings.warn(
            f"{what}: queries have up to {runs} spans of keys, so the spans take "
            f"{8 * runs * q_len >> 20} MiB. A dense boolean mask would take {q_len * k_len >> 20} MiB",
            SpansLargerThanMask,
            stacklevel=3,
        )
    return spans(arrays.asarray(bounds, "int32"))


def lowered(
    what: str, mask: Mask | Spans, q_len: int, k_len: int | None, batch: int | None, heads: int
) -> tuple[Host, int, Arrays]:
    """Return canonical bounds (B|1, H|1, q_len, R, 2), the number of keys, and the mask's framework.

    The spans of a query ascend and do not touch. Empty spans come last, as (k_len, k_len).
    """
    if isinstance(mask, Spans):
        mask = Prepared(mask.validate(), bare=True)
    if not isinstance(mask, Mask):
        raise not_a_mask(mask, f"{what}: mask")
    q_len = checks.count(f"{what}: q_len", q_len)
    k_len = q_len if k_len is None else checks.count(f"{what}: k_len", k_len)
    found = mask.prepare(q_len, k_len, batch=batch or 1, heads=heads).lowered
    arrays = arrays_for([found.bounds])
    bounds: Host = arrays.to_numpy(found.bounds)
    if bounds.shape[3] == 1 and (bounds[..., 1] > bounds[..., 0]).all():
        return bounds, k_len, arrays
    # `prepare` writes empty spans as (0, 0).
    return np.where(bounds[..., 1:] > bounds[..., :1], bounds, k_len), k_len, arrays


def without_copies(planes: Host) -> Host:
    """Return planes (B, H, ...). If all entries along an axis are equal, only the first is left."""
    for axis in (0, 1):
        first = planes.take([0], axis) if planes.shape[axis] > 1 else planes
        planes = first if (planes == first).all() else planes
    return planes


def one_plane(what: str, bounds: Host) -> Host:
    """Return the bounds (q_len, R, 2) of a mask that is equal for all batch elements and heads."""
    bounds = without_copies(bounds)
    got, remedy = tuple(bounds.shape[:2]), "Write each batch element and head in a separate call"
    expect(got == (1, 1), what, "one mask for all batch elements and heads, (1, 1)", got, remedy)
    plane: Host = bounds[0, 0]
    return plane
