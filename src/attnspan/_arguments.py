"""Checks of what the mask functions are given, before there is a problem to fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays import INT32_MAX, Array, is_array, is_bool, is_integer
from .errors import DtypeError, OptionError, ShapeError, shown


def number(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DtypeError(what, expected="an int", got=type(value).__name__, remedy="Pass a Python int")
    return int(value)


def count(what: str, value: Any, least: int = 0) -> int:
    value = number(what, value)
    if not least <= value <= INT32_MAX:
        raise OptionError(
            what, expected=f"{least} to {INT32_MAX}", got=shown(value), remedy="Lengths and indices are int32"
        )
    return value  # type: ignore[no-any-return]


def runs(what: str, value: Any) -> int | None:
    return None if value is None else count(what, value, least=1)


def rank(what: str, x: Array, ranks: tuple[int, ...]) -> None:
    if x.ndim not in ranks:
        raise ShapeError(
            what,
            expected=f"an array with {' or '.join(map(str, ranks))} axes",
            got=shown(x.shape),
            remedy="Drop or add axes; a batch axis comes first",
        )


def integers(what: str, x: Any, ranks: tuple[int, ...]) -> Array:
    if isinstance(x, (list, tuple)):
        try:
            x = np.asarray(x)
        except ValueError:
            raise ShapeError(
                what, expected="rows of one length", got="rows of several", remedy="Pad them to one length"
            ) from None
        x = x if x.size else x.astype(np.int64)
    if not is_array(x) or not is_integer(x):
        got = str(x.dtype) if is_array(x) else type(x).__name__
        raise DtypeError(what, expected="an integer array", got=got, remedy="Convert it to int32 or int64")
    rank(what, x, ranks)
    return x


def booleans(what: str, x: Any) -> None:
    if not is_array(x) or not is_bool(x):
        got = str(x.dtype) if is_array(x) else type(x).__name__
        raise DtypeError(
            what, expected="a bool array", got=got, remedy="Compare: scores > -inf, or mask != 0"
        )


def lengths_of(what: str, x: Any, ranks: tuple[int, ...]) -> int | Array:
    return integers(what, x, ranks) if is_array(x) or isinstance(x, (list, tuple)) else count(what, x)


def offsets(what: str, x: Any) -> Array:
    x = integers(what, x, (1, 2))
    if x.shape[-1] < 2:
        raise ShapeError(
            what,
            expected="at least 2 offsets: 0 and the end of the first document",
            got=shown(x.shape[-1]),
            remedy="Pass cumulative lengths with a 0 before them",
        )
    return x


def function(what: str, fn: Any) -> Callable[..., Any]:
    if not callable(fn):
        raise DtypeError(
            what,
            expected="a function (b, h, q_index, k_index) -> bool",
            got=type(fn).__name__,
            remedy="Pass a mask_mod",
        )
    return fn  # type: ignore[no-any-return]
