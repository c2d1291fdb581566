"""Functions, their programs, and the lifetime of both.

As in `jax.jit`, the identity of a function object selects its programs, and they are freed with it. Programs
that compiled code refers to are kept until the process ends, because nothing reports that a graph is freed.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import secrets
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from types import MethodType
from typing import Any

import jax
import numpy as np
from torch import Tensor

from attnspan.base.forks import ForkSafeLock, without_locks
from attnspan.call.backend import asked
from attnspan.errors import DtypeError, expect
from attnspan.torch.compat import pytree

from ._convert import check_devices, jax_dtype
from ._programs import Program
from ._warnings import RetraceWarning

# Sizes of the caches, which evict the oldest entries. Keys are weak, but a program may hold its own function.
MOST_FUNCTIONS, MOST_PROGRAMS = 1024, 256
# A function that is traced this often for the same shapes causes a warning.
MANY_TRACES = 64

_lock = ForkSafeLock()
_counts: Counter[Hashable] = Counter()


class Programs:
    """The programs of one function."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name, self._where = getattr(fn, "__qualname__", type(fn).__name__), _where(fn)
        self._lock = ForkSafeLock()
        self._made: dict[Hashable, Program] = {}

    def get(self, structure: Hashable, shapes: Hashable, make: Callable[[], Program]) -> Program:
        """Return a program, made once even if several threads ask for it."""
        key = structure, shapes
        # The first lookup takes no lock, because the lock is held while another program is traced.
        found = self._made.get(key)
        if found is not None:
            return found
        with self._lock.held():
            if key not in self._made:
                _count(self._where, shapes)
                self._made[key] = make()
                if len(self._made) > MOST_PROGRAMS:
                    del self._made[next(iter(self._made))]
            return self._made[key]


# Keyed by the ids of a function's parts. Weak references remove an entry before its ids can be reused.
_programs: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], Programs]] = {}


def programs_of(fn: Callable[..., Any]) -> Programs:
    """Return the programs of a function object. A method is identified by its object and its function."""
    # Each access to a bound method makes a new object, but its parts stay the same.
    parts = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn,)
    key = tuple(map(id, parts))
    with _lock.held():
        if key in _programs:
            return _programs[key][1]
        made = Programs(fn)
        # A callable without weak references is traced at each call.
        with contextlib.suppress(TypeError):
            _programs[key] = [weakref.ref(x, lambda _: _programs.pop(key, None)) for x in parts], made
            if len(_programs) > MOST_FUNCTIONS:
                _programs.pop(next(iter(_programs)), None)
        return made


def _count(where: str, shapes: Hashable) -> None:
    """Warn once if one function in the source is traced again and again for the same shapes."""
    if len(_counts) > 4096:
        _counts.clear()
    _counts[where, shapes] += 1
    if _counts[where, shapes] == MANY_TRACES:
        warnings.warn(
            f"call_jax: {where} was traced {MANY_TRACES} times for the same shapes, each time as a new "
            "function object or for a new static argument. Create the function once, outside of the loop, "
            "and pass changing values as tensors.",
            RetraceWarning,
            stacklevel=5,  # The caller of `call_jax`, or its own frame if gradients are recorded.
        )


def _where(fn: Any) -> str:
    """Return a function's name and source location, or the class of a callable without code."""
    fn = inspect.unwrap(fn)  # Transforms and jit wrap functions.
    while isinstance(fn, functools.partial):
        fn = inspect.unwrap(fn.func)
    code = getattr(fn, "__code__", None)
    if code is None:
        return f"{type(fn).__qualname__} of {type(fn).__module__}"
    return f"{code.co_name} of {code.co_filename}:{code.co_firstlineno}"


def _leaf_key(i: int, x: Any) -> Hashable:
    try:
        return x if x is Tensor else static_key(x)
    except TypeError:
        expected, got = "a tensor, or something hashable to compile for", f"a {type(x).__name__}"
        remedy = "Convert it (torch.from_numpy, torch.from_dlpack). In JAX, call the function itself"
        raise DtypeError(f"argument leaf {i}", expected=expected, got=got, remedy=remedy) from None


def static_key(x: Any) -> Hashable:
    """Return a key of a static value, which distinguishes 1, True and 1.0, and 0.0 and -0.0, at any depth."""
    hash(x)
    if isinstance(x, jax.Array):  # Tracers may be hashable.
        raise TypeError
    if isinstance(x, float | complex | np.generic):
        return type(x), repr(x)
    parts: Any = ()
    if isinstance(x, tuple | frozenset):
        parts = x
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        parts = [getattr(x, f.name) for f in dataclasses.fields(x) if f.compare]
    return type(x), x, (frozenset if isinstance(x, frozenset) else tuple)(map(static_key, parts))


@without_locks
class JaxCall:
    """A function with all its arguments except the tensors. The operators run it.

    ``spec`` is the arguments' tree. Its ``leaves`` have the class `Tensor` in place of each tensor. It is
    None if the arguments are just tensors. ``kinds`` are the tensors' dtypes, numbers of dims and devices.
    """

    def __init__(
        self, fn: Callable[..., Any], spec: Any, leaves: Sequence[Any], kinds: Sequence[Any]
    ) -> None:
        remedy = "Without tensors, call the function itself"
        expect(kinds, "call_jax", "at least one tensor", "none", remedy)
        self._fn, self._spec, self._leaves, self.kinds = fn, spec, leaves, tuple(kinds)
        self._structure = spec, tuple(itertools.starmap(_leaf_key, enumerate(leaves)))
        self._programs = programs_of(fn)
        self.name = self._programs.name
        #: Structure of the results of the most recent program.
        self.tree: Any = None

    @functools.cached_property
    def handle(self) -> str:
        """A name for the operators, which take no Python objects. It is valid while the call exists."""
        handle = f"{self.name}#{_process}{next(_counter):x}"
        _live[handle] = self
        return handle

    def program(
        self, shapes: Sequence[tuple[Any, ...]], wanted: Sequence[bool] = (), key: Hashable = None
    ) -> Program:
        """Return the program for shapes. ``key`` replaces the shapes if they cannot be compared.

        If no gradients are wanted, the program returns nothing for backward.
        """
        config: Any = jax.config  # These settings change the meaning of a trace.
        settings = (
            config.jax_enable_x64,
            config.jax_default_matmul_precision,
            config.jax_numpy_dtype_promotion,
            config.jax_numpy_rank_promotion,
            config.jax_threefry_partitionable,
            config.jax_default_prng_impl,
            asked(None),
        )
        key = (tuple(shapes) if key is None else key, self.kinds, tuple(wanted), settings)
        found = self._programs.get(self._structure, key, lambda: self._trace(shapes, wanted))
        self.tree = found.tree
        return found

    def _trace(self, shapes: Sequence[tuple[Any, ...]], wanted: Sequence[bool]) -> Program:
        check_devices([device for _, _, device in self.kinds])
        dtypes = [jax_dtype(f"tensor {i}", dtype) for i, (dtype, _, _) in enumerate(self.kinds)]
        avals = list(itertools.starmap(jax.ShapeDtypeStruct, zip(shapes, dtypes, strict=True)))
        return Program(self._of_arrays, avals, wanted)

    def _of_arrays(self, *arrays: Any) -> Any:
        if self._spec is None:
            return self._fn(*arrays)
        left = iter(arrays)
        leaves = [next(left) if x is Tensor else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self._fn(*args, **kwargs)

    def shapes_of(self, sizes: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the shape of each tensor from all sizes in one list."""
        left = iter(sizes)
        return [tuple(itertools.islice(left, dims)) for _, dims, _ in self.kinds]

    def results(self) -> Any:
        """Return the structure of the results as nested tuples, which a compiler can store and rebuild."""
        return self._nested(self.tree.unflatten(range(self.tree.num_leaves)))

    def _nested(self, x: Any) -> tuple[Any, ...]:
        if type(x) is int or x is None:
            return "leaf", "" if x is None else str(x)
        what, expected = f"the result of {self.name} in compiled code", "arrays in tuples, lists and dicts"
        remedy, got = "Return one of these and build the object outside", f"a {type(x).__name__}"
        expect(type(x) in (list, tuple, dict), what, expected, got, remedy, error=DtypeError)
        parts = x.values() if isinstance(x, dict) else x
        return type(x).__name__, tuple(x) if isinstance(x, dict) else (), tuple(map(self._nested, parts))


# Compiled code may be stored on disk, and the next process would use a plain number for another function.
_process = secrets.token_hex(6)
_counter = itertools.count()
_live: weakref.WeakValueDictionary[str, JaxCall] = weakref.WeakValueDictionary()
_pinned: set[JaxCall] = set()


def pin(call: JaxCall) -> str:
    """Keep a call until the process ends, for a graph that stores its name."""
    _pinned.add(call)
    return call.handle


def find(handle: str) -> JaxCall:
    """Return the call with this name."""
    found = _live.get(handle)
    if found is None:
        raise RuntimeError(
            f"call_jax: expected a function of this process, got the unknown {handle}. You cannot save and "
            "load a graph that contains call_jax. Trace it again."
        )
    return found
