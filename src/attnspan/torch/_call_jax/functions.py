"""Functions, their traces, and how long they live.

A function that is known only by itself loses its traces when it dies. One that is shared with every function
of the same meaning keeps them while one of these lives, and the last few of them beyond that. What is held
past that time is held by someone: by a graph of autograd until it is freed, or by compiled code, of which
nobody learns when it dies: what a compiler has seen lives as long as the process.
"""

import contextlib
import functools
import itertools
import secrets
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType, MethodType
from typing import Any

import jax
import torch.utils._pytree as pytree

from ...errors import DtypeError
from .convert import check_devices, jax_dtype
from .keys import Unshareable, function_key
from .notices import RetraceWarning
from .programs import Derived, Forward, Recomputed, derive

# Traces of functions that have died, kept for the next function of the same meaning.
KEPT = 128
# They hold the arrays that such functions closed over: no more than this, but for the newest few.
KEPT_BYTES = 256 << 20
FEWEST = 4
# Programs of one function.
MOST_PROGRAMS = 256
# From here on a function that is traced again and again is worth a word.
MANY_TRACES = 64


class Arguments:
    """The structure of a call: where its tensors are, and everything else.

    Args:
        spec: Structure of (positional arguments, keyword arguments).
        leaves: Their leaves, with None in the place of tensors.
        places: Which leaves are tensors.
    """

    def __init__(self, spec: Any, leaves: list[Any], places: Sequence[int]) -> None:
        self._spec, self._leaves, self.places = spec, leaves, tuple(places)

    def bind(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function of the tensors alone."""

        def flat(*arrays: Any) -> Any:
            leaves = list(self._leaves)
            for place, x in zip(self.places, arrays, strict=True):
                leaves[place] = x
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
            return fn(*args, **kwargs)

        return flat

    def count_functions(self) -> None:
        """Note the functions among the leaves, for which a program is about to be made."""
        for x in self._leaves:
            if isinstance(x, FunctionType):
                table.count_static(x)


@functools.cache
def positional(count: int) -> Arguments:
    """The structure of a call with tensors alone, one after the other."""
    leaves = [None] * count
    return Arguments(pytree.tree_structure((tuple(leaves), {})), leaves, range(count))


_uses = itertools.count()


class _Entry:
    """A program, and when it was used last."""

    def __init__(self, program: Any) -> None:
        self.program, self.used = program, next(_uses)


class Traces:
    """All programs of one function; beyond `MOST_PROGRAMS`, those that were used last."""

    def __init__(self, key: Hashable, held: list[Any], name: str) -> None:
        self.key, self.held, self.name = key, held, name
        #: Bytes of the arrays that are held.
        self.weight = sum(x.nbytes for x in held if isinstance(x, jax.Array))
        self._lock = threading.RLock()
        self._programs: dict[Hashable, _Entry] = {}

    def find(self, key: Hashable) -> Any:
        """A program, or None where it must be made."""
        # Without the lock, which whoever traces another program holds for long.
        found = self._programs.get(key)
        if found is None:
            return None
        found.used = next(_uses)
        return found.program

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A program, made once however many threads ask."""
        with self._lock:
            found = self.find(key)
            if found is None:
                found = make()
                self._programs[key] = _Entry(found)
                if len(self._programs) > MOST_PROGRAMS:
                    del self._programs[min(self._programs, key=lambda k: self._programs[k].used)]
            return found


class _Table:
    """The traces of each function object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_object: dict[tuple[int, ...], tuple[tuple[weakref.ref[Any], ...], Traces]] = {}
        self._by_key: weakref.WeakValueDictionary[Hashable, Traces] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[Hashable, Traces] = OrderedDict()
        self._made: dict[Any, int] = {}
        self._statics: weakref.WeakSet[Any] = weakref.WeakSet()

    def traces_of(self, fn: Callable[..., Any]) -> Traces:
        """The traces of a function; new ones where none of the same meaning is known."""
        # Each look at a bound method makes a new one; its parts live on.
        parts = (fn.__self__, fn.__func__) if isinstance(fn, MethodType) else (fn,)
        place = tuple(map(id, parts))
        known = self._by_object.get(place)
        # An id is taken again once its object is gone: only the very object counts.
        if known is not None and all(ref() is x for ref, x in zip(known[0], parts, strict=True)):
            return known[1]
        try:
            key, held = function_key(fn)
        except Unshareable:
            key, held = None, []
        with self._lock:
            return self._add(fn, parts, place, key, held)

    def count(self) -> int:
        """How many functions have traces, and dead ones beside them."""
        return len(self._by_object) + len(self._kept)

    def clear(self) -> None:
        """Forget all traces, but for those that something else holds."""
        with self._lock:
            self._by_object.clear()
            self._by_key.clear()
            self._kept.clear()
            self._made.clear()

    def _add(
        self, fn: Any, parts: tuple[Any, ...], place: tuple[int, ...], key: Hashable, held: list[Any]
    ) -> Traces:
        traces = None if key is None else self._by_key.get(key)
        if traces is None:
            traces = Traces(key, held, getattr(fn, "__qualname__", type(fn).__name__))
            self._count(fn)
        if key is not None:
            self._by_key[key] = traces
            self._kept[key] = traces
            self._kept.move_to_end(key)
            self._drop()
        # What cannot be watched is looked up by its key, or traced anew. Of a method, either part may die.
        with contextlib.suppress(TypeError):
            forget = self._forget(place)
            self._by_object[place] = tuple(weakref.ref(x, forget) for x in parts), traces
        return traces

    def _drop(self) -> None:
        """Let go of the oldest, for their number or for the arrays that their functions hold."""
        total = sum(x.weight for x in self._kept.values())
        while len(self._kept) > KEPT or (total > KEPT_BYTES and len(self._kept) > FEWEST):
            total -= self._kept.popitem(last=False)[1].weight

    def _forget(self, place: tuple[int, ...]) -> Callable[[Any], None]:
        def forget(ref: Any) -> None:
            known = self._by_object.get(place)
            if known is not None and any(x is ref for x in known[0]):
                del self._by_object[place]

        return forget

    def count_static(self, x: Any) -> None:
        """Count a function that is a static argument: another one of the same code is another trace."""
        with self._lock:
            if x not in self._statics:
                self._statics.add(x)
                self._count(x, "a static argument", stacklevel=8)

    def _count(self, fn: Any, what: str = "", stacklevel: int = 6) -> None:
        where = what, *_made_at(fn)
        self._made[where] = self._made.get(where, 0) + 1
        if self._made[where] == MANY_TRACES:
            each = what and f", each {what}"
            warnings.warn(
                f"call_jax: {where[1]} of {where[2]} was traced as {MANY_TRACES} functions{each}. What it "
                "reaches changes, or may change unseen: pass tensors as arguments and numbers by keyword, or "
                "make the function once.",
                RetraceWarning,
                stacklevel=stacklevel,
            )


def _made_at(fn: Any) -> tuple[str, str]:
    """The name of a function, and where it is written; of a callable without code, where its class is."""
    for _ in range(16):  # What transforms, jit and partial are made of.
        inner = getattr(fn, "__wrapped__", None) or getattr(fn, "func", None)
        if not callable(inner):
            break
        fn = inner
    code = getattr(fn, "__code__", None)
    if code is None:
        return type(fn).__qualname__, type(fn).__module__
    return code.co_name, f"{code.co_filename}:{code.co_firstlineno}"


table = _Table()


class Call:
    """A function with the structure of its arguments: what the operators run.

    Args:
        fn: The function.
        traces: Its programs.
        structure: What distinguishes calls that differ in more than their tensors.
        arguments: Where the tensors go.
        kinds: Element type, number of dims and device of each tensor.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        traces: Traces,
        structure: Hashable,
        arguments: Arguments,
        kinds: Sequence[Any],
    ) -> None:
        self.fn, self.traces, self.structure, self.arguments = fn, traces, structure, arguments
        self.kinds = kinds
        self.handle = ""
        #: Structure of the results, as the program that was found last has it.
        self.tree: Any = None

    def shapes_of(self, sizes: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The shape of each tensor, of all sizes one after the other."""
        left = iter(sizes)
        return [tuple(itertools.islice(left, dims)) for _, dims, _ in self.kinds]

    def forward(self, shapes: Sequence[tuple[Any, ...]]) -> Forward:
        """The program for results alone."""
        key = self._key(shapes)
        found = self.traces.find(key)
        if found is None:
            self.arguments.count_functions()
            found = self.traces.get(key, lambda: Forward(self.flat(), self._avals(shapes)))
        self.tree = found.tree
        return found  # type: ignore[no-any-return]

    def derived(
        self, shapes: Sequence[tuple[Any, ...]], wanted: Sequence[bool], recompute: bool = False
    ) -> Derived | Recomputed:
        """The programs for results and gradients."""
        key = (*self._key(shapes), tuple(wanted), recompute)
        found = self.traces.find(key)
        if found is None:
            self.arguments.count_functions()
            found = self.traces.get(key, lambda: self._derive(shapes, wanted, recompute))
        self.tree = found.tree
        return found  # type: ignore[no-any-return]

    def _derive(self, shapes: Any, wanted: Sequence[bool], recompute: bool) -> Derived | Recomputed:
        if recompute:
            return Recomputed(self.forward(shapes), wanted)
        return derive(self.flat(), self._avals(shapes), wanted)

    def part(self, path: Sequence[int]) -> tuple[str, int, Any]:
        """What is at a path of the results: its kind, its place or number of parts, and itself.

        Raises:
            TypeError: A compiler could not build it.
        """
        x = jax.tree_util.tree_unflatten(self.tree, range(self.tree.num_leaves))
        for i in path:
            x = list(x.values() if isinstance(x, dict) else x)[i]
        kind = type(x)
        if kind is int:
            return "leaf", x, x
        if x is None:
            return "None", 0, x
        if kind in (list, tuple, dict):
            return kind.__name__, len(x), x
        raise DtypeError(
            f"the result of {self.traces.name} in compiled code",
            expected="arrays in tuples, lists and dicts",
            got=f"a {kind.__name__}",
            remedy="Return one of these and make the object of it outside",
        )

    def _key(self, shapes: Sequence[tuple[Any, ...]]) -> tuple[Hashable, ...]:
        return (self.structure, config_key(), *zip(self.kinds, shapes, strict=True))

    def flat(self) -> Callable[..., Any]:
        """The function of the tensors alone."""
        return self.arguments.bind(self.fn)

    def dtypes(self) -> list[Any]:
        """Element types as JAX calls them, for tensors that JAX can read.

        Raises:
            ValueError: The tensors are on several devices, or where JAX cannot read them.
            TypeError: An element type that JAX has not.
        """
        check_devices([device for _, _, device in self.kinds])
        return [jax_dtype(f"tensor {i}", dtype) for i, (dtype, _, _) in enumerate(self.kinds)]

    def _avals(self, shapes: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, self.dtypes(), strict=True)]


def config_key() -> Hashable:
    """Settings of JAX that change what a trace means."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision, config.jax_numpy_dtype_promotion


# Compiled code may be kept on disk, where a number would mean another function in the next process.
_process = secrets.token_hex(6)
_counter = itertools.count()
_live: weakref.WeakValueDictionary[str, Call] = weakref.WeakValueDictionary()
_pinned: dict[str, Call] = {}


def register(call: Call) -> str:
    """A name for the operators, which take no Python objects; it means the call as long as that lives."""
    if not call.handle:
        call.handle = f"{call.traces.name}#{_process}{next(_counter):x}"
        _live[call.handle] = call
    return str(call.handle)


def pin(call: Call) -> None:
    """Keep a call for the life of the process: a graph has its name."""
    _pinned[register(call)] = call


def find(handle: str) -> Call:
    """The call of a name.

    Raises:
        RuntimeError: It is gone, or of another process.
    """
    found = _live.get(handle)
    if found is None:
        raise RuntimeError(
            f"call_jax: expected a function of this process, got {handle}, which is none. A graph with "
            "call_jax in it cannot be saved and loaded: trace it anew."
        )
    return found


def handle_in_graph(fn: Any, structure: Hashable, arguments: Arguments, kinds: Sequence[Any]) -> str:
    """The name of a call for a graph that is being traced; the same one for the same call."""
    traces = table.traces_of(fn)
    call = traces.get(
        ("graph", structure, tuple(kinds)), lambda: Call(fn, traces, structure, arguments, kinds)
    )
    pin(call)
    return str(call.handle)
