"""Checks of the fields of masks and biases, independent of the sizes of a call.

Each check takes a name for errors and a value, and returns the value to store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnspan.errors import DtypeError, ShapeError, expect

from .arrays import INT32_MAX, Array, is_array, is_bool, is_integer, kind_of
from .plain import check_plain, check_strided


def number(what: str, value: Any, remedy: str = "Pass a Python int") -> int:
    """Check for a Python or NumPy integer."""
    holds = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    expect(holds, what, "an int", type(value).__name__, remedy, error=DtypeError)
    return int(value)


def count(what: str, value: Any, least: int = 0, remedy: str = "") -> int:
    """Check for an integer that fits int32 and is at least `least`."""
    value = number(what, value, remedy or "Pass a Python int")
    remedy = remedy or "Lengths and indices are int32"
    expect(least <= value <= INT32_MAX, what, "{} to {}", value, remedy, least, INT32_MAX)
    return value  # type: ignore[no-any-return]


def positive(what: str, value: Any) -> int:
    """Check for an integer that fits int32 and is at least 1."""
    return count(what, value, least=1)


def flag(what: str, value: Any) -> bool:
    """Check for True or False."""
    expect(isinstance(value, bool), what, "True or False", kind_of(value), "Pass a bool", error=DtypeError)
    return bool(value)


def optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Make a check that also accepts None."""
    return lambda what, value: None if value is None else check(what, value)


def _rank(what: str, x: Array, ranks: tuple[int, ...]) -> Array:
    expected = f"an array with {' or '.join(map(str, ranks))} axes"
    remedy = "Remove or add axes. A batch axis comes first"
    expect(x.ndim in ranks, what, expected, tuple(x.shape), remedy, error=ShapeError)
    return x


def _array(what: str, x: Any) -> Any:
    """Convert a list to a NumPy array. An unknown subclass of arrays raises."""
    check_plain(what, x)
    check_strided(what, x)
    if not isinstance(x, (list, tuple)):
        return x
    try:
        return np.asarray(x)
    except ValueError:
        remedy = "Pad them to one length"
        expect(False, what, "rows of one length", "rows of several", remedy, error=ShapeError)


def integers(what: str, x: Any, ranks: tuple[int, ...] = (1, 2)) -> Array:
    """Check for an integer array with one of the numbers of axes. Lists become NumPy arrays."""
    x = _array(what, x)
    x = x.astype(np.int64) if isinstance(x, np.ndarray) and not x.size else x
    holds = is_array(x) and is_integer(x)
    expect(holds, what, "an integer array", kind_of(x), "Convert it to int32 or int64", error=DtypeError)
    return _rank(what, x, ranks)


def booleans(what: str, x: Any, ranks: tuple[int, ...] = (1, 2)) -> Array:
    """Check for a boolean array with one of the numbers of axes. Lists become NumPy arrays."""
    x = _array(what, x)
    remedy = "Compare: scores > -inf, or mask != 0"
    expect(is_array(x) and is_bool(x), what, "a bool array", kind_of(x), remedy, error=DtypeError)
    if 4 not in ranks and x.ndim == 4:
        remedy = "For a mask of shape (B, 1, 1, S), pass mask[:, 0, 0]. from_dense takes any (B, H, Sq, Sk)"
        expect(False, what, "one axis of keys", tuple(x.shape), remedy, error=ShapeError)
    return _rank(what, x, ranks)


def lengths(what: str, x: Any, ranks: tuple[int, ...] = (0, 1)) -> int | Array:
    """Check for an integer or an integer array."""
    check_plain(what, x)
    check_strided(what, x)
    if is_array(x) and is_bool(x):
        remedy = "Use keys(valid) for a mask of valid keys, or pass valid.sum(-1)"
        expect(False, what, "integers", kind_of(x), remedy, error=DtypeError)
    return integers(what, x, ranks) if is_array(x) or isinstance(x, (list, tuple)) else count(what, x)


def offsets(what: str, x: Any) -> Array:
    """Check for offsets of documents, integer (n + 1,) or (B, n + 1)."""
    x = integers(what, x)
    expected = "at least 2 offsets: 0 and the end of the first document"
    remedy = "Pass cumulative lengths with a 0 before them"
    expect(x.shape[-1] >= 2, what, expected, x.shape[-1], remedy, error=ShapeError)
    return x


def function(what: str, fn: Any) -> Callable[..., Any]:
    """Check for a function of indices."""
    expected = "a function (b, h, q_index, k_index) -> bool"
    expect(callable(fn), what, expected, type(fn).__name__, "Pass a mask_mod", error=DtypeError)
    return fn  # type: ignore[no-any-return]
