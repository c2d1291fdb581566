"""Findings on positions that a 16-bit float counts: different positions become equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from attnspan_lab.doctor.digits import CLOSE, FEW, LARGE, collisions, neighbors, rounded
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import RESHAPES, Value, is_float, is_integer
from attnspan_lab.doctor.places import Place

__all__ = ["Counting"]

_FOLLOWED = ("mul", "div", "add", "sub", "neg", "dot_general", "concatenate", "slice", *RESHAPES)
_ANGLES = ("sin", "cos")


@dataclass(frozen=True)
class _Count:
    """Numbers that count: how many there are, how many the dtype distinguishes, and the line."""

    many: int
    distinct: int
    dtype: Any
    places: tuple[Place, ...]


class Counting:
    """Follows counted numbers to the angles that are made from them."""

    def __init__(self) -> None:
        self.found: dict[Any, Finding] = {}

    def see(self, eqn: Any, values: list[Value], out: list[Value]) -> None:
        """Follow one operator."""
        name = eqn.primitive.name
        if len(out) != 1:
            return
        if name in _ANGLES and values[0].count is not None:
            self._angle(values[0], out[0])
        elif name in ("iota", "convert_element_type") and (made := _counted(name, eqn, values, out[0])):
            out[0].count = made
        elif name in _FOLLOWED:
            out[0].count = next((x.count for x in values if x.count is not None), None)

    def _angle(self, angle: Value, out: Value) -> None:
        count, dtype = angle.count, angle.array.dtype
        if count.distinct < count.many:
            what, cause = collisions(str(count.dtype), count.distinct, count.many), FEW
            places = (*count.places[:1], *out.places[:1])
        elif is_float(angle.array) and dtype.itemsize == 2 and (step := _step(angle.array)) > CLOSE:
            what, cause, places = rounded(str(dtype), step), LARGE, out.places[:2]
        else:
            return
        self.found.setdefault(places[:1], finding("positions", what, places, cause=cause))


def _counted(name: str, eqn: Any, values: list[Value], out: Value) -> _Count | None:
    """Describe numbers that count up, as integers or as floats."""
    wanted = values[0].array if name == "convert_element_type" else None
    if name == "iota":
        wanted = np.arange(eqn.params["shape"][eqn.params["dimension"]])
    elif not is_integer(wanted) or not is_float(out.array):
        return None
    whole = np.unique(np.asarray(wanted))
    if len(whole) < 3 or (np.diff(whole) != np.diff(whole)[0]).any():
        return None
    distinct = len(np.unique(whole.astype(out.array.dtype).astype(np.float64)))
    return _Count(len(whole), distinct, out.array.dtype, out.places)


def _step(angles: Any) -> float:
    """Return the distance of neighbors at the largest angle."""
    info = jnp.finfo(angles.dtype)  # type: ignore[no-untyped-call]
    return neighbors(float(np.abs(np.asarray(angles, np.float64)).max(initial=0.0)), float(info.eps))
