"""Differences between results of one model in two runs, and the largest ones that are only rounding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnspan_lab.doctor.torch.masks.forms import distance

__all__ = ["SAME", "difference", "rounding"]

#: Results with a larger relative difference are not equal.
SAME = 1e-4
_ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


def difference(
    wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], *, beyond_rounding: bool = False
) -> float:
    """Return the largest relative difference of results.

    Args:
        wanted, found: Results with their names.
        beyond_rounding: A difference that is only rounding counts as 0.
    """
    most = 0.0
    for name, x in wanted.items():
        y = found.get(name)
        if y is None or x.shape != y.shape:
            return float("inf")
        error = distance(y, x) if x.numel() else 0.0
        most = max(most, error if not beyond_rounding or error > rounding(x) else 0.0)
    return most


def rounding(x: Tensor) -> float:
    """Return the largest relative difference of two results of one model that is only rounding."""
    return _ROUNDING.get(x.dtype, SAME)
