"""Calling a function of indices that somebody else wrote, and saying what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ._lowering import Lowering
from .arrays import Array, Arrays, arrays_for, is_array, is_bool
from .errors import DtypeError, OptionError, ShapeError

Function = Callable[[Any, Any, Any, Any], Any]
Kind = type[DtypeError] | type[ShapeError] | type[OptionError]

_raisers: dict[str, Callable[[Kind, str, str, str, str], None]] = {}

_FLOW = "Write it with &, | and where instead of and, or, not and if"
_AMBIGUOUS = ("Boolean value of Tensor", "truth value of an array", "TracerBoolConversionError")


def name_of(fn: Any) -> str:
    """What a user would recognise a function, a `functools.partial` or a callable object by.

    Example:
        >>> name_of(lambda: None), name_of(len), name_of(Ellipsis)
        ('<lambda>', 'len', 'ellipsis')
    """
    name = getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def register_raiser(framework: str, raiser: Callable[[Kind, str, str, str, str], None]) -> None:
    """Name what raises, in place of a program that is being traced: a compiler would lose the message.

    Args:
        framework: as in `Arrays.name`.
        raiser: called with the error's class, what, expected, got and remedy.

    Example:
        >>> _raisers.get("numpy") is None  # NumPy traces nothing
        True
    """
    _raisers[framework] = raiser


def call(what: str, fn: Function, low: Lowering, rows: Array) -> Array:
    """Call `fn` on values.

    Args:
        what: who asks, for errors.
        fn: the function (b, h, q_index, k_index) -> bool.
        low: the lowering it is called for.
        rows: int32 (B|1, 1, rows), global indices of rows.

    Returns:
        Bool (B|1, H|1, rows, k_len).

    Raises:
        DtypeError, ShapeError, OptionError: if it gives no booleans, gives them in another shape, or raises.
    """
    indices = _indices(low, rows)
    try:
        visible = fn(*indices)
    except Exception as error:  # whatever it is, it is the function's
        raise _failed(what, indices, error) from error
    return _checked(what, visible, low, rows)


def call_traced(what: str, fn: Function, low: Lowering, rows: Array) -> Array:
    """Call `fn` in a program that is being traced: the compiler reads it as if it stood here.

    Args, returns and raises are those of `call`; what the function raises comes as the compiler words it.
    """
    if low.arrays.name == "jax":
        return call(what, fn, low, rows)
    b, h, q, k = _indices(low, rows)
    # Compilers quote the next line in their errors, with its comment.
    visible = fn(b, h, q, k)  # A mask function is traced: write it with &, | and where, not and, or, if
    return _checked(what, visible, low, rows)


def _indices(low: Lowering, rows: Array) -> tuple[Array, Array, Array, Array]:
    """b (B, 1, 1, 1), h (1, H, 1, 1), q (B|1, 1, rows, 1) and k (1, 1, 1, k_len), int64."""
    b, h, k = (low.arrays.cast(low.arrays.arange(n), "int64") for n in (low.batch, low.heads, low.top))
    q = low.arrays.cast(rows, "int64")
    return b[:, None, None, None], h[None, :, None, None], q[..., None], k[None, None, None]


def _checked(what: str, visible: Any, low: Lowering, rows: Array) -> Array:
    """The function's result as bool (B|1, H|1, rows, k_len)."""
    wanted = (low.batch, low.heads, rows.shape[-1], low.top)
    if isinstance(visible, (bool, np.bool_)):
        return low.arrays.full((1, 1, *wanted[2:]), bool(visible), "bool")
    if not is_array(visible) or not is_bool(visible):
        _refuse_values(low, what, visible)
    found = arrays_for([visible])
    if found.name != low.arrays.name and (found.tracing() or not found.concrete(visible)):
        _refuse(
            found,
            OptionError,
            what,
            "indices of the framework that is being traced",
            f"{low.arrays.name} indices and a traced {found.name} result",
            "Pass like=, an array of that framework",
        )
    visible = low.arrays.asarray(visible, "bool")
    shape = (*(1,) * (4 - visible.ndim), *visible.shape)
    if len(shape) != 4 or any(n != 1 and n != m for n, m in zip(shape, wanted, strict=True)):
        _refuse(
            low.arrays,
            ShapeError,
            what,
            f"a function whose result broadcasts to (batch, heads, rows, keys), {wanted}",
            f"{tuple(visible.shape)}",
            "Index with all axes at once, ids[b, q] and not ids[b][q], and reduce no axis",
        )
    return low.arrays.broadcast_to(visible, (shape[0], shape[1], *wanted[2:]))


def _refuse_values(low: Lowering, what: str, visible: Any) -> NoReturn:
    if visible is None:
        remedy = "End it with return"
    elif is_array(visible) or isinstance(visible, (int, float)):
        remedy = "Compare: x != 0; for scores to add, pass bias= instead"
    else:
        remedy = "Return what comparisons of the index arrays give"
    expected = "a function that returns booleans, True where a query may see a key"
    got = f"an array of {visible.dtype}" if is_array(visible) else type(visible).__name__
    _refuse(low.arrays, DtypeError, what, expected, got, remedy)


def _refuse(arrays: Arrays, kind: Kind, what: str, expected: str, got: str, remedy: str) -> NoReturn:
    if arrays.tracing() and arrays.name in _raisers:
        _raisers[arrays.name](kind, what, expected, got, remedy)
    raise kind(what, expected=expected, got=got, remedy=remedy)


def _failed(what: str, indices: tuple[Array, ...], error: Exception) -> OptionError:
    text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(".")
    if any(sign in text for sign in _AMBIGUOUS):
        remedy = _FLOW
    elif isinstance(error, IndexError):
        remedy = "Index with all axes at once, ids[b, q] and not ids[b][q], within the arrays it reads"
    else:
        shapes = ", ".join(str(tuple(x.shape)) for x in indices)
        remedy = f"Try it on integer arrays b, h, q, k of shapes {shapes}"
    return OptionError(
        what,
        expected="a function of index arrays that broadcast",
        got=f"one that raised {text}",
        remedy=remedy,
    )
