"""Rows gathered and scattered by index, in one pass.

Arrays are (planes, length, inner, heads, width) with a unit last stride; row i is row i % length of plane
i // length.
"""

import torch
from torch import Tensor

from ..kernels import cpu

_MOVED = (torch.float32, torch.bfloat16, torch.float16)


def move(target: Tensor, to: Tensor | None, source: Tensor, at: Tensor | None, add: bool = False) -> None:
    """Copy rows of the source to rows of the target, or add them; each row of the target once.

    Args:
        target: Written.
        to: Rows of the target, int32 (n,); None for all in order.
        source: Of the target's dtype, inner, heads and width.
        at: Rows of the source, int32 (n,); None for all in order.
        add: Add to the target.
    """
    if cpu.core is not None and target.device.type == "cpu" and target.dtype in _MOVED:
        cpu.move_rows(target, to, source, at, num_threads=torch.get_num_threads(), add=add)
        return
    rows = source.reshape(-1, *source.shape[2:]) if at is None else source[_at(source, at)]
    if to is None:
        to = torch.arange(target.shape[0] * target.shape[1], device=target.device)
    target.index_put_(_at(target, to), target[_at(target, to)] + rows if add else rows)


def _at(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    rows, length = rows.long(), max(1, x.shape[1])
    return rows // length, rows % length
