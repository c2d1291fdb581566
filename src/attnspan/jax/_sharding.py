"""The check of shardings that are known when a call is made; others are checked when XLA partitions."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding

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
