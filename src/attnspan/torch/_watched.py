"""Check whether torch watches a program. If not, a call may bypass the operators."""

from collections.abc import Callable
from typing import TypeVar

from . import compat

_functorch = compat.are_functorch_transforms_active
_dispatch_modes = compat.dispatch_modes
_function_modes = compat.function_modes
_tracer = compat.tracing_state
_autocast = compat.is_any_autocast_enabled
_profiler = compat.profiler_enabled
_dual_level = compat.dual_level


def is_transformed() -> bool:
    """Whether a transform, a mode or a tracer replaces tensors."""
    return _functorch() or _dispatch_modes() != 0 or _function_modes() != 0 or _tracer() is not None


def is_watched() -> bool:
    """Whether a transform, mode, autocast, tracer, profiler or dual level needs to see the operator."""
    # This repeats the conditions of `is_transformed`, to save one Python call in every eager call.
    transformed = _functorch() or _dispatch_modes() != 0 or _function_modes() != 0 or _tracer() is not None
    return transformed or _autocast() or _profiler() or _dual_level() >= 0


F = TypeVar("F", bound=Callable[..., object])


def constant_when_traced(function: F) -> F:
    """`torch.compiler.assume_constant_result` without its import of the compiler, half of our import time."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
