"""Traced programs and their sizes: which values Python may read, and which sizes it may compare.

A value that Python reads while a program is traced becomes a constant of the program.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def is_recorded() -> bool:
    """Whether torch traces a program, by its compiler, `torch.jit.trace` or `make_fx`."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    # Under make_fx, tensors may be plain.
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def is_jit_traced() -> bool:
    """Whether `torch.jit.trace` traces a program. Sizes of tensors are then tensors."""
    torch = sys.modules.get("torch")
    if torch is None or torch.compiler.is_compiling():
        return False
    return torch._C._get_tracing_state() is not None  # type: ignore[no-any-return]


def called_apart(fn: Any, args: Any) -> Any:
    """Call a function that uses `torch.vmap` so that any tracer of torch records operators without vmap.

    Tracers other than the compiler fail at the tensors inside vmap, and record code that raises. The tracer
    pauses while the operators are found, and then records these operators.
    """
    torch = sys.modules["torch"]
    if torch.compiler.is_dynamo_compiling() or not is_recorded():
        return fn(*args)
    if torch.compiler.is_compiling():
        # As in FlexAttention. Otherwise, torch.export without the compiler would read an index as a number.
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex():
            return fn(*args)
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)
    try:
        with disable_proxy_modes_tracing():
            program = make_fx(fn)(*args)
    finally:
        torch._C._set_tracing_state(state)
    return program(*args)


def without_tracer_warnings() -> AbstractContextManager[Any]:
    """Silence the warnings of `torch.jit.trace` for the size checks of attnspan."""
    return _ours_silenced() if is_jit_traced() else nullcontext()


@contextmanager
def _ours_silenced() -> Iterator[None]:
    with warnings.catch_warnings():
        category = sys.modules["torch"].jit.TracerWarning
        warnings.filterwarnings("ignore", category=category, module=r"attnspan\.")
        yield


def sure(holds: Any) -> bool:
    """Whether a comparison of sizes certainly holds. For sizes that depend on data, it is false.

    Compilers have such sizes for ``x[keep]``. Python cannot ask a compiler whether such a size is 1.
    """
    if holds is True or holds is False:
        return holds
    symbols = _symbols_of_torch(holds)
    return bool(holds) if symbols is None else symbols.guard_or_false(holds)  # type: ignore[no-any-return]


def agree(size: Any, other: Any) -> bool:
    """Whether two sizes are equal. The program checks sizes that depend on data."""
    holds = size == other
    if sure(holds):
        return True
    symbols = _symbols_of_torch(holds)
    if symbols is None or not symbols.guard_or_true(holds):
        return False
    sys.modules["torch"]._check(holds)
    return True


def check_not_empty(size: Any) -> None:
    """Let the program check that a size that depends on data is not 0. A known size passes, also 0."""
    if not (sure(size != 0) or sure(size == 0)):
        sys.modules["torch"]._check(size != 0)


def is_static(size: Any) -> bool:
    """Whether a size is the same number in each run of the program that torch records."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return bool(has_static_value(size))


def _symbols_of_torch(holds: Any) -> Any:
    """The module of symbolic shapes if `holds` may be a comparison of torch's symbols, else None."""
    torch = sys.modules.get("torch")
    # A compiler treats symbols as numbers, so their type is not checked while it traces.
    if torch is None or not (torch.compiler.is_compiling() or isinstance(holds, torch.SymBool)):
        return None
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes
