"""What the operators of the bridge return, without running them: shapes for whoever traces torch.

Sizes that are symbols stay symbols where JAX can trace the function with symbols too. Where it cannot, they
are taken as the numbers that they have in this trace, which compiles once for each.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .functions import Call, config_key, find, pin
from .notices import SpecializedShapesWarning
from .programs import Derived, Forward, Result, derive
from .symbolic import Sizes, avals, is_symbolic


def call(tensors: Sequence[Tensor], handle: str) -> list[Tensor]:
    """Of ``attnspan::call_jax``."""
    bound = find(handle)
    pin(bound)
    program, read = _trace(bound, tensors, None)
    return [_empty(tensors[0], x, read) for x in program.results]


def vjp(tensors: Sequence[Tensor], handle: str, wanted: Sequence[bool]) -> list[Tensor]:
    """Of ``attnspan::call_jax_vjp``."""
    bound = find(handle)
    pin(bound)
    program, read = _trace(bound, tensors, tuple(wanted))
    return [_empty(tensors[0], x, read) for x in (*program.results, *program.new)]


def backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    sizes: Sequence[Any],
    handle: str,
    wanted: Sequence[bool],
    anchor: Tensor | None = None,
) -> list[Tensor]:
    """Of ``attnspan::call_jax_backward``: as the arguments of which it is the gradient."""
    del anchor
    like = next(x for x in (*grads, *saved) if x is not None)
    bound = find(handle)
    shapes = bound.shapes_of(sizes)
    return [
        like.new_empty(shape, dtype=dtype)
        for (dtype, _, _), shape, want in zip(bound.kinds, shapes, wanted, strict=True)
        if want
    ]


def derived_of(bound: Call, tensors: Sequence[Tensor], wanted: tuple[bool, ...]) -> Derived:
    """The residuals of a call, also where its sizes are symbols."""
    derived: Derived = _trace(bound, tensors, wanted)[0]
    return derived


def _trace(
    bound: Call, tensors: Sequence[Tensor], wanted: tuple[bool, ...] | None
) -> tuple[Any, Callable[[Any], Any]]:
    """The traced programs, and how to read the sizes of their results."""
    shapes = [tuple(x.shape) for x in tensors]
    if is_symbolic(shapes):
        sizes = Sizes(shapes)
        try:
            return _symbolic(bound, sizes, wanted), sizes.as_torch
        except (
            Exception
        ) as error:  # The trace with numbers below says what is wrong, if it is not the symbols.
            _warn(bound, error)
        shapes = [tuple(map(int, shape)) for shape in shapes]
    if wanted is None:
        return bound.forward(shapes), int
    return bound.derived(shapes, wanted), int


def _symbolic(bound: Call, sizes: Sizes, wanted: tuple[bool, ...] | None) -> Forward | Derived:
    kinds = tuple(bound.kinds)
    key = (bound.structure, config_key(), kinds, sizes.key, wanted)
    given = avals(sizes.shapes, bound.dtypes())
    if wanted is None:
        made: Forward = bound.traces.get(key, lambda: Forward(bound.flat(), given))
        bound.tree = made.tree
        return made
    found: Derived = bound.traces.get(key, lambda: derive(bound.flat(), given, wanted))
    bound.tree, bound.promises[wanted] = found.tree, found.stored
    return found


def _empty(like: Tensor, x: Result, read: Callable[[Any], Any]) -> Tensor:
    return like.new_empty([read(n) for n in x.shape], dtype=x.dtype)


def _warn(bound: Call, error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    warnings.warn(
        f"call_jax: {bound.traces.name} cannot be traced by JAX for sizes that are symbols ({reason}), so it "
        "is compiled anew for each size. Write its sizes so that jax.export's shape polymorphism takes them, "
        "or compile with dynamic=False.",
        SpecializedShapesWarning,
        stacklevel=2,
    )
