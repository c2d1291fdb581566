"""Masks as pytrees, for whichever framework asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ._expression import Mask
from .arrays import is_array
from .spans import Spans

Registrar = Callable[[type, Callable[..., Any], Callable[..., Any]], None]


def _is_child(value: object) -> bool:
    if value is None or isinstance(value, (int, float, str)):  # Dynamo cannot ask these for their module.
        return False
    several = isinstance(value, tuple) and all(isinstance(x, Mask) for x in value)
    return several or isinstance(value, (Mask, Spans)) or is_array(value) or _is_placeholder(value)


def _is_placeholder(value: object) -> bool:
    """Whether JAX put something of its own where an array was, as in programs compiled ahead of calls."""
    return type(value) is object or type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def _flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values = [(f.name, getattr(x, f.name)) for f in fields(x) if f.init]
    names = tuple(name for name, value in values if _is_child(value))
    static = tuple((name, value) for name, value in values if name not in names)
    return tuple(value for _, value in values if _is_child(value)), (names, static)


def register(registrar: Registrar, cls: type) -> None:
    """Hand `cls` to a framework's registrar, with functions that take it apart and put it together again."""

    def unflatten(children: Any, context: Any) -> Any:
        names, static = context
        # Past __init__: frameworks also put placeholders where arrays were.
        x: Any = object.__new__(cls)
        for name, value in (*zip(names, children, strict=True), *static):
            object.__setattr__(x, name, value)
        return x

    registrar(cls, _flatten, unflatten)
