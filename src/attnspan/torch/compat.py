"""Private names of torch 2.13. `make test-with WITH=torch==...` tests another version.

If a name is missing, the import of `attnspan.torch` raises an error that names it. No other module of this
package and the packages above it uses a private name of torch's modules or of `torch._C`
(tests/test_layers.py). The packages below do not import torch. They look up a few private names if torch is
already loaded (`base/arrays.py`, `base/recorded.py`, `masks/bounds.py`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from attnspan.base.installed import require

require("torch", "attnspan.torch", "torch")

import torch  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

version_of: Callable[[Any], int] = operator.attrgetter("_version")
#: Level of forward-mode derivatives. It is negative outside of forward mode. No Python call, for small calls.
dual_level: Callable[[], int] = functools.partial(operator.attrgetter("_current_level"), forward_ad)

try:
    from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
        enable_single_level_autograd_function as enable_single_level_autograd_function,
    )
    from torch._guards import TracingContext as TracingContext
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils import _pytree
    from torch.utils.data._utils.collate import default_collate_fn_map as default_collate_fn_map

    _C: Any = torch._C
    pytree = _pytree

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

    # Derivatives.
    SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction  # type: ignore[attr-defined]
    set_forward_mode_enabled: Any = forward_ad._set_fwd_grad_enabled

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


def mark_dynamic(x: Any, dim: int) -> None:
    """Mark a dim as dynamic, unless the compiler specializes it."""
    torch._dynamo.maybe_mark_dynamic(x, dim)


def unsupported_by_compiler() -> type[Exception]:
    """The compiler's error for untraceable code. The import takes seconds: only the compiler calls this."""
    from torch._dynamo.exc import Unsupported

    return Unsupported


def name_of(op: OpOverload) -> str:
    """The name of an operator, with its namespace."""
    return op._schema.name  # type: ignore[no-any-return]


def destroy(library: Any) -> None:
    """Remove the operators and kernels that a library registered."""
    library._destroy()


def context_of(spec: Any) -> Any:
    """The context of a tree's node, for example the keys of a dict."""
    return spec._context


def ragged_dim(x: Any) -> Any:
    """The jagged dim of a nested tensor."""
    return x._ragged_idx


def original(x: Any) -> Any:
    """The module in a compiled module. Other objects are returned unchanged."""
    return getattr(x, "_orig_mod", x)


def is_compiled(module: Any) -> bool:
    """Whether ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


def flattened(mesh: Any) -> Any:
    """A mesh of one dimension with all ranks of a mesh."""
    return mesh._flatten()


def timeout_of(group: Any, device: Any) -> Any:
    """The timeout of a group's collectives on a device, or None if its backend has none."""
    return getattr(group._get_backend(device).options, "_timeout", None)


# The functions below import slow parts of torch when they are called.


def resolve_process_group(name: str) -> Any:
    """The process group with a name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]


def default_store() -> Any:
    """The store of the default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()  # type: ignore[attr-defined]


def all_reduce(x: Any, op: str, group: str) -> Any:
    """The functional collective: a new tensor, also in compiled code."""
    from torch.distributed import _functional_collectives

    return _functional_collectives.all_reduce(x, op, group)  # type: ignore[arg-type]


def context_parallel() -> Any:
    """Load balancers of torch's context parallelism, and the function that shards tensors by them."""
    from torch.distributed.tensor.experimental import _attention as module

    return SimpleNamespace(
        shard=module._context_parallel_shard,
        LoadBalancer=module._LoadBalancer,
        HeadTailLoadBalancer=module._HeadTailLoadBalancer,
        PTRRLoadBalancer=module._PTRRLoadBalancer,
    )


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
