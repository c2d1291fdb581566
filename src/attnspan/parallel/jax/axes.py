"""Mesh axes that split the dims of q, k and v."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attnspan.errors import DeviceError, DtypeError, ShapeError, expect
from attnspan.jax.placement import is_traced
from attnspan.jax.varying import axes_of

#: One mesh axis, several axes (the first is the outermost), or none.
AxisNames = str | Sequence[str] | None

#: The dims that axes may split, and their names in errors.
_WORDS = {"batch": "batch elements", "heads": "heads", "sequence": "the sequence", None: "head_dim"}


@dataclass(frozen=True)
class Axes:
    """Mesh axes that split the batch, the heads, or queries and keys.

    Example:
        >>> axes = Axes.of(jax.make_mesh((1, 1), ("data", "model")), batch="data", heads="model")
        >>> tuple(axes.spec("batch", None, "sequence"))
        ('data', None, None)
    """

    mesh: Mesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh, **given: AxisNames) -> Axes:
        """Check axis names against a mesh.

        Raises:
            DtypeError: `mesh` is no mesh, or a name is no text.
            OptionError: The mesh lacks an axis, or an axis would split two dims.
        """
        remedy = "Make one by jax.make_mesh((2, 2), ('data', 'model'))"
        is_mesh, kind = isinstance(mesh, Mesh), type(mesh).__name__
        expect(is_mesh, "mesh", "a jax.sharding.Mesh", kind, remedy, error=DtypeError)
        named = {dim: _names(mesh, dim, names) for dim, names in given.items()}
        seen: dict[str, str] = {}
        for dim, names in named.items():
            for name in names:
                got, remedy = f"{name!r}, which splits {seen.get(name)} already", "Leave one of them out"
                expect(name not in seen, dim, "axes that split one dim each", got, remedy)
                seen[name] = dim
        return cls(mesh, **named)

    def names(self, dim: str | None) -> tuple[str, ...]:
        """List the axes that split "batch", "heads" or "sequence". Empty for any other dim."""
        return () if dim is None or dim not in _WORDS else getattr(self, dim)

    def size(self, dim: str | None) -> int:
        """Number of parts into which a dim is split."""
        return math.prod(self.mesh.shape[name] for name in self.names(dim))

    def places(self, dim: str) -> list[int]:
        """Numbers of a dim's parts in `jax.lax.ppermute`, which counts in the mesh's order of axes."""
        names = self.names(dim)
        ordered = [name for name in self.mesh.axis_names if name in names]
        numbers = np.arange(self.size(dim)).reshape([self.mesh.shape[name] for name in ordered])
        return numbers.transpose([ordered.index(name) for name in names]).ravel().tolist()  # type: ignore[no-any-return]

    def spec(self, *dims: str | None) -> PartitionSpec:
        """Make the spec of an array with these dims. Pass None for a dim that is whole everywhere."""
        every = map(self.names, dims)
        return PartitionSpec(*(None if not x else x[0] if len(x) == 1 else x for x in every))

    def spec_of(self, shape: Sequence[int], *dims: str | None) -> PartitionSpec:
        """Make the spec of an array with these first dims. A dim of size 1 is whole everywhere."""
        return self.spec(*(dim if size > 1 else None for dim, size in zip(dims, shape, strict=False)))

    def sharding(self, *dims: str | None) -> NamedSharding:
        """Make the sharding of an array with these dims."""
        return NamedSharding(self.mesh, self.spec(*dims))

    @property
    def explicit(self) -> bool:
        """Whether shardings are part of the types of arrays."""
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def here(self) -> Any:
        """The mesh, or the rest of it inside a `shard_map` over other axes than these."""
        inside = jax.sharding.get_abstract_mesh()
        return inside if inside.manual_axes else self.mesh

    def on_each(self, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Call `run` on each device with its parts."""
        inside = jax.sharding.get_abstract_mesh().manual_axes
        axes = {name for name in self.mesh.axis_names if name not in inside}
        how: Any = {"mesh": self.here, "axis_names": axes, "check_vma": False}
        return jax.shard_map(run, **how, in_specs=in_specs, out_specs=out_specs)

    def check_around(self, *arrays: Any) -> None:
        """Raise inside a `shard_map` that split these axes already, or that checks which arrays vary."""
        taken = set(jax.sharding.get_abstract_mesh().manual_axes)
        free = bool(set(self.mesh.axis_names) - taken) and not taken & {
            *self.batch,
            *self.heads,
            *self.sequence,
        }
        what, wanted = "a mask over a mesh, inside of shard_map", "axes of the mask that it leaves whole"
        remedy = "Call attention with a plain mask there, or leave these axes out of axis_names"
        expect(free, what, wanted, ", ".join(sorted(taken)), remedy)
        wanted = "shard_map(..., check_vma=False)"
        remedy = "Pass check_vma=False, because JAX cannot nest shard_map otherwise"
        expect(not axes_of(*arrays), what, wanted, "check_vma=True", remedy)

    def place(self, x: Any, *dims: str | None) -> jax.Array:
        """Put an array on the mesh, with these dims split. It is traceable and differentiable."""
        self.check_dims(x.shape, dims)
        return self.put(x, self.spec(*dims))

    def put(self, x: Any, spec: PartitionSpec) -> jax.Array:
        """Put an array on the mesh with this spec."""
        if not is_traced(x):
            return jax.device_put(x, NamedSharding(self.mesh, spec))  # type: ignore[no-any-return]
        groups = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        types = dict(zip(self.here.axis_names, self.here.axis_types, strict=True))
        moves: Any = {
            AxisType.Explicit: jax.sharding.reshard,
            AxisType.Auto: jax.lax.with_sharding_constraint,
        }
        for kind, move in moves.items():
            if kind in types.values():
                kept = (tuple(name for name in group if types.get(name) == kind) for group in groups)
                x = move(x, NamedSharding(self.here, PartitionSpec(*kept)))
        return x  # type: ignore[no-any-return]

    def check_dims(self, shape: Sequence[int], dims: Sequence[str | None]) -> None:
        """Raise unless an array can be split evenly."""
        for length, dim in zip(shape, dims, strict=True):
            self.check_divides(f"{dim} of an array of shape {tuple(shape)}", length, dim)

    def check_divides(self, what: str, length: int, dim: str | None) -> None:
        """Raise unless a length can be split evenly."""
        wanted = f"a multiple of {self.size(dim)}, the devices of mesh axis {self.words(dim)}"
        remedy = "Pad it, or split that dim over fewer devices"
        expect(length % self.size(dim) == 0, what, wanted, length, remedy, error=ShapeError)

    def check_ranks(self, ranks: int) -> None:
        """Raise unless the sequence axes have one device for each rank of a layout."""
        parts = self.size("sequence")
        wanted = "axes of {} devices, the ranks of the layout"
        remedy = "Pass sequence=, and make the layout for as many ranks as the axis has devices"
        fits, got = bool(self.sequence) and ranks == parts, f"{parts}: {self.words('sequence') or 'no axis'}"
        expect(fits, "sequence", wanted, got, remedy, ranks)

    def check_placed(self, name: str, x: Any, dims: Sequence[str | None]) -> None:
        """Raise for an array that is split over other axes, so that nothing is gathered silently.

        Arrays that are whole on all devices pass, and each device takes its part. Tracers on meshes without
        explicit axes pass, because their sharding is unknown.
        """
        sharding: Any = getattr(jax.typeof(x) if is_traced(x) else x, "sharding", None)
        if not is_traced(x) and x.committed:
            wanted, got = "the devices of the mask's mesh, in its order", f"{sharding}"
            remedy = "Place it by the mask's shard(...), or by NamedSharding(mesh, mask.spec())"
            devices = [*self.mesh.devices.flat]
            named = isinstance(sharding, NamedSharding)
            same = [*sharding.mesh.devices.flat] == devices if named else x.devices() == {*devices}
            expect(same, name, wanted, got, remedy, error=DeviceError)
        if not isinstance(sharding, NamedSharding):
            return
        for dim, entry in zip(dims, sharding.spec, strict=False):
            names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            names = tuple(n for n in names if sharding.mesh.shape[n] > 1)
            mine = tuple(n for n in self.names(dim) if self.mesh.shape[n] > 1)
            wanted = f"{_WORDS[dim]} {f'split over {mine}' if mine else 'whole'}"
            remedy = "Place it by the mask's shard(...) or spec(...)"
            if dim == "sequence" and not mine:
                remedy = f"Plan its exchange: layout.plan(...).on(mesh, rows=rows, sequence={names[:1]})"
            expect(not names or names == mine, f"sharding of {name}", wanted, f"{sharding.spec}", remedy)

    def words(self, dim: str | None) -> str:
        """Axes of a dim as text for messages."""
        return " x ".join(map(repr, self.names(dim)))


def _names(mesh: Mesh, dim: str, given: AxisNames) -> tuple[str, ...]:
    names = tuple(given) if isinstance(given, tuple | list) else () if given is None else (given,)
    for name in names:
        wanted, remedy = "the name of a mesh axis, a tuple of names, or None", "Pass names, not numbers"
        expect(isinstance(name, str), dim, wanted, repr(given), remedy, error=DtypeError)
        wanted = f"axes of the mesh, {', '.join(map(repr, mesh.axis_names))}"
        expect(name in mesh.axis_names, dim, wanted, repr(name), "Name one of them")
    return names  # type: ignore[return-value]
