"""Placement of q, k and v on a device mesh, and the placement of all other tensors that follows.

A partition spec names, for each dim of q, the mesh axes that split it. You can split batch and heads. Each
device then computes its own batch elements and heads alone. All other specs follow from q's spec.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnspan.call import LAYOUTS
from attnspan.errors import DtypeError, OptionError, expect

#: Names or numbers of the mesh axes that split one dim together. () for none.
Axes = tuple[str | int, ...]
#: For each dim of a tensor, the mesh axes that split it, as torch_xla takes them.
Spec = tuple[Any, ...]

#: Meshes, keyed by the text that operators receive. The global mesh has the key "".
_MESHES: dict[str, Any] = {}

_PLANS = (
    "Split the batch or the heads instead, or split the sequence by a plan of attnspan.parallel.Layout. "
    "Otherwise each device would see only a part of the keys, and results would be wrong"
)


@dataclass(frozen=True)
class Places:
    """Split of q: the mesh axes that split its batch and its heads, and the numbers of parts.

    ``key`` identifies the mesh for `mesh_of`.
    """

    key: str
    batch: Axes
    heads: Axes
    batch_parts: int
    head_parts: int

    def spec(self, batch: bool, heads: bool, *others: bool) -> Spec:
        """Return the spec of a tensor (B, H, ...), with or without split batch and heads."""
        entries = (_entry(self.batch if batch else ()), _entry(self.heads if heads else ()))
        return (*entries, *(None for _ in others))

    def text(self) -> str:
        """Return the attributes as a literal, which an operator can take."""
        axes = f"{spec_text(self.batch)}, {spec_text(self.heads)}"
        return f"({self.key!r}, {axes}, {self.batch_parts}, {self.head_parts})"


def _entry(axes: Axes) -> Any:
    return None if len(axes) == 0 else axes[0] if len(axes) == 1 else axes


def places_of(q: Tensor, mesh: Any, partition_spec: Any, layout: str) -> Places | None:
    """Find how q, in ``layout``, is split over a mesh of torch_xla. None without a partition spec."""
    if partition_spec is None:
        remedy = "Pass q's partition_spec, such as ('data', None, None, None)"
        expect(mesh is None, "mesh", "a partition_spec in the same call", "None", remedy)
        return None
    key, mesh = _known(mesh)
    axes = check_spec("partition_spec", partition_spec, len(q.shape), mesh)
    by_dim = dict(zip(LAYOUTS[layout], axes, strict=True))
    parts = {dim: _parts_of(own, mesh) for dim, own in by_dim.items()}
    for dim, size in zip(LAYOUTS[layout], q.shape, strict=True):
        what = f"partition_spec: {dim}"
        if dim in ("batch", "heads"):
            wanted = f"a multiple of {parts[dim]}, the number of parts"
            expect(size % parts[dim] == 0, what, wanted, size, "Pad it, or split another dim")
        elif parts[dim] != 1:
            scores = "Split the batch or the heads instead, because a score needs whole queries and keys"
            wanted = "None, because splitting this dim needs a plan that exchanges keys"
            remedy = scores if dim == "head_dim" else _PLANS
            raise OptionError(what, expected=wanted, got=repr(_entry(by_dim[dim])), remedy=remedy)
    batch = by_dim.get("batch", ())
    return Places(key, batch, by_dim["heads"], parts.get("batch", 1), parts["heads"])


def check_spec(what: str, spec: Any, rank: int, mesh: Any) -> tuple[Axes, ...]:
    """Check the number and names of a spec's axes and that none is used twice. Returns each dim's axes."""
    fits = isinstance(spec, (tuple, list)) and len(spec) == rank
    remedy = "Use None for dims that are not split"
    expect(fits, what, f"{rank} entries, one for each dim", f"{spec!r}", remedy)
    axes: tuple[Axes, ...] = tuple(
        () if entry is None else tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
        for entry in spec
    )
    used = [_number_of(axis, mesh, what) for dim in axes for axis in dim]
    remedy = "An axis can split only one dim. Use another axis or None for the other dim"
    expect(len(used) == len(set(used)), what, "each mesh axis once", f"{spec!r}", remedy)
    return axes


def _number_of(axis: Any, mesh: Any, what: str = "partition_spec") -> int:
    """Return the number of a mesh axis from its name or number."""
    names = mesh.axis_names or ()
    if isinstance(axis, str) and axis in names:
        return tuple(names).index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < len(mesh.mesh_shape):
        return axis
    known = ", ".join([str(x) for x in names or range(len(mesh.mesh_shape))])
    wanted, remedy = f"axes of the mesh, {known}", "Use an axis of the mesh, or None"
    raise OptionError(what, expected=wanted, got=f"{axis!r}", remedy=remedy)


def _parts_of(axes: Axes, mesh: Any) -> int:
    """Return the number of parts into which mesh axes split a dim."""
    count = 1  # Dynamo of torch 2.9 cannot trace math.prod.
    for axis in axes:
        count *= int(mesh.mesh_shape[_number_of(axis, mesh)])
    return count


def _known(mesh: Any) -> tuple[str, Any]:
    """Return the key of a mesh, and the mesh."""
    import torch_xla.distributed.spmd as xs
    from torch import compiler

    common = xs.get_global_mesh()
    if mesh is None or mesh is common:
        remedy = "Pass mesh=, or call torch_xla.distributed.spmd.set_global_mesh(mesh)"
        wanted = "a mesh of torch_xla with partition_spec, or a global mesh"
        expect(common is not None, "mesh", wanted, "None", remedy)
        return "", common
    remedy = 'Make a mesh with Mesh(np.arange(n), (n,), ("data",)), or leave it out to use the global mesh'
    wanted, got = "a mesh of torch_xla.distributed.spmd", type(mesh).__name__
    expect(isinstance(mesh, xs.Mesh), "mesh", wanted, got, remedy, error=DtypeError)
    key = f"{id(mesh)}"
    if not compiler.is_compiling():
        # The mesh is kept alive, because another mesh could get the id of a freed one.
        _MESHES[key] = mesh
    return key, mesh


def mesh_of(key: str) -> Any:
    """Return the mesh of a key from `places_of`."""
    import torch_xla.distributed.spmd as xs

    if not key:
        return xs.get_global_mesh()
    # The check runs when the program is built, because torch.compile can trace neither the error nor the
    # storing of a mesh.
    wanted = "the global mesh, or a mesh that an eager call has used"
    remedy = "Call torch_xla.distributed.spmd.set_global_mesh(mesh) first"
    expect(key in _MESHES, "mesh under torch.compile", wanted, "another mesh", remedy)
    return _MESHES[key]


def default_spec(x: Any, places: Places, name: str, batch: int, heads: int) -> Spec:
    """Return the default partition spec of a mask's array: split as q is, on the axes that it shares with q.

    Lowering sees whole arrays, so a spec changes only their placement, never their meaning.
    """
    shape = tuple(x.shape)
    entries: list[Any] = [None] * len(shape)
    if batch > 1 and len(shape) >= (1 if name == "lengths" else 2) and shape[0] == batch:
        entries[0] = _entry(places.batch)
    if heads > 1 and len(shape) >= 4 and shape[1] == heads:
        entries[1] = _entry(places.heads)
    return tuple(entries)


def spec_text(spec: Spec) -> str:
    """Return a spec as a Python literal for an operator, such as "('data',None,(0,'model',),)"."""
    entries = [spec_text(tuple(x)) if isinstance(x, (tuple, list)) else f"{x!r}" for x in spec]
    return "(" + "".join([f"{x}," for x in entries]) + ")"
