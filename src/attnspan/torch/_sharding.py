"""DTensor: how the operators may be sharded over a mesh axis.

Batch and heads shard freely; a bounds dim of size 1 is shared by all and stays replicated. The sequence does
not: each rank would see a part of the keys and be wrong without any error, so it is refused by name.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._biases import Alibi, DenseBias, Relative
from ..options import DISTANCE, Given, Options
from ._ops import NO_OPTIONS, backward_op, forward_op
from ._options import dropout_seeds
from ._placements import Places, check_parts, find_roles, is_dtensor, refuse_beside_plain

_registered = False


def like(x: Tensor, q: Tensor) -> Tensor:
    """Give a tensor q's mesh if q is a DTensor; every rank has made the same one from the same arguments."""
    mesh = _mesh(q)
    if mesh is None:
        return x
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(x, DTensor):
        return x
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def like_options(options: Options, q: Tensor) -> tuple[Any, ...]:
    """The operator's option arguments, on q's mesh if q is a DTensor."""
    o = options
    seed = o.dropout_seed
    if seed is not None and seed.dim() == 0 and _mesh(q) is not None:
        # Each rank numbers its batch rows and heads from 0: it must be handed the seeds of those it has.
        seed = dropout_seeds(_whole(seed), q.shape[0], q.shape[1])
    tensors = (None if x is None else like(x, q) for x in (o.bias, o.sinks, seed, o.q_index, o.k_index))
    bias, sinks, seed, q_index, k_index = tensors
    return o.softcap, bias, o.bias_kind, sinks, o.dropout_p, seed, q_index, k_index


def _mesh(q: Tensor) -> Any:
    """The mesh of a DTensor, None for any other tensor; strategies are registered at the first one."""
    if type(q) is Tensor or type(q) is torch.nn.Parameter or "torch.distributed.tensor" not in sys.modules:
        return None
    from torch.distributed.tensor import DTensor

    if not isinstance(q, DTensor):
        return None
    register()
    return q.device_mesh


def _whole(x: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def register() -> None:
    """Tell DTensor the strategies, once; importing DTensor is left to those who use it, as it takes long."""
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(forward_op)(_forward_strategies)
    register_sharding(backward_op)(_backward_strategies)
    _registered = True


_Strategies = list[tuple[list[Any], list[Any]]]


def _forward_strategies(q: Any, k: Any, v: Any, bounds: Any, scale: float, *given: Any) -> _Strategies:
    del scale
    _check_consistent(q, k, v)
    options, k_len = given[: len(NO_OPTIONS)], given[len(NO_OPTIONS) :]
    found = []
    for place in _ways():
        inputs = [place, place, place, _follow(bounds, place), None, *_places(options, place)]
        found.append(([place, place], [*inputs, *(_follow(x, place, None, None) for x in k_len)]))
    return found


def _backward_strategies(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, bounds: Any, out: Any, lse: Any, scale: float, *given: Any
) -> _Strategies:
    del dout, out, lse, scale
    _check_consistent(q, k, v)
    given, want_dbias = given[: len(NO_OPTIONS)], given[len(NO_OPTIONS) :] == (True,)
    found = []
    for place in _ways():
        places = _places(given, place)
        _, bias, _, sinks, *_ = (*places, *(None,) * 8)
        gradients = [_summed(bias if want_dbias else None, place), _summed(sinks, place)]
        inputs = [place, None if dlse is None else place, place, place, place, _follow(bounds, place)]
        more = [None] if want_dbias else []
        found.append(([place, place, place, *gradients], [*inputs, place, place, None, *places, *more]))
    return found


def _ways() -> list[Any]:
    """How q, k and v may lie on one mesh axis."""
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate(), Shard(0), Shard(1)]


def _follow(x: Any, place: Any, batch: int | None = 0, heads: int | None = 1) -> Any:
    """Placement of a tensor with these dims for batch and heads, where q, k and v have ``place``."""
    from torch.distributed.tensor import Replicate, Shard

    if x is None:
        return None
    dim = (batch, heads)[place.dim] if place.is_shard() else None
    return Replicate() if dim is None or x.shape[dim] == 1 else Shard(dim)


def _places(given: tuple[Any, ...], place: Any) -> list[Any]:
    """Placements of the option arguments; trailing ones may have been left out."""
    _, bias, kind, sinks, _, seed, q_index, k_index = (*given, *NO_OPTIONS[len(given) :])
    places = [
        None,
        _follow(bias, place, None, 0) if kind == DISTANCE else _follow(bias, place),
        None,
        _follow(sinks, place, None, 0),
        None,
        _follow(seed, place),
        _follow(q_index, place, 0, None),
        _follow(k_index, place, 0, None),
    ]
    return places[: len(given)]


def _summed(place: Any, way: Any) -> Any:
    """Placement of the gradient of a parameter: where each rank has all of it, it lacks the others' part."""
    from torch.distributed.tensor import Partial, Replicate

    if place is None:
        return Replicate()
    return Partial() if way.is_shard() and not place.is_shard() else place


def _check_consistent(*specs: Any) -> None:
    """What `attention` checks, for programs that call the operators themselves, or were compiled to do so."""
    meshes, placements = (tuple(getattr(x, name) for x in specs) for name in ("mesh", "placements"))
    places = Places(meshes[0], find_roles("bhsd", meshes, placements, None), placements[0])
    check_parts(places, specs[0].shape[0], specs[0].shape[1], specs[1].shape[1])


def option_tensors(given: Given) -> Iterator[tuple[str, Any, int | None, int | None]]:
    """The tensors of a call's options: name, value, and which dims are those of batch rows and heads.

    Args:
        given: The options.
    """
    bias: Any = DenseBias(given.bias) if isinstance(given.bias, Tensor) else given.bias
    if isinstance(bias, Alibi):
        each_row = bias.slopes.ndim == 2
        yield "bias.slopes", bias.slopes, 0 if each_row else None, int(each_row)
    if isinstance(bias, Relative):
        yield "bias.table", bias.table, None, 0
        yield "bias.buckets", bias.buckets, None, None
    if isinstance(bias, DenseBias):
        ndim = bias.values.ndim
        yield "bias.values", bias.values, 0 if ndim == 4 else None, ndim - 3 if ndim >= 3 else None
    yield "sinks", given.sinks, None, 0
    seed = given.dropout_seed
    own = isinstance(seed, Tensor) and seed.dim() == 2
    yield "dropout_seed", seed, 0 if own else None, 1 if own else None
    for name, index in (("q_index", given.q_index), ("k_index", given.k_index)):
        yield name, index, 0 if isinstance(index, Tensor) and index.dim() == 2 else None, None


def check_options(given: Given, places: Places | None) -> None:
    """Raise for an option whose tensor is a DTensor that does not go with q.

    Args:
        given: The options.
        places: How q lies; None where it is plain.

    Raises:
        OptionError: It is split otherwise than q, lies on another mesh, or q is plain.
    """
    if places is None and "torch.distributed.tensor" not in sys.modules:
        return
    for name, x, batch, heads in option_tensors(given):
        if places is None:
            refuse_beside_plain(name, x)
        elif is_dtensor(x):
            places.check(name, x, batch, heads)
