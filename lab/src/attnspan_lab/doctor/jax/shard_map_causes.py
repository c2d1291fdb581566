"""Causes of wrong results inside of shard_map: masks, sums and out_specs that forget the other devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from attnspan_lab.doctor.jax.flow import Flow
from attnspan_lab.doctor.jax.interpret import COMPARISONS, Interpreter, bind, equations, places_of
from attnspan_lab.doctor.jax.subject import Traced, wide
from attnspan_lab.doctor.places import Place, at

__all__ = ["Blame", "blamed", "shifted"]

_MOVES = ("all_gather", "all_gather_invariant", "ppermute", "all_to_all")
_SUMS = ("psum", "psum_invariant", "reduce_scatter")
_JOINS = (*_SUMS, "pmax", "pmin", "all_gather", "all_gather_invariant")
_VARYING = ("pvary", "pcast")


@dataclass(frozen=True)
class Blame:
    """A line inside of shard_map that explains a wrong result.

    Attributes:
        places: The line, then lines that use its result.
        case: Case of the kind "rank-rows".
        values: Values in the texts of the case.
        iota: Length, line and mesh axis of positions that count from 0 on each device, or None.
    """

    places: tuple[Place, ...]
    case: str
    values: Mapping[str, Any] = field(default_factory=dict)
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
    for eqn in equations(closed, "shard_map"):
        given = [frozenset(_From("varies", axis=a) for a in _axes(x)) for x in eqn.params["in_specs"]]
        walk = _Walk()
        made = walk.follow(eqn.params["jaxpr"], given)
        found += walk.found
        found += _outside(places_of(eqn)[:1], made, [_axes(x) for x in eqn.params["out_specs"]])
    return min(found, key=lambda x: x[0])[1] if found else None


def _axes(spec: Any) -> set[str]:
    return {y for x in spec if x for y in (x if isinstance(x, tuple) else (x,))}


def _outside(here: Any, made: Sequence[_Facts], specs: Sequence[set[str]]) -> Iterator[tuple[int, Blame]]:
    for facts, spec in zip(made, specs, strict=True):
        for axis in sorted({x.axis for x in facts if x.what == "varies"} - spec):
            yield 2, Blame(here, "parts", {"axis": axis})


class _Walk(Flow[_Facts]):
    """Follows facts through a jaxpr of one device."""

    def __init__(self) -> None:
        super().__init__(frozenset())
        self.found: list[tuple[int, Blame]] = []

    def entered(self, eqn: Any, inside: Any, facts: list[_Facts], here: Place | None) -> list[_Facts]:
        """Follow a call, a branch, or two steps of a loop."""
        made = super().entered(eqn, inside, facts, here)
        if "num_carry" not in eqn.params and "body_nconsts" not in eqn.params:
            return made
        first = len(facts) - len(made) if "body_nconsts" in eqn.params else eqn.params["num_consts"]
        carried = made[: eqn.params.get("num_carry")]
        facts = [*facts]
        for i, x in enumerate(carried, first):
            facts[i] |= x
        return super().entered(eqn, inside, facts, here)

    def made(self, eqn: Any, facts: list[_Facts], here: Place | None) -> _Facts:
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
            self.found.append((1, Blame(at(here), "maximum", {"axis": [*axes, ""][0]})))
        if name in _JOINS:
            made -= {_From("varies", axis=x) for x in axes}
        if name in _MOVES:
            return made | {_From("moved", axis=x) for x in axes}
        if name in ("reduce_max", "pmax"):
            made |= {_From("max" if name == "reduce_max" else "all max")}
        if name in COMPARISONS and eqn.invars[0].aval.dtype.kind in "iub":
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
            self.found.append((0, Blame(at(*lines[:1], here), "ids")))
            return
        own = min(positions, key=lambda x: x.size)
        values, places = {"axis": axis, "size": own.size}, at(own.at, *lines[:1], here)
        iota = (own.size, own.at, axis)
        self.found.append((0, Blame(places, "positions", values, iota)))  # type: ignore[arg-type]


def _has(facts: _Facts, what: str) -> bool:
    return any(x.what == what for x in facts)


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
        is_here = name == "iota" and self.at(eqn)[:1] == (self.place,)
        if is_here and params["shape"][params["dimension"]] == self.length:
            made[0] = made[0] + jax.lax.axis_index(self.axis).astype(made[0].dtype) * self.length
        return made


def shifted(traced: Traced, iota: tuple[int, Place, str]) -> list[np.ndarray]:
    """Run a step on its mesh with the remedy for positions. Return its floating-point results."""
    made = _Shifted(iota)
    run = jax.jit(lambda *own: made.run(traced.closed.jaxpr, traced.closed.consts, own))
    return wide(run(*traced.leaves))
