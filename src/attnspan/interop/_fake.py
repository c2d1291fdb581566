"""Fake results of `call_jax`'s operators: shapes for tracing, without running the function.

Torch's symbolic sizes become JAX's dimension variables. Sizes of results become arithmetic on torch's
symbols. If JAX cannot trace a function for symbols, it is traced for concrete sizes, and each size compiles
once.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from jax import export
from torch import SymInt, Tensor

from attnspan.torch import compat

from ._functions import JaxCall, find, pin
from ._programs import Program
from ._warnings import SpecializedShapesWarning


def call(tensors: Sequence[Tensor], handle: str, wanted: Sequence[bool] = ()) -> list[Tensor]:
    """Return the shapes of the results of ``attnspan::call_jax`` and ``attnspan::call_jax_vjp``."""
    bound = find(handle)
    pin(bound)
    # Residuals belong to the sizes of this trace. With symbolic sizes, no residuals are requested.
    program, read = (bound.program(_numbers(tensors), wanted), int) if wanted else trace(bound, tensors, ())
    return [tensors[0].new_empty([read(n) for n in shape], dtype=dtype) for shape, dtype in program.made]


def backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    sizes: Sequence[Any],
    handle: str,
    wanted: Sequence[bool],
    *_: Any,
) -> list[Tensor]:
    """Return the shapes of the results of ``attnspan::call_jax_backward``: gradients like the arguments."""
    like = next(x for x in (*grads, *saved) if x is not None)
    bound = find(handle)
    given = zip(bound.kinds, bound.shapes_of(sizes), wanted, strict=True)
    return [like.new_empty(shape, dtype=dtype) for (dtype, _, _), shape, want in given if want]


def trace(
    bound: JaxCall, tensors: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Program, Callable[[Any], Any]]:
    """Return the traced program, and a function that reads the sizes of its results.

    The set of residuals can depend on sizes in ways that symbols do not show. A program for symbolic sizes is
    therefore made for results alone.
    """
    symbols: list[Any] = [n for x in tensors for n in x.shape if isinstance(n, SymInt)]
    # A function may need equal sizes, such as the numbers of keys and values, so equal sizes are joined.
    for joined in (False, True) if symbols else ():
        if joined:
            first: dict[int, Any] = {}
            for n in symbols:
                bool(n == first.setdefault(n.node.hint, n))  # bool() adds a guard to the graph.
        sizes = _TracedSizes([tuple(x.shape) for x in tensors])
        try:
            return bound.program(sizes.shapes, (), sizes.key), sizes.as_torch
        except Exception as error:  # The trace below raises errors that symbols did not cause.
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if symbols:
        warnings.warn(
            f"call_jax: {bound.name} cannot be traced by JAX for symbolic sizes ({reason}), so it "
            "recompiles for each size. Write its sizes so that jax.export's shape polymorphism supports "
            "them, or compile with dynamic=False.",
            SpecializedShapesWarning,
            stacklevel=2,
        )
    return bound.program(_numbers(tensors), wanted), int


def _numbers(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(map(int, x.shape)) for x in tensors]


class _TracedSizes:
    """The sizes of a call's tensors in the form in which JAX traces them."""

    def __init__(self, shapes: Sequence[tuple[Any, ...]]) -> None:
        values: dict[Any, SymInt] = {}
        symbols = [n for shape in shapes for n in shape if isinstance(n, SymInt)]
        # Symbols come first, because a polynomial of known symbols needs no new variable.
        for n in sorted(symbols, key=lambda n: not n.node.expr.is_Symbol):
            x = n.node.expr
            if not (x.is_polynomial(*x.free_symbols) and x.free_symbols <= values.keys()):
                values.setdefault(x, n)
        self._values = {f"n{i}": n for i, n in enumerate(values.values())}
        least = [f"{name} >= 2" for name, n in self._values.items() if compat.statically_known_true(n >= 2)]
        variables = export.symbolic_shape(", ".join(self._values) + ",", constraints=least)
        self._variables = dict(zip(values, variables, strict=True))
        self.shapes = [tuple(self._as_jax(n) for n in shape) for shape in shapes]
        self.key = (str(self.shapes), *least)

    def _as_jax(self, n: Any) -> Any:
        if not isinstance(n, SymInt):
            return n
        x = n.node.expr
        known = {v: at for v, at in self._variables.items() if v.is_Symbol}
        return self._variables[x] if x in self._variables else sympy.lambdify(list(known), x)(*known.values())

    def as_torch(self, n: Any) -> Any:
        """Return a JAX size as arithmetic on torch's symbols."""
        if isinstance(n, int):
            return n
        # Text is the only public form of JAX's expressions, and it contains only these names.
        names = {"floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b}
        names |= {"max": torch.sym_max, "min": torch.sym_min}
        return eval(str(n).replace("^", "**"), {"__builtins__": {}}, {**names, **self._values})
