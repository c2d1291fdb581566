"""Placement of q, k and v on a mesh of devices, and what follows for all other tensors.

A partition spec names, for each dim of q, the mesh axes that split it. Batch and heads may be split: each
device then computes its own rows and heads alone. Everything else follows from q's spec.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnspan.call import LAYOUTS
from attnspan.errors import DtypeError, OptionError, expect

__all__ = ["Axes", "Places", "Spec", "check_spec", "default_spec", "mesh_of", "places_of", "spec_text"]

#: Mesh axes, by name or number, that split one dim together; () for none.
Axes = tuple[str | int, ...]
#: For each dim of a tensor, the mesh axes that split it: what torch_xla takes.
Spec = tuple[Any, ...]

#: Meshes by the key under which operators know them; the global mesh has the key "".
_MESHES: dict[str, Any] = {}

_PLANS = (
    "A device would see a part of the keys, and be wrong without any error: split the batch or the heads, or "
    "share rows by a plan with attnspan.parallel.Layout"
)


@dataclass(frozen=True)
class Places:
    """Split of q: mesh axes that split its batch and its heads, and into how many parts.

    ``key`` names the mesh for `mesh_of`.
    """

    key: str
    batch: Axes
    heads: Axes
    batch_parts: int
    head_parts: int

    def spec(self, batch: bool, heads: bool, *others: bool) -> Spec:
        """The spec of a tensor (B, H, ...), by whether its batch and its heads are split; the rest is not."""
        entries = (_entry(self.batch if batch else ()), _entry(self.heads if heads else ()))
        return (*entries, *(None for _ in others))

    def text(self) -> str:
        """Text for an operator: a literal of the attributes."""
        axes = f"{spec_text(self.batch)}, {spec_text(self.heads)}"
        return f"({self.key!r}, {axes}, {self.batch_parts}, {self.head_parts})"


def _entry(axes: Axes) -> Any:
    return None if len(axes) == 0 else axes[0] if len(axes) == 1 else axes


def places_of(q: Tensor, mesh: Any, partition_spec: Any, layout: str) -> Places | None:
    """Find how q, in ``layout``, is split over a mesh of torch_xla; None if no partition spec is given."""
    if partition_spec is None:
        remedy = "Pass q's, such as ('data', None, None, None)"
        expect(mesh is None, "mesh", "a partition_spec with it", "None", remedy)
        return None
    key, mesh = _known(mesh)
    axes = check_spec("partition_spec", partition_spec, len(q.shape), mesh)
    by_dim = dict(zip(LAYOUTS[layout], axes, strict=True))
    parts = {dim: _parts_of(own, mesh) for dim, own in by_dim.items()}
    for dim, size in zip(LAYOUTS[layout], q.shape, strict=True):
        what = f"partition_spec: {dim}"
        if dim in ("batch", "heads"):
            wanted = f"a size that {parts[dim]} devices can share, a multiple of {parts[dim]}"
            expect(size % parts[dim] == 0, what, wanted, size, "Pad it, or split another dim")
        elif parts[dim] != 1:
            scores = "A score needs all elements of a query and a key: split the batch or the heads"
            wanted = "None: this dim cannot be split without a plan of who needs which keys"
            remedy = scores if dim == "head_dim" else _PLANS
            raise OptionError(what, expected=wanted, got=repr(_entry(by_dim[dim])), remedy=remedy)
    batch = by_dim.get("batch", ())
    return Places(key, batch, by_dim["heads"], parts.get("batch", 1), parts["heads"])


def check_spec(what: str, spec: Any, rank: int, mesh: Any) -> tuple[Axes, ...]:
    """The axes of each dim, after checks of their number, of their names, and that none is used twice."""
    fits = isinstance(spec, (tuple, list)) and len(spec) == rank
    remedy = "Give dims that are not split None"
    expect(fits, what, f"{rank} entries, one for each dim", f"{spec!r}", remedy)
    axes: tuple[Axes, ...] = tuple(
        () if entry is None else tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
        for entry in spec
    )
    used = [_number_of(axis, mesh, what) for dim in axes for axis in dim]
    remedy = "An axis can split one dim only; give the other another axis, or None"
    expect(len(used) == len(set(used)), what, "each mesh axis once", f"{spec!r}", remedy)
    return axes


def _number_of(axis: Any, mesh: Any, what: str = "partition_spec") -> int:
    """The number of a mesh axis that is given by name or number."""
    names = mesh.axis_names or ()
    if isinstance(axis, str) and axis in names:
        return tuple(names).index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < len(mesh.mesh_shape):
        return axis
    known = ", ".join([str(x) for x in names or range(len(mesh.mesh_shape))])
    wanted, remedy = f"axes of the mesh, {known}", "Name an axis that the mesh has, or None"
    raise OptionError(what, expected=wanted, got=f"{axis!r}", remedy=remedy)


def _parts_of(axes: Axes, mesh: Any) -> int:
    """The number of parts into which mesh axes split a dim."""
    count = 1  # Not math.prod, which Dynamo of torch 2.9 cannot trace.
    for axis in axes:
        count *= int(mesh.mesh_shape[_number_of(axis, mesh)])
    return count


def _known(mesh: Any) -> tuple[str, Any]:
    """The key of a mesh, and the mesh."""
    import torch_xla.distributed.spmd as xs
    from torch import compiler

    common = xs.get_global_mesh()
    if mesh is None or mesh is common:
        remedy = "Pass mesh=, or call torch_xla.distributed.spmd.set_global_mesh(mesh)"
        wanted = "a mesh of torch_xla with partition_spec, or a global one"
        expect(common is not None, "mesh", wanted, "None", remedy)
        return "", common
    remedy = 'Make one: Mesh(np.arange(n), (n,), ("data",)), or leave it out for the global one'
    wanted, got = "a mesh of torch_xla.distributed.spmd", type(mesh).__name__
    expect(isinstance(mesh, xs.Mesh), "mesh", wanted, got, remedy, error=DtypeError)
    key = f"{id(mesh)}"
    if not compiler.is_compiling():
        # Kept: the number of one that is gone could become another's.
        _MESHES[key] = mesh
    return key, mesh


def mesh_of(key: str) -> Any:
    """The mesh of a key of `places_of`."""
    import torch_xla.distributed.spmd as xs

    if not key:
        return xs.get_global_mesh()
    # Said when the program is built: torch.compile reads no errors, and could not remember the mesh.
    wanted = "the global mesh, or one that a call outside of the compiler has used"
    remedy = "Call torch_xla.distributed.spmd.set_global_mesh(mesh) first"
    expect(key in _MESHES, "mesh under torch.compile", wanted, "another", remedy)
    return _MESHES[key]


def default_spec(x: Any, places: Places, name: str, batch: int, heads: int) -> Spec:
    """Default partition spec of a mask's array: as q is split, on the axes that it shares with q.

    Lowering treats arrays as whole ones, so a spec decides where they lie, never what they mean.
    """
    shape = tuple(x.shape)
    entries: list[Any] = [None] * len(shape)
    if batch > 1 and len(shape) >= (1 if name == "lengths" else 2) and shape[0] == batch:
        entries[0] = _entry(places.batch)
    if heads > 1 and len(shape) >= 4 and shape[1] == heads:
        entries[1] = _entry(places.heads)
    return tuple(entries)


def spec_text(spec: Spec) -> str:
    """A spec as a Python literal, which an operator can be told: "('data',None,(0,'model',),)"."""
    entries = [spec_text(tuple(x)) if isinstance(x, (tuple, list)) else f"{x!r}" for x in spec]
    return "(" + "".join([f"{x}," for x in entries]) + ")"
