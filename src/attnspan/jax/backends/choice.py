"""Choice of a call's backend for each platform that its program may be compiled for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from attnspan.backends import EVERYWHERE, Backend, defaults, table
from attnspan.call import Problem
from attnspan.jax.part import Static
from attnspan.kernels import Choice, SlowPathWarning, choose

from . import own as _own  # registers them

del _own

# XLA's names of each platform.
_XLA_NAMES = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}


class Branch(NamedTuple):
    """Backend of a program on one platform. ``platform`` is XLA's name, and "" stands for all others.

    With a ``refusal``, compiling the program for that platform is an error.
    """

    platform: str
    backend: Backend
    refusal: str = ""


def choice_of(problem: Problem, static: Static, requested: str | None) -> Choice:
    """Return the backend for the problem's platform, and why each preferred backend does not run."""
    return choose(problem, "jax", requested, static)


def choose_backend(problem: Problem, static: Static, requested: str | None) -> Backend:
    """Return the backend for the problem's platform. Warn if it is a slower fallback."""
    warn_if_slow(problem, static, requested)
    return table("jax")[choice_of(problem, static, requested).name]


def branches_of(problem: Problem, static: Static, requested: str | None) -> tuple[Branch, ...]:
    """Return the backend of each platform that a program may be compiled for.

    The last branch stands for all other platforms. Raises if no backend has that name, or if it cannot run
    the call on any platform.
    """
    problems = {platform: replace(problem, device=platform) for platform in _XLA_NAMES}
    chosen: dict[str, Backend | None]
    if requested is None:
        chosen = {p: _first(x, static) for p, x in problems.items()}
        if not any(chosen.values()):
            choice_of(problem, static, None)  # raises the reason
        backend = table("jax")[defaults("jax", EVERYWHERE)[0]]
        last = Branch("", backend, backend.supports(problem, static) or "")
    else:
        if requested not in table("jax"):
            choice_of(problem, static, requested)  # raises
        backend = table("jax")[requested]
        reasons = {p: backend.supports(x, static) for p, x in problems.items()}
        if all(reasons.values()):
            choice_of(problem, static, requested)
        chosen = {p: None if reason else backend for p, reason in reasons.items()}
        last = Branch("", backend, "; ".join(filter(None, reasons.values())))
    own = [
        Branch(name, found)
        for platform, found in chosen.items()
        if found and (last.refusal or found is not last.backend)
        for name in _XLA_NAMES[platform]
    ]
    return (*own, last)


def _first(problem: Problem, static: Static) -> Backend | None:
    """Return the default backend of a platform, or None if none can run the call."""
    backends = (table("jax")[name] for name in defaults("jax", problem.device))
    return next((x for x in backends if x.against(problem, static) is None), None)


def static_for(backends: Iterable[Backend], static: Static) -> Static:
    """Drop static fields that no chosen backend reads, because they would cause recompilations."""
    if any(backend.reads_mask for backend in backends):
        return static
    return replace(static, mask=None, want_lse=True)


_warned: set[str] = set()


def warn_if_slow(problem: Problem, static: Static, requested: str | None) -> None:
    """Warn once per reason if plain XLA code replaces a kernel."""
    choice = choice_of(problem, static, None) if requested is None else None
    for name, reason in choice.refusals.items() if choice and choice.name == "xla" else ():
        message = f"attention runs as plain XLA code: backend {name!r} refused ({reason})"
        if message not in _warned:
            _warned.add(message)
            text = f'{message}. To silence this warning, select it with `with attnspan.backend("xla"):`.'
            warnings.warn(text, SlowPathWarning, stacklevel=4)
