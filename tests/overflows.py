"""Programs whose integers must stay within their dtype: compiled C++ leaves what lies beyond undefined."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_CHECKED = {"aten::" + name for name in ("add", "sub", "rsub", "mul", "neg", "abs", "cumsum", "sum", "dot")}
_BITS = {torch.int32: 31, torch.int64: 63}


class _WithinRange(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.name in _CHECKED and isinstance(result, Tensor) and result.dtype in _BITS:
            wide, own = tree_map_only(Tensor, Tensor.double, (args, kwargs))
            limit = 2.0 ** _BITS[result.dtype]
            exact = func(*wide, **{name: x for name, x in own.items() if name != "dtype"})
            if bool((exact.abs() >= limit).any()):
                raise OverflowError(f"{func} leaves {result.dtype}")
        return result


def within_range(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A compiler for ``torch.compile``: its programs raise where a sum or product of integers overflows."""

    def run(*inputs: Any) -> Any:
        with _WithinRange():
            return graph(*inputs)

    return run
