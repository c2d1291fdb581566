"""Functions, their programs, and how long these live.

As in `jax.jit`, a function is identified by its object, and its programs are freed with it. Programs that
compiled code refers to live as long as the process: there is no signal when a graph is freed.
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
from .call_jax import RetraceWarning

# Bounds of the caches; the oldest entries make room. Keys are weak, but a program may hold its own function.
MOST_FUNCTIONS, MOST_PROGRAMS = 1024, 256
# A function that is traced as often as this for the same shapes is worth a warning.
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
        """A program, made once however many threads ask."""
        key = structure, shapes
        # First without the lock, which is held while another program is traced.
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


# By the ids of what makes a function. The references forget an entry before its ids can be taken again.
_programs: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], Programs]] = {}


def programs_of(fn: Callable[..., Any]) -> Programs:
    """The programs of a function object; of a method, those of its object and its function."""
    # Each access to a bound method makes a new one; its parts live on.
    parts = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn,)
    key = tuple(map(id, parts))
    with _lock.held():
        if key in _programs:
            return _programs[key][1]
        made = Programs(fn)
        # What has no weak references is traced at each call.
        with contextlib.suppress(TypeError):
            _programs[key] = [weakref.ref(x, lambda _: _programs.pop(key, None)) for x in parts], made
            if len(_programs) > MOST_FUNCTIONS:
                _programs.pop(next(iter(_programs)), None)
        return made


def _count(where: str, shapes: Hashable) -> None:
    """Warn once when one function of the source is traced again and again for the same shapes."""
    if len(_counts) > 4096:
        _counts.clear()
    _counts[where, shapes] += 1
    if _counts[where, shapes] == MANY_TRACES:
        warnings.warn(
            f"call_jax: {where} was traced {MANY_TRACES} times for the same shapes, each time as a new "
            "function object or for a new static argument. Make the function once, outside of what repeats, "
            "and pass what changes as tensors.",
            RetraceWarning,
            stacklevel=5,  # The caller of `call_jax`; where gradients are recorded, a frame of ours.
        )


def _where(fn: Any) -> str:
    """The name of a function and where it is written; of a callable without code, its class."""
    fn = inspect.unwrap(fn)  # Transforms and jit wrap what they are given.
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
        remedy = "Convert it (torch.from_numpy, torch.from_dlpack); in JAX, call the function itself"
        raise DtypeError(f"argument leaf {i}", expected=expected, got=got, remedy=remedy) from None


def static_key(x: Any) -> Hashable:
    """A key of a static value, which tells 1, True and 1.0 apart, and 0.0 and -0.0, at any depth."""
    hash(x)
    if isinstance(x, jax.Array):  # Tracers may have a hash.
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
    """A function with its arguments but for the tensors: what the operators run.

    ``spec`` is the arguments' tree, whose ``leaves`` have the class `Tensor` in the place of each tensor; it
    is None for tensors one after the other. ``kinds`` are the tensors' element types, numbers of dims and
    devices.
    """

    def __init__(
        self, fn: Callable[..., Any], spec: Any, leaves: Sequence[Any], kinds: Sequence[Any]
    ) -> None:
        remedy = "Call the function itself where no tensor is involved"
        expect(kinds, "call_jax", "at least one tensor", "none", remedy)
        self._fn, self._spec, self._leaves, self.kinds = fn, spec, leaves, tuple(kinds)
        self._structure = spec, tuple(itertools.starmap(_leaf_key, enumerate(leaves)))
        self._programs = programs_of(fn)
        self.name = self._programs.name
        #: Structure of the results, as the program that was found last has it.
        self.tree: Any = None

    @functools.cached_property
    def handle(self) -> str:
        """A name for the operators, which take no Python objects. It is valid while the call lives."""
        handle = f"{self.name}#{_process}{next(_counter):x}"
        _live[handle] = self
        return handle

    def program(
        self, shapes: Sequence[tuple[Any, ...]], wanted: Sequence[bool] = (), key: Hashable = None
    ) -> Program:
        """The program for shapes, which ``key`` stands for where they cannot be compared.

        Without gradients that are wanted, the program makes nothing for backward.
        """
        config: Any = jax.config  # Settings that change what a trace means.
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
        """The shape of each tensor, of all sizes one after the other."""
        left = iter(sizes)
        return [tuple(itertools.islice(left, dims)) for _, dims, _ in self.kinds]

    def results(self) -> Any:
        """The structure of the results as nested tuples, which a compiler can hold and build."""
        return self._nested(self.tree.unflatten(range(self.tree.num_leaves)))

    def _nested(self, x: Any) -> tuple[Any, ...]:
        if type(x) is int or x is None:
            return "leaf", "" if x is None else str(x)
        what, expected = f"the result of {self.name} in compiled code", "arrays in tuples, lists and dicts"
        remedy, got = "Return one of these and make the object of it outside", f"a {type(x).__name__}"
        expect(type(x) in (list, tuple, dict), what, expected, got, remedy, error=DtypeError)
        parts = x.values() if isinstance(x, dict) else x
        return type(x).__name__, tuple(x) if isinstance(x, dict) else (), tuple(map(self._nested, parts))


# Compiled code may be kept on disk, where a number would mean another function in the next process.
_process = secrets.token_hex(6)
_counter = itertools.count()
_live: weakref.WeakValueDictionary[str, JaxCall] = weakref.WeakValueDictionary()
_pinned: set[JaxCall] = set()


def pin(call: JaxCall) -> str:
    """Keep a call for the life of the process, for a graph that holds its name."""
    _pinned.add(call)
    return call.handle


def find(handle: str) -> JaxCall:
    """The call of a name."""
    found = _live.get(handle)
    if found is None:
        raise RuntimeError(
            f"call_jax: expected a function of this process, got {handle}, which is none. A graph with "
            "call_jax in it cannot be saved and loaded: trace it anew."
        )
    return found
