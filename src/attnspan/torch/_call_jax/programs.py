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

from ...errors import DtypeError
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
        self.avals = closed.out_avals
        self.traced = jax.extend.core.jaxpr_as_fun(closed)
        self._run = jax.jit(self.traced)

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
            left = iter(saved)
            leaves = [x.what if x.kind == "constant" else next(left) for x in self.stored]
            pullback = jax.tree_util.tree_unflatten(self._pullback, leaves)
            return [_conjugate(x) for x in pullback(_cotangents(there, grads, self._avals))]

        return backward


class Recomputed:
    """The same for sizes that are symbols: backward runs forward again, from the arguments.

    Which residuals there are depends on sizes in ways that symbols do not show, and compiled code is made
    for all sizes at once.
    """

    def __init__(self, forward: Forward, wanted: Sequence[bool]) -> None:
        self.tree, self.results = forward.tree, forward.results
        self.new: list[Result] = []
        self._forward, self._wanted = forward, tuple(wanted)
        self._backward: dict[tuple[bool, ...], Any] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results; nothing is new for backward."""
        return self._forward(tensors)

    def saved_of(self, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """What backward needs to be given: the arguments."""
        del made
        return list(tensors)

    def backward(self, grads: Sequence[Tensor | None], saved: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that are wanted, of those of the results; None for one that is zero."""
        there = tuple(x is not None for x in grads)
        run = self._backward.get(there)
        if run is None:
            run = self._backward[there] = jax.jit(self._make_backward(there))
        given = as_arguments([x for x in grads if x is not None])
        return as_tensors(run(as_arguments(saved), given))

    def _make_backward(self, there: tuple[bool, ...]) -> Callable[[Any, Any], list[Any]]:
        def backward(arrays: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
            pullback = _pullback(self._forward.traced, arrays, self._wanted)[1]
            return [_conjugate(x) for x in pullback(_cotangents(there, grads, self._forward.avals))]

        return backward


def _pullback(run: Flat, arrays: Sequence[Any], wanted: Sequence[bool]) -> Any:
    """`jax.vjp` with respect to some of the arguments."""

    def of_wanted(*some: Any) -> Any:
        left = iter(some)
        return run(*(next(left) if want else x for x, want in zip(arrays, wanted, strict=True)))

    return jax.vjp(of_wanted, *(x for x, want in zip(arrays, wanted, strict=True) if want))


def _cotangents(there: Sequence[bool], grads: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Of all results, zeros where none came."""
    given = iter(grads)
    return [
        _conjugate(next(given)) if is_there else _no_cotangent(aval)
        for is_there, aval in zip(there, avals, strict=True)
    ]


def _conjugate(x: Any) -> Any:
    """Complex gradients of torch are the conjugates of JAX's."""
    return x.conj() if jax.numpy.iscomplexobj(x) else x


def _no_cotangent(aval: Any) -> Any:
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact):
        return jax.numpy.zeros(aval.shape, aval.dtype)
    return np.zeros(aval.shape, jax.dtypes.float0)


def derive(fn: Flat, avals: Sequence[Any], wanted: Sequence[bool]) -> Derived:
    """Trace a function and its derivative with respect to the arguments that are wanted.

    Args:
        fn: Traced here and not kept.
        avals: Shapes and element types of the arguments.
        wanted: Which of them get a gradient.

    Example:
        >>> x = jax.ShapeDtypeStruct((3,), "float32")
        >>> [s.kind for s in derive(jax.numpy.exp, [x], [True]).stored]
        ['result']
    """
    trees: list[Any] = []

    def forward(*arrays: Any) -> Any:
        out, pullback = _pullback(lambda *given: _leaves(fn, given, trees), arrays, wanted)
        residuals, structure = jax.tree_util.tree_flatten(pullback)
        trees.append(structure)
        return out, residuals

    closed = jax.make_jaxpr(forward)(*avals)
    tree, structure = trees[0], trees[-1]
    count = tree.num_leaves
    stored, places = _places(closed, count)
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


def _places(closed: Any, count: int) -> tuple[list[Stored], list[int]]:
    """Where each residual is found, and which of the traced results exist for backward alone."""
    known = _known(closed, count)
    stored: list[Stored] = []
    places: list[int] = []
    for i, v in enumerate(closed.jaxpr.outvars[count:], count):
        if isinstance(v, jax.extend.core.Literal):
            stored.append(Stored("constant", v.val))
            continue
        if v not in known:
            known[v] = Stored("new", len(places))
            places.append(i)
        stored.append(known[v])
    return stored, places


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
