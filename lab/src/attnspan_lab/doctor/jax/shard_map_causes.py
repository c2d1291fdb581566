"""Causes of wrong results inside of shard_map: masks, sums and out_specs that forget the other devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from attnspan_lab.doctor.jax.interpret import Interpreter, bind, equations, inner, is_jaxs, places_of
from attnspan_lab.doctor.jax.subject import Traced
from attnspan_lab.doctor.places import Place

__all__ = ["Blame", "blamed", "shifted"]

_MOVES = ("all_gather", "all_gather_invariant", "ppermute", "all_to_all")
_SUMS = ("psum", "psum_invariant", "reduce_scatter")
_JOINS = (*_SUMS, "pmax", "pmin", "all_gather", "all_gather_invariant")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_VARYING = ("pvary", "pcast")


@dataclass(frozen=True)
class Blame:
    """A line inside of shard_map that explains a wrong result.

    Attributes:
        places: The line, then lines that use its result.
        cause, remedy: Of the finding.
        iota: Length, line and mesh axis of positions that count from 0 on each device, or None.
    """

    places: tuple[Place, ...]
    cause: str
    remedy: str
    iota: tuple[int, Place, str] | None = None


@dataclass(frozen=True)
class _From:
    """A fact about an array: it depends on this.

    Attributes:
        what: "moved" (comes from other devices), "device" (axis_index), "iota", "compared", "varies" (differs
            between devices of an axis), "max" or "all max" (a maximum of this device or of all).
        at: The line.
        axis: Axis of the mesh.
        size: Length of an iota.
    """

    what: str
    at: Place | None = None
    axis: str = ""
    size: int = 0


_Facts = frozenset[_From]


def blamed(closed: Any) -> Blame | None:
    """Find the line that explains why a step with shard_map differs from one device, if one is known."""
    found: list[tuple[int, Blame]] = []
    for eqn in equations(closed):
        if eqn.primitive.name == "shard_map":
            specs = [_axes(x) for x in eqn.params["in_specs"]]
            given = [frozenset(_From("varies", axis=a) for a in x) for x in specs]
            walk = _Walk()
            made = walk.follow(eqn.params["jaxpr"], given, None)
            found += walk.found
            here = places_of(eqn)[:1]
            found += _outside(here, made, [_axes(x) for x in eqn.params["out_specs"]])
    return min(found, key=lambda x: x[0])[1] if found else None


def _axes(spec: Any) -> set[str]:
    return {y for x in spec if x for y in (x if isinstance(x, tuple) else (x,))}


def _outside(here: Any, made: Sequence[_Facts], specs: Sequence[set[str]]) -> Iterator[tuple[int, Blame]]:
    for facts, spec in zip(made, specs, strict=True):
        for axis in sorted({x.axis for x in facts if x.what == "varies"} - spec):
            cause = f"out_specs says that the devices along {axis!r} hold equal results, and they differ"
            remedy = f'Add the parts: jax.lax.psum(x, "{axis}"). Or name the axis in out_specs'
            yield 2, Blame(here, cause, remedy)


class _Walk:
    """Follows facts through a jaxpr of one device."""

    def __init__(self) -> None:
        self.found: list[tuple[int, Blame]] = []

    def follow(self, jaxpr: Any, given: Sequence[_Facts], at: Place | None) -> list[_Facts]:
        """Return the facts of the results."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        of: dict[Any, _Facts] = dict(zip(jaxpr.invars, given, strict=True))

        def read(var: Any) -> _Facts:
            return frozenset() if isinstance(var, Literal) else of.get(var, frozenset())

        for eqn in jaxpr.eqns:
            facts, here = [read(x) for x in eqn.invars], at or next(iter(places_of(eqn)), None)
            inside = inner(eqn)
            made = self._entered(eqn, inside[-1], facts, here) if inside else []
            if len(made) != len(eqn.outvars):
                made = [self._made(eqn, facts, here)] * len(eqn.outvars)
            of.update(zip(eqn.outvars, made, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _entered(self, eqn: Any, inside: Any, facts: list[_Facts], here: Place | None) -> list[_Facts]:
        """Follow a call, a branch, or two steps of a loop."""
        size = len(getattr(inside, "jaxpr", inside).invars)
        facts, at = facts[max(len(facts) - size, 0) :], here if is_jaxs(inside) else None
        made = self.follow(inside, facts, at)
        first = eqn.params.get("num_consts", eqn.params.get("body_nconsts"))
        if first is None:
            return made
        count = eqn.params.get("num_carry", size - first)
        carry = [x | y for x, y in zip(facts[first : first + count], made, strict=False)]
        return self.follow(inside, [*facts[:first], *carry, *facts[first + count :]], at)

    def _made(self, eqn: Any, facts: list[_Facts], here: Place | None) -> _Facts:
        """Return the facts of an operator's results, and note an operator that explains the fault."""
        name, params = eqn.primitive.name, eqn.params
        axes = params.get("axis_name", params.get("axes", ()))
        axes = [x for x in (axes if isinstance(axes, tuple) else (axes,)) if isinstance(x, str)]
        made = frozenset[_From]().union(*facts)
        if name == "iota":
            return frozenset({_From("iota", here, size=params["shape"][params["dimension"]])})
        if name == "axis_index":
            return frozenset({_From("device"), *(_From("varies", axis=x) for x in axes)})
        if name in _SUMS and _has(made, "max") and not _has(made, "all max"):
            self.found.append((1, Blame(_lines(here), _OWN_MAXIMUM, _SCALE % axes[0] if axes else "")))
        if name in _JOINS:
            made -= {_From("varies", axis=x) for x in axes}
        if name in _MOVES:
            return made | {_From("moved", axis=x) for x in axes}
        if name in ("reduce_max", "pmax"):
            made |= {_From("max" if name == "reduce_max" else "all max")}
        if name in _COMPARED and eqn.invars[0].aval.dtype.kind in "iub":
            made |= {_From("compared", here)}
        elif len(facts) > 1:
            self._mask(facts, here)
        return made

    def _mask(self, facts: list[_Facts], here: Place | None) -> None:
        """Note scores of keys of other devices, with a mask that knows nothing of other devices."""
        scores = [x for x in facts if _has(x, "moved")]
        local = [x for x in facts if _has(x, "compared") and not _has(x, "moved") and not _has(x, "device")]
        if not scores or not local:
            return
        axis = next(x.axis for x in scores[0] if x.what == "moved")
        lines = tuple(x.at for x in local[0] if x.what == "compared" and x.at is not None)
        positions = [x for x in local[0] if x.what == "iota" and x.at is not None]
        if not positions:
            self.found.append((0, Blame((*lines[:1], *_lines(here)), _LOCAL_IDS, _SEND_IDS)))
            return
        own = min(positions, key=lambda x: x.size)
        text = f'jax.lax.axis_index("{axis}") * n + jnp.arange(n), where n is the length on one device'
        remedy = f"Count from the first token of the whole sequence: {text} ({own.size} here). {_NOT_CAUSAL}"
        places = (*_lines(own.at), *lines[:1], *_lines(here))
        iota = (own.size, own.at, axis)
        self.found.append((0, Blame(places, _LOCAL_POSITIONS, remedy, iota)))  # type: ignore[arg-type]


def _has(facts: _Facts, what: str) -> bool:
    return any(x.what == what for x in facts)


def _lines(here: Place | None) -> tuple[Place, ...]:
    return () if here is None else (here,)


_LOCAL_POSITIONS = """\
The mask's positions count from 0 on each device, and the scores have keys of other devices. The mask \
depends neither on axis_index nor on an array of another device"""
_NOT_CAUSAL = "If you pass is_causal=True, pass a mask instead: is_causal=True counts from 0 on each device"
_LOCAL_IDS = """\
The mask compares only ids of this device, and the scores have keys of other devices"""
_SEND_IDS = "Send the ids of the keys with the keys, by the same all_gather, ppermute or all_to_all"
_OWN_MAXIMUM = (
    "Each device subtracts its own maximum in its softmax, and the parts are added as if it were the same"
)
_SCALE = """\
Use one maximum: m = jax.lax.pmax(m_here, "%s"). Multiply the sums of this device by jnp.exp(m_here - m) \
before psum, and divide by the sum of the weights after psum"""


class _Shifted(Interpreter):
    """Evaluates a step on its mesh, with positions that count from the first token of the sequence."""

    def __init__(self, iota: tuple[int, Place, str]) -> None:
        super().__init__()
        self.length, self.place, self.axis = iota

    def apply(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "shard_map":
            run = jax.shard_map(  # type: ignore[no-untyped-call]
                lambda *own: self.run(params["jaxpr"], (), own),
                mesh=params["mesh"],
                in_specs=params["in_specs"],
                out_specs=list(params["out_specs"]),
                axis_names=set(params["newly_manual_axes"]),
                check_vma=False,
            )
            return list(run(*values))  # type: ignore[no-untyped-call]
        if name in _VARYING:
            return values
        if name == "psum_invariant":
            return list(jax.lax.psum(values, params["axes"]))  # type: ignore[no-untyped-call]
        made = bind(eqn, values)
        if (
            name == "iota"
            and self.at(eqn)[:1] == (self.place,)
            and params["shape"][params["dimension"]] == self.length
        ):
            made[0] = made[0] + jax.lax.axis_index(self.axis).astype(made[0].dtype) * self.length
        return made


def shifted(traced: Traced, iota: tuple[int, Place, str]) -> list[np.ndarray]:
    """Run a step on its mesh with the remedy for positions. Return its floating-point results."""
    made = _Shifted(iota)
    run = jax.jit(lambda *own: made.run(traced.closed.jaxpr, traced.closed.consts, own))
    results = run(*traced.leaves)
    return [np.asarray(x, np.float64) for x in results if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]
