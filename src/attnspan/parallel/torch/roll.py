"""Operators ``attnspan::sharded_roll`` and its ``_backward``, which move rows between ranks by a plan.

Both operators are opaque, like `sharded_attention`, and each computes the other's derivative. The plan is two
tensors among the arguments, so it may change at each step without recompilation. The operators exchange rows
as attention exchanges keys.

Shapes: H shifts, B batch elements, n rows of a rank, W elements of a row, L planes of the plan, K rows that
the rank needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnspan.errors import DeviceError, DtypeError, ShapeError, expect
from attnspan.parallel.local import Tables, decode
from attnspan.parallel.rows import checked_fill
from attnspan.parallel.strategy import split_heads
from attnspan.torch._autograd import below_autograd, define, differentiate
from attnspan.torch.dtensor import is_dtensor

from .comm import Ranks
from .heads import Team
from .keys import KeyRoute, as_rows, move, whole

if TYPE_CHECKING:
    from .mesh_plan import MeshPlan

_library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.needs_fixed_stride_order, torch.Tag.cudagraph_unsafe)
_DEVICES = ("CPU", "CUDA")
#: Integers with the bits of dtypes that torch cannot index or fill.
_FORMS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **{getattr(torch, name): torch.uint8 for name in dir(torch) if name.startswith("float8_")},
}


def rolled(plan: MeshPlan, x: Tensor, dim: int, fill: complex) -> tuple[Tensor, ...]:
    """Compute the rolled rows of a rank. See `attnspan.parallel.roll`."""
    frame = plan.frame
    plain, remedy = isinstance(x, Tensor) and not is_dtensor(x), "Pass this rank's rows, x.to_local()"
    expect(plain, "roll: x", "a plain tensor", type(x).__name__, remedy, error=DtypeError)
    fits = -x.dim() <= dim < x.dim() and x.shape[dim] == frame.rows_per_rank
    wanted, remedy = "this rank's {} rows along dimension {}", "Pass the dimension of the rows as `dim`"
    expect(fits, "roll: x", wanted, x.shape, remedy, frame.rows_per_rank, dim, error=ShapeError)
    dim %= x.dim()
    fits = frame.planes == 1 or (dim > 0 and x.shape[0] == frame.planes)
    remedy = "Pass the batch that the plan was made for. In a pipeline, pass PlanStack.of(plans)"
    wanted = "{} batch elements as dimension 0"
    expect(fits, "roll: x", wanted, x.shape, remedy, frame.planes, error=ShapeError)
    same, remedy = x.device.type == plan.data.device.type, "Move x to the plan's device"
    expect(same, "roll: x", f"a tensor on {plan.data.device}", str(x.device), remedy, error=DeviceError)
    first = x.movedim(dim, 1) if dim else x[None]
    rows = first.reshape(*first.shape[:2], math.prod(first.shape[2:]))
    fill = checked_fill("fill of roll: x", fill, x)
    found = sharded_roll(rows, plan.data, plan.numbers, frame.group, len(frame.shifts), fill)
    # Unlike views of `unbind`, these views may be written in place.
    every = [found[shift].reshape(first.shape) for shift in range(len(frame.shifts))]
    return tuple([y.movedim(1, dim) if dim else y[0] for y in every])


@contextmanager
def _reading(
    what: str, x: Tensor, plan: Tensor, numbers: Tensor, group: str
) -> Iterator[tuple[Tables, KeyRoute]]:
    """Open the context of a call: the tables of the rank, and the route of its rows."""
    ranks, tables = Ranks.named(group, 1), decode(plan, numbers.tolist())
    facts = {"call": what, "plan of the call": tables.numbers.plan, "shape": x.shape, "dtype": str(x.dtype)}
    ranks.agreement.note(facts)
    with ranks.scratch() as scratch:
        yield tables, KeyRoute(tables, Team(ranks, tables.numbers, split_heads(1, 1, 1), scratch))


def _sources(tables: Tables, shift: int) -> Tensor:
    """Return the place of each row's source among the K rows of its plane, int32 (L, n), and -1 for none."""
    lo, hi = tables.stages[0].bounds[:, shift, :, 0].unbind(-1)
    return torch.where(hi > lo, lo, -1)


def _readers(source: Tensor, needed: int) -> Tensor:
    """Return the row that reads each of the needed rows, int32 (L, K), and -1 for none."""
    planes, length = source.shape
    # Rows without a source write to one more place, which is cut off.
    found = source.new_full((planes, needed + 1), -1)
    rows = torch.arange(length, dtype=source.dtype, device=source.device).expand(planes, length)
    return found.scatter_(1, torch.where(source < 0, needed, source).long(), rows)[:, :needed]


def _fetch_into(target: Tensor, source: Tensor, at: Tensor, fill: complex) -> None:
    """Write the rows `at` (L, m) of the source (L, K, ...) to the target (L, m, ...), `fill` where -1."""
    length = source.shape[1]
    if length == 0:
        target.fill_(fill)
        return
    planes = torch.arange(len(at), dtype=at.dtype, device=at.device)[:, None]
    move(target, None, source, (at.clamp_min(0) + planes * length).flatten())
    target.masked_fill_((at < 0)[:, :, None, None, None], fill)


def _forward(x: Tensor, plan: Tensor, numbers: Tensor, group: str, shifts: int, fill: complex) -> Tensor:
    """Return the rows of each shift, (H, B, n, W), from the rows x (B, n, W)."""
    dtype = x.dtype
    if (form := _FORMS.get(dtype)) is not None:
        x, fill = x.view(form), torch.tensor(fill, dtype=dtype).view(form).item()
    with _reading("roll", x, plan, numbers, group) as (tables, route):
        rows = x.contiguous()[:, None]
        fetched, _ = route.fetch(rows, rows[..., :0], 0).wait()
        planes = tables.numbers.planes
        out = x.new_empty((shifts, *x.shape))
        for shift in range(shifts):
            target = as_rows(out[shift][:, None], planes)
            _fetch_into(target, as_rows(fetched, planes), _sources(tables, shift), fill)
    return out.view(dtype)


def _backward(grad: Tensor, plan: Tensor, numbers: Tensor, group: str, shifts: int) -> Tensor:
    """Return the gradient of x, (B, n, W), from the gradients (H, B, n, W) of its rolls."""
    with _reading("roll backward", grad, plan, numbers, group) as (tables, route):
        planes, (_, batch, length, width) = tables.numbers.planes, grad.shape
        needed = tables.stages[0].keys.shape[1]
        # One shift adds nothing, so the gradients travel in their own dtype.
        dtype = grad.dtype if shifts == 1 else torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros((planes, needed, batch // planes, 1, width), dtype=dtype)
        part = torch.empty_like(total) if shifts > 1 else total
        for shift in range(shifts):
            rows = as_rows(grad[shift].contiguous()[:, None].to(dtype), planes)
            _fetch_into(part, rows, _readers(_sources(tables, shift), needed), 0)
            if shifts > 1:
                total += part
        returned = [(slice(0, 1), total, route.give_back(total, 0))]
        found = whole(route.collect(returned, 1, length, one_reader=shifts == 1))
        return grad.new_empty((batch, length, width)).copy_(found[:, 0])


def _forward_fake(x: Tensor, plan: Tensor, numbers: Tensor, group: str, shifts: int, fill: complex) -> Tensor:
    del plan, numbers, group, fill
    return x.new_empty((shifts, *x.shape))


def _backward_fake(grad: Tensor, plan: Tensor, numbers: Tensor, group: str, shifts: int) -> Tensor:
    del plan, numbers, group, shifts
    return grad.new_empty(grad.shape[1:])


_PLAN = "Tensor plan, Tensor numbers, str group, int shifts"
#: Operator `attnspan::sharded_roll`, which computes the rows of one or several shifts.
sharded_roll = define(
    _library,
    f"sharded_roll(Tensor x, {_PLAN}, Scalar fill) -> Tensor",
    *(_forward_fake, *_TAGS),
    **dict.fromkeys(_DEVICES, _forward),
)
#: Operator `attnspan::sharded_roll_backward`: its backward pass.
sharded_roll_backward = define(
    _library,
    f"sharded_roll_backward(Tensor grad, {_PLAN}) -> Tensor",
    *(_backward_fake, *_TAGS),
    **dict.fromkeys(_DEVICES, _backward),
)


class _Linear(torch.autograd.Function):
    """A linear operator of rows and a plan."""

    @staticmethod
    def forward(ctx: Any, source: Any, *inputs: Any) -> Tensor:
        _, plan, numbers, *ctx.rest = inputs[:5]
        ctx.save_for_backward(plan, numbers)
        return below_autograd(*source)  # type: ignore[no-any-return]


class _Forward(_Linear):
    """Derivative of the forward operator."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, sharded_roll_backward(grad, *ctx.saved_tensors, *ctx.rest), *[None] * 5


class _Backward(_Linear):
    """Derivative of the backward operator, which is the roll."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, sharded_roll(grad, *ctx.saved_tensors, *ctx.rest, 0), *[None] * 4


_TANGENTS = "Roll the tangents in a separate call, because a roll is linear"
differentiate(_library, sharded_roll, _Forward, forward_mode=_TANGENTS)
differentiate(_library, sharded_roll_backward, _Backward, forward_mode=_TANGENTS)
