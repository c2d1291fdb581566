"""Calls of a user's function of indices, and errors that explain its mistakes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from attnspan.base.arrays import NUMPY, Array, Arrays, TorchArrays, arrays_for, is_array, is_bool, kind_of
from attnspan.base.recorded import is_jit_traced
from attnspan.errors import DtypeError, OptionError, ShapeError, UsageError, expect

from .captured import captured, with_arrays
from .lowering import Lowering
from .pairs import Function as Function
from .pairs import by_numpy, by_vmap

_AMBIGUOUS = (
    *("Boolean value of Tensor", "truth value of an array", "TracerBoolConversionError"),
    "data-dependent control flow",
)
_AS_NUMBER = ("calling .item()", "TracerIntegerConversionError")


def name_of(fn: Any) -> str:
    """Name of a function, of the function in a `functools.partial`, or of a callable object's class."""
    name = getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", None)
    return name if isinstance(name, str) else type(fn).__name__


def call(what: str, fn: Function, low: Lowering, rows: Array) -> Array:
    """Call `fn` for each pair of the queries with indices `rows`, int32 (B|1, 1, rows).

    Returns:
        bool (B|1, H|1, rows, k_len).

    Raises:
        DtypeError: If `fn` does not return booleans.
        ShapeError: If `fn` returns more than one boolean for a pair.
        OptionError: If `fn` raises.
    """
    raised: list[Exception] = []
    for arrays in _frameworks(fn, low):
        try:
            return _broadcast(what, _evaluated(what, fn, arrays, low, rows), low, rows)
        except (DtypeError, ShapeError):
            raise
        except Exception as error:
            raised.append(error)
    if isinstance(raised[0], (UsageError, OptionError)):
        raise raised[0]
    raise _failed(what, raised[0]) from raised[0]


def call_traced(what: str, fn: Function, low: Lowering, rows: Array) -> Array:
    """Call `fn` in a traced program. Under torch's compiler, exceptions of `fn` keep the compiler's text."""
    if low.arrays.name == "jax" or is_jit_traced():
        return call(what, fn, low, rows)
    return _broadcast(what, _evaluated(what, fn, low.arrays, low, rows), low, rows)


def _frameworks(fn: Function, low: Lowering) -> list[Arrays]:
    """The frameworks whose indices `fn` is called with. Each is tried if `fn` raised with the one before."""
    if low.arrays.tracing():
        return [low.arrays]
    if low.arrays.name != "numpy":
        return [low.arrays, NUMPY]
    found = arrays_for(captured(fn), what="from_predicate")
    if found.name != "numpy":
        return [found]
    torch = sys.modules.get("torch")
    return [NUMPY] if torch is None else [NUMPY, TorchArrays(torch.device("cpu"))]


def _evaluated(what: str, fn: Function, arrays: Arrays, low: Lowering, rows: Array) -> Array:
    """Call `fn` for each pair with indices of `arrays`. The result is bool (B|1, H|1, rows|1, k_len|1)."""
    if arrays.tracing() and not sys.modules["torch"].compiler.is_dynamo_compiling():
        # NumPy cannot read a tensor that is being recorded, not even as an index.
        fn = with_arrays(fn, lambda x: arrays.xp.asarray(x) if isinstance(x, np.ndarray) else x)

    def one(b: Any, h: Any, q: Any, k: Any) -> Any:
        # Compilers quote the next line in their errors, including its comment.
        visible = fn(b, h, q, k)  # A mask function is traced: write it with &, | and where, not and, or, if
        return _boolean(what, visible, arrays)

    q = rows[:, 0] if arrays is low.arrays else arrays.asarray(low.arrays.to_numpy(rows[:, 0]), "int32")
    sizes = (low.batch, low.heads, q.shape[-1], low.top)
    if any(arrays.is_static(n) and n == 0 for n in sizes):
        return arrays.full((1, 1, 1, 1), False, "bool")
    b, h, k = (arrays.cast(arrays.arange(n), "int64") for n in (low.batch, low.heads, low.top))
    q = arrays.cast(q, "int64")
    if arrays.name != "numpy":
        return by_vmap(one, arrays, b, h, q, k)
    indices = b[:, None, None, None], h[None, :, None, None], q[:, None, :, None], k[None, None, None]
    return by_numpy(what, fn, lambda *at: bool(one(*at)), list(indices))


def _boolean(what: str, visible: Any, arrays: Arrays) -> Any:
    """Check the value that a function returned for one pair."""
    if isinstance(visible, (bool, np.bool_)):
        return visible if arrays.name == "numpy" else arrays.full((), bool(visible), "bool")
    if not is_array(visible) or not is_bool(visible):
        raise _no_booleans(what, visible)
    expected, remedy = "a function that returns one boolean for a pair", "Reduce or index the axes it adds"
    expect(visible.ndim == 0, what, expected, tuple(visible.shape), remedy, error=ShapeError)
    other = arrays_for([visible]).name != arrays.name
    return arrays.asarray(visible, "bool") if other and arrays.name != "numpy" else visible


def _broadcast(what: str, visible: Array, low: Lowering, rows: Array) -> Array:
    """Broadcast results to bool (B|1, H|1, rows, k_len), in the framework of the mask."""
    found = arrays_for([visible])
    if found.name != low.arrays.name:
        readable = not found.tracing() and found.concrete(visible)
        got = f"{low.arrays.name} indices and a traced {found.name} result"
        wanted, remedy = "indices of the framework that is traced", "Pass like=, an array of that framework"
        expect(readable, what, wanted, got, remedy)
        visible = low.arrays.asarray(found.to_numpy(visible), "bool")
    return low.arrays.broadcast_to(visible, (*visible.shape[:2], rows.shape[-1], low.top))


def _no_booleans(what: str, visible: Any) -> DtypeError:
    if visible is None:
        remedy = "End it with return"
    elif is_array(visible) or isinstance(visible, (int, float)):
        remedy = "Compare: x != 0. To add numbers to the scores, pass bias= instead"
    else:
        remedy = "Return the result of comparisons of the indices"
    expected = "a function that returns booleans, True where a query may see a key"
    got = ("an array of " if is_array(visible) else "") + kind_of(visible)
    return DtypeError(what, expected=expected, got=got, remedy=remedy)


def _failed(what: str, error: Exception) -> OptionError:
    text = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(".")
    if any(sign in text for sign in _AMBIGUOUS):
        remedy = "Write it with &, | and where instead of and, or, not and if"
    elif any(sign in text for sign in _AS_NUMBER):
        remedy = "Convert the list that the function indexes to a tensor or an array"
    elif isinstance(error, IndexError):
        remedy = "Index captured arrays within their axes and sizes"
    else:
        remedy = "Try it on one pair: b, h, q and k are integers (arrays without axes)"
    expected = "a function of the indices of one pair"
    return OptionError(what, expected=expected, got=f"a function that raised {text}", remedy=remedy)
