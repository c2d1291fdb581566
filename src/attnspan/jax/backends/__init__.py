"""The JAX backends: one protocol, one table, and the selection for each platform.

A backend's module has ``supports(problem, static)``, which returns None or why it cannot run a call, and

* ``forward(part)``: returns out (B, Hq, Sq, Dv) and lse (B, Hq, Sq). A query that sees no key has out 0, and
  as its lse -inf or its sink. A query with illegal bounds has NaN in both.
* ``backward(part, out, lse, dout, dlse, want_dbias)``: returns the `Gradients` of
  sum(out * dout) + sum(lse * dlse). A ``dlse`` of None means zeros. The gradient of the bias is left out
  unless it is wanted.

out, dq, dk and dv have the dtypes of q, k and v (see ``Static.wide``). All other results are float32, or
float64 for float64 inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from attnspan.base.forks import without_locks
from attnspan.call import Problem
from attnspan.jax.part import Gradients, JaxPart, Static
from attnspan.kernels import Choice, SlowPathWarning, choose

__all__ = [
    "BACKENDS",
    "DEFAULTS",
    "Backend",
    "Branch",
    "branches_of",
    "candidates",
    "choice_of",
    "choose_backend",
    "static_for",
    "symbols",
    "warn_if_slow",
]


@without_locks
@dataclass(frozen=True)
class Backend:
    """One backend. Its module is imported when it is first needed.

    Attributes:
        name: Its name in ``backend=``.
        module: Its module in this package.
        layouts: The layouts of q, k and v that it reads without a copy.
        fine_lse: ``forward(part, fine=True)`` keeps the rounding error of a float lse, which is |lse| * 2^-24
            of each weight. The lse is then complex, with the error as its imaginary part, and `backward`
            reads it.
        own_derivative: JAX differentiates its `forward`, and it has no `backward`.
        reads_mask: It reads ``Static.mask`` and ``Static.want_lse``.
        by_name: The reason why it must be requested explicitly. Empty for a default backend.
    """

    name: str
    module: str
    layouts: tuple[str, ...] = ("bhsd",)
    fine_lse: bool = False
    own_derivative: bool = False
    reads_mask: bool = False
    by_name: str = ""

    @cached_property
    def _code(self) -> Any:
        return import_module(f".{self.module}", __name__)

    def supports(self, problem: Problem, static: Static) -> str | None:
        """Return None, or the reason why it cannot run a call."""
        reason: str | None = self._code.supports(problem, static)
        return reason

    def forward(self, part: JaxPart, fine: bool = False) -> tuple[Array, Array]:
        """Return out in the layout of the part, and lse. ``fine`` makes the lse complex.

        The lse is complex even if it is not finer. A backend with its own derivative returns None if it has
        no lse.
        """
        own = part if part.layout in self.layouts else part.in_layout("bhsd")
        if fine and self.fine_lse:
            out, lse = self._code.forward(own, fine=True)
        else:
            out, lse = self._code.forward(own)
            lse = lax.complex(lse, jnp.zeros_like(lse)) if fine else lse
        return (out if own is part else out.swapaxes(1, 2)), lse

    def backward(
        self, part: JaxPart, out: Array, lse: Array, dout: Array, dlse: Array | None, want_dbias: bool
    ) -> Gradients:
        """Return the gradients. dq, dk and dv are in the layout of the part, as ``out`` and ``dout`` are."""
        lse = lse if self.fine_lse else lse.real
        if part.layout in self.layouts:
            return self._code.backward(part, out, lse, dout, dlse, want_dbias)  # type: ignore[no-any-return]
        out, dout = (x.swapaxes(1, 2) for x in (out, dout))
        found = self._code.backward(part.in_layout("bhsd"), out, lse, dout, dlse, want_dbias)
        return (*(x.swapaxes(1, 2) for x in found[:3]), *found[3:])  # type: ignore[return-value]


#: All backends, keyed by name.
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cpu", "cpu", layouts=("bhsd", "bshd"), fine_lse=True),
        Backend("xla", "xla", fine_lse=True),
        Backend("pallas", "pallas_tpu", by_name="it was never measured on hardware, so it must be requested"),
        Backend("cudnn", "cudnn", own_derivative=True, reads_mask=True),
        Backend(
            "math", "math", own_derivative=True, by_name="it stores every score, so it must be requested"
        ),
    )
}

#: The default backends of each platform, the preferred one first.
DEFAULTS = {"cpu": ("cpu", "xla"), "gpu": ("cudnn", "xla"), "tpu": ("xla",)}

# XLA's names of each platform.
_XLA_NAMES = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}


class Branch(NamedTuple):
    """Backend of a program on one platform. ``platform`` is XLA's name, and "" stands for all others.

    With a ``refusal``, compiling the program for that platform is an error.
    """

    platform: str
    backend: str
    refusal: str = ""


def candidates(static: Static, names: Iterable[str] = BACKENDS, unasked: bool = False) -> dict[str, Any]:
    """Return backends keyed by name, as `choose` needs them. With ``unasked``, opt-in backends refuse."""

    def supports(name: str, problem: Problem) -> str | None:
        reason = BACKENDS[name].supports(problem, static)
        return (BACKENDS[name].by_name or None) if reason is None and unasked else reason

    return {name: SimpleNamespace(supports=partial(supports, name)) for name in names}


def choice_of(problem: Problem, static: Static, requested: str | None) -> Choice:
    """Return the backend for the problem's platform, and why each preferred backend does not run."""
    names = DEFAULTS.get(problem.device, ("xla",)) if requested is None else BACKENDS
    return choose(problem, candidates(static, names), requested)


def choose_backend(problem: Problem, static: Static, requested: str | None) -> str:
    """Return the name of the backend for the problem's platform. Warn if it is a slower fallback."""
    warn_if_slow(problem, static, requested)
    return choice_of(problem, static, requested).name


def branches_of(problem: Problem, static: Static, requested: str | None) -> tuple[Branch, ...]:
    """Return the backend of each platform that a program may be compiled for.

    The last branch stands for all other platforms. Raises if no backend has that name, or if it cannot run
    the call on any platform.
    """
    problems = {platform: replace(problem, device=platform) for platform in DEFAULTS}
    if requested is None:
        chosen = {p: _first(x, static) for p, x in problems.items()}
        if not any(chosen.values()):
            choice_of(problem, static, None)  # raises the reason
        last = Branch("", "xla", BACKENDS["xla"].supports(problem, static) or "")
    else:
        if requested not in BACKENDS:
            choice_of(problem, static, requested)  # raises
        reasons = {p: BACKENDS[requested].supports(x, static) for p, x in problems.items()}
        if all(reasons.values()):
            choice_of(problem, static, requested)
        chosen = {p: "" if reason else requested for p, reason in reasons.items()}
        last = Branch("", requested, "; ".join(filter(None, reasons.values())))
    own = [
        Branch(name, backend)
        for platform, backend in chosen.items()
        if backend and (last.refusal or backend != last.backend)
        for name in _XLA_NAMES[platform]
    ]
    return (*own, last)


def _first(problem: Problem, static: Static) -> str:
    """Return the default backend of a platform, or an empty string if none can run the call."""
    known = candidates(static, DEFAULTS[problem.device])
    return next((name for name, each in known.items() if each.supports(problem) is None), "")


def static_for(backends: Iterable[str], static: Static) -> Static:
    """Drop static fields that no chosen backend reads, because they would cause recompilations."""
    if any(BACKENDS[name].reads_mask for name in backends):
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


def symbols(problem: Problem) -> str | None:
    """Return None, or why a kernel whose grid is made at tracing time cannot run the problem."""
    known = all(isinstance(size, int) for size in (problem.batch, problem.q_len, problem.k_len))
    return None if known else "it needs concrete sizes, not symbols"
