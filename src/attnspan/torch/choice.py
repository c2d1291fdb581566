"""Choice of a call's backend: the requested backend, or else the fastest one that can run the call."""

import warnings
from types import ModuleType

import torch

from attnspan.backends import Choice, choose
from attnspan.call import Problem
from attnspan.kernels import SlowPathWarning

from . import backends as _own  # registers them
from . import compat
from ._watched import constant_when_traced

del _own

_warned: set[str] = set()


def _math_alone() -> bool:
    """Whether `torch.nn.attention.sdpa_kernel` allows only torch's math backend."""
    others = compat.flash_enabled() or compat.efficient_enabled()
    others = others or compat.cudnn_enabled() or compat.overrideable_enabled()
    return bool(not others and compat.math_enabled())


class _Outside(ModuleType):
    @property
    def math_alone(self) -> bool:
        return _math_alone()


_outside = _Outside("attnspan.torch.choice._outside")


def torchs_backend() -> str | None:
    """Backend of drop-in calls: "math" within ``sdpa_kernel(SDPBackend.MATH)``, else None."""
    # A compiler treats the flags as constants, which is right for blocks inside the program. It guards on an
    # attribute of a module, so this read recompiles a program that is entered within such a block.
    if torch.compiler.is_compiling() and _outside.math_alone:
        pass
    return "math" if _math_alone() else None


def choose_backend(problem: Problem, requested: str | None) -> Choice:
    """Choose the backend that runs a problem, with the reason against each faster one.

    Raises:
        OptionError: As `attnspan.backends.choose`.
        BackendError: As `attnspan.backends.choose`.
    """
    return choose(problem, "torch", requested)


def backend_for(problem: Problem, requested: str | None) -> str:
    """Name of the backend that runs a call. Warns once per reason if framework code is the fallback.

    Raises:
        OptionError: As `attnspan.backends.choose`.
        BackendError: As `attnspan.backends.choose`.
    """
    choice = choose(problem, "torch", requested)
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
        message = f'{message}. To suppress this warning, request it: `with attnspan.backend("math"):`.'
        warnings.warn(message, SlowPathWarning, stacklevel=4)
