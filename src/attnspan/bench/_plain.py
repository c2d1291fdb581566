"""Dataclasses to plain JSON data and back, by their annotations."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from attnspan.errors import OptionError

__all__ = ["from_plain", "to_plain"]

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dicts, lists, strings and numbers; tuples become lists.

    Args:
        value: A dataclass instance, or plain data.

    Example:
        >>> from attnspan.bench.results import Ratio
        >>> to_plain(Ratio(1.5, 1.4, 1.6, pairs=9))
        {'median': 1.5, 'low': 1.4, 'high': 1.6, 'pairs': 9}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], data: Any, where: str) -> T:
    """Build a dataclass from what `to_plain` made of it.

    Args:
        kind: The dataclass.
        data: Plain data.
        where: Name of the data in error messages.

    Raises:
        OptionError: A field is missing, unknown, or of another type than its annotation.

    Example:
        >>> from attnspan.bench.results import Ratio
        >>> from_plain(Ratio, {"median": 1.5, "low": 1.4, "high": 1.6, "pairs": 9}, "ratio").pairs
        9
        >>> from_plain(Ratio, {"median": "fast"}, "ratio")
        Traceback (most recent call last):
        attnspan.errors.OptionError: ratio: expected the fields median, low, high, pairs, got median. \
Write the file anew.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    required = [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if not isinstance(data, dict) or not set(required) <= set(data) <= set(names):
        got = ", ".join(data) if isinstance(data, dict) else type(data).__name__
        raise _refused(where, f"the fields {', '.join(names)}", got or "nothing")
    hints = get_type_hints(kind)
    return kind(**{name: _build(hints[name], item, f"{where}.{name}") for name, item in data.items()})


def _build(hint: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return data
    if origin is types.UnionType:
        if data is None and type(None) in args:
            return None
        return _build(next(arg for arg in args if arg is not type(None)), data, where)
    if origin is tuple:
        items = _checked(data, list, where)
        return tuple(_build(args[0], item, f"{where}[{index}]") for index, item in enumerate(items))
    if origin is dict:
        items = _checked(data, dict, where)
        return {key: _build(args[1], item, f"{where}.{key}") for key, item in items.items()}
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, data, where)  # type: ignore[arg-type]
    return _scalar(hint, data, where)


def _scalar(hint: Callable[[Any], Any], data: Any, where: str) -> Any:
    # JSON writes 2.0 as 2.0 but a hand-written file may say 2; a bool is no number here.
    if hint is float and type(data) is int:
        return float(data)
    if type(data) is not hint:
        raise _refused(where, f"{getattr(hint, '__name__', hint)}", repr(data))
    return data


def _checked(data: Any, kind: type, where: str) -> Any:
    if not isinstance(data, kind):
        raise _refused(where, f"a {kind.__name__}", type(data).__name__)
    return data


def _refused(where: str, expected: str, got: str) -> OptionError:
    return OptionError(where, expected=expected, got=got, remedy="Write the file anew")
