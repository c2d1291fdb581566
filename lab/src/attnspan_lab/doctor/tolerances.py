"""Tolerances of comparisons that torch and JAX share."""

from __future__ import annotations

__all__ = ["ROUNDING", "is_rounding"]

#: Relative error of a compiled step, in roundings of its dtype, that says nothing.
ROUNDING = 128
# Fused kernels add in another order, so their error may be so many times the error of single operators.
_FACTOR = 16.0


def is_rounding(error: float, like: float, eps: float) -> bool:
    """Whether a compiled step rounds as the same operators one by one do. NaN is no rounding.

    Args:
        error: Relative error of the compiled step.
        like: Relative error of the operators one by one.
        eps: Distance of 1 to the next number of the dtype.
    """
    return error <= _FACTOR * like + ROUNDING * eps
