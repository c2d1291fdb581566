"""The whole from the rows of all ranks, differentiably."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import ShapeError
from ._collectives import raise_broken
from .partition import Partition


def gather_rows(x: Tensor, dim: int, partition: Partition, group: Any) -> Tensor:
    """All rows in order, on every rank.

    Args:
        x: This rank's rows along ``dim``, padding included.
        dim: The dimension of the rows.
        partition: Who owns which rows.
        group: The process group.

    Raises:
        ShapeError: Another number of rows.
    """
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != partition.rows_per_rank:
        raise ShapeError(
            "unshard",
            expected=f"this rank's {partition.rows_per_rank} rows along dimension {dim}",
            got=str(tuple(x.shape)),
            remedy="Pass the dimension of the rows as `dim`",
        )
    flat = torch.from_numpy(partition.rows.reshape(-1))
    real = (flat >= 0).nonzero().flatten()
    place = torch.empty(partition.q_len, dtype=torch.int64)
    place[flat[real].long()] = real
    return _GatherRows.apply(x, dim, place.to(x.device), partition.ranks, group)  # type: ignore[no-any-return,no-untyped-call]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, place: Tensor, ranks: int, group: Any) -> Tensor:
        ctx.dim, ctx.rows, ctx.ranks, ctx.group = dim, x.shape[dim], ranks, group
        ctx.save_for_backward(place)
        rows = x.movedim(dim, 0).contiguous()
        every = rows.new_empty((ranks * rows.shape[0], *rows.shape[1:]))
        try:
            dist.all_gather(list(every.chunk(ranks)), rows, group=group)
        except RuntimeError as error:
            raise_broken(group, "unshard", error)
        return every.index_select(0, place).movedim(0, dim)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (place,) = ctx.saved_tensors
        rows = grad.movedim(ctx.dim, 0)
        every = rows.new_zeros((ctx.rows * ctx.ranks, *rows.shape[1:]))
        every.index_copy_(0, place, rows.contiguous())
        try:
            dist.all_reduce(every, group=ctx.group)
        except RuntimeError as error:
            raise_broken(ctx.group, "gradient of unshard", error)
        mine = every.narrow(0, ctx.group.rank() * ctx.rows, ctx.rows)
        return mine.movedim(0, ctx.dim).contiguous(), None, None, None, None
