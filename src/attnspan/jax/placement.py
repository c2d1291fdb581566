"""Placement of a call's arrays. It is checked before JAX moves, gathers or rejects any array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes

from attnspan.call.options import NO_OPTIONS, Given
from attnspan.errors import DeviceError, expect

from .partitioning import AXES_OF_Q, INSIDE, refuse

#: Devices of committed arrays, or None without one, and the argument that has them.
Place = tuple[frozenset[Any] | None, str]


def is_traced(*arrays: Any) -> bool:
    """Return whether any of the arrays is traced, so that it has no values and no device yet."""
    return any([isinstance(x, jax.core.Tracer) for x in arrays])  # noqa: C419  (a generator is slower)


def platform_of(place: Place | None) -> str:
    """Return the platform of a place: "cpu", "gpu" or "tpu". Without devices, it is JAX's default platform.

    For traced arrays this is a guess, used for warnings. The program uses the platform that it is compiled
    for.
    """
    if place is not None and place[0]:
        return str(next(iter(place[0])).platform)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return str(getattr(default, "platform", default) or jax.default_backend())


def check_devices(q: Any, k: Any, v: Any, given: Given) -> Place | None:
    """Raise unless all committed arrays are on one device, or on one set of devices. Return this place.

    Uncommitted arrays move to the others. A jitted function may close over arrays on any device, because they
    become part of the program. If q, k or v is traced, only these three are checked, and the place is None.
    """
    inputs = (q, k, v)
    committed = {where: None for where in map(_devices, inputs) if where}
    if len(committed) > 1:
        got = " and ".join(sorted(map(_words, committed)))
        wanted, remedy = "one device, or one set of devices", "Move them with jax.device_put"
        raise DeviceError("q, k and v", expected=wanted, got=got, remedy=remedy)
    if is_traced(*inputs):
        return None
    place: Place | None = (next(iter(committed), None), "q, k and v")
    for name, argument in vars(given).items() if given is not NO_OPTIONS else ():
        place = place if argument is None else check_place(place, name, argument)
    return place


def check_place(place: Place | None, name: str, argument: Any) -> Place | None:
    """Raise if an argument has an array on other devices than `place`. Return the place of both."""
    for where in filter(None, map(_devices, jax.tree.leaves(argument))) if place is not None else ():
        devices, owner = place  # type: ignore[misc]
        if devices is None:
            place = (where, name)
        elif where != devices:
            remedy = "Move its arrays with jax.device_put"
            if len(devices) > 1:
                remedy += "(x, NamedSharding(mesh, PartitionSpec())), to all devices of the mesh"
            wanted, got = f"arrays on {_words(devices)} (as {owner})", f"an array on {_words(where)}"
            raise DeviceError(name, expected=wanted, got=got, remedy=remedy)
    return place


def _devices(x: Any) -> frozenset[Any] | None:
    """Return the devices of a committed array, and None for any other value."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "committed", False):
        return None
    return frozenset(x.devices())


def _words(devices: frozenset[Any]) -> str:
    names = sorted(map(str, devices))
    return str(names) if len(names) <= 8 else f"{len(names)} devices, including {names[0]}"


def check_sharding(layout: str, **inputs: Array) -> None:
    """Raise if q, k or v is split over devices along its sequence or head dim without a plan.

    The error names the array. Shardings that are known when a call is made are checked here, others when XLA
    partitions the program.
    """
    for name, x in inputs.items():
        # A concrete array has a sharding. A traced array's type has one on explicit meshes.
        sharding: Any = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
        for axis, mesh_axes in enumerate(sharding.spec if isinstance(sharding, NamedSharding) else ()):
            over = mesh_axes if isinstance(mesh_axes, tuple) else (mesh_axes,) if mesh_axes else ()
            if AXES_OF_Q[layout][axis : axis + 1] == "." and any(sharding.mesh.shape[a] > 1 for a in over):
                refuse(x.shape, axis, mesh_axes, name)


def explicit_sharding(q: Array) -> NamedSharding | None:
    """Return the sharding in q's type if the mesh has explicit axes, else None."""
    sharding = jax.typeof(q).sharding if isinstance(q, jax.Array) else None
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        wanted, got = "a shard_map over all axes of the mesh", f"a shard_map over {sharding.mesh.manual_axes}"
        expect(not sharding.mesh.manual_axes, "shard_map", wanted, got, f"Leave out axis_names. Or, {INSIDE}")
        return sharding
    return None


def in_auto_mode(run: Callable[..., Any], q: NamedSharding, layout: str, return_lse: bool) -> Any:
    """Return `run` in automatic mode, where the compiler propagates shardings, with explicit results.

    Args:
        run: Function that returns out, or out and lse.
        q: Sharding of the queries.
        layout: Order of their axes.
        return_lse: Whether `run` returns both.
    """
    spec = (*q.spec, *(None,) * (len(AXES_OF_Q[layout]) - len(q.spec)))
    sharding: Any = NamedSharding(q.mesh, PartitionSpec(*spec))
    if return_lse:
        rows = {axis: spec[i] for i, axis in enumerate(AXES_OF_Q[layout])}
        lse = PartitionSpec(*([rows["b"]] if "b" in rows else []), rows["h"], None)
        sharding = (sharding, NamedSharding(q.mesh, lse))

    def call(*args: Any) -> Any:
        # Only arrays are passed: the static fields in a mask's tree have no sharding.
        leaves, tree = jax.tree.flatten(args)
        arrays = [x if isinstance(x, jax.Array) else None for x in leaves]

        def with_arrays(*found: Any) -> Any:
            filled = [x if y is None else y for x, y in zip(leaves, found, strict=True)]
            return run(*jax.tree.unflatten(tree, filled))

        return auto_axes(with_arrays, out_sharding=sharding)(*arrays)

    return call
