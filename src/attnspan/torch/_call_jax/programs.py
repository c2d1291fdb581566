"""What a function becomes for one set of shapes: jitted programs without the function, and their results.

Residuals are what the backward program reads of the forward one. Those that are arguments, results or
constants are not stored a second time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend
import numpy as np
import torch
from torch import Tensor

from ...errors import DtypeError, OptionError
from .convert import as_arguments, as_tensors, torch_dtype

#: A function of arrays, with everything that is no array put in its place: what is traced.
Flat = Callable[..., Any]


@dataclass(frozen=True)
class Result:
    """One array that a program makes.

    Attributes:
        shape: Its sizes; where tensors have symbolic ones, JAX's expressions of them.
        dtype: As torch calls it.
        floating: Whether it can have a gradient.
    """

    shape: tuple[Any, ...]
    dtype: torch.dtype
    floating: bool


@dataclass(frozen=True)
class Stored:
    """Where backward finds one residual: ("argument" | "result" | "new", place), or ("constant", value)."""

    kind: str
    what: Any


def _result(aval: Any) -> Result:
    dtype = torch_dtype("the result of the JAX function", aval.dtype)
    return Result(tuple(aval.shape), dtype, dtype.is_floating_point or dtype.is_complex)


def _leaves(fn: Flat, arrays: Sequence[Any], trees: list[Any]) -> list[Any]:
    """The results of the function as arrays; their structure goes to ``trees``."""
    leaves, tree = jax.tree_util.tree_flatten(fn(*arrays))
    for x in leaves:
        if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise DtypeError(
                "the result of the JAX function",
                expected="arrays, in any structure that is a pytree of JAX",
                got=f"a {type(x).__name__}",
                remedy="Return arrays only; register a class of your own with jax.tree_util",
            )
    trees.append(tree)
    return [jax.numpy.asarray(x) for x in leaves]


class Forward:
    """The results alone.

    Args:
        fn: Traced here and not kept.
        avals: Shapes and element types of the arguments.
    """

    def __init__(self, fn: Flat, avals: Sequence[Any]) -> None:
        trees: list[Any] = []
        closed = jax.make_jaxpr(lambda *arrays: _leaves(fn, arrays, trees))(*avals)
        self.tree = trees[0]
        self.results = [_result(x) for x in closed.out_avals]
        self._run = jax.jit(jax.extend.core.jaxpr_as_fun(closed))

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return as_tensors(self._run(*as_arguments(tensors)))


@dataclass
class Derived:
    """Results and residuals, and the program from these to gradients.

    Attributes:
        tree: Structure of the results.
        results: The results.
        new: What the forward program makes for backward alone.
        stored: All residuals, in the order in which JAX expects them.
    """

    tree: Any
    results: list[Result]
    new: list[Result]
    stored: list[Stored]
    wanted: tuple[bool, ...]
    _run: Any
    _pullback: Any
    _avals: list[Any]
    _backward: dict[tuple[bool, ...], Any] = field(default_factory=dict)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results, then what is new for backward."""
        return as_tensors(self._run(*as_arguments(tensors)))

    def saved_of(self, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """What backward needs to be given, of the arguments and of what the call has made."""
        found, count = [], len(self.results)
        for x in self.stored:
            if x.kind == "argument":
                found.append(tensors[x.what])
            elif x.kind != "constant":
                found.append(made[x.what + (count if x.kind == "new" else 0)])
        return found

    def backward(self, grads: Sequence[Tensor | None], saved: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that are wanted, of those of the results; None for one that is zero."""
        there = tuple(x is not None for x in grads)
        run = self._backward.get(there)
        if run is None:
            run = self._backward[there] = jax.jit(self._make_backward(there))
        given = as_arguments([x for x in grads if x is not None])
        return as_tensors(run(as_arguments(saved), given))

    def _make_backward(self, there: tuple[bool, ...]) -> Callable[[Any, Any], list[Any]]:
        def backward(saved: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
            left, given = iter(saved), iter(grads)
            leaves = [x.what if x.kind == "constant" else next(left) for x in self.stored]
            incoming = [
                _conjugate(next(given)) if is_there else _no_cotangent(aval)
                for is_there, aval in zip(there, self._avals, strict=True)
            ]
            pullback = jax.tree_util.tree_unflatten(self._pullback, leaves)
            return [_conjugate(x) for x in pullback(incoming)]

        return backward


def _conjugate(x: Any) -> Any:
    """Complex gradients of torch are the conjugates of JAX's."""
    return x.conj() if jax.numpy.iscomplexobj(x) else x


def _no_cotangent(aval: Any) -> Any:
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact):
        return jax.numpy.zeros(aval.shape, aval.dtype)
    return np.zeros(aval.shape, jax.dtypes.float0)


def derive(
    fn: Flat, avals: Sequence[Any], wanted: Sequence[bool], promise: Sequence[Stored] | None = None
) -> Derived:
    """Trace a function and its derivative with respect to the arguments that are wanted.

    Args:
        fn: Traced here and not kept.
        avals: Shapes and element types of the arguments.
        wanted: Which of them get a gradient.
        promise: The residuals that compiled code was made for.

    Example:
        >>> x = jax.ShapeDtypeStruct((3,), "float32")
        >>> [s.kind for s in derive(jax.numpy.exp, [x], [True]).stored]
        ['result']
    """
    trees: list[Any] = []

    def forward(*arrays: Any) -> Any:
        def of_wanted(*some: Any) -> list[Any]:
            left = iter(some)
            given = [next(left) if want else x for x, want in zip(arrays, wanted, strict=True)]
            return _leaves(fn, given, trees)

        out, pullback = jax.vjp(of_wanted, *(x for x, want in zip(arrays, wanted, strict=True) if want))
        residuals, structure = jax.tree_util.tree_flatten(pullback)
        trees.append(structure)
        return out, residuals

    closed = jax.make_jaxpr(forward)(*avals)
    tree, structure = trees[0], trees[-1]
    count = tree.num_leaves
    stored, places = _places(closed, count, promise)
    return Derived(
        tree=tree,
        results=[_result(x) for x in closed.out_avals[:count]],
        new=[_result(closed.out_avals[i]) for i in places],
        stored=stored,
        wanted=tuple(wanted),
        _run=jax.jit(_some_of(jax.extend.core.jaxpr_as_fun(closed), [*range(count), *places])),
        _pullback=structure,
        _avals=list(closed.out_avals[:count]),
    )


def _some_of(run: Callable[..., list[Any]], places: Sequence[int]) -> Callable[..., list[Any]]:
    def some(*arrays: Any) -> list[Any]:
        made = run(*arrays)
        return [made[i] for i in places]

    return some


def _places(closed: Any, count: int, promise: Sequence[Stored] | None) -> tuple[list[Stored], list[int]]:
    """Where each residual is found, and which of the traced results exist for backward alone."""
    known = _known(closed, count)
    literal = jax.extend.core.Literal
    residuals = list(enumerate(closed.jaxpr.outvars[count:], count))
    if promise is not None and len(promise) != len(residuals):
        raise _broken(len(promise), len(residuals))
    stored: list[Stored] = []
    places: list[int] = []
    for at, (i, v) in enumerate(residuals):
        promised = None if promise is None else promise[at]
        found = Stored("constant", v.val) if isinstance(v, literal) else known.get(v)
        if promised is not None and promised.kind == "new":
            # Sizes that happen to be equal may make it an argument; compiled code was told otherwise.
            found = known.get(v) if found is not None and found.kind == "new" else None
            if promised.what < len(places):
                found = promised
        if found is None:
            found = Stored("new", len(places))
            places.append(i)
            if not isinstance(v, literal):
                known.setdefault(v, found)
        if promised is not None and (found.kind, _place(found)) != (promised.kind, _place(promised)):
            raise _broken(promised.kind, found.kind)
        stored.append(found)
    return stored, places


def _place(x: Stored) -> Any:
    return None if x.kind == "constant" else x.what


def _known(closed: Any, count: int) -> dict[Any, Stored]:
    """Variables that backward finds without being stored for it."""
    jaxpr = closed.jaxpr
    known: dict[Any, Stored] = {v: Stored("argument", i) for i, v in enumerate(jaxpr.invars)}
    for v, value in zip(jaxpr.constvars, closed.consts, strict=True):
        known[v] = Stored("constant", value)
    for i, v in enumerate(jaxpr.outvars[:count]):
        if not isinstance(v, jax.extend.core.Literal):
            known.setdefault(v, Stored("result", i))
    return known


def _broken(promised: Any, found: Any) -> Exception:
    return OptionError(
        "call_jax in compiled code of dynamic shapes",
        expected=f"the derivative that was traced, with residuals {promised}",
        got=f"another one for these sizes, with {found}",
        remedy="Compile with dynamic=False: the function takes another way for some sizes",
    )
