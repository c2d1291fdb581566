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
from .programs import Derived, Forward, Recomputed, Result
from .symbolic import Sizes, avals, is_symbolic, join


def call(tensors: Sequence[Tensor], handle: str) -> list[Tensor]:
    """Of ``attnspan::call_jax``."""
    bound = find(handle)
    pin(bound)
    program, read = _trace(bound, tensors)
    return [_empty(tensors[0], x, read) for x in program.results]


def vjp(tensors: Sequence[Tensor], handle: str, wanted: Sequence[bool], recompute: bool) -> list[Tensor]:
    """Of ``attnspan::call_jax_vjp``."""
    if recompute:
        return call(tensors, handle)
    bound = find(handle)
    pin(bound)
    program = bound.derived([_numbers(x) for x in tensors], wanted)
    return [_empty(tensors[0], x, int) for x in (*program.results, *program.new)]


def backward(
    grads: Sequence[Tensor | None],
    saved: Sequence[Tensor],
    sizes: Sequence[Any],
    handle: str,
    wanted: Sequence[bool],
    recompute: bool,
    anchor: Tensor | None = None,
) -> list[Tensor]:
    """Of ``attnspan::call_jax_backward``: as the arguments of which it is the gradient."""
    del recompute, anchor
    like = next(x for x in (*grads, *saved) if x is not None)
    bound = find(handle)
    shapes = bound.shapes_of(sizes)
    return [
        like.new_empty(shape, dtype=dtype)
        for (dtype, _, _), shape, want in zip(bound.kinds, shapes, wanted, strict=True)
        if want
    ]


def derived_of(
    bound: Call, tensors: Sequence[Tensor], wanted: tuple[bool, ...]
) -> tuple[Derived | Recomputed, bool]:
    """What backward needs of a call, and whether it recomputes: so where sizes are symbols."""
    program, read = _trace(bound, tensors)
    if read is not int:
        return Recomputed(program, wanted), True
    return bound.derived([_numbers(x) for x in tensors], wanted), False


def _numbers(x: Tensor) -> tuple[int, ...]:
    return tuple(map(int, x.shape))


def _trace(bound: Call, tensors: Sequence[Tensor]) -> tuple[Forward, Callable[[Any], Any]]:
    """The traced program, and how to read the sizes of its results."""
    shapes = [tuple(x.shape) for x in tensors]
    if is_symbolic(shapes):
        # A function may need sizes to be equal, as rows of keys and values are: then what is so is promised.
        for promise in (False, True):
            if promise:
                join(shapes)
            sizes = Sizes(shapes)
            try:
                return _symbolic(bound, sizes), sizes.as_torch
            except Exception as error:  # The trace with numbers below says what is wrong beside symbols.
                reason = error
        _warn(bound, reason)
    return bound.forward([_numbers(x) for x in tensors]), int


def _symbolic(bound: Call, sizes: Sizes) -> Forward:
    key = (bound.structure, config_key(), tuple(bound.kinds), sizes.key)
    made: Forward = bound.traces.get(key, lambda: Forward(bound.flat(), avals(sizes.shapes, bound.dtypes())))
    bound.tree = made.tree
    return made


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
