"""Arrays that a user's function captures."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from attnspan.base.arrays import Array, is_array

_FRAMEWORKS = ("numpy", "torch", "jax", "jaxlib")


def captured(fn: Any) -> list[Array]:
    """Find the arrays that a function captures: in closures, globals, defaults, partials and attributes.

    Example:
        >>> import numpy as np
        >>> ids = np.arange(3)
        >>> captured(lambda b, h, q, k: ids[q] == ids[k])
        [array([0, 1, 2])]
    """
    found: list[Array] = []

    def keep(x: Array) -> Array:
        found.append(x)
        return x

    with_arrays(fn, keep)
    return found


def with_arrays(fn: Any, replace: Callable[[Array], Any]) -> Any:
    """Copy a function with its captured arrays replaced. Without replacements, return the function itself."""
    return _Copier(replace).copy(fn)


class _Copier:
    def __init__(self, replace: Callable[[Array], Any]) -> None:
        self.replace, self.seen = replace, set[int]()

    def copy(self, x: Any) -> Any:
        if is_array(x):
            return self.replace(x)
        # A framework's function reads no array of the user. An object that refers to itself is copied once.
        if id(x) in self.seen or type(x) in (int, float, str) or _is_of_framework(x):
            return x
        self.seen.add(id(x))
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType):
            return self._changed(x, [x.__func__, x.__self__], lambda new: types.MethodType(*new))
        if isinstance(x, functools.partial):
            return self._changed(
                x, [x.func, x.args, x.keywords], lambda new: functools.partial(new[0], *new[1], **new[2])
            )
        if type(x) in (list, tuple):
            return self._changed(x, x, type(x))
        if type(x) is dict:
            return self._changed(x, x.values(), lambda new: dict(zip(x, new, strict=True)))
        if callable(x) and hasattr(x, "__dict__") and not isinstance(x, type):
            return self._changed(x, [vars(x)], lambda new: _with_attributes(x, new[0]))
        return x

    def _changed(self, x: Any, parts: Any, build: Callable[[list[Any]], Any]) -> Any:
        parts = list(parts)
        new = [self.copy(part) for part in parts]
        return x if all(a is b for a, b in zip(parts, new, strict=True)) else build(new)

    def _function(self, fn: types.FunctionType) -> Any:
        names = {name for name in _names(fn.__code__) if name in fn.__globals__}
        parts = [
            [_content(cell) for cell in fn.__closure__ or ()],
            {name: fn.__globals__[name] for name in names},
            fn.__defaults__,
            fn.__kwdefaults__,
        ]

        def build(new: list[Any]) -> types.FunctionType:
            cells = [
                old if _content(old) is x else types.CellType(x)
                for old, x in zip(fn.__closure__ or (), new[0], strict=True)
            ]
            everything = {**fn.__globals__, **new[1]}
            made = types.FunctionType(fn.__code__, everything, fn.__name__, new[2], tuple(cells) or None)
            made.__kwdefaults__ = new[3]
            return made

        return self._changed(fn, parts, build)


def _is_of_framework(x: Any) -> bool:
    where = getattr(x, "__module__", None) if callable(x) else None
    return isinstance(where, str) and where.partition(".")[0] in _FRAMEWORKS


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _with_attributes(x: Any, attributes: dict[str, Any]) -> Any:
    made = copy.copy(x)
    vars(made).update(attributes)
    return made
