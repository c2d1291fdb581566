"""What a function becomes for one set of shapes: jitted programs, which do not hold the function."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import numpy as np
import torch
from torch import Tensor

from ..errors import DtypeError
from ._convert import as_arguments, as_tensors, torch_dtype
from ._errors import expect

#: A function of arrays, with everything that is no array put in its place: what is traced.
Flat = Callable[..., Any]
_RESULT = "the result of the JAX function"


class Result(NamedTuple):
    """One array that a program makes; where tensors have symbolic sizes, its shape has JAX's expressions."""

    shape: tuple[Any, ...]
    dtype: torch.dtype


class Forward:
    """The results alone. Backward, if there is one, runs the function again.

    Attributes:
        tree: Structure of the results.
        results: The results.
        new: What is made besides, for backward alone.
    """

    def __init__(self, fn: Flat, avals: Sequence[Any]) -> None:
        trees: list[Any] = []
        closed = jax.make_jaxpr(lambda *arrays: _leaves(fn, arrays, trees))(*avals)
        self._traced = jax.extend.core.jaxpr_as_fun(closed)
        self._describe(trees[0], closed.out_avals, self._traced)

    def _describe(self, tree: Any, avals: Sequence[Any], run: Flat) -> None:
        count = tree.num_leaves
        self.tree, self._avals = tree, avals[:count]
        made = [Result(tuple(x.shape), torch_dtype(_RESULT, x.dtype)) for x in avals]
        self.results, self.new = made[:count], made[count:]
        self._run = jax.jit(run)
        self._backward: dict[Any, Any] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Results, then what is new for backward."""
        return as_tensors(self._run(*as_arguments(tensors)))

    def saved_of(self, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """What backward needs, of the arguments and of what the call has made."""
        del made
        return list(tensors)

    def backward(
        self, grads: Sequence[Tensor | None], saved: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor]:
        """Gradients of the wanted arguments, from those of the results; None is one that is zero."""
        key = tuple(x is not None for x in grads), tuple(wanted)
        run = self._backward.get(key)
        if run is None:
            run = self._backward[key] = jax.jit(functools.partial(self._gradients, *key))
        return as_tensors(run(as_arguments(saved), as_arguments([x for x in grads if x is not None])))

    def _gradients(
        self, there: Sequence[bool], wanted: Sequence[bool], saved: Sequence[Any], grads: Sequence[Any]
    ) -> list[Any]:
        given = iter(grads)
        cotangents = [
            _conjugate(next(given)) if is_there else _no_cotangent(aval)
            for is_there, aval in zip(there, self._avals, strict=True)
        ]
        return [_conjugate(x) for x in self._pullback(saved, wanted)(cotangents)]

    def _pullback(self, saved: Sequence[Any], wanted: Sequence[bool]) -> Any:
        return _vjp(self._traced, saved, wanted)[1]


class Derived(Forward):
    """Results and residuals: what backward reads of the forward pass instead of running it again."""

    def __init__(self, fn: Flat, avals: Sequence[Any], wanted: Sequence[bool]) -> None:
        trees: list[Any] = []

        def forward(*arrays: Any) -> Any:
            out, pullback = _vjp(lambda *given: _leaves(fn, given, trees), arrays, wanted)
            residuals, structure = jax.tree_util.tree_flatten(pullback)
            trees.append(structure)
            return out, residuals

        closed = jax.make_jaxpr(forward)(*avals)
        tree, self._structure = trees[0], trees[-1]
        self._stored, new = _places(closed, tree.num_leaves)
        kept = [*range(tree.num_leaves), *new]
        run = jax.extend.core.jaxpr_as_fun(closed)

        def some(*arrays: Any) -> list[Any]:
            made = run(*arrays)
            return [made[i] for i in kept]

        self._describe(tree, [closed.out_avals[i] for i in kept], some)

    def saved_of(self, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """What backward needs, of the arguments and of what the call has made."""
        sources = {"argument": tensors, "made": made}
        return [sources[kind][what] for kind, what in self._stored if kind != "constant"]

    def _pullback(self, saved: Sequence[Any], wanted: Sequence[bool]) -> Any:
        del wanted  # Those of the forward pass.
        left = iter(saved)
        leaves = [what if kind == "constant" else next(left) for kind, what in self._stored]
        return jax.tree_util.tree_unflatten(self._structure, leaves)


def _leaves(fn: Flat, arrays: Sequence[Any], trees: list[Any]) -> list[Any]:
    """The results of the function as arrays; their structure goes to ``trees``."""
    leaves, tree = jax.tree_util.tree_flatten(fn(*arrays))
    arrays_only = "arrays, in any structure that is a pytree of JAX"
    remedy = "Return arrays only; register a class of your own with jax.tree_util"
    for x in leaves:
        is_array = isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
        expect(is_array, _RESULT, arrays_only, f"a {type(x).__name__}", remedy, DtypeError)
    trees.append(tree)
    return [jax.numpy.asarray(x) for x in leaves]


def _vjp(run: Flat, arrays: Sequence[Any], wanted: Sequence[bool]) -> Any:
    """`jax.vjp` with respect to some of the arguments."""

    def of_wanted(*some: Any) -> Any:
        left = iter(some)
        return run(*(next(left) if want else x for x, want in zip(arrays, wanted, strict=True)))

    return jax.vjp(of_wanted, *(x for x, want in zip(arrays, wanted, strict=True) if want))


def _conjugate(x: Any) -> Any:
    """Complex gradients of torch are the conjugates of JAX's."""
    return x.conj() if jax.numpy.iscomplexobj(x) else x


def _no_cotangent(aval: Any) -> Any:
    if jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact):
        return jax.numpy.zeros(aval.shape, aval.dtype)
    return np.zeros(aval.shape, jax.dtypes.float0)


def _places(closed: Any, count: int) -> tuple[list[tuple[str, Any]], list[int]]:
    """Where backward finds each residual, and which of the traced results exist for backward alone.

    Arguments, results and constants are not stored a second time.
    """
    literal, jaxpr = jax.extend.core.Literal, closed.jaxpr
    known = {v: ("argument", i) for i, v in enumerate(jaxpr.invars)}
    known |= {v: ("constant", value) for v, value in zip(jaxpr.constvars, closed.consts, strict=True)}
    for i, v in enumerate(jaxpr.outvars[:count]):
        if not isinstance(v, literal):
            known.setdefault(v, ("made", i))
    stored: list[tuple[str, Any]] = []
    new: list[int] = []
    for i, v in enumerate(jaxpr.outvars[count:], count):
        if isinstance(v, literal):
            stored.append(("constant", v.val))
            continue
        if v not in known:
            known[v] = "made", count + len(new)
            new.append(i)
        stored.append(known[v])
    return stored, new
