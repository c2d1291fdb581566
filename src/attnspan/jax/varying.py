"""Arrays inside `shard_map`, whose types say over which mesh axes their values differ.

In `shard_map`, the type of an array names the axes over which the array varies, and operations need equal
axes. A kernel's results vary as its arguments do. The zeros that a loop starts from must be declared to vary
as well.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

#: Names of mesh axes.
Axes = frozenset[str]


def axes_of(*trees: Any) -> Axes:
    """Return the axes over which any array of some pytrees varies. There are none outside of `shard_map`."""
    return axes_of_types(*map(jax.typeof, jax.tree.leaves(trees)))


def axes_of_types(*types: Any) -> Axes:
    """Return the axes over which arrays of some types vary, as `axes_of` does for arrays."""
    found: Axes = frozenset()
    for type_ in types:
        kind = getattr(type_, "manual_axis_type", None)  # JAX has renamed the attribute.
        found |= getattr(type_, "vma", frozenset()) if kind is None else kind.varying
    return found


def spread(tree: Any, axes: Axes) -> Any:
    """Return the same arrays, declared to vary over the axes. Gradients are summed over the added axes."""
    if not axes:
        return tree

    def cast(x: Any) -> Any:
        missing = tuple(sorted(axes - axes_of(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def declared(shape: tuple[int, ...], dtype: Any, axes: Axes) -> jax.ShapeDtypeStruct:
    """Declare a kernel's result that varies over the axes."""
    if not axes:
        return jax.ShapeDtypeStruct(shape, dtype)
    kind = getattr(jax.sharding, "ManualAxisType", None)
    keyword = {"vma": axes} if kind is None else {"manual_axis_type": kind(varying=axes)}
    return jax.ShapeDtypeStruct(shape, dtype, **keyword)
