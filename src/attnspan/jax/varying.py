"""Arrays inside `shard_map`: over which axes of the mesh their values differ, as their types say.

There a type names the axes over which its array varies, and operations want equal ones: what a kernel makes
varies as its arguments do, and zeros that a loop starts from must say so too.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

__all__ = ["Axes", "axes_of", "axes_of_types", "declared", "spread"]

#: Names of mesh axes.
Axes = frozenset[str]


def axes_of(*trees: Any) -> Axes:
    """The axes over which any array of some pytrees varies; none outside of `shard_map`."""
    return axes_of_types(*map(jax.typeof, jax.tree.leaves(trees)))


def axes_of_types(*types: Any) -> Axes:
    """As `axes_of`, of the types of arrays."""
    found: Axes = frozenset()
    for type_ in types:
        kind = getattr(type_, "manual_axis_type", None)  # JAX has renamed it.
        found |= getattr(type_, "vma", frozenset()) if kind is None else kind.varying
    return found


def spread(tree: Any, axes: Axes) -> Any:
    """The same arrays, as ones that vary over the axes. Gradients are summed over those that are new."""
    if not axes:
        return tree

    def cast(x: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def declared(shape: tuple[int, ...], dtype: Any, axes: Axes) -> jax.ShapeDtypeStruct:
    """Declare a result that varies over the axes, for a kernel."""
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    kind = getattr(jax.sharding, "ManualAxisType", None)
    keyword = {"vma": axes} if kind is None else {"manual_axis_type": kind(varying=axes)}
    return jax.ShapeDtypeStruct(shape, dtype, **keyword)
