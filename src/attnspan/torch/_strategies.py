"""Sharding strategies of the operators, by batch or heads. Loaded at the first call with DTensors."""

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
    given = schema.by_name(schema.FORWARD, args)
    _check(given)
    found = []
    for role in _LETTERS:
        places = _places(given, role)
        results = [places["q"]] * len(schema.RESULTS)
        found.append((results, list(places.values())[: len(args)]))
    return found


@register_sharding([backward_op, named_backward_op])  # type: ignore[untyped-decorator]
def _backward(*args: Any) -> _Strategies:
    given = schema.by_name(schema.BACKWARD, args)
    _check(given)
    found = []
    for role in _LETTERS:
        places = _places(given, role)
        gradients = [places[name] for name in schema.with_gradient(schema.INPUTS)]
        gradients += [
            _summed(places[name] if given.get(f"want_d{name}", True) else None, places["q"])
            for name in schema.with_gradient(schema.OPTIONS)
        ]
        found.append((gradients, list(places.values())[: len(args)]))
    return found


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
