"""Programs that are recorded, and their sizes: what Python may ask of values, and what it may compare.

A value that Python reads while a program is recorded becomes a constant of it.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

__all__ = ["agree", "called_apart", "is_jit_traced", "is_recorded", "sure", "without_tracer_warnings"]


def is_recorded() -> bool:
    """Whether torch records a program: by its compiler, `torch.jit.trace` or `make_fx`."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    # make_fx, whose tensors may be plain.
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def is_jit_traced() -> bool:
    """Whether `torch.jit.trace` records: sizes of tensors are tensors then."""
    torch = sys.modules.get("torch")
    if torch is None or torch.compiler.is_compiling():
        return False
    return torch._C._get_tracing_state() is not None  # type: ignore[no-any-return]


def called_apart(fn: Any, args: Any) -> Any:
    """Call a function that uses `torch.vmap` so that any recorder of torch gets operators without vmap.

    Recorders other than the compiler fail at the tensors within vmap, and record what raises. The recorder
    pauses while the operators are found, and then records these.
    """
    torch = sys.modules["torch"]
    if torch.compiler.is_dynamo_compiling() or not is_recorded():
        return fn(*args)
    if torch.compiler.is_compiling():
        # As FlexAttention does: torch.export without the compiler would read an index as a number.
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
    """Let our checks compare sizes under `torch.jit.trace`, which would warn of each of them."""
    return _ours_silenced() if is_jit_traced() else nullcontext()


@contextmanager
def _ours_silenced() -> Iterator[None]:
    with warnings.catch_warnings():
        category = sys.modules["torch"].jit.TracerWarning
        warnings.filterwarnings("ignore", category=category, module=r"attnspan\.")
        yield


def sure(holds: Any) -> bool:
    """Whether a comparison of sizes holds for certain, which is not so for sizes that only data decide.

    Compilers have such sizes for ``x[keep]``: they cannot be asked, in Python, whether one is 1.
    """
    if holds is True or holds is False:
        return holds
    symbols = _symbols_of_torch(holds)
    return bool(holds) if symbols is None else symbols.guard_or_false(holds)  # type: ignore[no-any-return]


def agree(size: Any, other: Any) -> bool:
    """Whether two sizes are equal; the program checks those that only data decide."""
    holds = size == other
    if sure(holds):
        return True
    symbols = _symbols_of_torch(holds)
    if symbols is None or not symbols.guard_or_true(holds):
        return False
    sys.modules["torch"]._check(holds)
    return True


def _symbols_of_torch(holds: Any) -> Any:
    """The module for what may be a comparison of torch's symbols, else None."""
    torch = sys.modules.get("torch")
    # A compiler takes symbols for numbers, so it is not asked about their type.
    if torch is None or not (torch.compiler.is_compiling() or isinstance(holds, torch.SymBool)):
        return None
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes
