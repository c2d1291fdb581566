"""How far a result is from another."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def error(got: np.ndarray, exact: np.ndarray) -> float:
    """Norm of the difference over that of the exact result; infinite where only one of them is finite."""
    assert got.shape == exact.shape, (got.shape, exact.shape)
    finite = np.isfinite(exact)
    if not np.array_equal(got[~finite], exact[~finite]) or not np.isfinite(got[finite]).all():
        return float("inf")
    difference = float(np.linalg.norm(got[finite] - exact[finite]))
    return difference / max(float(np.linalg.norm(exact[finite])), 1e-30) if difference else 0.0


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The same of tensors, in float64; all of it must be finite."""
    assert torch.isfinite(got).all(), "a result is not finite"
    return error(got.detach().double().numpy(), expected.detach().double().numpy())
