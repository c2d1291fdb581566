"""Differentiable gathering of the rows of all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from attnspan.errors import ShapeError, expect
from attnspan.parallel.layout import Layout

from .agreement import agreement_of, moved, raise_broken
from .groups import group_of


def gather_rows(x: Tensor, layout: Layout, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """See `Layout.gather`."""
    group, remedy = group_of(mesh), "Pass the mesh of the ranks that the layout was made for"
    expect(
        group.size() == layout.ranks, "Layout.gather: mesh", "{} ranks", group.size(), remedy, layout.ranks
    )
    fits = -x.dim() <= dim < x.dim() and x.shape[dim] == layout.rows_per_rank
    wanted, remedy = (
        f"{layout.rows_per_rank} rows along dimension {dim}",
        "Pass the dimension of the rows as `dim`",
    )
    expect(fits, "Layout.gather: x", f"this rank's {wanted}", tuple(x.shape), remedy, error=ShapeError)
    alone = layout.planes == 1 or (dim % x.dim() > 0 and x.shape[0] == layout.planes)
    remedy = "This layout partitions each batch element differently: pass all of them, as dimension 0"
    what, wanted = "Layout.gather: x", f"{layout.planes} batch elements as dimension 0"
    expect(alone, what, wanted, tuple(x.shape), remedy, error=ShapeError)
    facts = {"call": "gather", "shape": (dim % x.dim(), *x.shape), "dtype": str(x.dtype)}
    agreement_of(group).note({**facts, "layout of the rows": layout.fingerprint})
    places = moved(layout.places, x.device.type)
    return _GatherRows.apply(x, dim, places, layout.ranks, group)  # type: ignore[no-any-return,no-untyped-call]


def _at(places: Tensor) -> tuple[Tensor, ...]:
    """Place of each row (S, ...) among the rows of all ranks."""
    if places.shape[0] == 1:
        return (places[0],)
    return places.T, torch.arange(places.shape[0], device=places.device)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, places: Tensor, ranks: int, group: Any) -> Tensor:
        ctx.dim, ctx.rows, ctx.ranks, ctx.group = dim, x.shape[dim], ranks, group
        ctx.save_for_backward(places)
        rows = x.movedim(dim, 0).contiguous()
        every = rows.new_empty((ranks * rows.shape[0], *rows.shape[1:]))
        try:
            dist.all_gather(list(every.chunk(ranks)), rows, group=group)
        except RuntimeError as error:
            raise_broken(group, "gather", error)
        return every[_at(places)].movedim(0, dim)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        rows = grad.movedim(ctx.dim, 0)
        every = rows.new_zeros((ctx.rows * ctx.ranks, *rows.shape[1:]))
        every[_at(places)] = rows
        try:
            dist.all_reduce(every, group=ctx.group)
        except RuntimeError as error:
            raise_broken(ctx.group, "gradient of gather", error)
        mine = every.narrow(0, ctx.group.rank() * ctx.rows, ctx.rows)
        return mine.movedim(0, ctx.dim).contiguous(), None, None, None, None
