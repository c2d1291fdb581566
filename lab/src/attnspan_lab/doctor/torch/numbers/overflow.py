"""Operators whose result is too large for its dtype: the line where a number becomes inf or -inf."""

from __future__ import annotations

from math import isfinite, isinf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.words import dtype_name

__all__ = ["Overflow", "has_inf", "overflow_of", "overflow_of_data"]


class Overflow(NamedTuple):
    """A number that became infinite.

    Args:
        place: The user's line.
        dtype: Dtype of the result.
        value: The number in float64, or None if it is infinite there too, or unknown.
        sign: "" or "-".
    """

    place: Place | None
    dtype: torch.dtype
    value: float | None
    sign: str

    @property
    def text(self) -> str:
        """Describe the overflow."""
        where, name = self.place or "an unknown line", dtype_name(self.dtype)
        if self.value is None:
            return f"the first {self.sign}inf ({name}) is made at {where}"
        most = f"{torch.finfo(self.dtype).max:.5g}"
        return f"{self.value:.3g} becomes {self.sign}inf in {name} at {where}: the largest number is {most}"


def has_inf(x: Tensor) -> bool:
    """Whether a tensor of numbers contains inf or -inf."""
    return x.is_floating_point() and bool(x.detach().isinf().any())


def overflow_of(op: Any, args: Any, kwargs: Any, out: Tensor, place: Place | None) -> Overflow | None:
    """Describe an infinite result of finite numbers. None if an argument is infinite.

    Args:
        op, args, kwargs: The operator.
        out: Its result, which contains inf.
        place: The user's line.
    """
    for x in tree_leaves((args, kwargs)):
        if x is not out and (has_inf(x) if isinstance(x, Tensor) else isinstance(x, float) and isinf(x)):
            return None
    return _overflow(out, _exact(op, args, kwargs, out), place)


def overflow_of_data(data: Any, out: Tensor, place: Place | None) -> Overflow | None:
    """Describe a tensor that was made from finite Python numbers, and is infinite."""
    numbers = [x for x in tree_leaves(data) if isinstance(x, (int, float))]
    if not numbers or not all(map(isfinite, numbers)) or not has_inf(out):
        return None
    return _overflow(out, torch.tensor(data, dtype=torch.float64), place)


def _overflow(out: Tensor, exact: Tensor | None, place: Place | None) -> Overflow:
    value = None
    if exact is not None and exact.shape == out.shape:
        finite = exact.detach()[out.detach().isinf()]
        finite = finite[finite.isfinite()]
        value = float(finite[finite.abs().argmax()]) if finite.numel() else None
    sign = "" if bool(out.detach().isposinf().any()) and (value is None or value > 0) else "-"
    return Overflow(place, out.dtype, value, sign)


def _exact(op: Any, args: Any, kwargs: Any, out: Tensor) -> Tensor | None:
    """Run the operator in float64. None if that fails, as for an operator in place."""
    if any(x is out for x in tree_leaves(args)) or torch.is_inference(out):
        return None

    def wide(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.detach().to(torch.float64, copy=True)
        return torch.float64 if x is out.dtype else x

    try:
        with torch.no_grad():
            found = op(*tree_map(wide, args), **tree_map(wide, kwargs))
    except Exception:
        return None
    return next((x for x in tree_leaves(found) if isinstance(x, Tensor) and x.shape == out.shape), None)
