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

from attnspan.call import schema
from attnspan.errors import expect
from attnspan.torch._signature import arguments

from . import programs
from .places import Places, Spec, mesh_of

# How q is split, as a text of `Places`.
_PLACES = schema.Number("places", "str")
_FORWARD = (*schema.INPUTS, *schema.OPTIONS, _PLACES)
_BACKWARD = (*(row for row in schema.BACKWARD if row is not schema.BACKEND), _PLACES)
_ARRAYS = schema.names(schema.arrays(_FORWARD))
_NUMBERS = [name for name in schema.names(_FORWARD[:-1]) if name not in _ARRAYS]
_OF_INPUTS = schema.with_gradient(schema.INPUTS)


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


@_op("forward", f"({arguments(_FORWARD)}) -> (Tensor, Tensor)")
def forward_op(*args: Any) -> tuple[Tensor, Tensor]:
    """Compute output and lse of attention with a lowered mask and lowered options."""
    given = schema.by_name(_FORWARD, args)
    split = _split(given["places"])
    results = programs.call(programs.forward(_numbers(given)), _parts(_ARRAYS, given, split))
    out, lse = (x if split is None else _whole(x, split) for x in results)
    return out, lse


@forward_op.register_fake  # type: ignore[untyped-decorator]
def _(*args: Any) -> tuple[Tensor, Tensor]:
    given = schema.by_name(_FORWARD, args)
    q, v = given["q"], given["v"]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


@_op("backward", f"({arguments(_BACKWARD)}) -> Tensor[]")
def backward_op(*args: Any) -> list[Tensor]:
    """Compute dq, dk, dv, then the gradients of the bias (if wanted) and of the sinks (if there are any)."""
    given = schema.by_name(_BACKWARD, args)
    split = _split(given["places"])
    program = programs.backward(_numbers(given), given["want_dbias"])
    rest = _parts(("out", "lse", "dout", "dlse"), given, split)
    results = programs.call(program, _parts(_ARRAYS, given, split), *rest)
    if split is not None:
        results = [_whole(x, split) for x in results]
    count = len(_OF_INPUTS)
    options = zip(results[count:], _parameters(given), strict=True)
    return [*results[:count], *(_summed(x, like) for x, like in options)]


@backward_op.register_fake  # type: ignore[untyped-decorator]
def _(*args: Any) -> list[Tensor]:
    given = schema.by_name(_BACKWARD, args)
    parameters = [x.new_empty(x.shape) for x in _parameters(given)]
    if given["want_dbias"] and given["q"].dtype != torch.float64:
        parameters[0] = parameters[0].to(torch.float32)
    return [*(given[name].new_empty(given[name].shape) for name in _OF_INPUTS), *parameters]


def _parameters(given: dict[str, Any]) -> list[Tensor]:
    """Return the options whose gradients are wanted."""
    names = schema.with_gradient(schema.OPTIONS)
    return [given[x] for x in names if given[x] is not None and given.get(f"want_d{x}", True)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    given = schema.by_name(_FORWARD, inputs)
    ctx.numbers = {name: given[name] for name in (*_NUMBERS, "places")}
    ctx.save_for_backward(*(given[name] for name in _ARRAYS), *output)


def _differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    given = ctx.numbers | dict(zip((*_ARRAYS, "out", "lse"), ctx.saved_tensors, strict=True))
    bias, names = given["bias"], schema.names(_FORWARD)
    given["dout"], given["dlse"] = torch.zeros_like(given["out"]) if dout is None else dout, dlse
    given["want_dbias"] = bias is not None and ctx.needs_input_grad[names.index("bias")]
    found = iter(backward_op(*(given[name] for name in schema.names(_BACKWARD))))
    gradients: dict[str, Any] = {name: next(found) for name in _OF_INPUTS}
    for name in schema.with_gradient(schema.OPTIONS):
        if given[name] is not None and given.get(f"want_d{name}", True):
            gradients[name] = next(found).to(given[name].dtype)
    return tuple(gradients.get(name) for name in names)


forward_op.register_autograd(_differentiate, setup_context=_save)


def _numbers(given: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, given[name]) for name in _NUMBERS)


@cache
def _split(places: str) -> Places | None:
    return Places(*literal_eval(places)) if places else None


def _parts(names: Sequence[str], given: dict[str, Any], split: Places | None) -> list[Any]:
    """Return one device's part of some arrays of a call."""
    arrays = {name: given[name] for name in names}
    if split is not None:
        there = {name: x for name, x in arrays.items() if x is not None}
        arrays |= {name: _part(x, split, _spec(name, given, split)) for name, x in there.items()}
    return list(arrays.values())


def _spec(name: str, given: dict[str, Any], split: Places) -> Spec:
    """Return the spec of an array of a call. Axes of size 1 that are shared stay whole."""
    x, kind = given[name], given["bias_kind"]
    entries: list[Any] = [None] * x.dim()
    for letter, axes in zip("bh", split.spec(True, True), strict=True):
        dim = schema.dim(name, letter, kind=kind)
        if dim is not None and not (x.shape[dim] == 1 and schema.is_shared(name, letter, kind)):
            entries[dim] = axes
    return tuple(entries)


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


def _whole(x: Tensor, split: Places) -> Tensor:
    """Return the tensor (B, H, ...) whose parts the devices have computed."""
    import torch_xla.distributed.spmd as xs

    others = [1] * (x.dim() - 2)
    counts = [split.batch_parts, split.head_parts, *others]
    shape = torch.Size([size * count for size, count in zip(x.shape, counts, strict=True)])
    spec = split.spec(True, True, *(False for _ in others))
    whole = xs.disable_manual_sharding(x, spec, shape, mesh=mesh_of(split.key))
    return whole.global_tensor  # type: ignore[no-any-return]


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient with leading axes for batch and heads to the shape of its parameter."""
    shape = [*[1] * (x.dim() - like.dim()), *like.shape]
    for dim in (0, 1):
        if shape[dim] == 1 and x.shape[dim] != 1:
            x = x.sum(dim, keepdim=True)
    return x.reshape(like.shape)
