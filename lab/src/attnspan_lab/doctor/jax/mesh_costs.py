"""Costs of a step on a mesh: operands that devices gather, and work that they repeat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from attnspan_lab.doctor.findings import Finding
from attnspan_lab.doctor.grouped import grouped
from attnspan_lab.doctor.jax.constraints import Constraint, constraints, gathers_text, unsharded
from attnspan_lab.doctor.jax.hlo import Instruction, Program
from attnspan_lab.doctor.jax.interpret import equations, places_of
from attnspan_lab.doctor.jax.recompiles import place_of
from attnspan_lab.doctor.jax.subject import JaxSubject, Traced
from attnspan_lab.doctor.jax.texts import finding
from attnspan_lab.doctor.jax.watch import Attention
from attnspan_lab.doctor.places import Place

__all__ = ["MeshCosts"]

_REPEATED = 1.5  # work of all devices, in the work of one device, that is a finding


@dataclass
class MeshCosts:
    """The programs of a step on a mesh and on one device.

    Args:
        subject: The subject, with its mesh.
        sharded: The step on the mesh.
        one: The step on one device.
        calls: Attention calls of the step.
    """

    subject: JaxSubject
    sharded: Traced
    one: Traced
    calls: list[Attention]

    def findings(self) -> Iterator[Finding]:
        """Yield operands that are whole, gathers and repeated work. A line has one of these findings."""
        narrow = list(
            unsharded(self.calls, self._constraints, self._program, self._alone, self.subject.mesh.size)
        )
        named = {x.places[0] for x in narrow}
        named |= {y for x in self._constraints if x.places[0] in named for y in x.made}
        yield from narrow
        yield from (x for x in self._gathers() if not named & {*x.places})
        yield from self._repeated(named)

    @cached_property
    def _constraints(self) -> list[Constraint]:
        return list(constraints(self.sharded.closed))

    @cached_property
    def _compiled(self) -> list[Any]:
        return [x.program() for x in (self.sharded, self.one)]

    @cached_property
    def _program(self) -> Program:
        return Program(self._compiled[0].as_text() or "")

    @cached_property
    def _alone(self) -> Program:
        return Program(self._compiled[1].as_text() or "")

    @cached_property
    def _whole(self) -> dict[Place, set[int]]:
        """Sizes of the arrays of each line on one device."""
        found: dict[Place, set[int]] = {}
        for x in equations(self.one.closed):
            for place in places_of(x)[:1]:
                sizes = (prod(getattr(v.aval, "shape", ())) for v in (*x.invars, *x.outvars))
                found.setdefault(place, set()).update(sizes)
        return found

    def _gathers(self) -> Iterator[Finding]:
        """Yield all-gathers that the partitioner inserted: of attention's operands, and of other arrays."""
        size = self.subject.size(self.subject.batches[0]) or (1, 1)
        own = self.one.leaves[: self.one.variables]
        # A loop over layers takes a part of stacked weights in each step.
        weights = {np.size(x) for x in own} | {np.size(x) // len(x) for x in own if np.ndim(x) and len(x)}
        asked = {x for y in equations(self.sharded.closed, "all_gather") for x in places_of(y)[:1]}
        held = {prod(x.shape): x.places[0] for x in self._constraints if x.places}
        gathers = [x for x in self._program.gathers if x.places and x.places[0] not in asked]
        gathers = [x for x in gathers if x.size > 4 * prod(size) and x.size not in weights]
        for (kind, place), many in grouped(gathers, lambda x: (self._kind(x, size[1]), x.places[0])).items():
            if not kind:
                continue
            array = "An operand of attention" if kind == "rank-gather" else "An array"
            shapes = ", ".join(dict.fromkeys(map(str, many)))
            constraint = held.get(many[0].size) if kind == "rank-replicated" else None
            what, said = f"{array} is gathered whole on each device here", f"{gathers_text(many)}: {shapes}"
            yield finding(kind, what, (constraint, place), said, count=len(many))

    def _kind(self, gather: Instruction, length: int) -> str:
        """Return the kind of finding for a gather, or "" if devices share an array that others split."""
        lengths = {length, *(length // n for n in self.subject.mesh.shape.values())} - {0, 1}
        # The partitioner gives a gather the line of the product that needs it, or that made it.
        is_result = any(sum(n in lengths for n in x) > 1 for x in self._program.factors(gather))
        if gather.places[0] in {x for y in self.calls for x in y.lines} and not is_result:
            return "rank-gather"
        return "rank-replicated" if gather.size in self._whole.get(gather.places[0], ()) else ""

    def _repeated(self, named: set[Place]) -> Iterator[Finding]:
        """Yield products whose work several devices repeat, if the step repeats much."""
        devices, work, alone = self.subject.mesh.size, self._program.work, self._alone.work
        flops = [float((x.cost_analysis() or {}).get("flops", 0.0)) for x in self._compiled]
        if flops[1] <= 0 or flops[0] * devices <= _REPEATED * flops[1]:
            return
        more = {k: x * devices - alone.get(k, 0) for k, x in work.items()}
        more = {k: x for k, x in more.items() if work[k] * devices > _REPEATED * alone.get(k, 0)}
        if set(more) & named and not set(more) - named:
            return
        more = {k: x for k, x in more.items() if k not in named}
        what = f"Each of {devices} devices computes {flops[0] / flops[1]:.0%} of the step's operations"
        attention = {place for call in self.calls for place in call.places}
        lines = sorted(more, key=lambda x: (x not in attention, -more[x]))
        places: list[Place | None] = [*lines[:2], place_of(self.subject.fn)][:2]
        case = "rank-replicated.work" if more else "rank-replicated.unknown-work"
        yield finding(case, what, places, f"equal shares are {1 / devices:.0%}")
