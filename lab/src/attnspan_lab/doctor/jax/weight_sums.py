"""Findings on softmax weights that do not add up to 1: if all values are 1, attention must return 1."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.interpret import evaluated
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import RESHAPES, Value

__all__ = ["Sums"]

_LINEAR = ("mul", "div", "add", "select_n", "slice", *RESHAPES)
_KEEP_MASS = ("mul", "max", "select_n", *RESHAPES)
_EXPONENTIALS = ("exp", "exp2")
_WITHIN, _ROUNDINGS = 1e-3, 16  # difference from 1 that counts


class Sums:
    """Follows attention with values of 1, also through loops over blocks, next to the step itself."""

    def __init__(self) -> None:
        self.found: dict[Any, Finding] = {}
        self._origins: dict[tuple[int, str], Value] = {}

    def start(self, eqn: Any, values: list[Value], weights: int, out: Value) -> None:
        """Begin at the product of weights and values."""
        given, call = values[weights], values[weights].call
        arrays = [x.array for x in values]
        arrays[1 - weights] = np.ones_like(np.asarray(arrays[1 - weights]))
        out.ones = evaluated(eqn, arrays)[0]
        self._origins[id(call), "weights"] = _origin(given)
        divided = next((x for x in given.chain() if x.name == "div"), None)
        if divided is not None and divided.parents[1].mass:
            off = _off(out.ones, extra=divided.parents[1].extra)
            if off > 0 and call is not None:
                call.uneven = True
                places = (*divided.places[:1], *out.places[:2])
                what = "The weights of a query do not add up to 1 over its keys"
                said = finding("softmax-axis", what, places, _evidence(off), call=call)
                self.found.setdefault(("axis", divided.places[:1]), said)

    def see(self, eqn: Any, values: list[Value], out: list[Value]) -> None:
        """Follow one operator."""
        name = eqn.primitive.name
        if name == "reduce_sum" and values[0].axes and values[0].call is not None and values[0].call.softmax:
            out[0].mass = True
            self._origins[id(values[0].call), "sum"] = _origin(values[0])
        elif len(out) == 1 and any(x.mass for x in values):
            self._mass(name, values, out[0])
        if len(out) == 1 and name in _LINEAR and any(x.ones is not None for x in values):
            self._ones(eqn, values, out[0])

    def _mass(self, name: str, values: list[Value], out: Value) -> None:
        others = [x for x in values if not x.mass]
        out.mass = name == "add" or name in _KEEP_MASS
        out.extra = any(x.extra for x in values) or (name == "add" and any(map(_is_not_zero, others)))

    def _ones(self, eqn: Any, values: list[Value], out: Value) -> None:
        name, known = eqn.primitive.name, [x for x in values if x.ones is not None]
        others = [x for x in values if x.ones is None]
        if (name == "mul" and len(known) > 1) or (name == "div" and values[0].ones is None):
            return
        if name == "add" and any(map(_is_not_zero, others)):
            return  # A residual: attention ends before it.
        if name == "mul" and any(x.data and not _is_exponential(x) for x in others):
            return  # A gate.
        out.ones = evaluated(eqn, [x.array if x.ones is None else x.ones for x in values])[0]
        if name == "div" and values[1].mass and self._same_weights(values[1]):
            self._check(values, out)

    def _same_weights(self, total: Value) -> bool:
        """Whether the sum is made from the weights of the product. Dropout is between the two."""
        one, other = (self._origins.get((id(total.call), x)) for x in ("weights", "sum"))
        return one is not None and one is other

    def _check(self, values: list[Value], out: Value) -> None:
        off = _off(out.ones, extra=values[1].extra)
        if not off > 0:
            return
        sums = [_accumulated(x) for x in values]
        scaled = [x is not None and _is_rescaled(x) for x in sums]
        case = "weight-sum"
        if scaled[0] != scaled[1]:
            case = "weight-sum.results" if scaled[1] else "weight-sum.sums"
            sums = sums if scaled[1] else sums[::-1]
        places = [y for x in (*sums, out) if x is not None for y in x.places[:1]]
        what = "The weights of each query must add up to 1, and they do not"
        self.found.setdefault(("sum", *places[:1]), finding(case, what, places, _evidence(off)))


def _evidence(off: float) -> str:
    return f"if all values are 1, results must be 1, and they differ from 1 by up to {off:.1e}"


def _off(ones: Any, *, extra: bool) -> float:
    """Return the largest difference from 1 that rounding does not explain, or 0.

    A query without visible keys returns 0 or NaN. With a sink, results may be less than 1.
    """
    x = np.asarray(ones)
    eps = float(jnp.finfo(x.dtype).eps)  # type: ignore[no-untyped-call]
    x = x.astype(np.float64)
    off = np.where(np.isfinite(x) & (x != 0), x - 1, 0)
    most = float((off if extra else np.abs(off)).max(initial=0.0))
    return most if most > max(_WITHIN, _ROUNDINGS * eps) else 0.0


def _origin(value: Value) -> Value:
    return list(value.chain())[-1]


def _is_not_zero(value: Value) -> bool:
    return bool(np.asarray(value.array).any())


def _accumulated(value: Value) -> Value | None:
    """Find the operator that last added to a sum."""
    return next((x for x in value.chain() if x.name == "add"), None)


def _is_rescaled(total: Value) -> bool:
    """Whether a sum multiplies an earlier sum by an exponential before it adds."""
    products = [x for p in total.parents for x in p.chain() if x.name == "mul"]
    return any(_is_exponential(p) for x in products for p in x.parents)


def _is_exponential(value: Value) -> bool:
    """Whether an array is made by exp, possibly with another number at some entries."""
    return any(y.name in _EXPONENTIALS for x in value.chain() for y in (x, *x.parents))
