"""Where the arrays of a call lie: one place for all of them, looked at before JAX moves or refuses any."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from ..errors import DeviceError
from ..options import Given


def platform_of(q: Array, k: Array, v: Array) -> str:
    """Where concrete arrays lie, "cpu", "gpu" or "tpu"; of traced ones, where JAX runs by default."""
    placed = [x for x in (q, k, v) if not isinstance(x, jax.core.Tracer)]
    if len(placed) == 3:
        return str(next(iter(placed[0].devices())).platform)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return str(getattr(default, "platform", default) or jax.default_backend())


def check_devices(q: Any, k: Any, v: Any, mask: Any, given: Given) -> None:
    """Raise unless all arrays that were put somewhere lie on one device, or on one set of devices.

    Arrays that nobody put anywhere go where the others are. What a jitted function closes over is a part of
    it, wherever it lay: with traced q, k or v only those of the three that are none are looked at.

    Raises:
        DeviceError: Naming the argument.
    """
    inputs = (q, k, v)
    committed = {where: None for where in map(_devices, inputs) if where}
    if len(committed) > 1:
        raise DeviceError(
            "q, k and v",
            expected="one device, or one set of devices",
            got=" and ".join(sorted(map(_words, committed))),
            remedy="Move them by jax.device_put",
        )
    if any(isinstance(x, jax.core.Tracer) for x in inputs):
        return
    place, owner = next(iter(committed), None), "q, k and v"
    for name, argument in (("mask", mask), *vars(given).items()):
        for where in filter(None, map(_devices, jax.tree.leaves(argument))):
            if place is None:
                place, owner = where, name
            elif where != place:
                raise _elsewhere(name, where, place, owner)


def _elsewhere(name: str, where: frozenset[Any], place: frozenset[Any], owner: str) -> DeviceError:
    remedy = "Move its arrays by jax.device_put"
    if len(place) > 1:
        remedy += "(x, NamedSharding(mesh, PartitionSpec())), to all devices of the mesh"
    return DeviceError(
        name, expected=f"arrays on {_words(place)} (as {owner})", got=f"one on {_words(where)}", remedy=remedy
    )


def _devices(x: Any) -> frozenset[Any] | None:
    """The devices of an array that was put there; None for any other value."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "committed", False):
        return None
    return frozenset(x.devices())


def _words(devices: frozenset[Any]) -> str:
    names = sorted(map(str, devices))
    return str(names) if len(names) <= 8 else f"{len(names)} devices, {names[0]} among them"
