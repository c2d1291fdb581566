"""Scales of attention's scores: rules that tell the usual scale from probable mistakes, and their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isclose, prod
from pathlib import Path
from typing import NamedTuple

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.places import Place, at

__all__ = ["UNKNOWN", "Factor", "Scale", "faulty", "scale_finding"]

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
        sizes: Root mean squares of q and k, if they are projections that no other operator changed, except
            copies and rotations.
        is_biased: The scores have a bias or a softcap.
    """

    factors: tuple[Factor, ...]
    dim: int
    widths: tuple[int, ...]
    place: Place | None
    sizes: tuple[float, ...] = ()
    is_biased: bool = False

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
        # A projection may contain the scale: the queries are then smaller than the keys.
        is_bare = bool(self.sizes) and min(self.sizes) > 1.5 * self.usual * max(self.sizes)
        return "none" if is_bare and total.is_near(1.0) else ""


def faulty(sites: Iterable[list[Scale]], *, has_learned_bias: bool) -> Iterator[list[Scale]]:
    """Yield the scales of each line whose calls have the same fault.

    Args:
        sites: Scales of the calls of each line. A factor that differs from layer to layer is a choice.
        has_learned_bias: The model adds a learned bias. As in T5, its projections may contain the scale.
    """
    for scales in sites:
        fault = scales[0].fault
        if fault and {x.fault for x in scales} == {fault} and not (fault == "none" and has_learned_bias):
            yield scales


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
        if len(lines) > 1:
            other = "pass scale=1.0" if factors[-1].place == scale.place else "the one"
            remedy += f", or {other} at {lines[-1]}"
    elif scale.fault == "width":
        remedy = f"At {lines[0]}, use head_dim**-0.5 = {scale.usual:.4g} instead of {scale.total:.4g}"
    places = at(*(x.place for x in factors), scale.place)
    return Finding("scale", _WHAT[scale.fault], places, tuple(evidence), remedy=remedy, tried=tried)


def _line(place: Place | None) -> str:
    return "an unknown line" if place is None else f"{Path(place.file).name}:{place.line}"
