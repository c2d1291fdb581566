"""Numbers that multiply q, k and the scores of a watched step, followed back from the softmax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt, prod

import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.jax.values import RESHAPES, Value, is_float
from attnspan_lab.doctor.jax.watch import Attention
from attnspan_lab.doctor.places import is_installed
from attnspan_lab.doctor.scales import UNKNOWN, Factor, Scale, scale_finding

__all__ = ["scale_findings", "unknown_scales"]

_PASSED = (*RESHAPES, "neg", "slice", "split", "dynamic_slice", "concatenate", "gather", "rev", "pad")
_OF_SCORES = ("select_n", "add", "sub", "max", "min", "tanh")


@dataclass
class _Path:
    """Operators from a product to a value.

    Attributes:
        factors: Numbers that multiplied the value.
        root: The product.
        free: A norm or a learned factor changed the value.
        biased: A learned bias was added to the value.
    """

    factors: tuple[Factor, ...] = ()
    root: Value | None = None
    free: bool = False
    biased: bool = False

    @property
    def width(self) -> int:
        """Width of the input of the projection, or 0 if the value is no projection."""
        parents = self.root.parents if self.root is not None else ()
        if self.root is None or len([x for x in parents if x.data]) != 1:
            return 0
        # (N, C) times (C, M) makes (N, M).
        return isqrt(prod(x.size for x in parents) // self.root.size)


def scale_findings(calls: list[Attention]) -> Iterator[Finding]:
    """Yield the lines whose scores have another scale than usual, and not a scale that may be a choice."""
    sites: dict[object, list[tuple[Scale, bool]]] = {}
    for call in calls:
        place = call.places[0] if call.places else None
        found = None if place is None or is_installed(place.file) else _scale_of(call)
        if found is not None:
            sites.setdefault(place, []).append(found)
    biased = any(x for site in sites.values() for _, x in site)
    for site in sites.values():
        faults, scale = {x.fault for x, _ in site}, site[0][0]
        # A factor that differs from layer to layer is a choice. As in T5, projections may contain the scale.
        if len(faults) == 1 and scale.fault and not (scale.fault == "none" and biased):
            yield scale_finding(scale)


def unknown_scales(calls: list[Attention]) -> str:
    """Say why no scale is known, or return "" if one is."""
    if not calls or any(_scale_of(x) is not None for x in calls):
        return ""
    return UNKNOWN


def _scale_of(call: Attention) -> tuple[Scale, bool] | None:
    """Find the scale of a call, and whether it adds a learned bias. None if the scale is unknown."""
    scores = _Path() if call.softmaxed is None else _path(call.softmaxed, call)
    q, k = (_path(x) for x in call.operands[:2])
    own = () if call.factor in (None, 1.0) else (Factor(call.factor, call.places[0]),)
    is_unknown = call.kind == "in blocks" or (scores.root is None and call.factor is None)
    if is_unknown or q.free or k.free or scores.free:
        return None
    shape, dim = call.scores[0], call.size
    heads = 1 if call.visible is None or not shape else prod(shape) // call.visible.size
    size = [float(np.sqrt(np.square(np.asarray(x.array, np.float64)).mean())) for x in call.operands[:2]]
    # A projection may contain the scale: the queries are then smaller than the keys.
    is_bare = bool(q.width and k.width) and min(size) > 1.5 * dim**-0.5 * max(size)
    factors = (*q.factors, *k.factors, *scores.factors, *own)
    return Scale(factors, dim, (q.width, k.width, dim * heads), call.places[0], is_bare), scores.biased


def _path(value: Value, call: Attention | None = None) -> _Path:
    """Follow a value back to its product. Scores belong to a call, and their masks are left out."""
    found = _Path()
    while value.name != "dot_general":
        name, parents = value.name, value.parents
        if name in ("mul", "div"):
            value = _before(value, found)
        elif call is not None and name in (*_PASSED, *_OF_SCORES):
            own = [x for x in parents if x.call is call and x.axes]
            others = [x for x in parents if x not in own]
            found.biased |= name == "add" and any("variables" in x.arguments() for x in others)
            if not own:
                return found
            value = own[0]
        elif call is None and (name in _PASSED or _is_sum(value)):
            value = max(parents, key=lambda x: (x.data, x.size))
        else:
            return found
    found.root = value
    return found


def _is_sum(value: Value) -> bool:
    """Whether a value is a projection with its bias, or the sum of two products of a rotation."""
    parts = [x.name == "mul" or not x.data for x in value.parents]
    return value.name in ("add", "sub") and (all(parts) or not all(x.data for x in value.parents))


def _before(value: Value, found: _Path) -> Value:
    """Find the value that a product multiplies, and note the factor."""
    a, b = value.parents
    for x, y in ((a, b),) if value.name == "div" else ((a, b), (b, a)):
        if y.distinct == 1 and not y.data and "variables" not in y.arguments() and x.data:
            number = float(np.asarray(y.array, np.float64).flat[0])
            number = 1 / number if value.name == "div" and number else number
            found.factors = (Factor(number, (*value.places, None)[0]), *found.factors)
            return x
    x, y = (a, b) if (a.data, a.distinct) >= (b.data, b.distinct) else (b, a)
    # Rotations multiply by fixed numbers for each dim. Norms have one number for each vector.
    norms = any(np.ndim(z.array) > 1 and np.shape(z.array)[-1] == 1 for z in y.chain())
    found.free |= norms or "variables" in y.arguments() or not is_float(y.array)
    return x
