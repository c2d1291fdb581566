"""The operators of this package for Dynamo and autograd. Each is a JAX program within the XLA graph.

If q is split over devices, each device computes its own batch elements and heads (torch_xla's manual
sharding). The specs of all arguments and results follow from q's spec, and nothing is gathered. Tensors are
in (B, H, S, D) order.
"""

from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnspan.call.options import DISTANCE
from attnspan.errors import expect

from . import programs
from .places import Places, Spec, mesh_of

__all__ = ["backward_op", "forward_op", "lower_op", "place_op", "split_seeds_op"]

_GIVEN = "Tensor bounds, Tensor? bias, Tensor? sinks, Tensor? seeds, Tensor? q_index, Tensor? k_index"
_STATIC = "float scale, float softcap, SymInt bias_kind, float dropout_p, str places"
_INPUTS = "Tensor q, Tensor k, Tensor v, " + _GIVEN


def _op(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.custom_op(f"attnspan_xla::{name}", mutates_args=(), schema=schema)


@_op("lower", "(Tensor[] arrays, str recipe, SymInt[] sizes, Tensor? q_index, Tensor? k_index) -> Tensor[]")
def lower_op(arrays: Any, recipe: str, sizes: Any, q_index: Any, k_index: Any) -> list[Tensor]:
    """Return the bounds of a mask, then the queries' and keys' indices if they are not the defaults."""
    return programs.call(programs.lowering(recipe, tuple(sizes)), list(arrays), q_index, k_index)


@lower_op.register_fake  # type: ignore[untyped-decorator]
def _(arrays: Any, recipe: str, sizes: Any, q_index: Any, k_index: Any) -> list[Tensor]:
    results = programs.shapes(programs.lowering(recipe, tuple(sizes)), list(arrays), q_index, k_index)
    device = next((x.device for x in (*arrays, q_index, k_index) if x is not None), torch.device("xla:0"))
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape, _ in results]


@_op("split_seeds", "(Tensor words, SymInt batch, SymInt heads) -> Tensor")
def split_seeds_op(words: Tensor, batch: int, heads: int) -> Tensor:
    """Expand the words (2,) of a seed to the words of each batch element and head, (B, H, 2), int32."""
    return programs.call(programs.splitting(batch, heads), words)[0]


@split_seeds_op.register_fake  # type: ignore[untyped-decorator]
def _(words: Tensor, batch: int, heads: int) -> Tensor:
    return words.new_empty((batch, heads, 2))


@_op("place", "(Tensor x, str mesh, str spec) -> Tensor")
def place_op(x: Tensor, mesh: str, spec: str) -> Tensor:
    """Return the same values, split over a mesh as the spec says."""
    return _placed(x, mesh_of(mesh), literal_eval(spec))


@place_op.register_fake  # type: ignore[untyped-decorator]
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


place_op.register_autograd(lambda _, dx: (dx, None, None))


@_op("forward", f"({_INPUTS}, {_STATIC}) -> (Tensor, Tensor)")
def forward_op(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Compute output and lse of attention with a lowered mask and lowered options."""
    given, static, split = rest[:6], rest[6:10], _split(rest[10])
    program = programs.forward(_static(*static))
    if split is None:
        out, lse = programs.call(program, q, k, v, given)
        return out, lse
    rows = split.spec(True, True, False, False)
    parts = (_part(x, split, rows) for x in (q, k, v))
    out, lse = programs.call(program, *parts, _given_parts(given, static[2], q.shape, split))
    return _whole(out, split, rows), _whole(lse, split, rows[:3])


@forward_op.register_fake  # type: ignore[untyped-decorator]
def _(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


@_op(
    "backward",
    f"(Tensor dout, Tensor? dlse, {_INPUTS}, Tensor out, Tensor lse, {_STATIC}, bool want_dbias) -> Tensor[]",
)
def backward_op(dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    """Compute dq, dk, dv, then the gradients of the bias (if wanted) and of the sinks (if there are any)."""
    given, (out, lse), static = rest[:6], rest[6:8], rest[8:12]
    split, want_dbias = _split(rest[12]), rest[13]
    program = programs.backward(_static(*static), want_dbias)
    if split is None:
        results = programs.call(program, dout, dlse, q, k, v, given, out, lse)
    else:
        rows = split.spec(True, True, False, False)
        dlse, lse = None if dlse is None else _part(dlse, split, rows[:3]), _part(lse, split, rows[:3])
        parts = _given_parts(given, static[2], q.shape, split)
        dout, q, k, v, out = (_part(x, split, rows) for x in (dout, q, k, v, out))
        results = programs.call(program, dout, dlse, q, k, v, parts, out, lse)
        results = [_whole(x, split, split.spec(True, True, *[False] * (x.dim() - 2))) for x in results]
    parameters = _parameters(given, want_dbias)
    return [*results[:3], *(_summed(x, like) for x, like in zip(results[3:], parameters, strict=True))]


@backward_op.register_fake  # type: ignore[untyped-decorator]
def _(dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    del dout, dlse
    parameters = [x.new_empty(x.shape) for x in _parameters(rest[:6], rest[13])]
    if rest[13] and q.dtype != torch.float64:
        parameters[0] = parameters[0].to(torch.float32)
    return [*(x.new_empty(x.shape) for x in (q, k, v)), *parameters]


def _parameters(given: Sequence[Any], want_dbias: bool) -> list[Tensor]:
    """Return the bias, if its gradient is wanted, and the sinks, if there are any."""
    return [x for x in (given[1] if want_dbias else None, given[2]) if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.static = inputs[9:]
    ctx.save_for_backward(*inputs[:9], *output)


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    bias, sinks = tensors[4:6]
    want_dbias = bias is not None and ctx.needs_input_grad[4]
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, *others = backward_op(dout, dlse, *tensors, out, lse, *ctx.static, want_dbias)
    dbias = others.pop(0).to(bias.dtype) if want_dbias else None
    dsinks = None if sinks is None else others.pop(0)
    return dq, dk, dv, None, dbias, dsinks, *[None] * (3 + len(ctx.static))


forward_op.register_autograd(_differentiate, setup_context=_save)


def _static(scale: float, softcap: float, bias_kind: int, dropout_p: float) -> Any:
    programs.jax_of_xla()
    from attnspan.jax.part import Static

    return Static(scale=scale, softcap=softcap, bias_kind=bias_kind, dropout_p=dropout_p)


@cache
def _split(places: str) -> Places | None:
    return Places(*literal_eval(places)) if places else None


def _given_parts(
    given: Sequence[Any], bias_kind: int, q_shape: Sequence[int], split: Places
) -> tuple[Any, ...]:
    """Return one device's part of all arguments except q, k and v. Shared arguments stay whole."""
    sides = tuple(zip(q_shape[:2], split.spec(True, True), strict=True))  # batch, heads

    def shared(x: Any, *dims: int | None) -> Any:
        """Return the part of a tensor. `dims` are its batch and head dims, None if it lacks one."""
        if x is None:
            return None
        entries: list[Any] = [None] * x.dim()
        for dim, (size, axes) in zip(dims, sides, strict=True):
            if dim is not None and x.shape[dim] == size:
                entries[dim] = axes
        return _part(x, split, tuple(entries))

    bounds, bias, sinks, seeds, q_index, k_index = given
    bias = shared(bias, None, 0) if bias_kind == DISTANCE else shared(bias, 0, 1)
    indices = (shared(x, 0, None) for x in (q_index, k_index))
    return shared(bounds, 0, 1), bias, shared(sinks, None, 0), shared(seeds, 0, 1), *indices


def _placed(x: Tensor, mesh: Any, spec: Spec) -> Tensor:
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    remedy = "Call torch_xla.runtime.use_spmd() before the first tensor is on a device"
    expect(xr.is_spmd(), "partition_spec", "SPMD mode", "another mode", remedy)
    # A copy is placed, because the caller's tensor must keep its own placement.
    x = x.clone()
    xs.annotate_custom_sharding(x, mesh, spec)
    return x


def _part(x: Tensor, split: Places, spec: Spec) -> Tensor:
    """Return the part of a tensor that a device has, as a tensor of the part's size."""
    import torch_xla

    placed = _placed(x, mesh_of(split.key), spec)
    return torch_xla._XLAC._spmd_full_to_shard_shape(placed)  # type: ignore[no-any-return]


def _whole(x: Tensor, split: Places, spec: Spec) -> Tensor:
    """Return the tensor whose parts the devices have computed."""
    import torch_xla.distributed.spmd as xs

    counts = [split.batch_parts, split.head_parts, *[1] * (x.dim() - 2)]
    shape = torch.Size([size * count for size, count in zip(x.shape, counts, strict=True)])
    whole = xs.disable_manual_sharding(x, spec, shape, mesh=mesh_of(split.key))
    return whole.global_tensor  # type: ignore[no-any-return]


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient with leading axes for batch and heads to the shape of its parameter."""
    shape = [*[1] * (x.dim() - like.dim()), *like.shape]
    for dim in (0, 1):
        if shape[dim] == 1 and x.shape[dim] != 1:
            x = x.sum(dim, keepdim=True)
    return x.reshape(like.shape)
