"""When two function objects mean the same: what lets fresh closures share one trace, and what forbids it.

A function is known by its code and by every value that it can reach: cells, defaults, globals, attributes of
modules, classes and functions that it names. It is shared only if each of them is proven to be constant: a
value that cannot change is compared by value, an object of a library that is found there under its own name,
or an array of JAX, by identity and held alive. Whatever is not proven forbids to share, and only the very
object counts.
"""

import builtins
import dataclasses
import dis
import enum
import functools
import sys
from collections.abc import Hashable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

# What these hold does not change while a program runs: their functions and objects count by identity.
_LIBRARIES = frozenset({"builtins", "jax", "jaxlib", "numpy", "ml_dtypes", "math", "attnspan"})
_LIBRARIES |= {"functools", "_functools", "operator", "_operator"}
_VALUES = (type(None), bool, int, str, bytes, type(...))
# With these a function reaches what its code does not name.
_REACHING = frozenset(
    id(getattr(builtins, name))
    for name in (
        *("globals", "vars", "locals", "eval", "exec", "getattr", "__import__", "dir", "compile", "open"),
        *("hasattr", "setattr", "delattr", "input", "super", "id"),
    )
)
# Of what `jax.jit` was told, all that may change the meaning.
_JIT_OPTIONS = (
    *("static_argnums", "static_argnames", "donate_argnums", "donate_argnames", "device", "backend"),
    *("keep_unused", "inline", "in_shardings_leaves", "out_shardings_leaves", "in_layouts_leaves"),
    *("out_layouts_leaves", "use_resource_env", "compiler_options_kvs"),
)
# Beyond this many values a key costs more than it can save.
_MOST_VALUES = 512

Path = tuple[str, ...]


class Unshareable(Exception):
    """The function reaches something whose changes nobody would see."""


def function_key(fn: Any) -> tuple[Hashable, list[Any]]:
    """What all functions that mean the same have in common.

    Args:
        fn: A Python function, a `functools.partial` of one, or what `jax.jit` made of one.

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
    walk = _Walk()
    return walk.value(fn), walk.held


def value_key(value: Any) -> Hashable:
    """A static value, such that 1, True and 1.0 differ and so do 0.0 and -0.0, wherever they are in it.

    Raises:
        TypeError: It cannot be hashed.

    Example:
        >>> value_key(1) == value_key(True)
        False
        >>> value_key((0.0,)) == value_key((-0.0,))
        False
    """
    hash(value)
    found = _number_key(value)
    if found is not None:
        return found
    kind = type(value)
    if isinstance(value, tuple):
        return kind, value, tuple(map(value_key, value))
    if isinstance(value, frozenset):
        return kind, frozenset(map(value_key, value))
    if isinstance(value, range):
        return kind, value.start, value.stop, value.step
    if _is_frozen(value):
        return kind, value, tuple(_hashable_key(getattr(value, f.name)) for f in dataclasses.fields(value))
    return kind, value


def _hashable_key(x: Any) -> Hashable:
    """Of a field; the dataclass need not count one that has no hash."""
    try:
        return value_key(x)
    except TypeError:
        return str(type(x))


def _number_key(x: Any) -> Hashable | None:
    """The key of a number, by its bits; None for what is none."""
    kind = type(x)
    if kind is float:
        return kind, x.hex()
    if kind is complex:
        return kind, x.real.hex(), x.imag.hex()
    if isinstance(x, np.number | np.bool_) or kind.__module__ == "ml_dtypes":
        return kind, x.tobytes() if isinstance(x, np.generic) else x
    return None


def _is_library_name(name: Any) -> bool:
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def _is_library_module(x: Any) -> bool:
    return isinstance(x, ModuleType) and _is_library_name(x.__name__)


def _is_library(x: Any) -> bool:
    """Whether a library has it under its own name: `__module__` alone is copied by `functools.wraps`."""
    module = getattr(x, "__module__", None)
    if not _is_library_name(module):
        return False
    if not (isinstance(getattr(x, "__self__", None), ModuleType | type(None))):  # A method of some object.
        return False
    for name in (getattr(x, "__qualname__", None), getattr(x, "__name__", None)):
        at: Any = sys.modules.get(str(module))
        for part in str(name).split("."):
            at = getattr(at, part, None)
        if at is x:
            return True
    return False


class _Walk:
    """One look at a function and all that it reaches."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self._seen: dict[int, int] = {}
        self._count = 0

    def _same(self, x: Any) -> Hashable:
        self.held.append(x)
        return "is", id(x)

    def _function(self, fn: FunctionType) -> Hashable:
        if id(fn) in self._seen:
            return "again", self._seen[id(fn)]
        self._seen[id(fn)] = len(self._seen)
        # JAX's transforms are functions of its own around yours, under your function's name.
        own = _is_library_name(fn.__globals__.get("__name__"))
        if not own and _reaches_unseen(fn.__code__):
            raise Unshareable
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        try:
            closed = tuple(
                (name, self._reached(fn, ("cell", name), cell.cell_contents)) for name, cell in cells.items()
            )
        except ValueError:  # A cell that is still empty will be filled later.
            raise Unshareable from None
        defaults = tuple(map(self.value, fn.__defaults__ or ()))
        keywords = tuple((name, self.value(x)) for name, x in (fn.__kwdefaults__ or {}).items())
        found = self._same(fn.__code__), closed, defaults, keywords
        if own:
            return found
        attributes = tuple((name, self.value(x)) for name, x in sorted(fn.__dict__.items()))
        return *found, self._globals(fn), attributes

    def _globals(self, fn: FunctionType) -> Hashable:
        names = sorted({path[1] for path in _paths(fn.__code__) if path[0] == "global"})
        found = []
        for name in names:
            for known in (fn.__globals__, fn.__builtins__):  # type: ignore[attr-defined]
                if name in known:
                    found.append((name, self._reached(fn, ("global", name), known[name])))
                    break
        return tuple(found)

    def _reached(self, fn: FunctionType, name: Path, value: Any) -> Hashable:
        """The key of what a function calls by a name; of a module or a class, only of what it takes there."""
        if not isinstance(value, ModuleType | type) or _is_library(value):
            return self.value(value)
        taken = []
        for path in sorted(p for p in _paths(fn.__code__) if p[:2] == name):
            if len(path) == 2:  # Handed on: what is taken from it cannot be seen.
                raise Unshareable
            taken.append((path, self._attribute(value, path[2:])))
        return self._same(value), tuple(taken)

    def _attribute(self, holder: Any, path: Path) -> Hashable:
        for i, name in enumerate(path):
            if not isinstance(holder, ModuleType | type) or _is_library(holder):
                return self.value(holder), path[i:]
            if not hasattr(holder, name):
                return "absent"
            holder = getattr(holder, name)
        return self.value(holder)

    def value(self, x: Any) -> Hashable:
        """The key of a value that is proven to be constant.

        Raises:
            Unshareable: It is not.
        """
        self._count += 1
        if self._count > _MOST_VALUES:
            raise Unshareable
        kind = type(x)
        if kind in _VALUES:
            return kind, x
        if kind is range or kind is slice:
            return kind, self.value(x.start), self.value(x.stop), self.value(x.step)
        number = _number_key(x)
        if number is not None:
            return number
        if kind is tuple:
            return kind, tuple(map(self.value, x))
        return self._object(x)

    def _object(self, x: Any) -> Hashable:
        kind = type(x)
        if isinstance(x, np.dtype) or kind is object or _is_constant_array(x):
            return self._same(x)
        if isinstance(x, enum.Enum | tuple) or _is_frozen(x):
            return self._record(x)
        if _is_library(x):
            if id(x) in _REACHING:
                raise Unshareable
            return self._same(x)
        if isinstance(x, FunctionType):
            return self._function(x)
        if isinstance(x, functools.partial) and _is_library(kind) and not x.__dict__:
            given = tuple((name, self.value(a)) for name, a in x.keywords.items())
            return kind, self.value(x.func), tuple(map(self.value, x.args)), given
        if kind.__module__ == "jaxlib._jax" and kind.__name__ == "PjitFunction":
            return self._jitted(x)
        if kind.__module__ == "jax._src.custom_derivatives":  # `custom_vjp`, `custom_jvp`.
            parts = sorted((name, part) for name, part in vars(x).items() if not name.startswith("__"))
            return kind, tuple((name, self.value(part)) for name, part in parts)
        if _is_of_jax(x):
            return self._same(x)
        raise Unshareable

    def _jitted(self, x: Any) -> Hashable:
        """What `jax.jit` made, by the function and the options that it was made of."""
        info = getattr(x, "_jit_info", None)
        if info is None or not all(hasattr(info, name) for name in _JIT_OPTIONS):
            raise Unshareable
        options = tuple(self.value(getattr(info, name)) for name in _JIT_OPTIONS)
        return "jit", self.value(x.__wrapped__), options

    def _record(self, x: Any) -> Hashable:
        """A member of an enumeration, a named tuple, a frozen dataclass: by value, if it is all there is."""
        kind: Any = type(x)
        ours = _is_library(kind)
        if isinstance(x, enum.Enum):
            if not (ours or _has_only(kind, frozenset(kind.__members__))):
                raise Unshareable
            return self._same(x), self.value(x._value_)
        if isinstance(x, tuple):
            names = frozenset(getattr(kind, "_fields", ()))
            if not (ours or (names and _has_only(kind, names) and not getattr(x, "__dict__", None))):
                raise Unshareable
            return self._same(kind), tuple(map(self.value, x))
        names = frozenset(f.name for f in dataclasses.fields(x))
        if not (ours or (_has_only(kind, names) and names >= set(getattr(x, "__dict__", ())))):
            raise Unshareable
        return self._same(kind), tuple((name, self.value(getattr(x, name))) for name in sorted(names))


def _is_frozen(x: Any) -> bool:
    """A frozen dataclass's fields cannot be set, and are looked at themselves."""
    return dataclasses.is_dataclass(x) and not isinstance(x, type) and x.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _is_constant_array(x: Any) -> bool:
    return is_jax_array(x) and not is_tracer(x)


def _is_of_jax(x: Any) -> bool:
    """Devices and what names them, and marks of JAX, as for an option that was not given."""
    kind = type(x)
    if not kind.__module__.startswith(("jax.", "jaxlib.")):
        return False
    jax = sys.modules["jax"]
    sharding = jax.sharding
    if isinstance(x, jax.Device | sharding.Mesh | sharding.PartitionSpec | sharding.Sharding):
        return True
    return getattr(x, "__dict__", None) == {} and not any("__slots__" in vars(c) for c in kind.__mro__)


# Who writes methods into records.
_MAKERS = frozenset({"dataclasses", "enum", "collections", "reprlib", "typing"})
_GENERATED = frozenset({"__init__", "__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"})
_GENERATED |= {"__setattr__", "__delattr__", "__replace__", "__new__"}


def _has_only(kind: type, names: frozenset[str]) -> bool:
    """Whether a class has fields alone: its own methods and attributes may reach what nobody looks at."""
    if type(kind) not in (type, enum.EnumMeta):
        return False
    for base in kind.__mro__:
        if base.__module__ in _MAKERS or _is_library(base):
            continue
        for name, x in vars(base).items():
            if name not in names and not _is_generated(name, x):
                return False
    return True


def _is_generated(name: str, x: Any) -> bool:
    x = getattr(x, "__func__", x)  # Of a classmethod.
    if isinstance(x, FunctionType):
        of = str(x.__globals__.get("__name__"))
        made = name in _GENERATED and x.__code__.co_filename == "<string>"
        return made or of in _MAKERS or of.startswith("namedtuple_")
    return name.startswith("_") and name.endswith("_") and not isinstance(x, property)


@functools.lru_cache(maxsize=1024)
def _paths(code: CodeType) -> frozenset[Path]:
    """The names that code loads from outside, each with where from and the attributes it takes at once."""
    paths: set[Path] = set()
    current: list[str] = []
    for at in dis.get_instructions(code):
        if current and at.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            current.append(str(at.argval))
            continue
        if current and at.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG"):
            paths.add(tuple(current))
            current = []
        if at.opname.startswith("LOAD_") and at.opname.endswith(("GLOBAL", "GLOBALS", "NAME")):
            current = ["global", str(at.argval)]
        elif at.opname.startswith("LOAD_") and at.opname.endswith("DEREF"):
            current = ["cell", str(at.argval)]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            paths |= _paths(constant)
    return frozenset(paths)


@functools.lru_cache(maxsize=1024)
def _reaches_unseen(code: CodeType) -> bool:
    """Whether code takes what its names do not show: another module, or the insides of an object."""
    if any(name.startswith("__") and name.endswith("__") for name in code.co_names):
        return True
    for at in dis.get_instructions(code):
        if at.opname == "IMPORT_NAME" and not _is_library_name(at.argval):
            return True
    return any(_reaches_unseen(x) for x in code.co_consts if isinstance(x, CodeType))


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
