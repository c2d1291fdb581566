"""NumPy versions of common operators. JAX compiles each operator for each shape, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["quick"]

_PLAIN: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "abs": np.abs,
    "square": np.square,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "copy": np.copy,
    "stop_gradient": np.copy,
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_sum": np.sum,
}


def quick(eqn: Any, arrays: list[Any]) -> np.ndarray | None:
    """Run an operator in NumPy. Return None if it has no version here, or for other than plain numbers."""
    name, params = eqn.primitive.name, eqn.params
    # Random keys have a dtype without a kind.
    kinds = [getattr(getattr(x, "dtype", None), "kind", "O") for x in arrays]
    if any(x not in "biuf" for x in kinds) or len(eqn.outvars) != 1:
        return None
    with np.errstate(all="ignore"):
        made = _made(name, params, [np.asarray(x) for x in arrays])
    return None if made is None else np.asarray(made, eqn.outvars[0].aval.dtype)


def _product(numbers: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Multiply matrices: axes of batch elements first, then the free axes of both."""
    contract, batch = numbers
    free = [[a for a in range(z.ndim) if a not in (*contract[i], *batch[i])] for i, z in enumerate((x, y))]
    shape = [x.shape[a] for a in (*batch[0], *free[0])] + [y.shape[a] for a in free[1]]
    lead, inner = (int(np.prod([x.shape[a] for a in axes])) for axes in (batch[0], contract[0]))
    left = x.transpose(*batch[0], *free[0], *contract[0]).reshape(lead, -1, inner)
    right = y.transpose(*batch[1], *contract[1], *free[1]).reshape(lead, inner, -1)
    return np.asarray((left @ right).reshape(shape))


def _made(name: str, params: Any, arrays: list[np.ndarray]) -> Any:
    first = arrays[0] if arrays else None
    if name in _PLAIN:
        return _PLAIN[name](*arrays)
    if name == "div" and first is not None and first.dtype.kind == "f":
        return np.divide(*arrays)
    if name in _REDUCTIONS and first is not None:
        return _REDUCTIONS[name](first, axis=tuple(params["axes"])) if first.size else None
    if name == "transpose":
        return np.transpose(first, params["permutation"])  # type: ignore[arg-type]
    if name == "reshape" and params.get("dimensions") is None:
        return np.reshape(first, params["new_sizes"])  # type: ignore[arg-type]
    if name == "squeeze":
        return np.squeeze(first, tuple(params["dimensions"]))  # type: ignore[arg-type]
    if name == "broadcast_in_dim" and len(arrays) == 1 and first is not None:
        sizes = dict(zip(params["broadcast_dimensions"], first.shape, strict=True))
        return np.broadcast_to(
            first.reshape([sizes.get(i, 1) for i in range(len(params["shape"]))]), params["shape"]
        )
    if name == "dot_general" and all(x.dtype.kind == "f" and x.dtype.itemsize >= 4 for x in arrays):
        return _product(params["dimension_numbers"], *arrays)
    if name == "select_n" and first is not None and first.dtype == bool and len(arrays) == 3:
        return np.where(first, arrays[2], arrays[1])
    return first.astype(params["new_dtype"]) if name == "convert_element_type" and first is not None else None
