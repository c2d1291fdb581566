"""Checks of what masks and biases are made of, before there is a problem to fit.

Each takes a name for errors and a value, and returns the value that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnspan.errors import DtypeError, ShapeError, expect

from .arrays import INT32_MAX, Array, is_array, is_bool, is_integer, kind_of
from .plain import check_plain, check_strided

__all__ = [
    "booleans",
    "count",
    "flag",
    "function",
    "integers",
    "lengths",
    "number",
    "offsets",
    "optional",
    "positive",
]


def number(what: str, value: Any, remedy: str = "Pass a Python int") -> int:
    """A Python or NumPy integer."""
    holds = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    expect(holds, what, "an int", type(value).__name__, remedy, error=DtypeError)
    return int(value)


def count(what: str, value: Any, least: int = 0, remedy: str = "") -> int:
    """An integer of int32, at least `least`."""
    value = number(what, value, remedy or "Pass a Python int")
    remedy = remedy or "Lengths and indices are int32"
    expect(least <= value <= INT32_MAX, what, "{} to {}", value, remedy, least, INT32_MAX)
    return value  # type: ignore[no-any-return]


def positive(what: str, value: Any) -> int:
    """An integer of int32, at least 1."""
    return count(what, value, least=1)


def flag(what: str, value: Any) -> bool:
    """True or False."""
    expect(isinstance(value, bool), what, "True or False", kind_of(value), "Pass a bool", error=DtypeError)
    return bool(value)


def optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """A check that lets None pass."""
    return lambda what, value: None if value is None else check(what, value)


def _rank(what: str, x: Array, ranks: tuple[int, ...]) -> Array:
    expected = f"an array with {' or '.join(map(str, ranks))} axes"
    remedy = "Drop or add axes; a batch axis comes first"
    expect(x.ndim in ranks, what, expected, tuple(x.shape), remedy, error=ShapeError)
    return x


def _array(what: str, x: Any) -> Any:
    """A list as a NumPy array, anything else as it is; a subclass of arrays that is not known raises."""
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
    """An integer array with one of the numbers of axes; lists become NumPy arrays."""
    x = _array(what, x)
    x = x.astype(np.int64) if isinstance(x, np.ndarray) and not x.size else x
    holds = is_array(x) and is_integer(x)
    expect(holds, what, "an integer array", kind_of(x), "Convert it to int32 or int64", error=DtypeError)
    return _rank(what, x, ranks)


def booleans(what: str, x: Any, ranks: tuple[int, ...] = (1, 2)) -> Array:
    """An array of bool with one of the numbers of axes; lists become NumPy arrays."""
    x = _array(what, x)
    remedy = "Compare: scores > -inf, or mask != 0"
    expect(is_array(x) and is_bool(x), what, "a bool array", kind_of(x), remedy, error=DtypeError)
    if 4 not in ranks and x.ndim == 4:
        remedy = "Of a mask (B, 1, 1, S) pass mask[:, 0, 0]; from_dense takes any mask (B, H, Sq, Sk)"
        expect(False, what, "one axis of keys", tuple(x.shape), remedy, error=ShapeError)
    return _rank(what, x, ranks)


def lengths(what: str, x: Any, ranks: tuple[int, ...] = (0, 1)) -> int | Array:
    """An integer, or an array of them."""
    check_plain(what, x)
    check_strided(what, x)
    if is_array(x) and is_bool(x):
        remedy = "Take keys(valid) for a mask of valid keys, or pass valid.sum(-1)"
        expect(False, what, "integers", kind_of(x), remedy, error=DtypeError)
    return integers(what, x, ranks) if is_array(x) or isinstance(x, (list, tuple)) else count(what, x)


def offsets(what: str, x: Any) -> Array:
    """Integer (n + 1,) or (B, n + 1): where documents start, and where the last one ends."""
    x = integers(what, x)
    expected = "at least 2 offsets: 0 and the end of the first document"
    remedy = "Pass cumulative lengths with a 0 before them"
    expect(x.shape[-1] >= 2, what, expected, x.shape[-1], remedy, error=ShapeError)
    return x


def function(what: str, fn: Any) -> Callable[..., Any]:
    """A function of indices."""
    expected = "a function (b, h, q_index, k_index) -> bool"
    expect(callable(fn), what, expected, type(fn).__name__, "Pass a mask_mod", error=DtypeError)
    return fn  # type: ignore[no-any-return]
