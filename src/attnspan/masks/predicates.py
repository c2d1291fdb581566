"""Calling a user's function of indices, and saying what is wrong with it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from attnspan.base.arrays import Array, arrays_for, is_array, is_bool, kind_of
from attnspan.base.recorded import agree, is_jit_traced, sure
from attnspan.errors import DtypeError, OptionError, ShapeError, UsageError, expect, shown

from .lowering import Lowering

__all__ = ["Function", "call", "call_traced", "name_of"]

#: FlexAttention's `mask_mod`: a function of batch row, head, query and key.
Function = Callable[[Any, Any, Any, Any], Any]

_ALL_AXES = "Index with all axes at once, ids[b, q] and not ids[b][q]"
_AMBIGUOUS = ("Boolean value of Tensor", "truth value of an array", "TracerBoolConversionError")


def name_of(fn: Any) -> str:
    """The name of a function, of that in a `functools.partial`, or of a callable object's class."""
    name = getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def call(what: str, fn: Function, low: Lowering, rows: Array) -> Array:
    """Call `fn` on the indices of `rows`, int32 (B|1, 1, rows): bool (B|1, H|1, rows, k_len).

    Raises:
        DtypeError, ShapeError, OptionError: for no booleans, booleans of another shape, or if `fn` raises.
    """
    indices = _indices(low, rows)
    try:
        try:
            visible = fn(*indices)
        except IndexError:
            visible = _of_pairs(what, fn, low.arrays.name)(*indices)
        if _is_in_steps(visible):
            visible = _of_pairs(what, fn, arrays_for([visible]).name)(*indices)
        elif not _holds_for_pairs(fn, indices, visible):
            visible = _of_pairs(what, fn, low.arrays.name)(*indices)
    except (UsageError, DtypeError):
        raise
    except Exception as error:
        raise _failed(what, indices, error) from error
    return _checked(what, visible, low, rows)


#: Pairs that are tried one by one.
_TRIED = 24


def _holds_for_pairs(fn: Function, indices: tuple[Array, ...], visible: Any) -> bool:
    """Whether `fn` returns for single pairs what it returned for the whole batch.

    A reduction, such as ``ids[b].sum()``, sums over all batch entries when it is given all of them at once.
    A result that is no mask, or has no values to read, passes: `_checked` follows.
    """
    if not is_array(visible) or not is_bool(visible) or visible.ndim not in (0, 4):
        return True
    found = arrays_for([visible])
    if found.tracing() or not found.concrete(visible):
        return True
    pairs = np.broadcast_shapes(*(tuple(x.shape) for x in indices))
    values = found.to_numpy(visible)
    if not all(n in (1, m) for n, m in zip(values.shape, pairs, strict=False)) or 0 in pairs:
        return True
    values, draw = np.broadcast_to(values, pairs), np.random.default_rng(0)
    for at in zip(*(draw.integers(n, size=min(_TRIED, math.prod(pairs))) for n in pairs), strict=True):
        numbers = (x[tuple(np.minimum(at, np.array(x.shape) - 1))] for x in indices)
        try:
            one = fn(*numbers)
        except Exception:
            return True  # It needs arrays, as in `q[..., 0]`.
        if getattr(one, "ndim", 0) == 0 and bool(one) != values[at]:
            return False
    return True


def _is_in_steps(visible: Any) -> bool:
    """Whether a function has indexed an array axis by axis, as in ``ids[b][q]``: each step adds axes."""
    return is_array(visible) and visible.ndim > 4  # type: ignore[attr-defined]


def _of_pairs(what: str, fn: Function, framework: str) -> Function:
    """`fn` called with the numbers of each pair, as FlexAttention does: by vmap, or in NumPy one by one."""
    if framework == "numpy":
        return _one_by_one(what, fn)
    jax = framework == "jax"
    vmap = sys.modules["jax"].vmap if jax else sys.modules["torch"].vmap  # type: ignore[attr-defined]

    def over(run: Function, *axes: int | None) -> Function:
        return vmap(run, in_axes=axes) if jax else vmap(run, in_dims=axes)  # type: ignore[no-any-return]

    def run(b: Array, h: Array, q: Array, k: Array) -> Array:
        shared = q.shape[0] == 1
        of_batch = over(over(over(fn, None, None, None, 0), None, None, 0, None), None, 0, None, None)
        of_all = over(of_batch, 0, None, None if shared else 0, None)
        return of_all(b[:, 0, 0, 0], h[0, :, 0, 0], q[0, 0, :, 0] if shared else q[:, 0, :, 0], k[0, 0, 0])

    return run


#: Pairs for which a function of Python is called one by one, about a second.
_MOST_CALLS = 1 << 20


def _one_by_one(what: str, fn: Function) -> Function:
    def of_one(*at: Any) -> bool:
        one = fn(*at)
        if not (isinstance(one, (bool, np.bool_)) or (is_array(one) and is_bool(one))):
            raise _no_booleans(what, one)
        return bool(one)

    def run(*indices: Array) -> Array:
        pairs = int(np.prod(np.broadcast_shapes(*(x.shape for x in indices))))
        wanted, remedy = "a function that NumPy can call on arrays, or at most {} pairs", _ALL_AXES
        expect(pairs <= _MOST_CALLS, what, wanted, pairs, remedy, _MOST_CALLS, error=UsageError)
        return np.frompyfunc(of_one, 4, 1)(*(np.asarray(x) for x in indices)).astype(bool)

    return run


def call_traced(what: str, fn: Function, low: Lowering, rows: Array) -> Array:
    """`call` in a program that is being traced. What `fn` raises comes as the compiler words it."""
    if low.arrays.name == "jax" or is_jit_traced():
        return call(what, fn, low, rows)
    b, h, q, k = _indices(low, rows)
    # Compilers quote the next line in their errors, with its comment.
    visible = fn(b, h, q, k)  # A mask function is traced: write it with &, | and where, not and, or, if
    if _is_in_steps(visible):
        visible = _of_pairs(what, fn, low.arrays.name)(b, h, q, k)
    return _checked(what, visible, low, rows)


def _indices(low: Lowering, rows: Array) -> tuple[Array, Array, Array, Array]:
    """b (B, 1, 1, 1), h (1, H, 1, 1), q (B|1, 1, rows, 1) and k (1, 1, 1, k_len), int64."""
    b, h, k = (low.arrays.cast(low.arrays.arange(n), "int64") for n in (low.batch, low.heads, low.top))
    q = low.arrays.cast(rows, "int64")
    return b[:, None, None, None], h[None, :, None, None], q[..., None], k[None, None, None]


def _checked(what: str, visible: Any, low: Lowering, rows: Array) -> Array:
    """A function's result as bool (B|1, H|1, rows, k_len)."""
    wanted = (low.batch, low.heads, rows.shape[-1], low.top)
    if isinstance(visible, (bool, np.bool_)):
        return low.arrays.full((1, 1, *wanted[2:]), bool(visible), "bool")
    if not is_array(visible) or not is_bool(visible):
        raise _no_booleans(what, visible)
    found = arrays_for([visible])
    readable = found.name == low.arrays.name or (not found.tracing() and found.concrete(visible))
    got, remedy = f"{low.arrays.name} indices and a traced {found.name} result", "Pass like=, an array of it"
    expect(readable, what, "indices of the framework that is being traced", got, remedy)
    visible = low.arrays.asarray(visible, "bool")
    shape = tuple(visible.shape) or (1, 1, 1, 1)
    # Indices have four axes. A reduction leaves fewer, and would put rows where keys belong.
    fits = len(shape) == 4 and all(sure(n == 1) or agree(n, m) for n, m in zip(shape, wanted, strict=True))
    expected = "a function whose result broadcasts to (batch, heads, rows, keys), {}"
    remedy = f"{_ALL_AXES}, and reduce no axis"
    expect(fits, what, expected, tuple(visible.shape), remedy, wanted, error=ShapeError)
    return low.arrays.broadcast_to(visible, (shape[0], shape[1], *wanted[2:]))


def _no_booleans(what: str, visible: Any) -> DtypeError:
    if visible is None:
        remedy = "End it with return"
    elif is_array(visible) or isinstance(visible, (int, float)):
        remedy = "Compare: x != 0; for scores to add, pass bias= instead"
    else:
        remedy = "Return what comparisons of the index arrays give"
    expected = "a function that returns booleans, True where a query may see a key"
    got = ("an array of " if is_array(visible) else "") + kind_of(visible)
    return DtypeError(what, expected=expected, got=got, remedy=remedy)


def _failed(what: str, indices: tuple[Array, ...], error: Exception) -> OptionError:
    text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(".")
    if any(sign in text for sign in _AMBIGUOUS):
        remedy = "Write it with &, | and where instead of and, or, not and if"
    elif isinstance(error, IndexError):
        remedy = f"{_ALL_AXES}, within the arrays it reads"
    else:
        shapes = ", ".join(shown(x.shape) for x in indices)
        remedy = f"Try it on integer arrays b, h, q, k of shapes {shapes}"
    expected = "a function of index arrays that broadcast"
    return OptionError(what, expected=expected, got=f"one that raised {text}", remedy=remedy)
