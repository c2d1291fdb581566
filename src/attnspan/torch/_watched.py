"""Whether anything looks at a program: where nothing does, a call may go past the operators."""

from collections.abc import Callable
from typing import TypeVar

from torch.autograd import forward_ad

from . import compat

_functorch = compat.are_functorch_transforms_active
_dispatch_modes = compat.dispatch_modes
_function_modes = compat.function_modes
_tracer = compat.tracing_state
_autocast = compat.is_any_autocast_enabled
_profiler = compat.profiler_enabled


def is_transformed() -> bool:
    """Are tensors not what they seem: a transform, a mode, a tracer?"""
    return _functorch() or _dispatch_modes() != 0 or _function_modes() != 0 or _tracer() is not None


def is_watched() -> bool:
    """Would someone miss the operator: a transform, a mode, autocast, a tracer, a profiler, a dual level?"""
    # The conditions of `is_transformed`, repeated: a call less in every eager call.
    transformed = _functorch() or _dispatch_modes() != 0 or _function_modes() != 0 or _tracer() is not None
    return transformed or _autocast() or _profiler() or forward_ad._current_level >= 0


F = TypeVar("F", bound=Callable[..., object])


def constant_when_traced(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would load the compiler: half the time of our import."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
