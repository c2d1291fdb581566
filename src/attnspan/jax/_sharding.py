"""The check of shardings that are known when a call is made; others are checked when XLA partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from ._partitioning import refuse

# The axes that no device splits, by layout, as `_partitioning` names them.
_WORDS = {"bhsd": "bh..", "bshd": "b.h.", "thd": ".h."}


def check_sharding(layout: str, **inputs: Array) -> None:
    """Raise for q, k or v whose rows or elements are spread over devices without a plan.

    Args:
        layout: Order of their axes.
        **inputs: The arrays by name.

    Raises:
        OptionError: Naming the axis.
    """
    word = _WORDS[layout]
    for name, x in inputs.items():
        sharding = _sharding_of(x)
        if not isinstance(sharding, NamedSharding):
            continue
        for axis, mesh_axes in enumerate(sharding.spec):
            if axis < len(word) and word[axis] == "." and _is_split(sharding.mesh, mesh_axes):
                refuse(x.shape, axis, mesh_axes, name)


def _sharding_of(x: Array) -> Any:
    """Of a concrete array its own; of a traced one that of its type, which has one on explicit meshes."""
    return jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding


def _is_split(mesh: Any, mesh_axes: Any) -> bool:
    if mesh_axes is None:
        return False
    names = mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,)
    return any(mesh.shape[name] > 1 for name in names)


def explicit_sharding(q: Array) -> NamedSharding | None:
    """The sharding in the type of q, on a mesh whose axes are explicit; else None."""
    sharding = jax.typeof(q).sharding if isinstance(q, jax.Array) else None
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return sharding
    return None


def in_auto_mode(run: Callable[..., Any], q: NamedSharding, layout: str, return_lse: bool) -> Any:
    """`run` where the compiler propagates shardings, with results of explicit ones again.

    Args:
        run: Function that returns out, or out and lse.
        q: Sharding of the queries.
        layout: Order of their axes.
        return_lse: It returns both.
    """
    spec = (*q.spec, *(None,) * (len(_WORDS[layout]) - len(q.spec)))
    sharding: Any = NamedSharding(q.mesh, PartitionSpec(*spec))
    if return_lse:
        rows = {axis: spec[i] for i, axis in enumerate(_WORDS[layout])}
        lse = PartitionSpec(*([rows["b"]] if "b" in rows else []), rows["h"], None)
        sharding = (sharding, NamedSharding(q.mesh, lse))

    def call(*args: Any) -> Any:
        # Apart from their masks: what of a mask is an array is part of its tree, and shardings are none.
        leaves, tree = jax.tree.flatten(args)
        arrays = [x if isinstance(x, jax.Array) else None for x in leaves]

        def with_arrays(*found: Any) -> Any:
            filled = [x if y is None else y for x, y in zip(leaves, found, strict=True)]
            return run(*jax.tree.unflatten(tree, filled))

        return auto_axes(with_arrays, out_sharding=sharding)(*arrays)

    return call
