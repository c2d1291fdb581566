"""Placement of the arrays of a call: looked at before JAX moves, gathers or refuses any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from attnspan.call.options import Given
from attnspan.errors import DeviceError, expect

from .partitioning import INSIDE, refuse

__all__ = ["check_devices", "check_sharding", "explicit_sharding", "in_auto_mode", "is_traced", "platform_of"]

# The axes of q, k and v by layout: batch, heads, and a dot for one that no device splits.
_AXES = {"bhsd": "bh..", "bshd": "b.h.", "thd": ".h."}


def is_traced(*arrays: Any) -> bool:
    """Whether any of the arrays has no values, and so lies nowhere yet."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def platform_of(*arrays: Any) -> str:
    """Platform of arrays, "cpu", "gpu" or "tpu"; of those that lie nowhere yet, the one where JAX runs.

    For traced arrays that is a guess, good for a warning: the program itself goes by the platform that it is
    compiled for.
    """
    placed = next((x for x in arrays if _devices(x)), None)
    if placed is not None:
        return str(next(iter(placed.devices())).platform)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return str(getattr(default, "platform", default) or jax.default_backend())


def check_devices(q: Any, k: Any, v: Any, mask: Any, given: Given) -> None:
    """Raise unless all arrays that were put somewhere lie on one device, or on one set of devices.

    Arrays that nobody put anywhere go where the others are. What a jitted function closes over is a part of
    it, wherever it lay: with traced q, k or v only the others of these three are looked at.
    """
    inputs = (q, k, v)
    committed = {where: None for where in map(_devices, inputs) if where}
    if len(committed) > 1:
        got = " and ".join(sorted(map(_words, committed)))
        wanted, remedy = "one device, or one set of devices", "Move them by jax.device_put"
        raise DeviceError("q, k and v", expected=wanted, got=got, remedy=remedy)
    if is_traced(*inputs):
        return
    place, owner = next(iter(committed), None), "q, k and v"
    for name, argument in (("mask", mask), *vars(given).items()):
        for where in filter(None, map(_devices, jax.tree.leaves(argument))):
            if place is None:
                place, owner = where, name
            elif where != place:
                remedy = "Move its arrays by jax.device_put"
                if len(place) > 1:
                    remedy += "(x, NamedSharding(mesh, PartitionSpec())), to all devices of the mesh"
                wanted, got = f"arrays on {_words(place)} (as {owner})", f"one on {_words(where)}"
                raise DeviceError(name, expected=wanted, got=got, remedy=remedy)


def _devices(x: Any) -> frozenset[Any] | None:
    """The devices of an array that was put there; None for any other value."""
    if is_traced(x) or not getattr(x, "committed", False):
        return None
    return frozenset(x.devices())


def _words(devices: frozenset[Any]) -> str:
    names = sorted(map(str, devices))
    return str(names) if len(names) <= 8 else f"{len(names)} devices, {names[0]} among them"


def check_sharding(layout: str, **inputs: Array) -> None:
    """Raise for q, k or v, by name, whose rows or elements are spread over devices without a plan.

    Shardings that are known when a call is made are checked here, others when XLA partitions the program.
    """
    for name, x in inputs.items():
        # Of a concrete array its own; of a traced one that of its type, which has one on explicit meshes.
        sharding: Any = jax.typeof(x).sharding if is_traced(x) else x.sharding
        for axis, mesh_axes in enumerate(sharding.spec if isinstance(sharding, NamedSharding) else ()):
            over = mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,) if mesh_axes else ()
            if _AXES[layout][axis : axis + 1] == "." and any(sharding.mesh.shape[a] > 1 for a in over):
                refuse(x.shape, axis, mesh_axes, name)


def explicit_sharding(q: Array) -> NamedSharding | None:
    """The sharding in the type of q, on a mesh whose axes are explicit; else None."""
    sharding = jax.typeof(q).sharding if isinstance(q, jax.Array) else None
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        wanted, got = "a shard_map over all axes of the mesh", f"one over {sharding.mesh.manual_axes}"
        expect(not sharding.mesh.manual_axes, "shard_map", wanted, got, f"Leave out axis_names; {INSIDE}")
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
    spec = (*q.spec, *(None,) * (len(_AXES[layout]) - len(q.spec)))
    sharding: Any = NamedSharding(q.mesh, PartitionSpec(*spec))
    if return_lse:
        rows = {axis: spec[i] for i, axis in enumerate(_AXES[layout])}
        lse = PartitionSpec(*([rows["b"]] if "b" in rows else []), rows["h"], None)
        sharding = (sharding, NamedSharding(q.mesh, lse))

    def call(*args: Any) -> Any:
        # Arrays apart from their masks: a mask's tree holds what is static of it, which has no sharding.
        leaves, tree = jax.tree.flatten(args)
        arrays = [x if isinstance(x, jax.Array) else None for x in leaves]

        def with_arrays(*found: Any) -> Any:
            filled = [x if y is None else y for x, y in zip(leaves, found, strict=True)]
            return run(*jax.tree.unflatten(tree, filled))

        return auto_axes(with_arrays, out_sharding=sharding)(*arrays)

    return call
