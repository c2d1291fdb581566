"""DTensors: the placement of a call's arguments on their mesh, and each rank's part of its mask.

Batch and heads may be sharded, and every rank then computes only its part. A sharded sequence raises an error
unless a plan exchanges keys, because each rank would see only some keys and return wrong results. DTensor
itself would silently redistribute inconsistent arguments, but here they raise an error. Only a replicated
tensor of the mask or of an option is sliced to a rank's part, which moves no data.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from attnspan.base.mistakes import OneMask
from attnspan.call import LAYOUTS, schema
from attnspan.call.options import Bias, Given, dense_bias
from attnspan.errors import ShapeError, expect

from ._watched import constant_when_traced

#: Role of a mesh axis: the dim that it shards. `ROWS` is the sequence, which only a plan may shard. `WHOLE`
#: shards no dim.
BATCH, HEADS, ROWS, WHOLE = "batch", "heads", "rows", "whole"
_DIMS = {"batch": BATCH, "heads": HEADS, "length": ROWS, "tokens": ROWS}
_PLAN = (
    "Redistribute it, or plan the exchange of keys that a sharded sequence needs: "
    "mask=attnspan.parallel.Layout.of(...).plan(...).on(mesh, rows=rows)"
)
_MOVES_NOTHING = "Redistribute it: attention never moves data by itself"

#: A tensor that belongs to q: its name, its value, its batch dim and its head dim.
Follower = tuple[str, Any, int | None, int | None]


class ShardedMask(OneMask):
    """A mask together with a plan on a mesh. `attention` passes its calls to the plan."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Call `attnspan.torch.attention`, without ``mask``, for this rank's part of q, k and v."""
        raise NotImplementedError(f"{type(self).__name__} must define attention")


def is_dtensor(x: object) -> bool:
    """Whether `x` is a DTensor. The check imports nothing, because the import of DTensor is slow."""
    module = None if type(x) is Tensor else sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


@dataclass(frozen=True)
class Places:
    """Placement of a call's q, k and v on their mesh.

    Attributes:
        mesh: The DeviceMesh.
        roles: Role of each mesh axis: `BATCH`, `HEADS`, `ROWS` or `WHOLE`.
    """

    mesh: Any
    roles: tuple[str, ...]

    def wanted(self, x: Tensor, batch: int | None, heads: int | None) -> tuple[Any, ...]:
        """Placements of a tensor with these batch and head dims: q's, except for dims of size 1."""
        return tuple(follow(x, role, batch, heads) for role in self.roles)

    def part(self, name: str, x: Any, batch: int | None, heads: int | None) -> Tensor:
        """This rank's part of a tensor that belongs to q. A plain tensor is global."""
        check_follower(self, name, x, batch, heads)
        whole = x if is_dtensor(x) else replicated(x, self.mesh)
        # From replicated to sharded: each rank slices its own part.
        return whole.redistribute(self.mesh, self.wanted(x, batch, heads)).to_local()  # type: ignore[no-any-return]

    def join(
        self, x: Tensor, shape: Sequence[Any], dims: dict[str, int], order: Sequence[int] | None = None
    ) -> Tensor:
        """DTensor of the parts x of all ranks.

        Args:
            x: This rank's part.
            shape: Global shape.
            dims: Dim to shard for each role.
            order: Dims in storage order, by default ascending.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Shard(dims[role]) if role in dims else Replicate() for role in self.roles]
        stride, step = [1] * len(shape), 1
        for dim in reversed(range(len(shape)) if order is None else order):
            stride[dim], step = step, step * shape[dim]
        whole = {"shape": torch.Size(shape), "stride": tuple(stride)}
        found: Tensor = DTensor.from_local(x, self.mesh, placements, run_check=False, **whole)  # type: ignore[arg-type]
        return found


def places_of(
    q: Tensor, k: Tensor, v: Tensor, layout: str, given: Given, plan_mesh: Any = None
) -> Places | None:
    """Find the placement of q, k and v, or None if all are plain. Options must have matching placements.

    ``plan_mesh`` is the mesh of a plan, whose axes shard the sequence.

    Raises:
        OptionError: A tensor has another placement.
        ShapeError: A rank would have no batch element, or heads without their key heads.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return None
    tensors: tuple[Any, ...] = (q, k, v)
    meshes = tuple([x.device_mesh if is_dtensor(x) else None for x in tensors])
    places = None
    if meshes != (None, None, None):
        placements = tuple([tuple(x.placements) if is_dtensor(x) else None for x in tensors])
        heads, batch = LAYOUTS[layout].index("heads"), LAYOUTS[layout][0] == "batch"
        sizes = (q.shape[0] if batch else 1, q.shape[heads], k.shape[heads])
        places = check_places(layout, meshes, placements, sizes, plan_mesh)
    for follower in option_tensors(given):
        check_follower(places, *follower)
    return places


def check_places(
    layout: str, meshes: Any, placements: Any, sizes: tuple[Any, Any, Any], plan_mesh: Any = None
) -> Places:
    """Find the placement of q, k and v on their meshes. Sizes: batch, query heads and key heads."""
    places = Places(meshes[0], _find_roles(layout, meshes, placements, plan_mesh))
    _check_parts(places, *sizes)
    return places


# A compiler runs this function while it traces the call, because placements never change within a program.
# Its code is not traced, and an error keeps its message.
@constant_when_traced
def _find_roles(
    layout: str, meshes: tuple[Any, ...], placements: tuple[Any, ...], plan_mesh: Any
) -> tuple[str, ...]:
    """Find the role of each mesh axis from the placements of q, k and v, which must agree."""
    from torch.distributed.tensor import Replicate, Shard

    first = next(i for i, mesh in enumerate(meshes) if mesh is not None)
    mesh, wanted, dims = meshes[first], placements[first], LAYOUTS[layout]
    for name, own, places in zip("qkv", meshes, placements, strict=True):
        what, one = f"{name} as a DTensor", (_words(wanted), mesh, "qkv"[first])
        remedy = "Pass all three as DTensors (DTensor.from_local), or none (to_local)"
        expect(own is not None, name, "a DTensor with {} on {}, as {} is one", "a plain tensor", remedy, *one)
        expect(own == mesh, what, "the mesh of q, {}", own, "Place q, k and v on one mesh", mesh)
        expect(places == wanted, what, "{}, as q", _words(places), _MOVES_NOTHING, _words(wanted))
    split = {i: _DIMS[dim] for i, dim in enumerate(dims) if dim in _DIMS}
    may = [i for i, role in split.items() if role != ROWS or plan_mesh is not None]
    expected = ", ".join(f"Shard({i}) ({dims[i]})" for i in may)
    for place in wanted:
        dim = place.dim if type(place) is Shard else -1
        rows = split.get(dim) == ROWS
        got = repr(place) if dim < 0 else f"{place!r}, which shards {'q_len' if rows else dims[dim]}"
        fits, remedy = type(place) is Replicate or dim in may, _PLAN if rows else "Redistribute it"
        expect(fits, "q as a DTensor", "{} or Replicate()", got, remedy, expected)
    if plan_mesh is not None:
        axes, rows_at = _axes_of_plan(mesh, plan_mesh), next(i for i, role in split.items() if role == ROWS)
        fits = axes == [i for i, place in enumerate(wanted) if place == Shard(rows_at)]
        expected = "Shard({}) along mesh axes {} only: the plan's ranks hold its rows"
        remedy = "Make it with DTensor.from_local(...) from the rows that layout.shard(...) returned"
        what = "q as a DTensor with context parallelism"
        expect(fits, what, expected, _words(wanted), remedy, rows_at, f"{axes}")
    return tuple(split[place.dim] if place.is_shard() else WHOLE for place in wanted)


def _axes_of_plan(mesh: Any, plan_mesh: Any) -> list[int]:
    """Axes of a mesh whose ranks are a plan's ranks, in the plan's order."""
    wanted, here, counts = plan_mesh.mesh.flatten(), mesh.get_coordinate(), range(1, mesh.ndim + 1)
    found: list[list[int]] = []
    for axes in (axes for count in counts for axes in combinations(range(mesh.ndim), count)):
        at = tuple(slice(None) if i in axes else here[i] for i in range(mesh.ndim))
        if mesh.mesh[at].flatten().equal(wanted):
            found.append(list(axes))
    # Axes of size 1 differ only in their names.
    own, names = mesh.mesh_dim_names or (), plan_mesh.mesh_dim_names or ()
    found.sort(key=lambda axes: tuple(own[i] for i in axes if own) != names)
    what, expected = "q as a DTensor with context parallelism", "a mesh with the ranks of the plan, {}"
    remedy = "Make the plan and the DTensors on one mesh: plan.on(mesh['cp'], rows=rows)"
    expect(found, what, expected + ", along its axes", mesh, remedy, f"{wanted.tolist()}")
    return found[0]


def _check_parts(places: Places, batch: Any, q_heads: Any, kv_heads: Any) -> None:
    """Raise a ShapeError unless every rank has a batch element, and heads together with their key heads."""
    for role, what, size in ((BATCH, "batch elements", batch), (HEADS, "key heads", kv_heads)):
        counts = [places.mesh.size(axis) for axis, own in enumerate(places.roles) if own == role]
        ranks, sizes = math.prod(counts), {size}
        if ranks == 1 or size % ranks == 0:
            continue
        name, remedy = "q, k and v as DTensors", "Repeat key heads, or shard heads over fewer ranks"
        expected = "a multiple of {} key heads, because this many ranks share {} query heads"
        fits = role != HEADS or q_heads == kv_heads
        expect(fits, name, expected, kv_heads, remedy, ranks, q_heads, error=ShapeError)
        for count in counts:
            # Shard gives `each` elements to every part except the last ones.
            whole = [(n, -(-n // count)) for n in sizes]
            sizes = {min(each, max(n - each * i, 0)) for n, each in whole for i in range(count)}
        expected, remedy = what + " for each of {} ranks", "Use fewer ranks along that axis, or Replicate()"
        expect(0 not in sizes, name, expected, size, remedy, ranks, error=ShapeError)


def _words(placements: Any) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def follow(x: Any, role: str, batch: int | None = 0, heads: int | None = 1) -> Any:
    """Placement of a tensor that belongs to q, with these dims, along a mesh axis with this role."""
    from torch.distributed.tensor import Replicate, Shard

    if x is None:
        return None
    dim = {BATCH: batch, HEADS: heads}.get(role)
    return Replicate() if dim is None or x.shape[dim] == 1 else Shard(dim)


def check_follower(places: Places | None, name: str, x: Any, batch: int | None, heads: int | None) -> None:
    """Raise an OptionError for a DTensor without q's placement, and for any DTensor if q is plain."""
    if is_dtensor(x):
        mesh, wanted = (None, ()) if places is None else (places.mesh, places.wanted(x, batch, heads))
        _check_placements(name, x.device_mesh, tuple(x.placements), mesh, wanted)


@constant_when_traced
def _check_placements(
    name: str, mesh: Any, placements: tuple[Any, ...], q_mesh: Any, wanted: tuple[Any, ...]
) -> None:
    got, what = _words(placements), f"{name} as a DTensor"
    remedy = "Pass q, k and v as DTensors too, or pass its to_local()"
    expect(q_mesh is not None, name, "a plain tensor, as q, k and v are", f"a DTensor with {got}", remedy)
    expect(mesh == q_mesh, what, "the mesh of q, {}", mesh, "Place it on the mesh of q, k and v", q_mesh)
    # The one rank of an axis of size 1 has the whole tensor, whether it is sharded or replicated.
    pairs = enumerate(zip(placements, wanted, strict=True))
    fits = all(a == b or (mesh.size(at) == 1 and not a.is_partial()) for at, (a, b) in pairs)
    fits = fits or all(place.is_replicate() for place in placements)
    expected = "{}, which goes with q" + ", or Replicate()" * any(place.is_shard() for place in wanted)
    expect(fits, what, expected, got, _MOVES_NOTHING, _words(wanted))


def option_tensors(given: Given) -> Iterator[Follower]:
    """Tensors of a call's options."""
    bias: Any = dense_bias(given.bias) if isinstance(given.bias, Tensor) else given.bias
    for field in fields(bias) if isinstance(bias, Bias) else ():  # type: ignore[arg-type]
        x = getattr(bias, field.name)
        yield f"bias.{field.name}", x, *_dims("bias", x, schema.KIND_OF_FIELD.get(field.name, 0))
    for row in schema.arrays(schema.OPTIONS):
        if row.name != "bias" and (x := getattr(given, row.name)) is not None:
            yield row.name, x, *_dims(row.name, x)


def _dims(name: str, x: Any, kind: int = 0) -> tuple[int | None, int | None]:
    """Batch dim and head dim of an option's tensor."""
    rank = getattr(x, "ndim", 0)
    return schema.dim(name, "b", rank, kind), schema.dim(name, "h", rank, kind)


def batch_dim(x: Any, rank: int) -> int | None:
    """Batch dim of an array: 0 if it has more than ``rank`` dims, else None."""
    return 0 if getattr(x, "ndim", 0) > rank else None


def replicated(x: Any, mesh: Any) -> Any:
    """A tensor that all ranks have, as a DTensor. Any other `x` is returned unchanged."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(x, Tensor):
        return x
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
