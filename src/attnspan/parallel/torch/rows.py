"""Differentiable gathering of the rows of all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from attnspan.errors import expect
from attnspan.parallel.layout import Layout

from .agreement import agreement_of, answered, gathered, moved
from .groups import group_of


def gather_rows(x: Tensor, layout: Layout, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """See `Layout.gather`."""
    group, remedy = group_of(mesh), "Pass the mesh of the ranks that the layout was made for"
    fits, got = group.size() == layout.ranks, group.size()
    expect(fits, "Layout.gather: mesh", "{} ranks", got, remedy, layout.ranks)
    layout.check_rows("Layout.gather: x", x, dim, layout.rows_per_rank, "this rank's ")
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
        every = gathered(x.movedim(dim, 0), group, "gather").flatten(0, 1)
        return every[_at(places)].movedim(0, dim)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        rows = grad.movedim(ctx.dim, 0)
        every = rows.new_zeros((ctx.rows * ctx.ranks, *rows.shape[1:]))
        every[_at(places)] = rows
        with answered(ctx.group, "gradient of gather"):
            dist.all_reduce(every, group=ctx.group)
        mine = every.narrow(0, ctx.group.rank() * ctx.rows, ctx.rows)
        return mine.movedim(0, ctx.dim).contiguous(), None, None, None, None
