"""Which back end runs a call."""

from __future__ import annotations

import warnings
from dataclasses import replace

from ..call import Problem
from ..kernels import Choice, choose
from ._contract import Static
from ._ops import MODULES, module_of

#: The back ends of each platform, the preferred one first. "math", which stores every score, is for its name.
PREFERRED = {
    "cpu": ("cpu", "xla"),
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


def all_backends(static: Static) -> dict[str, _Backend]:
    """Every back end by name, as `choose` sees it."""
    return {name: _Backend(name, static) for name in MODULES}


def choose_backend(problem: Problem, static: Static, requested: str | None) -> str:
    """Its name; a warning where kernels refuse and slower code stands in."""
    choice = choice_of(problem, static, requested)
    if choice.name == "xla" and requested is None:
        for name, reason in choice.refusals.items():
            _warn_once(f"attention runs as plain XLA code: back end {name!r} refused ({reason})")
    return choice.name


def static_for(backend: str, static: Static) -> Static:
    """What of a call's numbers a back end reads: others must not make it a program of its own.

    Example:
        >>> static_for("cpu", Static(1.0, mask=("causal",))).mask is None
        True
    """
    if getattr(module_of(backend), "READS_MASK", False):
        return static
    return replace(static, mask=None, want_lse=True)


class SlowPathWarning(UserWarning):
    """Attention runs on a slower back end than its device has."""


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        text = f'{message}. Pass backend="xla" to choose it without this warning.'
        warnings.warn(text, SlowPathWarning, stacklevel=4)
