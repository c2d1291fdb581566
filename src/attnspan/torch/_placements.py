"""DTensors among the arguments of a call: what their mesh splits, or an error that says what would fit.

DTensor would make inconsistent arguments consistent by moving them, silently; here they are refused. Only a
tensor of the mask or of an option that each rank has whole is cut down to the part that a rank needs, which
moves nothing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call import LAYOUTS
from ..errors import OptionError, ShapeError

#: What a mesh axis splits. `ROWS` is the sequence, which only a plan may split; `WHOLE`: nothing.
BATCH, HEADS, ROWS, WHOLE = "batch", "heads", "rows", "whole"
_DIMS = {"batch": BATCH, "heads": HEADS, "length": ROWS, "tokens": ROWS}


def is_dtensor(x: object) -> bool:
    """Whether it is a DTensor; asking loads nothing, as importing DTensor takes long."""
    if type(x) is Tensor or not isinstance(x, Tensor) or "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


@dataclass(frozen=True)
class Places:
    """How the q, k and v of a call lie on their mesh.

    Attributes:
        mesh: The DeviceMesh.
        roles: What each of its axes splits: `BATCH`, `HEADS`, `ROWS` or `WHOLE`.
        placements: Those of q, k and v.
    """

    mesh: Any
    roles: tuple[str, ...]
    placements: tuple[Any, ...]

    def count(self, role: str) -> int:
        """Into how many parts something is split.

        Args:
            role: What.
        """
        found = 1
        for axis, own in enumerate(self.roles):
            found *= self.mesh.size(axis) if own == role else 1
        return found

    def wanted(self, x: Tensor, batch: int | None, heads: int | None) -> tuple[Any, ...]:
        """The placements of a tensor that belongs to q: it is split where q is, but for dims of size 1.

        Args:
            x: The tensor.
            batch: Which of its dims is that of batch rows, or None.
            heads: Which is that of query heads, or None.
        """
        from torch.distributed.tensor import Replicate, Shard

        dims = {
            role: dim
            for role, dim in ((BATCH, batch), (HEADS, heads))
            if dim is not None and x.shape[dim] != 1
        }
        return tuple(Shard(dims[role]) if role in dims else Replicate() for role in self.roles)

    def check(self, name: str, x: Tensor, batch: int | None, heads: int | None) -> None:
        """Raise unless a tensor is plain, whole on each rank, or split where q is.

        Args:
            name: What the error calls it.
            x: The tensor.
            batch: Which of its dims is that of batch rows, or None.
            heads: Which is that of query heads, or None.

        Raises:
            OptionError: It lies on another mesh, or otherwise.
        """
        if is_dtensor(x):
            wanted = self.wanted(x, batch, heads)
            _check_follower(name, x.device_mesh, tuple(x.placements), self.mesh, wanted)  # type: ignore[attr-defined]

    def part(self, name: str, x: Tensor, batch: int | None, heads: int | None) -> Tensor:
        """This rank's part of a tensor that belongs to q; a plain one is taken to be the whole.

        Args:
            name: What the error calls it.
            x: The tensor.
            batch: Which of its dims is that of batch rows, or None.
            heads: Which is that of query heads, or None.

        Raises:
            OptionError: It lies on another mesh, or otherwise.
        """
        from torch.distributed.tensor import DTensor, Replicate

        self.check(name, x, batch, heads)
        if not is_dtensor(x):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        placed: Any = x
        # From whole to split: each rank cuts its own part out.
        return placed.redistribute(self.mesh, self.wanted(x, batch, heads)).to_local()  # type: ignore[no-any-return]

    def join(
        self,
        x: Tensor,
        shape: Sequence[Any],
        dims: dict[str, int],
        order: Sequence[int] | None = None,
    ) -> Tensor:
        """The DTensor of which each rank has a part.

        Args:
            x: This rank's part.
            shape: Sizes of the whole.
            dims: Which dim belongs to which role; the whole is split along these where q is.
            order: The dims as they are stored, the last one without gaps; None for the usual order.
        """
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Shard(dims[role]) if role in dims else Replicate() for role in self.roles]
        stride, step = [1] * len(shape), 1
        for dim in reversed(range(len(shape)) if order is None else order):
            stride[dim], step = step, step * shape[dim]
        whole = {"shape": torch.Size(shape), "stride": tuple(stride)}
        found: Tensor = DTensor.from_local(x, self.mesh, placements, run_check=False, **whole)  # type: ignore[arg-type]
        return found


def places_of(q: Tensor, k: Tensor, v: Tensor, layout: str, plan_mesh: Any = None) -> Places | None:
    """How q, k and v lie on their mesh; None where all are plain.

    Args:
        q: As given to `attention`, as all.
        k: Keys.
        v: Values.
        layout: "bhsd", "bshd" or "thd".
        plan_mesh: The mesh of a plan, whose axes split the rows; None where there is no plan.

    Raises:
        OptionError: Some are no DTensors, lie on other meshes, or are split otherwise or along dims that may
            not be.
        ShapeError: A rank would have no batch row, or heads without their key heads.
    """
    placed: tuple[Any, ...] = (q, k, v)
    meshes = tuple(x.device_mesh if is_dtensor(x) else None for x in placed)
    if meshes == (None, None, None):
        return None
    placements = tuple(tuple(x.placements) if is_dtensor(x) else None for x in placed)
    roles = find_roles(layout, meshes, placements, plan_mesh)
    found = Places(meshes[0], roles, tuple(placed[0].placements))
    heads, batch = LAYOUTS[layout].index("heads"), LAYOUTS[layout][0] == "batch"
    check_parts(found, q.shape[0] if batch else 1, q.shape[heads], k.shape[heads])
    return found


# Run while a compiler reads the call, as placements never change within a program: nothing of it is traced,
# and an error keeps its message.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def find_roles(
    layout: str, meshes: tuple[Any, ...], placements: tuple[Any, ...], plan_mesh: Any
) -> tuple[str, ...]:
    """What each mesh axis splits, by the placements of q, k and v, which must agree.

    Args:
        layout: The dims of q, k and v.
        meshes: The meshes of q, k and v; None for plain tensors.
        placements: Their placements.
        plan_mesh: The mesh of a plan, or None.

    Raises:
        OptionError: They do not agree, or may not be so.
    """
    first = next(i for i, mesh in enumerate(meshes) if mesh is not None)
    mesh, wanted = meshes[first], placements[first]
    for name, own, places in zip("qkv", meshes, placements, strict=True):
        if own is None:
            raise OptionError(
                name,
                expected=f"a DTensor with {_words(wanted)} on {mesh}, as {'qkv'[first]} is one",
                got="a plain tensor",
                remedy="Give all three as DTensors (DTensor.from_local), or none (to_local)",
            )
        if own != mesh:
            raise OptionError(
                f"{name} as a DTensor",
                expected=f"the mesh of q, {mesh}",
                got=f"{own}",
                remedy="Place q, k and v on one mesh",
            )
        for place in places:
            _check_place(name, place, layout, plan_mesh is not None)
    axes = _axes_of_plan(mesh, plan_mesh)
    for name, places in zip("qkv", placements, strict=True):
        _check_rows(name, places, layout, axes, plan_mesh)
    for name, places in zip("kv", placements[1:], strict=True):
        if places != wanted:
            raise OptionError(
                f"{name} as a DTensor",
                expected=f"{_words(wanted)}, as q",
                got=_words(places),
                remedy="Redistribute one of them: attention moves nothing by itself",
            )
    dims = LAYOUTS[layout]
    return tuple(_DIMS[dims[place.dim]] if place.is_shard() else WHOLE for place in wanted)


def check_parts(places: Places, batch: Any, q_heads: Any, kv_heads: Any) -> None:
    """Raise unless every rank has a batch row, and heads together with their key heads.

    Args:
        places: How q lies.
        batch: Number of batch rows, of the whole.
        q_heads: Number of query heads, of the whole.
        kv_heads: Number of key heads, of the whole.

    Raises:
        ShapeError: Some rank has not.
    """
    for role, what, size in ((BATCH, "batch rows", batch), (HEADS, "key heads", kv_heads)):
        count = places.count(role)
        if count == 1 or size % count == 0:
            continue
        if role == HEADS and q_heads != kv_heads:
            raise ShapeError(
                "q, k and v as DTensors",
                expected=f"a multiple of {count} key heads, as so many ranks share them",
                got=f"{q_heads} query heads and {kv_heads} key heads",
                remedy="Repeat key heads, or share heads out to fewer ranks",
            )
        sizes = {size}
        for axis, own in enumerate(places.roles):
            if own == role:
                sizes = {part for whole in sizes for part in _parts(whole, places.mesh.size(axis))}
        if 0 in sizes:
            raise ShapeError(
                "q, k and v as DTensors",
                expected=f"{what} for each of {count} ranks",
                got=f"{size}, of which some rank gets none",
                remedy="Use fewer ranks along that axis, or Replicate()",
            )


def _parts(size: Any, count: int) -> list[Any]:
    """Sizes of the parts of Shard."""
    each = -(-size // count)
    return [min(each, max(size - each * i, 0)) for i in range(count)]


def _words(placements: Any) -> str:
    return f"[{', '.join(map(repr, placements))}]"


def _check_place(name: str, place: Any, layout: str, planned: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard

    dims = LAYOUTS[layout]
    may = [
        f"Shard({i}) ({dim})"
        for i, dim in enumerate(dims)
        if dim in _DIMS and (planned or _DIMS[dim] != ROWS)
    ]
    expected = f"{', '.join(may)} or Replicate()"
    what, remedy = f"{name} as a DTensor", "Redistribute it"
    if type(place) is Replicate:
        return
    if type(place) is not Shard:
        raise OptionError(what, expected=expected, got=repr(place), remedy=remedy)
    dim = dims[place.dim]
    if dim == "head_dim":
        raise OptionError(what, expected=expected, got=f"{place!r}, which splits head_dim", remedy=remedy)
    if _DIMS[dim] == ROWS and not planned:
        raise OptionError(
            what,
            expected=expected,
            got=f"{place!r}, which splits {'q_len' if name == 'q' else 'k_len'}",
            remedy="Redistribute it, or plan the exchange of keys that a split sequence needs: "
            "mask=attnspan.parallel.ContextParallel(...)",
        )


def _axes_of_plan(mesh: Any, plan_mesh: Any) -> tuple[int, ...]:
    """The axes of a mesh whose ranks are those of a plan, in its order."""
    if plan_mesh is None:
        return ()
    from itertools import combinations

    ranks, wanted = mesh.mesh, plan_mesh.mesh.flatten()
    here = mesh.get_coordinate()
    names = plan_mesh.mesh_dim_names or ()
    found = [
        axes
        for count in range(1, mesh.ndim + 1)
        for axes in combinations(range(mesh.ndim), count)
        if ranks[tuple(slice(None) if i in axes else here[i] for i in range(mesh.ndim))]
        .flatten()
        .equal(wanted)
    ]
    # Axes of size 1 are told apart by name.
    own = mesh.mesh_dim_names or ()
    found.sort(key=lambda axes: tuple(own[i] for i in axes if own) != names)
    if not found:
        raise OptionError(
            "q as a DTensor with context parallelism",
            expected=f"a mesh with the ranks of the plan, {wanted.tolist()}, along its axes",
            got=f"{mesh}",
            remedy="Make ContextParallel and the DTensors of one mesh: ContextParallel(mesh['cp'], ...)",
        )
    return found[0]


def _check_rows(name: str, places: Any, layout: str, axes: tuple[int, ...], plan_mesh: Any) -> None:
    """Raise unless the sequence is split along the axes of the plan and those only."""
    if plan_mesh is None:
        return
    from torch.distributed.tensor import Shard

    dim = next(i for i, dim in enumerate(LAYOUTS[layout]) if _DIMS.get(dim) == ROWS)
    wanted = tuple(Shard(dim) if i in axes else place for i, place in enumerate(places))
    stray = [i for i, place in enumerate(places) if i not in axes and place == Shard(dim)]
    if wanted != tuple(places) or stray:
        raise OptionError(
            f"{name} as a DTensor with context parallelism",
            expected=f"Shard({dim}) along mesh axes {list(axes)} only: the plan's ranks hold its rows",
            got=_words(places),
            remedy="Make it by DTensor.from_local(...) of rows that cp.shard(...) gave",
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _check_follower(
    name: str, mesh: Any, placements: tuple[Any, ...], q_mesh: Any, wanted: tuple[Any, ...]
) -> None:
    if mesh != q_mesh:
        raise OptionError(
            f"{name} as a DTensor",
            expected=f"the mesh of q, {q_mesh}",
            got=f"{mesh}",
            remedy="Place it on the mesh of q, k and v",
        )
    whole = all(place.is_replicate() for place in wanted)
    if placements != wanted and not all(place.is_replicate() for place in placements):
        raise OptionError(
            f"{name} as a DTensor",
            expected=f"{_words(wanted)}, which goes with q{'' if whole else ', or Replicate()'}",
            got=_words(placements),
            remedy="Redistribute it: attention moves nothing by itself",
        )


def refuse_beside_plain(name: str, x: Any) -> None:
    """Raise for a DTensor beside plain q, k and v.

    Args:
        name: What the error calls it.
        x: What may be one.

    Raises:
        OptionError: It is one.
    """
    if is_dtensor(x):
        _refuse_beside_plain(name, tuple(x.placements))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_beside_plain(name: str, placements: tuple[Any, ...]) -> None:
    raise OptionError(
        name,
        expected="a plain tensor, as q, k and v are",
        got=f"a DTensor with {_words(placements)}",
        remedy="Give q, k and v as DTensors too, or its to_local()",
    )
