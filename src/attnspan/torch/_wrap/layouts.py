"""The contract of strides: what a kernel accepts, and the copy where an input breaks it."""

from typing import Literal

import torch
from torch import Tensor

Strides = Literal["any", "unit", "contiguous", "bshd", "bhsd"]
STRIDES: tuple[str, ...] = ("any", "unit", "contiguous", "bshd", "bhsd")


def conform(x: Tensor, strides: str, layout: str) -> Tensor:
    """The tensor itself where its strides are what the kernel accepts, else a copy that has them.

    Args:
        x: Any tensor.
        strides: "any"; "unit", a last stride of 1; "contiguous"; "bshd" or "bhsd", stored as contiguous in
            that order of dims whatever the order of the dims of a 4-dim tensor.
        layout: The order of the dims of a 4-dim tensor, "bhsd" or "bshd".

    Returns:
        ``x`` or a copy; never a view of ``x`` with other values.

    Example:
        >>> x = torch.zeros(1, 3, 2, 4).transpose(1, 2)
        >>> conform(x, "unit", "bhsd") is x, conform(x, "bshd", "bhsd").stride() == x.stride()
        (True, True)
        >>> conform(x, "contiguous", "bhsd").stride()
        (24, 12, 4, 1)
    """
    if strides == "any" or x.dim() == 0:
        return x
    if strides == "unit":
        return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    if strides in ("bshd", "bhsd") and strides != layout and x.dim() == 4:
        stored = x.transpose(1, 2)
        return x if stored.is_contiguous() else stored.contiguous().transpose(1, 2)
    return x.contiguous()
