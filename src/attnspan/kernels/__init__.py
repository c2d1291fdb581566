"""Backends, one file each, and the choice between them.

A backend is a module with ``supports(problem) -> None | reason`` and its forward and backward. Backends never
import each other. A front end lists the ones it can drive, fastest first, and `choose` picks from that list.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..errors import BackendError, OptionError
from ..problem import Problem

__all__ = ["Backend", "Choice", "choose"]


class Backend(Protocol):
    """What `choose` needs of a backend."""

    def supports(self, problem: Problem) -> str | None:
        """Return None, or why the backend cannot run the problem."""


@dataclass(frozen=True)
class Choice:
    """The backend that runs a problem, and why each one preferred to it does not."""

    name: str
    refusals: dict[str, str]  # name -> reason


def choose(problem: Problem, backends: Mapping[str, Backend], requested: str | None = None) -> Choice:
    """Choose the backend that runs a problem.

    Args:
        problem: What is to be computed.
        backends: Candidates by name, the preferred one first.
        requested: Take this one or raise; None takes the first that supports the problem.

    Raises:
        OptionError: ``requested`` is not a candidate.
        BackendError: The requested backend, or every one, does not support the problem.

    Example:
        >>> class Always:
        ...     def supports(self, problem):
        ...         return None
        >>> choose(Problem(1, 1, 1, 4, 4, 64, 64, 1, "float32", "cpu"), {"always": Always()}).name
        'always'
    """
    if requested is not None and requested not in backends:
        names, remedy = ", ".join(backends), "Leave it out to take the fastest that can run the call"
        raise OptionError("backend", expected=f"None or one of {names}", got=repr(requested), remedy=remedy)
    refusals: dict[str, str] = {}
    for name in backends if requested is None else (requested,):
        reason = backends[name].supports(problem)
        if reason is None:
            return Choice(name, refusals)
        refusals[name] = reason
    raise BackendError(
        f"backend={requested!r}",
        expected="a backend that can run the call",
        got="; ".join(f"{name}: {reason}" for name, reason in refusals.items()),
        remedy="Change what the reason names, or choose another backend",
    )
