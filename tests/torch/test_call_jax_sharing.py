"""What a function reaches without showing it: where another trace would be wrong numbers, none is shared."""

import builtins
import enum
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType, ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from attnspan.torch import RetraceWarning, call_jax

jax = pytest.importorskip("jax")
jnp = jax.numpy
functions = pytest.importorskip("attnspan.torch._call_jax.functions")
keys = pytest.importorskip("attnspan.torch._call_jax.keys")

X = torch.ones(3)
traced: list[str] = []


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def counted(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (traced.append(make.__name__), make(*given))[1]

    monkeypatch.setattr(functions, "Forward", counted(functions.Forward))
    monkeypatch.setattr(functions, "derive", counted(functions.derive))
    traced.clear()
    functions.table.clear()
    yield
    functions.table.clear()


# Methods.


class Owner:
    method: Any


def _times(s: float) -> Callable[..., Any]:
    return lambda _self, x: x * s


def test_a_method_is_its_object_and_its_function() -> None:
    owner = Owner()
    for i in range(20):
        method = MethodType(_times(float(i)), owner)
        assert call_jax(method, X)[0] == i, "a fresh function, at an id that is taken again"
        del method
    for i in range(20):
        Owner.method = _times(float(i))
        assert call_jax(owner.method, X)[0] == i, "another function of the class"
        del Owner.method
    gc.collect()
    assert functions.table.count() == 0, "forgotten with the function, though the object lives"


# What changes unseen.

CONFIG = {"s": 1.0}
READ = CONFIG.get
STATE = ModuleType("attnspan_test_state")
SCALE = 1.0


def _attribute(x: Any) -> Any:
    return x * _attribute.s  # type: ignore[attr-defined]


@functools.wraps(jnp.sin)
def _named_as_a_librarys(x: Any) -> Any:
    return x * SCALE


@functools.cache
def _cached(x: Any) -> Any:
    return x * SCALE


@dataclass(frozen=True)
class Shown:
    s: Any


@dataclass(frozen=True)
class Hiding(Shown):
    factor: ClassVar[float] = 1.0

    def by_global(self, x: Any) -> Any:
        return x * SCALE

    def by_class(self, x: Any) -> Any:
        return x * type(self).factor


class Pair(NamedTuple):
    s: Any

    def by(self, x: Any) -> Any:
        return x * SCALE


class Kind(enum.Enum):
    ONE = 1

    def by(self, x: Any) -> Any:
        return x * SCALE


class Plain(enum.Enum):
    ONE = 1


def _import() -> Callable[[Any], Any]:
    def fn(x: Any) -> Any:
        import attnspan_test_state  # type: ignore[import-not-found]

        return x * attnspan_test_state.s

    return fn


HIDING, PAIR, ITEMS = Hiding(1.0), Pair(1.0), bytearray(b"\1")
REACHES: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "a bound built-in": lambda: lambda x: x * READ("s"),
    "an import inside": _import,
    "globals()": lambda: lambda x: x * globals()["SCALE"],
    "vars()": lambda: lambda x: x * vars(STATE)["s"],
    "eval()": lambda: lambda x: x * eval("SCALE"),
    "getattr()": lambda: lambda x: x * getattr(STATE, "s"),  # noqa: B009
    "the insides of a function": lambda: lambda x: x * _by_insides.__globals__["SCALE"],
    "a wrapper under a library's name": lambda: lambda x: _named_as_a_librarys(x),
    "a cache": lambda: lambda x: _cached.__wrapped__(x),
    "an attribute of a function": lambda: lambda x: _attribute(x),
    "a dataclass's method": lambda: lambda x: HIDING.by_global(x),
    "a dataclass's class": lambda: lambda x: HIDING.by_class(x),
    "a tuple's method": lambda: lambda x: PAIR.by(x),
    "an enumeration's method": lambda: lambda x: Kind.ONE.by(x),
    "a built-in's name": lambda: lambda x: x * attnspan_test_name,  # type: ignore[name-defined] # noqa: F821
    "bytes that change": lambda: lambda x: x * ITEMS[0],
    "a module handed on": lambda: lambda x: x * (lambda m: m.s)(STATE),
}


def _by_insides(x: Any) -> Any:
    return x


@pytest.mark.parametrize("case", REACHES)
def test_what_is_not_proven_to_be_constant_is_not_shared(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attnspan_test_state", STATE)
    for s in (1, 2, 3):
        for holder in (CONFIG, STATE.__dict__):
            monkeypatch.setitem(holder, "s", s)
        monkeypatch.setitem(globals(), "SCALE", s)
        monkeypatch.setattr(builtins, "attnspan_test_name", s, raising=False)
        monkeypatch.setattr(Hiding, "factor", s)
        monkeypatch.setattr(_attribute, "s", s, raising=False)
        ITEMS[0] = s
        assert call_jax(REACHES[case](), X)[0] == s


MARK = Shown(3.0)


@jax.custom_vjp
def _custom(x: Any) -> Any:
    return x * 2


_custom.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
CONSTANT: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "libraries": lambda: lambda x: jnp.sin(x) + jax.nn.relu(jnp.where(x > np.pi, x, jnp.exp(x))),
    "types": lambda: lambda x: x.astype(jnp.float32) + jnp.zeros(3, np.dtype("float32")),
    "built-ins": lambda: lambda x: functools.reduce(jnp.add, [x * float(i) for i in range(len(x))]),
    "a dataclass of fields": lambda: lambda x: x * MARK.s,
    "an enumeration": lambda: (lambda one: lambda x: x * one.value)(Plain.ONE),
    "a function of functions": lambda: lambda x: _by_insides(x),
    "a derivative of one's own": lambda: lambda x: _custom(x),
    "a slice": lambda: (lambda at: lambda x: x[at])(slice(1, None)),
}


@pytest.mark.parametrize("case", CONSTANT)
def test_what_is_proven_is_shared(case: str) -> None:
    for _ in range(3):
        call_jax(CONSTANT[case](), X)
    assert len(traced) == 1


def test_a_jax_ref_is_not_shared() -> None:
    ref = jax.new_ref(jnp.ones(()))
    for s in (1.0, 2.0):
        ref[...] = s
        with pytest.raises(keys.Unshareable):
            keys.function_key(lambda x: x * ref[...])


# Transforms that are made anew at each call.


def _cube(x: Any) -> Any:
    return (x**3).sum()


def _scaled_cube(s: float) -> Callable[[Any], Any]:
    return lambda x: (x**3 * s).sum()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "vmap": jax.vmap,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "grad of jit": lambda fn: jax.grad(jax.jit(fn)),
    "lambda": lambda fn: jax.grad(lambda x: fn(x)),
}


@pytest.mark.parametrize("case", TRANSFORMS)
def test_transforms_made_at_each_call_are_traced_once(case: str) -> None:
    for _ in range(10):
        call_jax(TRANSFORMS[case](_cube), X)
    assert len(traced) == 1
    for _ in range(10):
        first = call_jax(TRANSFORMS[case](_scaled_cube(1.0)), X)
    assert len(traced) == 2
    again = call_jax(TRANSFORMS[case](_scaled_cube(2.0)), X)
    assert len(traced) == 3, "and the numbers it closes over count"
    for a, b in zip(tree_leaves(first), tree_leaves(again), strict=True):
        assert torch.equal(a * 2, b)


def test_options_of_jit_are_part_of_the_meaning() -> None:
    key = keys.function_key
    assert key(jax.jit(_cube))[0] == key(jax.jit(_cube))[0]
    assert key(jax.jit(_cube))[0] != key(jax.jit(_cube, inline=True))[0]


# Static arguments.


def test_static_values_are_told_apart_by_bits_and_types() -> None:
    def of(x: Any, s: Any) -> Any:
        return x * s.s if isinstance(s, Shown | Hiding) else x / s[0]

    ints = torch.ones(3, dtype=torch.int32)
    for make in (Shown, Hiding):
        dtypes = [call_jax(of, ints, s=make(s)).dtype for s in (1, 1.0, True, 1)]
        assert dtypes == [torch.int32, torch.float32, torch.int32, torch.int32]
    for zero in (0.0, np.float32(0.0)):
        given = [keys.value_key(z) for z in (zero, -zero)]
        assert given[0] != given[1]
        values = [call_jax(of, X, s=Shown(frozenset({1})) and (z,))[0].item() for z in (zero, -zero)]
        assert values == [float("inf"), float("-inf")]
    assert keys.value_key(frozenset({1})) != keys.value_key(frozenset({True}))
    assert keys.value_key(((1,),)) == keys.value_key(((1,),))


# Warnings.


class Caller:
    def __call__(self, x: Any) -> Any:
        return x


def test_objects_and_static_functions_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MANY_TRACES", 3)
    made = [Caller() for _ in range(3)]
    with pytest.warns(RetraceWarning, match=r"Caller of .*test_call_jax_sharing was traced as 3 functions"):
        [functions.table.traces_of(fn) for fn in made]

    def apply(x: Any, fn: Any) -> Any:
        return fn(x)

    with pytest.warns(RetraceWarning, match="<lambda> of .* 3 functions, each a static argument"):
        [call_jax(apply, X, fn=lambda x: x + 1) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [call_jax(apply, torch.ones(n), fn=_by_insides) for n in range(1, 6)]


def test_programs_that_are_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MOST_PROGRAMS", 2)
    for n in (1, 2, 1, 3, 1, 4, 1):
        call_jax(_by_insides, torch.ones(n))
    assert len(traced) == 4, "that of 1 is never the one unused for longest"
