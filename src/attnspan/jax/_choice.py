"""Which back end runs a call."""

from __future__ import annotations

from functools import cache
from typing import Any

from ..kernels import Choice, choose
from ..problem import Problem
from ._contract import Static
from ._ops import MODULES, module_of

#: The back ends of each platform, the preferred one first. "math", which stores every score, is for its name.
PREFERRED = {
    "cpu": ("ffi", "xla"),
    "tpu": ("pallas", "xla"),
    "gpu": ("cudnn", "pallas_gpu", "xla"),
}


class _Backend:
    """A back end as `choose` sees it, for one call's numbers."""

    def __init__(self, name: str, static: Static) -> None:
        self.name = name
        self.static = static

    def supports(self, problem: Problem) -> str | None:
        return module_of(self.name).supports(problem, self.static)  # type: ignore[no-any-return]


def choice_of(problem: Problem, static: Static, requested: str | None) -> Choice:
    """The choice, with the reasons against the others."""
    names = PREFERRED.get(problem.device, ("xla",)) if requested is None else tuple(MODULES)
    return choose(problem, {name: _Backend(name, static) for name in names}, requested)


@cache
def _remembered(problem: Problem, static: Static, requested: str | None) -> str:
    return choice_of(problem, static, requested).name


def choose_backend(call: Any, requested: str | None) -> str:
    """Its name."""
    return _remembered(call.problem, call.static, requested)
