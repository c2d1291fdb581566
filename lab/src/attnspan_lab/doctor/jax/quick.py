"""NumPy versions of common operators. JAX compiles each operator for each shape, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["free_axes", "quick"]

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
#: Operators of one array, from their parameters and the array.
_OF_ONE: dict[str, Callable[[Any, np.ndarray], Any]] = {
    "reduce_max": lambda params, x: np.max(x, axis=tuple(params["axes"])) if x.size else None,
    "reduce_min": lambda params, x: np.min(x, axis=tuple(params["axes"])) if x.size else None,
    "reduce_sum": lambda params, x: np.sum(x, axis=tuple(params["axes"])),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "reshape": lambda params, x: np.reshape(x, params["new_sizes"]) if not params.get("dimensions") else None,
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
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


def free_axes(dims: int, numbers: Any, operand: int) -> list[int]:
    """List the axes of a product's operand that are neither added up nor of batch elements."""
    return [a for a in range(dims) if not any(a in x[operand] for x in numbers)]


def _product(numbers: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Multiply matrices: axes of batch elements first, then the free axes of both."""
    contract, batch = numbers
    free = [free_axes(z.ndim, numbers, i) for i, z in enumerate((x, y))]
    shape = [x.shape[a] for a in (*batch[0], *free[0])] + [y.shape[a] for a in free[1]]
    lead, inner = (int(np.prod([x.shape[a] for a in axes])) for axes in (batch[0], contract[0]))
    left = x.transpose(*batch[0], *free[0], *contract[0]).reshape(lead, -1, inner)
    right = y.transpose(*batch[1], *contract[1], *free[1]).reshape(lead, inner, -1)
    return np.asarray((left @ right).reshape(shape))


def _made(name: str, params: Any, arrays: list[np.ndarray]) -> Any:
    if name in _PLAIN:
        return _PLAIN[name](*arrays)
    if name in _OF_ONE:
        return _OF_ONE[name](params, arrays[0])
    if name == "div" and arrays[0].dtype.kind == "f":
        return np.divide(*arrays)
    if name == "broadcast_in_dim" and len(arrays) == 1:
        sizes = dict(zip(params["broadcast_dimensions"], arrays[0].shape, strict=True))
        narrow = arrays[0].reshape([sizes.get(i, 1) for i in range(len(params["shape"]))])
        return np.broadcast_to(narrow, params["shape"])
    if name == "dot_general" and all(x.dtype.kind == "f" and x.dtype.itemsize >= 4 for x in arrays):
        return _product(params["dimension_numbers"], *arrays)
    if name == "select_n" and arrays[0].dtype == bool and len(arrays) == 3:
        return np.where(arrays[0], arrays[2], arrays[1])
    return None
