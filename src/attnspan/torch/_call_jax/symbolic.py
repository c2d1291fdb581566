"""Sizes that are symbols, between torch's compiler and JAX's shape polymorphism.

Each free symbol of torch becomes a dimension variable of JAX; a function is traced with these, and the sizes
of its results are read back as arithmetic on torch's symbols.
"""

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import sympy
import torch
from jax import export
from torch.fx.experimental.symbolic_shapes import statically_known_true

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.BitXor: operator.pow,  # JAX prints powers so.
}
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": torch.sym_max,
    "min": torch.sym_min,
}


def is_symbolic(shapes: Sequence[tuple[Any, ...]]) -> bool:
    """Whether a size is a symbol of torch.

    Example:
        >>> is_symbolic([(2, 3)])
        False
    """
    return any(isinstance(n, torch.SymInt) for shape in shapes for n in shape)


def join(shapes: Sequence[tuple[Any, ...]]) -> None:
    """Make symbols of equal values one symbol; other values are another graph's.

    Example:
        >>> join([(2, 3), (2,)])
    """
    first: dict[int, Any] = {}
    for n in (n for shape in shapes for n in shape if isinstance(n, torch.SymInt)):
        known = first.setdefault(n.node.hint, n)
        bool(n == known)  # Asked, it becomes a guard of the graph.


class Sizes:
    """The sizes of a call's tensors as JAX traces with them.

    Args:
        shapes: Sizes, some of them symbols of torch.

    Attributes:
        shapes: Sizes as JAX's expressions.
    """

    def __init__(self, shapes: Sequence[tuple[Any, ...]]) -> None:
        self._names: dict[Any, str] = {}
        self._values: dict[str, Any] = {}
        symbols = [n for shape in shapes for n in shape if isinstance(n, torch.SymInt)]
        # Symbols first: an expression of known ones needs no variable of its own.
        for n in sorted(symbols, key=lambda n: not n.node.expr.is_Symbol):
            expression = n.node.expr
            if not _is_arithmetic(expression, self._names):
                self._names[expression] = name = f"n{len(self._names)}"
                self._values[name] = n
        names = list(self._values)
        least = [f"{x} >= 2" for x in names if statically_known_true(self._values[x] >= 2)]
        variables = export.symbolic_shape(", ".join(names) + ",", constraints=least)
        self._variables = dict(zip(names, variables, strict=True))
        self.shapes = [tuple(self._as_jax(n) for n in shape) for shape in shapes]
        self.key = (str(self.shapes), *least)

    def _as_jax(self, n: Any) -> Any:
        return self._convert(n.node.expr) if isinstance(n, torch.SymInt) else n

    def _convert(self, x: Any) -> Any:
        if x in self._names:
            return self._variables[self._names[x]]
        if x.is_Integer:
            return int(x)
        parts = [self._convert(part) for part in x.args]
        if isinstance(x, sympy.Pow):
            return parts[0] ** parts[1]
        total = parts[0]
        for part in parts[1:]:
            total = total + part if isinstance(x, sympy.Add) else total * part
        return total

    def as_torch(self, n: Any) -> Any:
        """A size of JAX as arithmetic on torch's symbols."""
        return n if isinstance(n, int) else self._read(ast.parse(str(n), mode="eval").body)

    def _read(self, x: ast.expr) -> Any:
        if isinstance(x, ast.Constant):
            return x.value
        if isinstance(x, ast.Name):
            return self._values[x.id]
        if isinstance(x, ast.UnaryOp):
            return -self._read(x.operand)
        if isinstance(x, ast.BinOp):
            return _BINARY[type(x.op)](self._read(x.left), self._read(x.right))
        assert isinstance(x, ast.Call), ast.dump(x)
        assert isinstance(x.func, ast.Name), ast.dump(x)
        return _FUNCTIONS[x.func.id](*map(self._read, x.args))


def _is_arithmetic(x: Any, known: dict[Any, str]) -> bool:
    """Whether it is sums, products and powers of known symbols."""
    if x in known or x.is_Integer:
        return True
    if isinstance(x, sympy.Pow):
        return bool(x.exp.is_Integer and x.exp > 0) and _is_arithmetic(x.base, known)
    return isinstance(x, sympy.Add | sympy.Mul) and all(_is_arithmetic(part, known) for part in x.args)


def avals(shapes: Sequence[tuple[Any, ...]], dtypes: Sequence[Any]) -> list[Any]:
    """What JAX traces a function with.

    Example:
        >>> avals([(2,)], ["float32"])[0].shape
        (2,)
    """
    return [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
