"""Programs of a JAX function for one set of shapes: jitted, without a reference to the function."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np
from torch import Tensor

from attnspan.errors import DtypeError, expect

from ._convert import as_arguments, as_tensors, torch_dtype

#: A function of arrays alone.
Flat = Callable[..., Any]
_RESULT = "the result of the JAX function"


class Program:
    """A jitted function that returns results and residuals, which backward reads.

    If no gradients are ``wanted``, the residuals are the arguments, and backward runs the function again.

    Attributes:
        tree: Structure of the results.
        made: Shape and dtype of each result, then of each residual that is computed for backward alone. If
            tensors have symbolic sizes, shapes contain JAX's expressions.
        count: Number of results.
    """

    def __init__(self, fn: Flat, avals: Sequence[Any], wanted: Sequence[bool]) -> None:
        trees: list[Any] = []

        def forward(*arrays: Any) -> Any:
            if not any(wanted):
                return _leaves(fn, arrays, trees)
            out, pullback = _vjp(lambda *given: _leaves(fn, given, trees), arrays, wanted)
            residuals, structure = jax.tree_util.tree_flatten(pullback)
            trees.append(structure)
            return [*out, *residuals]

        closed = jax.make_jaxpr(forward)(*avals)
        self._traced, self._derived = jax.extend.core.jaxpr_as_fun(closed), any(wanted)
        self.tree, self._pullback, self.count = trees[0], trees[-1], trees[0].num_leaves
        stored, new = _places(closed, self.count)
        self._stored = stored if self._derived else [("argument", i) for i in range(len(avals))]
        kept = [*range(self.count), *new]
        avals = [closed.out_avals[i] for i in kept]
        self.made = [(tuple(x.shape), torch_dtype(_RESULT, x.dtype)) for x in avals]
        self._avals, traced = avals[: self.count], self._traced
        self._run = jax.jit(lambda *arrays: [made[i] for made in [traced(*arrays)] for i in kept])
        self._backward: dict[Any, Any] = {}

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the results, then the residuals that are computed for backward alone."""
        return as_tensors(self._run(*as_arguments(tensors)))

    def saved_of(self, tensors: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """Select the arguments and results that backward needs."""
        sources = {"argument": tensors, "made": made}
        return [sources[kind][what] for kind, what in self._stored if kind != "constant"]

    def backward(
        self, grads: Sequence[Tensor | None], saved: Sequence[Tensor], wanted: Sequence[bool]
    ) -> list[Tensor]:
        """Return gradients of the wanted arguments from the results' gradients. None is a zero gradient."""
        key = tuple(x is not None for x in grads), tuple(wanted)
        run = self._backward.get(key)
        if run is None:
            run = self._backward[key] = jax.jit(functools.partial(self._gradients, *key))
        return as_tensors(run(as_arguments(saved), as_arguments([x for x in grads if x is not None])))

    def _gradients(
        self, there: Sequence[bool], wanted: Sequence[bool], saved: Sequence[Any], grads: Sequence[Any]
    ) -> list[Any]:
        given, left = iter(grads), iter(saved)
        pairs = zip(there, self._avals, strict=True)
        cotangents = [_conjugate(next(given)) if is_there else _zeros(aval) for is_there, aval in pairs]
        if self._derived:
            leaves = [what if kind == "constant" else next(left) for kind, what in self._stored]
            pullback = jax.tree_util.tree_unflatten(self._pullback, leaves)
        else:
            pullback = _vjp(self._traced, saved, wanted)[1]
        return [_conjugate(x) for x in pullback(cotangents)]


def _leaves(fn: Flat, arrays: Sequence[Any], trees: list[Any]) -> list[Any]:
    """Return the function's results as arrays. Their structure is appended to ``trees``."""
    leaves, tree = jax.tree_util.tree_flatten(fn(*arrays))
    expected = "arrays, in any JAX pytree"
    remedy = "Return arrays only. Register your own classes with jax.tree_util"
    for x in leaves:
        is_array = isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
        expect(is_array, _RESULT, expected, f"a {type(x).__name__}", remedy, error=DtypeError)
    trees.append(tree)
    return [jax.numpy.asarray(x) for x in leaves]


def _vjp(run: Flat, arrays: Sequence[Any], wanted: Sequence[bool]) -> Any:
    """`jax.vjp` with respect to some of the arguments."""

    def of_wanted(*some: Any) -> Any:
        left = iter(some)
        return run(*(next(left) if want else x for x, want in zip(arrays, wanted, strict=True)))

    return jax.vjp(of_wanted, *(x for x, want in zip(arrays, wanted, strict=True) if want))


def _conjugate(x: Any) -> Any:
    """Conjugate complex gradients, because torch's and JAX's conventions are conjugate."""
    return x.conj() if jax.numpy.iscomplexobj(x) else x


def _zeros(aval: Any) -> Any:
    inexact = jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)
    return jax.numpy.zeros(aval.shape, aval.dtype) if inexact else np.zeros(aval.shape, jax.dtypes.float0)


def _places(closed: Any, count: int) -> tuple[list[tuple[str, Any]], list[int]]:
    """Find each residual of backward, and the traced results that exist for backward alone.

    Arguments, results and constants are not stored a second time.
    """
    literal, jaxpr = jax.extend.core.Literal, closed.jaxpr
    known = {v: ("argument", i) for i, v in enumerate(jaxpr.invars)}
    known |= {v: ("constant", value) for v, value in zip(jaxpr.constvars, closed.consts, strict=True)}
    results = [(v, ("made", i)) for i, v in enumerate(jaxpr.outvars[:count]) if not isinstance(v, literal)]
    known = dict(results) | known
    stored: list[tuple[str, Any]] = []
    new: list[int] = []
    for i, v in enumerate(jaxpr.outvars[count:], count):
        if not isinstance(v, literal) and v not in known:
            known[v] = "made", count + len(new)
            new.append(i)
        stored.append(("constant", v.val) if isinstance(v, literal) else known[v])
    return stored, new
