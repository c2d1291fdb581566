"""Masks as text and arrays, because operators take only tensors and strings.

A mask becomes the text of a Python literal, in which its arrays are numbers, and the list of arrays. An array
that is used twice has one number, because masks compare their arrays by identity.
"""

from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from attnspan.base.arrays import Array, is_array
from attnspan.base.pytrees import library_classes, register_pytrees
from attnspan.masks import Mask
from attnspan.masks.bounds import Spans

#: Name of each mask class -> function that builds a mask from its fields.
_CLASSES: dict[str, Callable[..., Any]] = {}


def _register(cls: type, _: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    if cls in library_classes:
        _CLASSES[cls.__name__] = unflatten


register_pytrees(_register)


class OpaqueError(Exception):
    """A part of a mask has no words: it is a function or a user's own mask class."""


def encode(mask: Mask) -> tuple[str, list[Array], list[str]]:
    """Encode a mask as a text, its arrays, and the names of their fields. May raise an OpaqueError.

    Example:
        >>> from attnspan import causal, segments
        >>> text, arrays, names = encode(causal() & segments([0, 0, 1]))
        >>> names, decode(text, arrays)
        (['q_ids'], causal() & segments(int64[3]))
    """
    arrays: list[Array] = []
    names: list[str] = []
    return _words(mask, "", arrays, names), arrays, names


def decode(text: str, arrays: Sequence[Array]) -> Mask:
    """Return the mask of a text from `encode`, with these arrays."""
    return _value(literal_eval(text), arrays)  # type: ignore[no-any-return]


def _words(x: Any, name: str, arrays: list[Array], names: list[str]) -> str:
    if isinstance(x, (Mask, Spans)) and type(x) in library_classes:
        values = [(field.name, getattr(x, field.name)) for field in fields(x) if field.init]  # type: ignore[arg-type]
        parts = [f"{field!r}: {_words(value, field, arrays, names)}, " for field, value in values]
        return f"{{'': {type(x).__name__!r}, " + "".join(parts) + "}"
    if isinstance(x, tuple):
        return "(" + "".join([_words(part, name, arrays, names) + "," for part in x]) + ")"
    if is_array(x):
        for number, known in enumerate(arrays):
            if known is x:
                return f"[{number}]"
        arrays.append(x)
        names.append(name)
        return f"[{len(arrays) - 1}]"
    if x is None or isinstance(x, (bool, int, float, str)):
        return f"{x!r}"
    raise OpaqueError(type(x).__name__)


def _value(x: Any, arrays: Sequence[Array]) -> Any:
    if isinstance(x, tuple):
        return tuple(_value(part, arrays) for part in x)
    if isinstance(x, list):
        return arrays[x[0]]
    if isinstance(x, dict):
        names = tuple(name for name in x if name)
        return _CLASSES[x[""]]([_value(x[name], arrays) for name in names], (names, ()))
    return x
