"""Choice of a call's backend for each platform that its program may be compiled for."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax

from attnspan.backends import EVERYWHERE, Backend, Choice, choose, defaults, table
from attnspan.call import Problem
from attnspan.jax.part import JaxPart
from attnspan.kernels import SlowPathWarning

from . import registered as _registered  # registers them

del _registered

# XLA's names of each platform.
_XLA_NAMES = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}


class Branch(NamedTuple):
    """Backend of a program on one platform. ``platform`` is XLA's name, and "" stands for all others.

    With a ``refusal``, compiling the program for that platform is an error.
    """

    platform: str
    backend: Backend
    refusal: str = ""


def choice_of(problem: Problem, part: JaxPart, requested: str | None) -> Choice:
    """Return the backend for the problem's platform, and why each preferred backend does not run."""
    return choose(problem, "jax", requested, part)


def choose_backend(problem: Problem, part: JaxPart, requested: str | None) -> Backend:
    """Return the backend for the problem's platform. Warn if it is a slower fallback."""
    choice = choice_of(problem, part, requested)
    if requested is None:
        warn_if_slow(choice)
    return table("jax")[choice.name]


def branches_of(problem: Problem, part: JaxPart, requested: str | None) -> tuple[Branch, ...]:
    """Return the backend of each platform that a program may be compiled for.

    The last branch stands for all other platforms. Raises if no backend has that name, or if it cannot run
    the call on any platform.
    """
    problems = {platform: replace(problem, device=platform) for platform in _XLA_NAMES}
    chosen: dict[str, Backend | None]
    if requested is None:
        chosen = {p: _first(x, part) for p, x in problems.items()}
        if not any(chosen.values()):
            choice_of(problem, part, None)  # raises the reason
        backend = table("jax")[defaults("jax", EVERYWHERE)[0]]
        last = Branch("", backend, backend.refusal(problem, part) or "")
    else:
        if requested not in table("jax"):
            choice_of(problem, part, requested)  # raises
        backend = table("jax")[requested]
        reasons = {p: backend.refusal(x, part) for p, x in problems.items()}
        if all(reasons.values()):
            choice_of(problem, part, requested)
        chosen = {p: None if reason else backend for p, reason in reasons.items()}
        last = Branch("", backend, "; ".join(filter(None, reasons.values())))
    own = [
        Branch(name, found)
        for platform, found in chosen.items()
        if found and (last.refusal or found is not last.backend)
        for name in _XLA_NAMES[platform]
    ]
    return (*own, last)


def _first(problem: Problem, part: JaxPart) -> Backend | None:
    """Return the default backend of a platform, or None if none can run the call."""
    backends = (table("jax")[name] for name in defaults("jax", problem.device))
    return next((x for x in backends if x.against(problem, part) is None), None)


class Chosen(NamedTuple):
    """The branches of a program, and what a call needs to know of them.

    Attributes:
        branches: One for each platform.
        slow: The choice, if plain XLA code replaces a kernel. Else None.
        reads_mask: Whether a backend reads ``part.band`` and ``part.want_lse``. Without such a backend, they
            would cause recompilations.
    """

    branches: tuple[Branch, ...]
    slow: Choice | None
    reads_mask: bool


def chosen_for(problem: Problem, part: JaxPart, requested: str | None, known: bool) -> Chosen:
    """Choose the backends of a program.

    The sizes and the structure of the part decide, so eager calls choose once. No value of an array matters.

    Args:
        problem: The sizes.
        part: The call.
        requested: Name of the requested backend.
        known: Whether sizes and platform are known. A wrong backend then raises now.
    """
    facts = problem, jax.tree.structure(part), requested, known, tuple(table("jax").values())
    # Sizes of tracers may be symbols. Symbols of two programs cannot be compared.
    return _chosen(*facts) if known else _chosen.__wrapped__(*facts)


@lru_cache(maxsize=1024)
def _chosen(problem: Problem, structure: Any, requested: str | None, known: bool, _: Any) -> Chosen:
    part = structure.unflatten(range(structure.num_leaves))
    choice = choice_of(problem, part, requested) if known or requested is None else None
    branches = branches_of(problem, part, requested)
    slow = choice if requested is None and choice is not None and choice.name == "xla" else None
    return Chosen(branches, slow, any(branch.backend.reads_mask for branch in branches))


_warned: set[str] = set()


def warn_if_slow(choice: Choice) -> None:
    """Warn once per reason if plain XLA code replaces a kernel."""
    for name, reason in choice.refusals.items() if choice.name == "xla" else ():
        message = f"attention runs as plain XLA code: backend {name!r} refused ({reason})"
        if message not in _warned:
            _warned.add(message)
            text = f'{message}. To silence this warning, select it with `with attnspan.backend("xla"):`.'
            warnings.warn(text, SlowPathWarning, stacklevel=4)
