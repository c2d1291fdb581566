"""Digits of counted positions: what floats of 16 bits do not distinguish, for torch and JAX."""

from __future__ import annotations

from math import floor, isfinite, log2

from attnspan_lab.doctor.words import dtype_name

__all__ = ["CLOSE", "collisions", "neighbors", "rounded"]

#: Largest distance, in radians, between an angle in 16 bits and the next one.
CLOSE = 0.5


def neighbors(most: float, eps: float) -> float:
    """Return the distance from a number to the next one, in a dtype with this `eps`."""
    return eps * 2.0 ** floor(log2(most)) if most > 0 and isfinite(most) else 0.0


def collisions(dtype: object, distinct: int, many: int) -> str:
    """Say that different positions are equal."""
    return f"Positions collide: {dtype_name(dtype)} distinguishes {distinct} of {many} positions"


def rounded(dtype: object, step: float) -> str:
    """Say that angles are rounded."""
    return f"Angles of positions are rounded to multiples of {step:g} rad in {dtype_name(dtype)}"
