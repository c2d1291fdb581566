"""The backends of JAX: what each is given, and which one runs a call on which platform.

A backend is a module with ``supports(problem, static)``, which returns None or why it cannot run a call, and

* ``forward(q, k, v, given, static)``: out (B, Hq, Sq, Dv) and lse (B, Hq, Sq). A row that sees nothing has
  out 0, and lse -inf or its sink; a row of illegal bounds has NaN in both.
* ``backward(dout, dlse, q, k, v, given, out, lse, static, want_dbias)``: `Gradients` of sum(out * dout) +
  sum(lse * dlse); a ``dlse`` of None is zeros. The gradient of the bias is left out unless it is wanted.

Arrays are in (B, H, S, D) order; out, dq, dk and dv have the dtypes of q, k and v (see ``Static.wide``), all
else is float32, or float64 for float64 inputs. A module may also set ``LAYOUTS`` (orders of q, k and v that
it reads, passed as ``layout``), ``OWN_DERIVATIVE`` (JAX differentiates its `forward`), and
``READS_MASK`` (it reads ``Static.mask`` and ``Static.want_lse``).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from attnspan.call import Problem
from attnspan.kernels import Choice, SlowPathWarning, choose
from attnspan.masks import Mask

__all__ = [
    "BY_NAME",
    "DEFAULTS",
    "MODULES",
    "Branch",
    "Gradients",
    "MaskWords",
    "Operands",
    "Static",
    "branches_of",
    "candidates",
    "choice_of",
    "choose_backend",
    "module_of",
    "result_dtype",
    "static_for",
    "symbols",
    "warn_if_slow",
    "words_of",
]

#: Every backend by name: its module here.
MODULES = {
    "cpu": "cpu",
    "xla": "xla",
    "pallas": "pallas_tpu",
    "cudnn": "cudnn",
    "math": "math",
}

#: What a platform takes without a name, the preferred backend first.
DEFAULTS = {"cpu": ("cpu", "xla"), "gpu": ("cudnn", "xla"), "tpu": ("xla",)}

#: Why a backend that could run a call still has to be asked for.
BY_NAME = {
    "math": "it stores every score, so it runs by name only",
    "pallas": "it was never measured on hardware, so it runs by name only",
}

# Each platform by XLA's names.
_XLA_NAMES = {"cpu": ("cpu",), "gpu": ("cuda", "rocm"), "tpu": ("tpu",)}

#: A mask in words, where it is known when a call is traced that queries and keys count from 0 together:
#: ("full",), ("causal",) or ("window", left, right) with None for an open side.
MaskWords = tuple[str | int | None, ...]

#: dq, dk, dv, and the gradients of the bias and of the sinks where there are any.
Gradients = tuple[jax.Array, jax.Array, jax.Array, Any, Any]


@dataclass(frozen=True)
class Static:
    """The part of a call that a compiled program is made for.

    Attributes:
        scale: Factor of the scores.
        softcap: 0 for none, else x becomes softcap * tanh(x / softcap), before the bias.
        bias_kind: 0, ALIBI, SIGNED_ALIBI, DISTANCE or DENSE of `attnspan.call.options`.
        dropout_p: Probability with which a weight is dropped, 0 for none.
        mask: The mask in words, for backends that have kernels for a few masks; None where only the bounds
            know it.
        want_lse: The caller asks for the lse as well.
        sinks: There are sinks.
        wide: Results and gradients of 16 bits come in float32, as parts of sums over several calls do.
    """

    scale: float
    softcap: float = 0.0
    bias_kind: int = 0
    dropout_p: float = 0.0
    mask: MaskWords | None = None
    want_lse: bool = True
    sinks: bool = False
    wide: bool = False


class Operands(NamedTuple):
    """The arrays of a call other than q, k and v; a pytree.

    Attributes:
        bounds: int32 (B|1, Hq|1, Sq, R, 2), the mask as spans.
        bias: By kind, slopes (B|1, Hq) or values by distance (Hq, 2L + 1), float32, or dense values
            (B|1, Hq|1, Sq|1, Sk) in q's dtype or float32; float64 with a float64 q. None for no bias.
        sinks: float32 (Hq,), or None.
        seeds: uint32 (B, Hq, 2), low and high word of the seed of each batch row and head, or None.
        q_index: int32 (B|1, Sq), global indices of the queries; None for k_len - q_len + row.
        k_index: int32 (B|1, Sk), global indices of the keys, in any order; None for 0..k_len-1.
    """

    bounds: jax.Array
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
    seeds: jax.Array | None = None
    q_index: jax.Array | None = None
    k_index: jax.Array | None = None


class Branch(NamedTuple):
    """Backend of a program where it is compiled for a platform, by XLA's name of it; "" is any other one.

    With a ``refusal``, that it is compiled for such a platform is an error.
    """

    platform: str
    backend: str
    refusal: str = ""


@cache
def module_of(backend: str) -> Any:
    """The module of a backend, imported when it is first asked for."""
    return import_module(f".{MODULES[backend]}", __name__)


def candidates(static: Static, names: Any = MODULES, unasked: bool = False) -> dict[str, Any]:
    """Backends by name, as `choose` sees them; where none was asked for, some are for their names only."""

    def supports(name: str, problem: Problem) -> str | None:
        reason: str | None = module_of(name).supports(problem, static)
        return BY_NAME.get(name) if reason is None and unasked else reason

    return {name: SimpleNamespace(supports=partial(supports, name)) for name in names}


def choice_of(problem: Problem, static: Static, requested: str | None) -> Choice:
    """The backend for the platform of the problem, and why each one preferred to it does not run."""
    names = DEFAULTS.get(problem.device, ("xla",)) if requested is None else MODULES
    return choose(problem, candidates(static, names), requested)


def choose_backend(problem: Problem, static: Static, requested: str | None) -> str:
    """The name of the backend for the platform of the problem; warns where a slower one stands in."""
    warn_if_slow(problem, static, requested)
    return choice_of(problem, static, requested).name


def branches_of(problem: Problem, static: Static, requested: str | None) -> tuple[Branch, ...]:
    """The backend of each platform that a program may be compiled for; the last branch is any other platform.

    Raises where there is no backend of that name, or it runs the call on no platform.
    """
    problems = {platform: replace(problem, device=platform) for platform in DEFAULTS}
    if requested is None:
        chosen = {p: _first(x, static) for p, x in problems.items()}
        if not any(chosen.values()):
            choice_of(problem, static, None)  # which says why
        last = Branch("", "xla", module_of("xla").supports(problem, static) or "")
    else:
        if requested not in MODULES:
            choice_of(problem, static, requested)  # which says so
        reasons = {p: module_of(requested).supports(x, static) for p, x in problems.items()}
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
    """The default backend of a platform; empty where none runs the call."""
    known = candidates(static, DEFAULTS[problem.device])
    return next((name for name, each in known.items() if each.supports(problem) is None), "")


def static_for(backends: Any, static: Static) -> Static:
    """Drop static fields that no chosen backend reads; they would force a program of its own."""
    names = (backends,) if isinstance(backends, str) else backends
    if any(getattr(module_of(name), "READS_MASK", False) for name in names):
        return static
    return replace(static, mask=None, want_lse=True)


_warned: set[str] = set()


def warn_if_slow(problem: Problem, static: Static, requested: str | None) -> None:
    """Warn once per reason where plain XLA code stands in for a kernel."""
    choice = choice_of(problem, static, None) if requested is None else None
    for name, reason in choice.refusals.items() if choice and choice.name == "xla" else ():
        message = f"attention runs as plain XLA code: backend {name!r} refused ({reason})"
        if message not in _warned:
            _warned.add(message)
            text = f'{message}. Choose it by `with attnspan.backend("xla"):` to have no warning.'
            warnings.warn(text, SlowPathWarning, stacklevel=4)


def words_of(mask: object, problem: Problem, default_indices: bool) -> MaskWords | None:
    """The mask of `attention` in words; None where only its bounds say what it is."""
    if not isinstance(mask, Mask) or not default_indices:
        return None
    band = mask.band()
    if band is None or band.cu_q is not None:
        return None
    if band.name == "full":
        return ("full",)
    # Other libraries align the first query with the first key, we the last ones.
    if problem.q_len != problem.k_len:
        return None
    return ("causal",) if band.name == "causal" else ("window", band.left, band.right)


def symbols(problem: Problem) -> str | None:
    """None, or why a kernel whose grid is made when a call is traced cannot run it."""
    known = all(isinstance(size, int) for size in (problem.batch, problem.q_len, problem.k_len))
    return None if known else "it needs sizes that are numbers, not symbols"


def result_dtype(like: Any, static: Static) -> Any:
    """The dtype of a result or gradient, of the array whose dtype it has in a plain call."""
    return jax.numpy.promote_types(like.dtype, "float32") if static.wide else like.dtype
