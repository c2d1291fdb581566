"""Choice of the backend of a call: the one that it names, else the fastest that can run it."""

import warnings
from types import ModuleType
from typing import Any

import torch

from attnspan.call import Problem
from attnspan.kernels import Choice, SlowPathWarning, choose

from . import compat
from ._watched import constant_when_traced
from .backends import BACKENDS

__all__ = ["MOST_KEYS", "backend_for", "candidates", "choose_backend", "torchs_backend"]

#: Keys beyond which a device that has kernels never stores every score unasked.
MOST_KEYS = 4096

_warned: set[str] = set()


def _math_alone() -> bool:
    """Whether `torch.nn.attention.sdpa_kernel` leaves torch's own attention its math backend alone."""
    others = compat.flash_enabled() or compat.efficient_enabled()
    others = others or compat.cudnn_enabled() or compat.overrideable_enabled()
    return bool(not others and compat.math_enabled())


class _Outside(ModuleType):
    @property
    def math_alone(self) -> bool:
        return _math_alone()


_outside = _Outside("attnspan.torch.choice._outside")


def torchs_backend() -> str | None:
    """The backend of calls in the place of torch's own: "math" within ``sdpa_kernel(SDPBackend.MATH)``."""
    # A compiler takes the flags for constants, as they are within blocks of the program. On an attribute of a
    # module it guards: whether the program is entered within such a block.
    if torch.compiler.is_compiling() and _outside.math_alone:
        pass
    return "math" if _math_alone() else None


class _Unnamed:
    """A backend for calls that name none: some backends are for their names only.

    Args:
        name: Of the backend.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def supports(self, problem: Problem) -> str | None:
        reason: str | None = BACKENDS[self.name].supports(problem)
        if reason is not None:
            return reason
        if self.name == "triton":
            return "it was never measured on a GPU, so it runs by name only"
        if self.name == "math" and problem.device != "cpu" and problem.k_len > MOST_KEYS:
            return f"it stores every score, so beyond {MOST_KEYS:,} keys it runs by name only"
        return None


_UNNAMED = {name: _Unnamed(name) for name in BACKENDS}
_ON_GPUS = {name: _UNNAMED[name] for name in ("vendor", "flex", "math")}
_BY_DEVICE = {"cpu": {name: _UNNAMED[name] for name in ("cpu", "math")}}


def candidates(*, named: bool) -> dict[str, Any]:
    """All backends as `choose` sees them, for calls that name one and for those that do not."""
    return BACKENDS if named else _UNNAMED


def choose_backend(problem: Problem, requested: str | None) -> Choice:
    """The backend that runs a problem, and why each one preferred to it does not.

    Raises:
        OptionError, BackendError: As `attnspan.kernels.choose`.
    """
    if requested is not None:
        return choose(problem, BACKENDS, requested)
    return choose(problem, _BY_DEVICE.get(problem.device, _ON_GPUS), None)


def backend_for(problem: Problem, requested: str | None) -> str:
    """Name of the backend that runs a call; warns once per reason where framework code does a kernel's work.

    Raises:
        OptionError, BackendError: As `attnspan.kernels.choose`.
    """
    choice = choose_backend(problem, requested)
    if choice.name == "math":
        for name, reason in choice.refusals.items():
            _warn_once(
                "attention runs as plain framework code, which stores every score: "
                f"backend {name!r} refused ({reason})"
            )
    return choice.name


@constant_when_traced
def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        message = f'{message}. Choose it by `with attnspan.backend("math"):` to have no warning.'
        warnings.warn(message, SlowPathWarning, stacklevel=4)
