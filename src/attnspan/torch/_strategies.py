"""Sharding strategies of the operators, by batch or heads. Loaded at the first call with DTensors."""

from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from attnspan.call.options import DISTANCE, Options

from .dtensor import BATCH, HEADS, WHOLE, check_places, follow
from .ops import backward_op, forward_op, named_backward_op, named_op

# The roles of a mesh axis, and the placements of q, k and v on it.
_WAYS: tuple[tuple[str, Any], ...] = ((WHOLE, Replicate()), (BATCH, Shard(0)), (HEADS, Shard(1)))

_COUNT = len(Options._fields)

_Strategies = list[tuple[list[Any], list[Any]]]


@register_sharding([forward_op, named_op])  # type: ignore[untyped-decorator]
def _forward(q: Any, k: Any, v: Any, bounds: Any, scale: float, *given: Any) -> _Strategies:
    del scale
    _check(q, k, v)
    options, rest = given[:_COUNT], given[_COUNT:]  # the rest: k_len and the name of a backend
    found = []
    for role, place in _WAYS:
        inputs = [place, place, place, follow(bounds, role), None, *_option_places(options, role)]
        inputs += [follow(x, role, None, None) if hasattr(x, "shape") else None for x in rest]
        found.append(([place, place], inputs))
    return found


@register_sharding([backward_op, named_backward_op])  # type: ignore[untyped-decorator]
def _backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, bounds: Any, out: Any, lse: Any, scale: float, *given: Any
) -> _Strategies:
    del dout, out, lse, scale
    _check(q, k, v)
    options, rest = given[:_COUNT], given[_COUNT:]
    want_dbias = rest[:1] == (True,)
    found = []
    for role, place in _WAYS:
        places = _option_places(options, role)
        _, bias, _, sinks, *_ = (*places, *(None,) * 8)
        gradients = [_summed(bias if want_dbias else None, place), _summed(sinks, place)]
        inputs = [place, None if dlse is None else place, place, place, place, follow(bounds, role)]
        inputs += [place, place, None, *places, *(None for _ in rest)]
        found.append(([place, place, place, *gradients], inputs))
    return found


def _option_places(given: tuple[Any, ...], role: str) -> list[Any]:
    """Placements of the option arguments. Trailing arguments may be missing."""
    o = Options(*given)
    of_bias = follow(o.bias, role, None, 0) if o.bias_kind == DISTANCE else follow(o.bias, role)
    of_indices = [follow(index, role, 0, None) for index in (o.q_index, o.k_index)]
    places = [
        None,
        of_bias,
        None,
        follow(o.sinks, role, None, 0),
        None,
        follow(o.dropout_seed, role),
        *of_indices,
    ]
    return places[: len(given)]


def _summed(place: Any, way: Any) -> Any:
    """Placement of a parameter's gradient. If each rank has the whole parameter, its gradient is partial."""
    if place is None:
        return Replicate()
    return Partial() if way.is_shard() and not place.is_shard() else place


def _check(q: Any, k: Any, v: Any) -> None:
    """Run the checks of `attention`, for programs that call the operators directly."""
    meshes, placements = (q.mesh, k.mesh, v.mesh), (q.placements, k.placements, v.placements)
    check_places("bhsd", meshes, placements, (q.shape[0], q.shape[1], k.shape[1]))
