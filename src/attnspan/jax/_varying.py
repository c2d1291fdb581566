"""Arrays inside `shard_map`: over which axes of the mesh their values differ, as their types say.

There a type names the axes over which its array varies, and operations want equal ones: what a kernel makes
varies as its arguments do, and zeros that a loop starts from must say so too.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

Axes = frozenset[str]


def axes_of(*trees: Any) -> Axes:
    """The axes over which any array of some pytrees varies; none outside of `shard_map`.

    Example:
        >>> axes_of(jax.numpy.zeros(2), None)
        frozenset()
    """
    found: Axes = frozenset()
    for x in jax.tree.leaves(trees):
        found |= _axes(jax.typeof(x))
    return found


def spread(tree: Any, axes: Axes) -> Any:
    """The same arrays, as ones that vary over the axes. Gradients are summed over those that are new.

    Example:
        >>> spread((jax.numpy.zeros(2), None), frozenset())[1] is None
        True
    """
    if not axes:
        return tree
    return jax.tree.map(lambda x: _cast(x, tuple(sorted(axes - axes_of(x)))), tree)


def declared(shape: tuple[int, ...], dtype: Any, axes: Axes) -> jax.ShapeDtypeStruct:
    """What a kernel is told of a result that varies over the axes.

    Example:
        >>> declared((2,), "float32", frozenset()).shape
        (2,)
    """
    return jax.ShapeDtypeStruct(shape, dtype, **as_keyword(axes))


def as_keyword(axes: Axes) -> dict[str, Any]:
    """The axes as an argument of types; JAX has renamed it.

    Example:
        >>> as_keyword(frozenset())
        {}
    """
    if not axes:
        return {}
    kind = getattr(jax.sharding, "ManualAxisType", None)
    return {"vma": axes} if kind is None else {"manual_axis_type": kind(varying=axes)}


def axes_of_types(*types: Any) -> Axes:
    """As `axes_of`, of the types of arrays.

    Example:
        >>> axes_of_types(jax.typeof(jax.numpy.zeros(2)))
        frozenset()
    """
    return frozenset().union(*map(_axes, types))


def _axes(type_: Any) -> Axes:
    kind = getattr(type_, "manual_axis_type", None)
    found: Axes = getattr(type_, "vma", frozenset()) if kind is None else kind.varying
    return found


def _cast(x: Any, axes: tuple[str, ...]) -> Any:
    return lax.pcast(x, axes, to="varying") if axes else x
