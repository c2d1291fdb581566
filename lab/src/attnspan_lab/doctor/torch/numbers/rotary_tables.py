"""Tables of rotary positions: the lines that multiply by them, and the other order of their pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attnspan_lab.doctor.places import Place, at, place_here

__all__ = ["Tables"]


class Tables(TorchFunctionMode):
    """Records lines that multiply by a table of sines, cosines or complex numbers.

    The first position has zeros or ones.

    Args:
        length: Number of positions.
        swap: Exchange the two orders of pairs: halves (a, b, a, b) and neighbours (a, a, b, b).
    """

    def __init__(self, length: int, *, swap: bool = False) -> None:
        super().__init__()
        self.length, self.swap, self.places = length, swap, list[Place]()

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(fn, "__name__", "").strip("_")
        if name in ("mul", "rmul", "imul") and any(self._is_table(x) for x in args):
            self.places += at(place_here())
            args = tuple(_swapped(x) if self.swap and self._is_table(x) else x for x in args)
        return fn(*args, **(kwargs or {}))

    def _is_table(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
            return False
        dims = [i for i, n in enumerate(x.shape[:-1]) if n == self.length]
        if len(dims) != 1 or x.shape[-1] < 2:
            return False
        first, second = x.detach().select(dims[0], 0), x.detach().select(dims[0], 1)
        fits = bool((first == 1).all()) or (not x.is_complex() and bool((first == 0).all()))
        return fits and bool((first != second).any()) and float(x.detach().abs().max()) < 2


def _swapped(table: Tensor) -> Tensor:
    """Exchange the orders of pairs of a table. Other tables stay as they are."""
    half = table.shape[-1] // 2
    if torch.equal(table[..., ::2], table[..., 1::2]):
        return torch.cat([table[..., ::2]] * 2, -1)
    is_halved = torch.equal(table[..., :half], table[..., half:])
    return table[..., :half].repeat_interleave(2, -1) if is_halved else table
