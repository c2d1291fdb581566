"""A step with shard_map on one device: the step is traced again with a mesh of one device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var, primitives
from jax.sharding import AbstractMesh, Mesh

from attnspan_lab.doctor.jax.constraints import without_constraints
from attnspan_lab.doctor.jax.interpret import COMPARISONS, equations, folder_of, places_of
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced
from attnspan_lab.doctor.places import Place
from attnspan_lab.doctor.words import error_text

__all__ = ["Alone", "Incomparable", "NotAlone", "alone"]

#: Operators between devices. With one device, each returns its operands, perhaps with other dims of size 1.
_GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all")
_BETWEEN = {
    "psum",
    "psum_invariant",
    "pmax",
    "pmin",
    "pvary",
    "pcast",
    "ppermute",
    "reduce_scatter",
    *_GATHERS,
}
_CHOOSING = ("random_", "threefry", "rng_", "top_k", "approx_top_k", "sort")


class Incomparable(ValueError):
    """The step cannot be compared with one device. The message says why."""


class NotAlone(Incomparable):
    """The step on one device may be another function. The message says why, and what to return."""

    def __init__(self, why: str) -> None:
        super().__init__(f'{why}. Return "one_device", the function without shard_map')


@dataclass
class Alone:
    """A step whose parts for each device run on one device, and are no shard_map any more.

    Attributes:
        traced: The step.
        whole: The traced step with its shard_map.
        sizes: Sizes of the axes of the step's own meshes.
        numbers: Lines of numbers in shard_map that may be the size of an axis, by value and line.
        chosen: Operators in shard_map whose results may differ between numbers of devices in a right step.
    """

    traced: Traced
    whole: Traced
    sizes: frozenset[int]
    numbers: list[tuple[float, Place | None]]
    chosen: set[str]

    def without(self, numbers: list[tuple[float, Place | None]]) -> Traced:
        """The step with other numbers: as a size of 1 would give them."""
        made = _Inlined(self.sizes, swapped=numbers)
        return without_constraints(replace(self.whole, closed=made.closed(self.whole.closed)))


def alone(subject: JaxSubject, batch: Any, spread: Any) -> Alone:
    """Trace a step for one device. ``spread`` is the jaxpr of the step on its mesh.

    Raises:
        NotAlone: The step relies on its number of devices, or cannot be traced.
    """
    maps = list(equations(spread, "shard_map"))
    sizes = frozenset(n for x in maps for n in x.params["mesh"].shape.values() if n > 1)
    whole = _traced(subject, batch, maps[0].primitive)
    made = _Inlined(sizes)
    traced = without_constraints(replace(whole, closed=made.closed(whole.closed)))
    return Alone(traced, whole, sizes, list(dict.fromkeys(made.numbers)), made.chosen)


def _traced(subject: JaxSubject, batch: Any, primitive: Any) -> Traced:
    """Trace without a context's mesh, or with a mesh of one device if shard_map needs the context's mesh."""
    for mesh in (None, *([] if subject.mesh is None else [_of_one(subject.mesh)])):
        try:
            with jax.set_mesh(mesh), _one_device(primitive):  # type: ignore[arg-type]
                return Traced.of(subject, batch)
        except Exception as error:
            failed = error
    raise NotAlone(f"on one device, the step raises {error_text(failed)}") from failed


@contextmanager
def _one_device(primitive: Any) -> Iterator[None]:
    """Let shard_map trace for one device, and let code outside of JAX read meshes of one device.

    JAX remembers what it traced, so its caches are empty before and after.
    """
    bind = primitive.bind

    def bind_alone(*args: Any, mesh: Any, **params: Any) -> Any:
        return bind(*args, mesh=_of_one(mesh), **params)

    known = {k: Mesh.__dict__.get(k) for k in ("devices", "size", "shape", "axis_sizes")}
    jax.clear_caches()
    primitive.bind = bind_alone
    try:
        for name, own in known.items():
            setattr(Mesh, name, _Read(name, own))
        yield
    finally:
        for name, own in known.items():
            if own is None:
                delattr(Mesh, name)
            else:
                setattr(Mesh, name, own)
        del primitive.bind
        jax.clear_caches()


def _of_one(mesh: Any) -> Any:
    """Make the mesh with the same axes and one device."""
    names, ones = mesh.axis_names, (1,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(ones, names, axis_types=mesh.axis_types)
    return Mesh(np.asarray(jax.devices()[:1]).reshape(ones), names, axis_types=mesh.axis_types)


class _Read:
    """An attribute of a mesh. Code outside of JAX reads the attribute of a mesh of one device."""

    def __init__(self, name: str, own: Any) -> None:
        self.name, self.own = name, own

    def __get__(self, mesh: Any, owner: Any = None) -> Any:
        if mesh is None:
            return self
        found = mesh.__dict__[self.name] if self.own is None else self.own.__get__(mesh, owner)
        if sys._getframe(1).f_code.co_filename.startswith((folder_of(jax), __file__)):
            return found
        return getattr(_of_one(mesh), self.name)

    def __set__(self, mesh: Any, value: Any) -> None:
        mesh.__dict__[self.name] = value


@dataclass
class _Inlined:
    """Rewrites jaxprs: a shard_map over one device becomes a call, and collectives return their operands.

    Attributes:
        sizes: Sizes of the axes of the real mesh.
        swapped: Numbers that a size of 1 replaces.
        numbers: Numbers found in shard_map that may be such a size.
        chosen: Random operators in shard_map, and operators that rank the tokens of a device.
    """

    sizes: frozenset[int]
    swapped: list[tuple[float, Place | None]] = field(default_factory=list)
    numbers: list[tuple[float, Place | None]] = field(default_factory=list)
    chosen: set[str] = field(default_factory=set)

    def closed(self, closed: Any, ctx: Any = None) -> Any:
        """Rewrite a closed jaxpr. ``ctx`` is the context outside of shard_map, or None there."""
        return closed.replace(jaxpr=self.jaxpr(closed.jaxpr, ctx))

    def jaxpr(self, jaxpr: Any, ctx: Any) -> Any:
        """Rewrite a jaxpr. Types inside of shard_map name the mesh, so all variables are new."""
        env: dict[Any, Any] = {}

        def own(var: Any) -> Any:
            if isinstance(var, Literal):
                return Literal(var.val, _type(var.aval))
            return env.setdefault(var, Var(_type(var.aval)))

        ends = [[own(x) for x in vs] for vs in (jaxpr.constvars, jaxpr.invars)]
        eqns = []
        for eqn in jaxpr.eqns:
            given = [own(x) for x in self._numbers(eqn)] if ctx is not None else [*map(own, eqn.invars)]
            made = eqn.replace(
                invars=given, outvars=[own(x) for x in eqn.outvars], effects=_real(eqn.effects)
            )
            eqns += self._equations(made, ctx)
        outs = [own(x) for x in jaxpr.outvars]
        effects = _real(jaxpr.effects)
        return jaxpr.replace(constvars=ends[0], invars=ends[1], outvars=outs, eqns=eqns, effects=effects)

    def _equations(self, eqn: Any, ctx: Any) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "shard_map":
            inside = self.jaxpr(params["jaxpr"], _no_mesh())
            called = {"call_jaxpr": ClosedJaxpr(inside, ())}
            return [eqn.replace(primitive=primitives.closed_call_p, params=called, ctx=_no_mesh())]
        if ctx is None:
            inside = {k: self._inside(x, None) for k, x in params.items()}
            return [eqn.replace(params=inside, ctx=_no_mesh())]
        eqn = eqn.replace(ctx=ctx)
        self.chosen |= {name} if name.startswith(_CHOOSING) else set()
        if name == "axis_index":
            zero = Literal(np.int32(0), eqn.outvars[0].aval)
            return [eqn.replace(primitive=primitives.copy_p, params={}, invars=[zero])]
        if name in _BETWEEN:
            _require_one(eqn)
            return [_moved(eqn, x, y) for x, y in zip(eqn.invars, eqn.outvars, strict=True)]
        if {"axis_name", "axis_index_groups"} & set(params):
            raise NotAlone(f"the doctor cannot run the operator {name} on one device")
        inside = {k: self._inside(x, ctx) for k, x in params.items()}
        return [eqn.replace(params=inside)]

    def _inside(self, value: Any, ctx: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(self._inside(x, ctx) for x in value)
        if hasattr(value, "consts") and hasattr(value, "jaxpr"):
            return self.closed(value, ctx)
        if isinstance(value, AbstractMesh):
            return _no_mesh().cur_abstract_mesh
        return self.jaxpr(value, ctx) if hasattr(value, "eqns") else value

    def _numbers(self, eqn: Any) -> list[Any]:
        """List an equation's operands, and note numbers that may be the size of an axis."""
        found, place = [], next(iter(places_of(eqn)), None)
        for x in eqn.invars:
            value = _size_of_one(x, self.sizes, eqn.primitive.name)
            if value is not None:
                number = (float(x.val), place)
                self.numbers.append(number)
                x = Literal(np.asarray(value, x.aval.dtype)[()], x.aval) if number in self.swapped else x
            found.append(x)
        return found


def _size_of_one(x: Any, sizes: frozenset[int], name: str) -> float | None:
    """Return what a number would be with one device, if it may be the size of an axis, or None."""
    if not isinstance(x, Literal) or np.ndim(x.val) or np.asarray(x.val).dtype.kind not in "iuf":
        return None
    value = float(x.val)
    if any(np.isclose(value, y) for n in sizes for y in (n, 1 / n)):
        return 1.0
    return 0.0 if name in COMPARISONS and value + 1 in sizes and value > 0 else None


@cache
def _no_mesh() -> Any:
    """Return the context of an equation outside of shard_map and without a context's mesh."""
    with jax.set_mesh(None):  # type: ignore[arg-type]
        return jax.make_jaxpr(lambda x: x + 1)(0.0).jaxpr.eqns[0].ctx


def _type(aval: Any) -> Any:
    if not isinstance(aval, jax.core.ShapedArray):
        return aval
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _real(effects: Any) -> Any:
    """Leave out effects that only say that an axis is named."""
    return type(effects)(x for x in effects if type(x).__name__ != "NamedAxisEffect")


def _require_one(eqn: Any) -> None:
    """Refuse a collective that names devices which one device does not have."""
    pairs = [*eqn.params.get("perm", ()), *(eqn.params.get("axis_index_groups") or ())]
    axes = eqn.params.get("axes", ())
    if any(i for pair in pairs for i in pair) or any(isinstance(x, int) for x in axes):
        at = next((f" at line {x.line}" for x in places_of(eqn)), "")
        raise NotAlone(f"{eqn.primitive.name}{at} has a fixed number of devices")


def _moved(eqn: Any, x: Any, y: Any) -> Any:
    if x.aval.shape == y.aval.shape:
        return eqn.replace(primitive=primitives.copy_p, params={}, invars=[x], outvars=[y])
    params = {"new_sizes": y.aval.shape, "dimensions": None, "sharding": None}
    return eqn.replace(primitive=primitives.reshape_p, params=params, invars=[x], outvars=[y])
