"""Sharding strategies of the operators, by batch or heads. Loaded at the first call with DTensors."""

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from attnspan.call import schema

from .dtensor import BATCH, HEADS, WHOLE, check_places
from .ops import backward_op, forward_op, named_backward_op, named_op

#: The axis that is sharded along a mesh axis with each role.
_LETTERS = {WHOLE: "", BATCH: "b", HEADS: "h"}

_Strategies = list[tuple[list[Any], list[Any]]]


@register_sharding([forward_op, named_op])  # type: ignore[untyped-decorator]
def _forward(*args: Any) -> _Strategies:
    return _strategies(schema.FORWARD, args, lambda _, places: [places["q"]] * len(schema.RESULTS))


@register_sharding([backward_op, named_backward_op])  # type: ignore[untyped-decorator]
def _backward(*args: Any) -> _Strategies:
    return _strategies(schema.BACKWARD, args, _gradients)


def _gradients(given: dict[str, Any], places: dict[str, Any]) -> list[Any]:
    """Placements of the gradients."""
    options = schema.with_gradient(schema.OPTIONS)
    wanted = [places[name] if given.get(f"want_d{name}", True) else None for name in options]
    inputs = [places[name] for name in schema.with_gradient(schema.INPUTS)]
    return inputs + [_summed(place, places["q"]) for place in wanted]


def _strategies(
    rows: tuple[schema.Row, ...], args: tuple[Any, ...], results: Callable[..., list[Any]]
) -> _Strategies:
    given = schema.by_name(rows, args)
    _check(given)
    each = [_places(given, role) for role in _LETTERS]
    return [(results(given, places), list(places.values())[: len(args)]) for places in each]


def _places(given: dict[str, Any], role: str) -> dict[str, Any]:
    """Placements of an operator's arguments along a mesh axis with this role. Numbers have none."""
    kind = given["bias_kind"]
    return {name: _place(name, x, kind, role) if hasattr(x, "shape") else None for name, x in given.items()}


def _place(name: str, x: Any, kind: int, role: str) -> Any:
    letter = _LETTERS[role]
    dim = schema.dim(name, letter, None, kind)
    shared = dim is not None and schema.is_shared(name, letter, kind) and x.shape[dim] == 1
    return Replicate() if dim is None or shared else Shard(dim)


def _summed(place: Any, way: Any) -> Any:
    """Placement of a parameter's gradient. If each rank has the whole parameter, its gradient is partial."""
    if place is None:
        return Replicate()
    return Partial() if way.is_shard() and not place.is_shard() else place


def _check(given: dict[str, Any]) -> None:
    """Run the checks of `attention`, for programs that call the operators directly."""
    q, k, v = given["q"], given["k"], given["v"]
    meshes, placements = (q.mesh, k.mesh, v.mesh), (q.placements, k.placements, v.placements)
    check_places("bhsd", meshes, placements, (q.shape[0], q.shape[1], k.shape[1]))
