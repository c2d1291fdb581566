"""The operators of this room, as Dynamo and autograd see them; each is a JAX program within the XLA graph.

Where q is split over devices, a device computes its own rows and heads by themselves (torch_xla's manual
sharding): what it is handed and what it returns have specs that follow from q's, and nothing is gathered.
Tensors are in (B, H, S, D) order.
"""

from ast import literal_eval
from collections.abc import Sequence
from functools import cache
from typing import Any, Optional

import torch
from torch import Tensor

from ..errors import OptionError
from ..options import DISTANCE
from . import _programs as programs
from ._places import Places, Spec, mesh_of

# Optional[Tensor] and not Tensor | None: a schema is read from these annotations.
_Given = Optional[Tensor]  # noqa: UP045

#: bias, sinks, seeds, q_index and k_index: what an operator is given beside q, k, v and the bounds.
GIVEN = 5


@torch.library.custom_op("attnspan_xla::lower", mutates_args=())
def lower_op(
    arrays: Sequence[Tensor], recipe: str, sizes: Sequence[int], q_index: _Given, k_index: _Given
) -> list[Tensor]:
    """Bounds of a mask, then the rows' and keys' indices where they are not the default ones."""
    return programs.call(_lowering(recipe, sizes), list(arrays), q_index, k_index)


@lower_op.register_fake
def _(
    arrays: Sequence[Tensor], recipe: str, sizes: Sequence[int], q_index: _Given, k_index: _Given
) -> list[Tensor]:
    results = programs.shapes(_lowering(recipe, sizes), list(arrays), q_index, k_index)
    device = next((x.device for x in (*arrays, q_index, k_index) if x is not None), torch.device("xla:0"))
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape, _ in results]


def _lowering(recipe: str, sizes: Sequence[int]) -> Any:
    q_len, k_len, batch, heads = sizes
    return programs.lowering(recipe, (q_len, k_len, batch, heads))


@torch.library.custom_op("attnspan_xla::split_seeds", mutates_args=())
def split_seeds_op(words: Tensor, batch: int, heads: int) -> Tensor:
    """Words (2,) of a seed to those of each batch row and head, (B, H, 2), int32."""
    return programs.call(programs.splitting(batch, heads), words)[0]


@split_seeds_op.register_fake
def _(words: Tensor, batch: int, heads: int) -> Tensor:
    return words.new_empty((batch, heads, 2))


@torch.library.custom_op("attnspan_xla::place", mutates_args=())
def place_op(x: Tensor, mesh: str, spec: str) -> Tensor:
    """The same values, split over a mesh as a spec says."""
    return _placed(x, mesh_of(mesh), literal_eval(spec))


@place_op.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


place_op.register_autograd(lambda _, dx: (dx, None, None))


@torch.library.custom_op("attnspan_xla::forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    bias: _Given,
    sinks: _Given,
    seeds: _Given,
    q_index: _Given,
    k_index: _Given,
    scale: float,
    softcap: float,
    bias_kind: int,
    dropout_p: float,
    places: str,
) -> tuple[Tensor, Tensor]:
    """Output and lse of an attention whose mask and options are lowered."""
    program = programs.forward(_static(scale, softcap, bias_kind, dropout_p))
    given = (bounds, bias, sinks, seeds, q_index, k_index)
    split = _split(places)
    if split is None:
        out, lse = programs.call(program, q, k, v, given)
        return out, lse
    rows = split.spec(True, True, False, False)
    parts = (_part(x, split, rows) for x in (q, k, v))
    out, lse = programs.call(program, *parts, _given_parts(given, bias_kind, q.shape, split))
    return _whole(out, split, rows), _whole(lse, split, rows[:3])


@forward_op.register_fake
def _(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.custom_op("attnspan_xla::backward", mutates_args=())
def backward_op(
    dout: Tensor,
    dlse: _Given,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    bias: _Given,
    sinks: _Given,
    seeds: _Given,
    q_index: _Given,
    k_index: _Given,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
    bias_kind: int,
    dropout_p: float,
    places: str,
    want_dbias: bool,
) -> list[Tensor]:
    """dq, dk, dv, then the gradients of the bias, where it is wanted, and of the sinks, if there are any."""
    program = programs.backward(_static(scale, softcap, bias_kind, dropout_p), want_dbias)
    given = (bounds, bias, sinks, seeds, q_index, k_index)
    split = _split(places)
    if split is None:
        results = programs.call(program, dout, dlse, q, k, v, given, out, lse)
    else:
        rows = split.spec(True, True, False, False)
        dlse, lse = None if dlse is None else _part(dlse, split, rows[:3]), _part(lse, split, rows[:3])
        dout, q_part, k, v, out = (_part(x, split, rows) for x in (dout, q, k, v, out))
        parts = _given_parts(given, bias_kind, q.shape, split)
        results = programs.call(program, dout, dlse, q_part, k, v, parts, out, lse)
        results = [_whole(x, split, split.spec(True, True, *[False] * (x.dim() - 2))) for x in results]
    parameters = [bias, sinks] if want_dbias else [sinks]
    sums = [_summed(x, like) for x, like in zip(results[3:], _present(parameters), strict=True)]
    return [*results[:3], *sums]


@backward_op.register_fake
def _(*inputs: Any) -> list[Tensor]:
    q, k, v, _, bias, sinks = inputs[2:8]
    want_dbias = inputs[-1]
    likes = [q, k, v, *_present([bias] if want_dbias else [])]
    gradients = [x.new_empty(x.shape) for x in likes]
    if want_dbias and q.dtype != torch.float64:
        gradients[3] = gradients[3].to(torch.float32)
    return [*gradients, *(x.new_empty(x.shape) for x in _present([sinks]))]


def _present(tensors: Sequence[_Given]) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.softcap, ctx.bias_kind, ctx.dropout_p, ctx.places = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, dout: _Given, dlse: _Given) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    bias, sinks = tensors[4:6]
    want_dbias = bias is not None and ctx.needs_input_grad[4]
    dout = torch.zeros_like(out) if dout is None else dout
    options = ctx.scale, ctx.softcap, ctx.bias_kind, ctx.dropout_p, ctx.places
    dq, dk, dv, *others = backward_op(dout, dlse, *tensors, out, lse, *options, want_dbias)
    dbias = others.pop(0).to(bias.dtype) if want_dbias else None
    dsinks = None if sinks is None else others.pop(0)
    return dq, dk, dv, None, dbias, dsinks, *[None] * (GIVEN - 2 + len(options))


forward_op.register_autograd(_differentiate, setup_context=_save)


def _static(scale: float, softcap: float, bias_kind: int, dropout_p: float) -> Any:
    programs._jax()
    from ..jax.backends import Static

    return Static(scale=scale, softcap=softcap, bias_kind=bias_kind, dropout_p=dropout_p)


@cache
def _split(places: str) -> Places | None:
    return Places(*literal_eval(places)) if places else None


def _given_parts(
    given: Sequence[_Given], bias_kind: int, q_shape: Sequence[int], split: Places
) -> tuple[_Given, ...]:
    """Each device's part of what is beside q, k and v: its rows and heads, or all of what all share."""
    bounds, bias, sinks, seeds, q_index, k_index = given
    batch, heads = q_shape[:2]

    def shared(x: _Given, batch_dim: int | None, heads_dim: int | None) -> _Given:
        if x is None:
            return None
        entries: list[Any] = [None] * x.dim()
        if batch_dim is not None and x.shape[batch_dim] == batch:
            entries[batch_dim] = split.spec(True, False)[0]
        if heads_dim is not None and x.shape[heads_dim] == heads:
            entries[heads_dim] = split.spec(False, True)[1]
        return _part(x, split, tuple(entries))

    bias = shared(bias, None, 0) if bias_kind == DISTANCE else shared(bias, 0, 1)
    indices = (shared(x, 0, None) for x in (q_index, k_index))
    return shared(bounds, 0, 1), bias, shared(sinks, None, 0), shared(seeds, 0, 1), *indices


def _placed(x: Tensor, mesh: Any, spec: Spec) -> Tensor:
    import torch_xla.distributed.spmd as xs

    _check_mode()
    # Of a copy: the caller's tensor stays where it is, and may lie elsewhere.
    x = x.clone()
    xs.annotate_custom_sharding(x, mesh, spec)
    return x


def _check_mode() -> None:
    import torch_xla.runtime as xr

    if not xr.is_spmd():
        raise OptionError(
            "partition_spec",
            expected="SPMD mode",
            got="a process that is not in it",
            remedy="Call torch_xla.runtime.use_spmd() before the first tensor is on a device",
        )


def _part(x: Tensor, split: Places, spec: Spec) -> Tensor:
    """The part of a tensor that a device has, as a tensor of that size."""
    import torch_xla

    placed = _placed(x, mesh_of(split.key), spec)
    return torch_xla._XLAC._spmd_full_to_shard_shape(placed)  # type: ignore[no-any-return]


def _whole(x: Tensor, split: Places, spec: Spec) -> Tensor:
    """The tensor whose parts the devices have computed."""
    import torch_xla.distributed.spmd as xs

    counts = [split.batch_parts, split.head_parts, *[1] * (x.dim() - 2)]
    shape = torch.Size([size * count for size, count in zip(x.shape, counts, strict=True)])
    whole = xs.disable_manual_sharding(x, spec, shape, mesh=mesh_of(split.key))
    return whole.global_tensor  # type: ignore[no-any-return]


def _summed(x: Tensor, like: Tensor) -> Tensor:
    """A gradient with axes for batch rows and heads in front, summed to the shape of its parameter."""
    shape = [*[1] * (x.dim() - like.dim()), *like.shape]
    for dim in (0, 1):
        if shape[dim] == 1 and x.shape[dim] != 1:
            x = x.sum(dim, keepdim=True)
    return x.reshape(like.shape)
