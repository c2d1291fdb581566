"""Which axes of a mesh split which dims of q, k and v."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...errors import DtypeError, OptionError, ShapeError

#: One axis of a mesh, several (the first is the outermost), or none.
AxisNames = str | Sequence[str] | None

#: What becomes of the dims of q, k and v, by the layout's names of them.
_SPLIT = ("batch", "heads", "sequence")


@dataclass(frozen=True)
class Axes:
    """The axes of a mesh by what they split; each is a tuple of names, empty where nothing is split.

    Args:
        mesh: All devices.
        batch: Axes that split batch rows.
        heads: Axes that split heads.
        sequence: Axes that split rows and keys.

    Example:
        >>> axes = Axes.of(jax.make_mesh((1, 1), ("data", "model")), "data", "model", None)
        >>> tuple(axes.spec("batch", None, "sequence"))
        ('data', None, None)
    """

    mesh: Mesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh, batch: AxisNames, heads: AxisNames, sequence: AxisNames) -> Axes:
        """Check the names against the mesh.

        Raises:
            DtypeError: The mesh is none, or a name is no string.
            OptionError: The mesh lacks an axis, or one would split two dims.
        """
        if not isinstance(mesh, Mesh):
            raise DtypeError(
                "shard: mesh",
                expected="a jax.sharding.Mesh",
                got=type(mesh).__name__,
                remedy="Make one by jax.make_mesh((2, 2), ('data', 'model'))",
            )
        given = {"batch": batch, "heads": heads, "sequence": sequence}
        named = {dim: _names(mesh, dim, names) for dim, names in given.items()}
        seen: dict[str, str] = {}
        for dim, names in named.items():
            for name in names:
                if name in seen:
                    raise OptionError(
                        f"shard: {dim}",
                        expected="axes that split one dim each",
                        got=f"{name!r}, which splits {seen[name]} already",
                        remedy="Give each dim axes of its own, or leave one out",
                    )
                seen[name] = dim
        return cls(mesh, **named)

    def names(self, dim: str | None) -> tuple[str, ...]:
        """The axes that split a dim, "batch", "heads" or "sequence"; none for any other."""
        return getattr(self, dim) if dim in _SPLIT else ()

    def size(self, dim: str | None) -> int:
        """Into how many parts a dim is split."""
        return math.prod(self.mesh.shape[name] for name in self.names(dim))

    def spec(self, *dims: str | None) -> PartitionSpec:
        """The spec of an array with these dims; None for a dim that is whole everywhere."""
        return PartitionSpec(*(_entry(self.names(dim)) for dim in dims))

    def sharding(self, *dims: str | None) -> NamedSharding:
        """The sharding of an array with these dims."""
        return NamedSharding(self.mesh, self.spec(*dims))

    @property
    def explicit(self) -> bool:
        """Are shardings part of the types of arrays?"""
        return any(kind == jax.sharding.AxisType.Explicit for kind in self.mesh.axis_types)

    def place(self, x: Any, *dims: str | None) -> jax.Array:
        """The array on the mesh, with these dims split; traceable and differentiable.

        Args:
            x: An array of NumPy or JAX, or a tracer.
            *dims: A name for each dim.

        Raises:
            ShapeError: A size that the axes do not divide.
        """
        for length, dim in zip(x.shape, dims, strict=True):
            self.check_divides(f"{dim} of an array of shape {tuple(x.shape)}", length, dim)
        sharding = self.sharding(*dims)
        if not isinstance(x, jax.core.Tracer):
            return jax.device_put(x, sharding)  # type: ignore[no-any-return]
        if self.explicit:
            return jax.sharding.reshard(x, sharding)  # type: ignore[no-any-return]
        return jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-any-return]

    def check_divides(self, what: str, length: int, dim: str | None) -> None:
        """Raise unless a length can be split evenly."""
        if length % self.size(dim):
            raise ShapeError(
                what,
                expected=f"a multiple of {self.size(dim)}, the devices of mesh axis {self.words(dim)}",
                got=str(length),
                remedy="Pad it, or split that dim over fewer devices",
            )

    def words(self, dim: str | None) -> str:
        """The axes of a dim for messages."""
        return " x ".join(map(repr, self.names(dim)))


def _entry(names: tuple[str, ...]) -> Any:
    return None if not names else names[0] if len(names) == 1 else names


def _names(mesh: Mesh, dim: str, given: AxisNames) -> tuple[str, ...]:
    several = given if isinstance(given, tuple | list) else () if given is None else (given,)
    names = tuple(several)
    for name in names:
        if not isinstance(name, str):
            raise DtypeError(
                f"shard: {dim}",
                expected="the name of a mesh axis, a tuple of names, or None",
                got=repr(given),
                remedy="Pass names; numbers of heads and of batch rows are num_heads and batch_size",
            )
        if name not in mesh.axis_names:
            raise OptionError(
                f"shard: {dim}",
                expected=f"axes of the mesh, {', '.join(map(repr, mesh.axis_names))}",
                got=repr(name),
                remedy="Name one of them",
            )
    return names
