"""Meshes and sharding constraints in a step: the user's lines, and operands of attention that they copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

import jax
from jax.extend.core import primitives
from jax.sharding import NamedSharding

from attnspan_lab.console import bytes_text
from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.hlo import Instruction, Program
from attnspan_lab.doctor.jax.interpret import constants, equations, jaxprs, places_of
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced, whole
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.values import RESHAPES, Value
from attnspan_lab.doctor.jax.watch import Attention
from attnspan_lab.doctor.places import Place

__all__ = [
    "Constraint",
    "constraints",
    "found_mesh",
    "gathers_text",
    "unsharded",
    "without_constraints",
]

# Work of all devices at the line of a constraint, in the work of one device, that the constraint explains.
_MORE = 1.1


def found_mesh(subject: JaxSubject, closed: Any) -> Any:
    """Find the mesh of the step's constraints, jitted functions, arrays, or shard_map."""
    arrays = [*jax.tree.leaves((subject.variables, subject.batches)), *constants(closed)]
    shardings = [x.params["sharding"] for x in equations(closed, "sharding_constraint")]
    for x in equations(closed):
        shardings += [y for n in ("in_shardings", "out_shardings") for y in x.params.get(n, ())]
    shardings += [getattr(x, "sharding", None) for x in arrays]
    meshes = [x.mesh for x in shardings if isinstance(x, NamedSharding)]
    meshes += [x.params["mesh"] for x in equations(closed, "shard_map")]
    return next((x for x in meshes if isinstance(x, jax.sharding.Mesh) and x.size > 1), None)


def without_constraints(traced: Traced) -> Traced:
    """Leave the mesh out of a traced step, so that one device can run the step."""
    return replace(traced, closed=_plain(traced.closed))


def _plain(jaxpr: Any) -> Any:
    if hasattr(jaxpr, "consts"):
        consts = [whole(x) for x in jaxpr.consts]
        return jaxpr.replace(jaxpr=_plain(jaxpr.jaxpr), consts=consts)
    return jaxpr.replace(eqns=[_plain_equation(x) for x in jaxpr.eqns])


def _plain_equation(eqn: Any) -> Any:
    name = eqn.primitive.name
    if name == "sharding_constraint":
        return eqn.replace(primitive=primitives.copy_p, params={})
    if name == "shard_map":
        return eqn
    return eqn.replace(params={k: _inside(k, x) for k, x in eqn.params.items()})


def _inside(name: str, value: Any) -> Any:
    """Leave the mesh out of a parameter of an equation."""
    if type(value) in (tuple, list):
        return type(value)(_inside(name, x) for x in value)
    if isinstance(value, NamedSharding):
        return _unspecified() if name in ("in_shardings", "out_shardings") else None
    return _plain(value) if hasattr(value, "eqns") or hasattr(value, "consts") else value


@cache
def _unspecified() -> Any:
    """Return the value with which jax.jit says that no sharding was asked for."""
    return jax.make_jaxpr(jax.jit(lambda x: x))(0.0).jaxpr.eqns[0].params["in_shardings"][0]


@dataclass(frozen=True)
class Constraint:
    """A sharding constraint of a step.

    Attributes:
        shape: Shape of the array, over all devices.
        spec: Axes of the mesh for each dim of the array.
        mesh: Sizes of the mesh's axes.
        lines: All lines of the user's, the innermost first.
        places: The same lines. The line that asks for the constraint comes before helpers that it calls.
        made: The line that makes the array.
        sharding: The constraint itself.
    """

    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    mesh: dict[str, int]
    lines: tuple[Place, ...]
    places: tuple[Place, ...]
    made: tuple[Place, ...]
    sharding: NamedSharding

    @property
    def text(self) -> str:
        """The spec as code."""
        return _code(self.spec)

    @property
    def axes(self) -> set[str]:
        """Axes of the mesh that split the array."""
        return {x for own in self.spec for x in own if self.mesh[x] > 1}


def _code(spec: tuple[tuple[str, ...], ...]) -> str:
    return f"P({', '.join(repr(x[0] if len(x) == 1 else x or None) for x in spec)})"


def constraints(closed: Any) -> Iterator[Constraint]:
    """Yield the constraints of a step, also those in loops and called functions."""
    for jaxpr in (getattr(x, "jaxpr", x) for x in jaxprs(closed)):
        for eqn in jaxpr.eqns:
            sharding = eqn.params.get("sharding")
            if eqn.primitive.name != "sharding_constraint" or not isinstance(sharding, NamedSharding):
                continue
            shape, lines = eqn.outvars[0].aval.shape, places_of(eqn)
            if not lines:
                continue
            spec = [x if isinstance(x, tuple) else (x,) if isinstance(x, str) else () for x in sharding.spec]
            spec += [()] * (len(shape) - len(spec))
            makes = _makers(jaxpr, eqn.invars[0])
            uses = [x for x in jaxpr.eqns if any(y is eqn.outvars[0] for y in x.invars)]
            first = _asking(lines, [*makes[:1], *uses])
            places, made = (
                (*lines[first:], *lines[:first]),
                tuple(y for x in makes[-1:] for y in places_of(x)[:1]),
            )
            yield Constraint(shape, tuple(spec), dict(sharding.mesh.shape), lines, places, made, sharding)


def _makers(jaxpr: Any, var: Any) -> list[Any]:
    """List the equation that makes an array, and the equations before it that make the same elements."""
    found: list[Any] = []
    while made := [x for x in jaxpr.eqns if any(y is var for y in x.outvars)]:
        found += made
        if made[0].primitive.name not in RESHAPES:
            break
        var = made[0].invars[0]
    return found


def _asking(lines: tuple[Place, ...], around: list[Any]) -> int:
    """Find the line that asks for a constraint: in a function that makes the array, or that uses the result.

    A function that does neither is a helper, which passes arrays on.
    """
    functions = {(y.file, y.function) for x in around for y in places_of(x)}
    return next((i for i, x in enumerate(lines) if (x.file, x.function) in functions), 0)


def unsharded(
    calls: list[Attention], given: list[Constraint], program: Program, alone: Program, devices: int
) -> Iterator[Finding]:
    """Yield operands of attention whose constraint leaves out an axis that splits another operand.

    Args:
        calls: Attention calls of the step.
        given: Constraints of the step.
        program: The compiled step on the mesh.
        alone: The compiled step on one device.
        devices: Number of devices.
    """
    by_lines = {(x.lines, x.sharding): x for x in given}
    found: list[tuple[Constraint, Constraint, str, int, Attention]] = []
    for call in calls:
        held = [x for y in call.operands if (x := _constraint_of(y, by_lines)) is not None]
        for pair in product(held, held):
            found += [(*pair, *left, call) for left in _left_out(*pair, call)]
    for (place, axis), site in grouped(found, lambda x: (x[0].places[0], x[2])).items():
        (own, other, _, dim, _), many = site[0], {x[4] for x in site}
        own_lines = {*own.lines[: own.lines.index(place) + 1], *own.made}
        lines = own_lines | {x for y in many for x in y.lines}
        evidence = []
        gathers = [x for x in program.gathers if lines & {*x.places[:1]}]
        if gathers:
            evidence.append(gathers_text(gathers))
        work = [sum(x.work.get(line, 0) for line in own_lines) for x in (program, alone)]
        if devices * work[0] > _MORE * work[1]:
            times = devices * work[0] / max(work[1], 1)
            evidence.append(f"all devices compute {times:.1f} times the work of one device here")
        if not evidence:
            continue  # XLA's partitioner found a better way.
        spec = _code((*own.spec[:dim], (*own.spec[dim], axis), *own.spec[dim + 1 :]))
        what = f"An operand of attention is whole along the mesh axis {axis!r}, and another operand is split"
        said = f"its constraint is {own.text}, the constraint of another operand {other.text}", *evidence
        more = {"values": {"spec": spec}, "count": len(many)}
        yield finding("rank-replicated.constraint", what, own.places[:3], *said, **more)


def gathers_text(gathers: list[Instruction]) -> str:
    """Count all-gathers and their bytes."""
    size = bytes_text(sum(x.bytes for x in gathers))
    return f"{len(gathers)} all-gathers of the compiled program, {size} on each device"


def _constraint_of(operand: Value, given: dict[Any, Constraint]) -> Constraint | None:
    """Find the last constraint of an operand, before operators that keep its size or repeat it."""
    value: Value | None = operand
    while value is not None:
        if (value.places, value.sharding) in given:
            return given[value.places, value.sharding]
        size, copies = value.size, value.name in RESHAPES or value.distinct < value.size
        value = next((x for x in value.parents if copies or x.size == size), None)
    return None


def _left_out(own: Constraint, other: Constraint, call: Attention) -> Iterator[tuple[str, int]]:
    """Yield axes that split a dim of another operand, and could split the same dim of this one.

    A dim of tokens is left out: each query needs all keys.
    """
    lengths = sorted(call.scores[0])[-2:] if call.visible is None else call.visible.shape[1:]
    if len(own.shape) != len(other.shape):
        return
    tokens = next((i for i, n in enumerate(other.shape) if i and n in lengths), None)
    for dim, axes in enumerate(other.spec):
        split = prod(own.mesh[x] for x in own.spec[dim])
        for axis in set(axes) - own.axes:
            if dim != tokens and own.mesh[axis] > 1 and own.shape[dim] % (split * own.mesh[axis]) == 0:
                yield axis, dim
