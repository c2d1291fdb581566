"""When two function objects mean the same: what lets fresh closures share one trace, and what forbids it.

A function is known by its code and by every value that it can reach: cells, defaults, globals, attributes of
modules and classes that it names. Values that cannot change are compared by value or, held alive, by
identity. Where one of them may change unseen, the function is not shared, and only the very object counts.
"""

import dataclasses
import dis
import enum
import functools
import sys
from collections.abc import Hashable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

# What these hold does not change while a program runs: their functions and objects count by identity.
_LIBRARIES = frozenset({"builtins", "jax", "jaxlib", "numpy", "ml_dtypes", "math", "functools", "operator"})
_VALUES = (type(None), bool, int, str, bytes, type(...), np.dtype, range)
# Beyond this many values a key costs more than it can save.
_MOST_VALUES = 512

Path = tuple[str, ...]


class Unshareable(Exception):
    """The function reaches something whose changes nobody would see."""


def function_key(fn: Any) -> tuple[Hashable, list[Any]]:
    """What all functions that mean the same have in common.

    Args:
        fn: A Python function, or a `functools.partial` of one.

    Returns:
        The key, and the objects in it that count by identity: keep them alive as long as the key.

    Raises:
        Unshareable: Only the very object is known to mean the same.

    Example:
        >>> def scale_by(s):
        ...     return lambda x: s * x
        >>> function_key(scale_by(2))[0] == function_key(scale_by(2))[0]
        True
        >>> function_key(scale_by(2))[0] == function_key(scale_by(3))[0]
        False
    """
    if not isinstance(fn, FunctionType | functools.partial):
        raise Unshareable
    walk = _Walk()
    return walk.callable(fn), walk.held


def value_key(value: Any) -> Hashable:
    """A static value, such that 1, True and 1.0 differ and so do 0.0 and -0.0.

    Raises:
        TypeError: It cannot be hashed.

    Example:
        >>> value_key(1) == value_key(True)
        False
    """
    if isinstance(value, float):
        return float, value.hex()
    hash(value)
    return type(value), value


def _is_library(x: Any) -> bool:
    return (getattr(x, "__module__", None) or "").partition(".")[0] in _LIBRARIES


class _Walk:
    """One look at a function and all that it reaches."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self._seen: dict[int, int] = {}
        self._count = 0

    def _same(self, x: Any) -> Hashable:
        self.held.append(x)
        return "is", id(x)

    def callable(self, fn: Any) -> Hashable:
        if isinstance(fn, functools.partial):
            given = tuple((name, self.value(x)) for name, x in fn.keywords.items())
            return "partial", self.value(fn.func), tuple(map(self.value, fn.args)), given
        return self._function(fn)

    def _function(self, fn: FunctionType) -> Hashable:
        if id(fn) in self._seen:
            return "again", self._seen[id(fn)]
        self._seen[id(fn)] = len(self._seen)
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        try:
            closed = tuple(
                (name, self._reached(fn, name, cell.cell_contents)) for name, cell in cells.items()
            )
        except ValueError:  # A cell that is still empty will be filled later.
            raise Unshareable from None
        defaults = tuple(map(self.value, fn.__defaults__ or ()))
        keywords = tuple((name, self.value(x)) for name, x in (fn.__kwdefaults__ or {}).items())
        return self._same(fn.__code__), closed, defaults, keywords, self._globals(fn)

    def _globals(self, fn: FunctionType) -> Hashable:
        if _is_library(fn):
            return ()
        known = fn.__globals__
        names = {path[0] for path in _paths(fn.__code__)} - set(fn.__code__.co_freevars)
        return tuple((name, self._reached(fn, name, known[name])) for name in sorted(names) if name in known)

    def _reached(self, fn: FunctionType, name: str, value: Any) -> Hashable:
        """The key of what a function calls by a name; of a module or a class, only of what it takes there."""
        if not isinstance(value, ModuleType | type) or _is_library(value) or _is_library_module(value):
            return self.value(value)
        taken = []
        for path in sorted(p for p in _paths(fn.__code__) if p[0] == name):
            if len(path) == 1:  # Handed on: what is taken from it cannot be seen.
                raise Unshareable
            taken.append((path, self._attribute(value, path[1:])))
        return self._same(value), tuple(taken)

    def _attribute(self, holder: Any, path: Path) -> Hashable:
        for i, name in enumerate(path):
            if not isinstance(holder, ModuleType | type) or _is_library_module(holder):
                return self.value(holder), path[i:]
            if not hasattr(holder, name):
                return "absent"
            holder = getattr(holder, name)
        return self.value(holder)

    def value(self, x: Any) -> Hashable:
        self._count += 1
        if self._count > _MOST_VALUES:
            raise Unshareable
        kind = type(x)
        if kind in _VALUES:
            return kind, x
        if kind is float:
            return kind, x.hex()
        if kind is complex:
            return kind, x.real.hex(), x.imag.hex()
        if isinstance(x, np.generic):
            return kind, x.tobytes()
        if kind is tuple or (isinstance(x, tuple) and hasattr(x, "_fields")):
            return self._same(kind), tuple(map(self.value, x))
        return self._object(x)

    def _object(self, x: Any) -> Hashable:
        if isinstance(x, enum.Enum | BuiltinFunctionType) or _is_library_module(x):
            return self._same(x)
        if isinstance(x, FunctionType):
            return self._same(x) if _is_library(x) and not x.__closure__ else self._function(x)
        if isinstance(x, functools.partial):
            return self.callable(x)
        if _is_frozen(x):
            fields = dataclasses.fields(x)
            return self._same(type(x)), tuple(self.value(getattr(x, f.name)) for f in fields)
        if isinstance(x, np.ndarray | MethodType | list | dict | set | ModuleType):
            raise Unshareable
        # Classes and immutable objects of JAX and NumPy: arrays, jitted functions, dtypes.
        if _is_library(x if isinstance(x, type) else type(x)):
            return self._same(x)
        raise Unshareable


def _is_frozen(x: Any) -> bool:
    """A frozen dataclass's fields cannot be set, and are looked at themselves."""
    return dataclasses.is_dataclass(x) and not isinstance(x, type) and x.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _is_library_module(x: Any) -> bool:
    return isinstance(x, ModuleType) and x.__name__.partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=1024)
def _paths(code: CodeType) -> frozenset[Path]:
    """The names that code loads from outside, each with the attributes that it takes of them at once."""
    paths: set[Path] = set()
    current: list[str] = []
    for at in dis.get_instructions(code):
        if current and at.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            current.append(str(at.argval))
            continue
        if current and at.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG"):
            paths.add(tuple(current))
            current = []
        if at.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"):
            current = [str(at.argval)]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            paths |= _paths(constant)
    return frozenset(paths)


def is_jax_array(x: Any) -> bool:
    """Whether it is an array or a tracer of JAX, without importing JAX.

    Example:
        >>> is_jax_array(np.zeros(2))
        False
    """
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def is_tracer(x: Any) -> bool:
    """Whether it stands for a value that JAX does not know yet.

    Example:
        >>> is_tracer(np.zeros(2))
        False
    """
    return is_jax_array(x) and isinstance(x, sys.modules["jax"].core.Tracer)
