"""Facts about arrays that are followed through a jaxpr, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Literal

from attnspan_lab.doctor.jax.interpret import inner, is_jaxs, places_of
from attnspan_lab.doctor.places import Place

__all__ = ["Flow"]

F = TypeVar("F")
# Operators with a function of single numbers.
_OF_NUMBERS = ("scatter", "reduce")


class Flow(Generic[F]):
    """Follows facts through equations, calls, branches and loops. A subclass defines `made`.

    Args:
        nothing: The fact about numbers in the program, and about arrays that it captures.
    """

    def __init__(self, nothing: F) -> None:
        self.nothing = nothing

    def made(self, eqn: Any, facts: list[F], here: Place | None) -> F:
        """Return the fact about the results of an equation, from the facts about its operands."""
        raise NotImplementedError

    def follow(
        self, jaxpr: Any, given: Sequence[F], caller: Place | None = None, captured: Sequence[F] = ()
    ) -> list[F]:
        """Return the facts about the results of a jaxpr.

        Args:
            jaxpr: The jaxpr.
            given: Facts about its arguments.
            caller: The line that calls it, if it is a function of JAX.
            captured: Facts about its first captured arrays.
        """
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known: dict[Any, F] = dict(zip(jaxpr.constvars, captured, strict=False))
        known |= zip(jaxpr.invars, given, strict=True)

        def read(var: Any) -> F:
            return self.nothing if isinstance(var, Literal) else known.get(var, self.nothing)

        for eqn in jaxpr.eqns:
            facts, here = [read(x) for x in eqn.invars], caller or next(iter(places_of(eqn)), None)
            made = self.entered(eqn, inner(eqn)[-1], facts, here) if _is_entered(eqn) else []
            if len(made) != len(eqn.outvars):
                made = [self.made(eqn, facts, here)] * len(eqn.outvars)
            known.update(zip(eqn.outvars, made, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def entered(self, eqn: Any, inside: Any, facts: list[F], here: Place | None) -> list[F]:
        """Follow a called function, the last branch, or one step of a loop."""
        del eqn
        first = len(facts) - len(getattr(inside, "jaxpr", inside).invars)
        return self.follow(inside, facts[first:], here if is_jaxs(inside) else None)


def _is_entered(eqn: Any) -> bool:
    """Whether an equation calls a jaxpr on its last operands. A kernel of Pallas gets more than operands."""
    if eqn.primitive.name.startswith(_OF_NUMBERS) or not inner(eqn):
        return False
    jaxpr = getattr(inner(eqn)[-1], "jaxpr", inner(eqn)[-1])
    return len(jaxpr.invars) <= len(eqn.invars) and len(jaxpr.outvars) == len(eqn.outvars)
