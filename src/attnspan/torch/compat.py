"""Private names of torch 2.13. `make test-with WITH=torch==...` tests another version.

If a name is missing, the import of `attnspan.torch` raises an error that names it. No other module of this
package and the packages above it uses a private name of torch's modules or of `torch._C`
(tests/test_layers.py). The packages below do not import torch. They look up a few private names if torch is
already loaded (`base/arrays.py`, `base/recorded.py`, `masks/bounds.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

try:
    from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
        enable_single_level_autograd_function,
    )
    from torch._guards import TracingContext
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils import _pytree as pytree
    from torch.utils.data._utils.collate import default_collate_fn_map

    _C: Any = torch._C

    # Observers of a program.
    are_functorch_transforms_active = _C._are_functorch_transforms_active
    dispatch_modes = _C._len_torch_dispatch_stack
    function_modes = _C._len_torch_function_stack
    tracing_state = _C._get_tracing_state
    is_any_autocast_enabled = _C._is_any_autocast_enabled
    profiler_enabled = _C._autograd._profiler_enabled
    any_requires_grad = _C._any_requires_grad
    is_alias_of = _C._is_alias_of

    # Kernels of operators by dispatch key.
    DispatchKey = _C.DispatchKey
    ForceDispatchKeyGuard = _C._ForceDispatchKeyGuard
    DisableAutocast = _C._DisableAutocast
    BelowAutograd = _C._AutoDispatchBelowAutograd
    BelowInplaceOrView = _C._AutoDispatchBelowADInplaceOrView
    after_autograd = _C._after_autograd_keyset
    after_inplace_or_view = _C._after_ADInplaceOrView_keyset
    excluded_keys = _C._dispatch_tls_local_exclude_set
    included_keys = _C._dispatch_tls_local_include_set
    parse_schema = _C.parse_schema

    # Kernels that `torch.nn.attention.sdpa_kernel` allows.
    flash_enabled = _C._get_flash_sdp_enabled
    efficient_enabled = _C._get_mem_efficient_sdp_enabled
    cudnn_enabled = _C._get_cudnn_sdp_enabled
    overrideable_enabled = _C._get_overrideable_sdp_enabled
    math_enabled = _C._get_math_sdp_enabled

    assert_async: Any = torch._assert_async
    check_size: Any = torch._check
except (ImportError, AttributeError) as _missing:
    raise ImportError(
        f"attnspan: expected a torch with the private names of 2.13, got {torch.__version__}: {_missing}. "
        "Install torch 2.13, or report this line"
    ) from _missing

__all__ = [
    "BelowAutograd",
    "BelowInplaceOrView",
    "DisableAutocast",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "ForceDispatchKeyGuard",
    "OpOverload",
    "TracingContext",
    "after_autograd",
    "after_inplace_or_view",
    "any_requires_grad",
    "are_functorch_transforms_active",
    "assert_async",
    "check_size",
    "cudnn_enabled",
    "default_collate_fn_map",
    "dispatch_modes",
    "dual_level",
    "efficient_enabled",
    "enable_single_level_autograd_function",
    "excluded_keys",
    "flash_enabled",
    "flop_formula",
    "function_modes",
    "get_proxy_mode",
    "guard_scalar",
    "included_keys",
    "is_alias_of",
    "is_any_autocast_enabled",
    "mark_dynamic",
    "math_enabled",
    "overrideable_enabled",
    "parameter_types",
    "parse_schema",
    "profiler_enabled",
    "pytree",
    "statically_known_true",
    "tracing_state",
    "tuple_to_list",
    "unsupported_by_compiler",
]


def dual_level() -> int:
    """Level of forward-mode derivatives. It is negative outside of forward mode."""
    return int(forward_ad._current_level)


def mark_dynamic(x: Any, dim: int) -> None:
    """Mark a dim as dynamic, unless the compiler specializes it."""
    torch._dynamo.maybe_mark_dynamic(x, dim)


def unsupported_by_compiler() -> type[Exception]:
    """The compiler's error for untraceable code. The import takes seconds: only the compiler calls this."""
    from torch._dynamo.exc import Unsupported

    return Unsupported


# The functions below import slow parts of torch when they are called.


def get_proxy_mode() -> Any:
    """The mode in which `make_fx` records a program, or None."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor.get_proxy_mode()


def guard_scalar(x: Any) -> Any:
    """A symbolic number as a plain number, with a guard on it."""
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes.guard_scalar(x)


def statically_known_true(x: Any) -> bool:
    """Whether a condition on symbolic sizes holds without a guard."""
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes.statically_known_true(x)


def parameter_types() -> Any:
    """Supported annotations of an operator's schema, by type."""
    from torch._library import infer_schema

    return infer_schema.SUPPORTED_PARAM_TYPES


def tuple_to_list(annotation: Any) -> Any:
    """Annotation of a list that replaces the annotation of a tuple, if there is one."""
    from torch._library import infer_schema

    return infer_schema.tuple_to_list(annotation)


_formulas: dict[Any, Callable[..., int]] = {}


def flop_formula(packet: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function as the FLOP formula of an operator. It receives the operator's arguments.

    The import of torch's counter loads Triton, which takes longer than the import of attnspan. Counters and
    compilers call an operator's `decompose` before they run it, so the formulas are registered there.
    """

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas[packet] = formula
        for overload in packet.overloads():
            getattr(packet, overload).decompose = _register_formulas
        return formula

    return register


def _register_formulas(*args: Any, **kwargs: Any) -> Any:
    """Answer that an operator has no decomposition, after torch and the active counter know the formulas."""
    del args, kwargs
    from torch.utils import flop_counter
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    mode, known = _get_current_dispatch_mode(), [flop_counter.flop_registry]
    if isinstance(mode, flop_counter._FlopCounterMode):  # It copied torch's formulas when it was made.
        known.append(mode.counter.flop_registry)
    for formulas in known:
        formulas.update({packet: own for packet, own in _formulas.items() if packet not in formulas})
    return NotImplemented
