"""Scales of attention's scores: rules that tell the usual scale from probable mistakes, and their texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, prod
from pathlib import Path
from typing import NamedTuple

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at

__all__ = ["UNKNOWN", "Factor", "Scale", "are_bare", "faulty", "scale_finding"]

#: Reason against a check.
UNKNOWN = "q and k are normalized or have learned factors, or the doctor cannot follow how they are made"
_NEAR = 1e-2  # bfloat16 rounds numbers


class Factor(NamedTuple):
    """A number that multiplies q, k or the scores, and its line."""

    value: float
    place: Place | None

    def is_near(self, value: float) -> bool:
        """Whether it is this number."""
        return isclose(self.value, value, rel_tol=_NEAR)


@dataclass(frozen=True)
class Scale:
    """The numbers that multiply the scores of one attention call.

    Args:
        factors: Each number with its line.
        dim: Head dim.
        widths: Widths of the model, as far as they are known.
        place: Line of the call.
        is_bare: q and k are projections that no other operator changed, except copies and rotations.
    """

    factors: tuple[Factor, ...]
    dim: int
    widths: tuple[int, ...]
    place: Place | None
    is_bare: bool

    @property
    def total(self) -> float:
        """The product of all factors."""
        return prod(x.value for x in self.factors)

    @property
    def usual(self) -> float:
        """The usual scale."""
        return float(self.dim**-0.5)

    @property
    def repeated(self) -> tuple[Factor, ...]:
        """Factors that are the usual scale, or its root: q and k may each have one."""
        return tuple(x for x in self.factors if x.is_near(self.usual) or x.is_near(self.usual**0.5))

    @property
    def fault(self) -> str:
        """The fault: "twice", "width", "none", or "" for usual scales and for scales that may be a choice.

        One factor of 1 / head dim is the scale of muP.
        """
        total = Factor(self.total, None)
        if self.dim < 2 or total.is_near(self.usual):
            return ""
        if total.is_near(1 / self.dim):
            whole = sum(x.is_near(self.usual) for x in self.repeated)
            return "twice" if whole + (len(self.repeated) - whole) // 2 > 1 else ""
        if any(x > self.dim and total.is_near(x**-0.5) for x in self.widths):
            return "width"
        return "none" if self.is_bare and total.is_near(1.0) else ""


def are_bare(widths: tuple[int, int], sizes: Sequence[float], dim: int) -> bool:
    """Whether q and k are projections, and neither of the two contains a scale.

    A projection may contain the scale: the queries are then smaller than the keys.

    Args:
        widths: Widths of the inputs of both projections, or 0 without a projection.
        sizes: Root mean squares of q and k.
        dim: Head dim.
    """
    return all(widths) and min(sizes) > 1.5 * dim**-0.5 * max(sizes)


def faulty(scales: Sequence[Scale], *, learned_bias: bool) -> Scale | None:
    """Return the scale of the calls of a line if it has a fault.

    A factor that differs from layer to layer is a choice. Projections may contain the scale, as in T5, whose
    scores get a learned bias.
    """
    first, same = scales[0], len({x.fault for x in scales}) == 1
    return first if same and first.fault and not (first.fault == "none" and learned_bias) else None


_WHAT = {
    "twice": "Scores are scaled twice here",
    "width": "Scores are scaled by the width of the model here, and not by the head dim",
    "none": "Scores are not scaled here, and q and k are not normalized",
}


def scale_finding(scale: Scale, tried: str = "") -> Finding:
    """Write the finding for a scale with a fault.

    Args:
        scale: The scale.
        tried: By how much results change with the usual scale.
    """
    factors = scale.repeated if scale.fault == "twice" else scale.factors
    usual = f"1/sqrt(head dim {scale.dim}) is {scale.usual:.4g}"
    evidence = [f"the effective scale is {scale.total:.4g}, and {usual}"]
    evidence += [f"{x.value:.4g} at {_line(x.place)}" for x in factors]
    lines = list(dict.fromkeys(_line(x.place) for x in factors))
    remedy = f"Multiply the scores by {scale.usual:.4g}: pass scale=head_dim**-0.5, or multiply q by it once"
    if scale.fault == "twice":
        remedy = f"Keep one of the factors. Remove the one at {lines[0]}"
        at_call = factors[-1].place == scale.place
        remedy += f", or pass scale=1.0 at {lines[-1]}" * (at_call and len(lines) > 1)
        remedy += f", or the one at {lines[-1]}" * (not at_call and len(lines) > 1)
    elif scale.fault == "width":
        remedy = f"At {lines[0]}, use head_dim**-0.5 = {scale.usual:.4g} instead of {scale.total:.4g}"
    places = at(*(x.place for x in factors), scale.place)
    return Finding("scale", _WHAT[scale.fault], places, tuple(evidence), remedy=remedy, tried=tried)


def _line(place: Place | None) -> str:
    return "an unknown line" if place is None else f"{Path(place.file).name}:{place.line}"
