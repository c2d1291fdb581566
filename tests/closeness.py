"""How far a result is from another."""

from __future__ import annotations

from collections.abc import Callable

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


FEW = 32  # elements of a result below which the norm of its error is a matter of luck

# Times the error that no implementation can avoid, which is a root of a mean of squares: of a result of a few
# elements, six sigma.
FACTOR, FACTOR_OF_FEW = 3, 6

Arrays = dict[str, np.ndarray]


def sensitivity(
    solve: Callable[..., Arrays], arrays: Arrays, exact: Arrays, rounded: Callable[[str], bool], draws: int
) -> dict[str, float]:
    """How far results of attention move, relatively, where inputs that are `rounded` move by at most 1/2.

    `solve(arrays, misread)` gives the results, with `misread(out)` added to dlse. How far a vector of a few
    elements moves is luck, unless it is moved several times.
    """
    step, random = 1e-5, np.random.default_rng(1)

    def moved(name: str, x: np.ndarray) -> np.ndarray:
        noise = (random.random(x.shape) - 0.5) * rounded(name)
        return np.where(np.isfinite(x), x * (1 + step * noise), x)

    def misread(out: np.ndarray) -> np.ndarray:
        # Backward takes sum_j p_j dp_j from the row's output, which was stored rounded: as if dlse were
        # another. Sums over whole rows, those of parameters and sinks, depend on little else.
        rounding = step * (random.random(out.shape) - 0.5) * out
        return (arrays["dout"] * (out - exact["out"] + rounding)).sum(-1)

    squares = dict.fromkeys(exact, 0.0)
    for _ in range(draws):
        near = solve({name: moved(name, x) for name, x in arrays.items()}, misread)
        for name in exact:
            squares[name] += (error(near[name], exact[name]) / step) ** 2 / draws
    return {name: square**0.5 for name, square in squares.items()}
