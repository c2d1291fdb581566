"""The base of masks, spans and biases: frozen dataclasses that are pytrees of any framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, dataclass_transform

from attnspan.errors import shown

from .arrays import is_array

#: A function that registers a class with a framework. It takes the class, `flatten` and `unflatten`.
Registrar = Callable[[type, Callable[..., Any], Callable[..., Any]], None]


_PACKAGE = __name__.partition(".")[0] + "."
_classes: list[type] = []
#: The classes of attnspan. Methods of other classes may read attributes that are no fields.
library_classes: set[type] = set()
_registrars: list[Registrar] = []


@dataclass_transform(frozen_default=True, eq_default=False)
class Node:
    """Base of frozen dataclasses that are pytrees. Arrays and nodes are children, other fields are static.

    A subclass needs no decorator. It is registered with every framework, whether it is loaded before or
    after.
    """

    # NumPy then uses the operators of the class, instead of calling them for each element.
    __array_ufunc__ = None
    # Fields that were children, if a framework has replaced one by another object, such as an axis.
    _children: ClassVar[tuple[str, ...] | None] = None

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        dataclass(frozen=True, eq=False, repr=False)(cls)
        _classes.append(cls)
        if cls.__module__.startswith(_PACKAGE):
            library_classes.add(cls)
        for registrar in _registrars:
            registrar(cls, _flatten, partial(_unflatten, cls))

    def __eq__(self, other: object) -> Any:
        """Compare by structure if neither has an array, else by identity."""
        if self is other or type(self) is not type(other):
            return self is other
        mine = _structure(self)
        return mine is not None and mine == _structure(other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        structure = _structure(self)
        # A field of a user's class may have no hash. Equal masks then share the hash of the class.
        try:
            return object.__hash__(self) if structure is None else hash(structure)
        except TypeError:
            return hash(type(self))

    def to(self, device: Any, **options: Any) -> Any:
        """Move all tensors to a device, as you move a batch. Without tensors, return the object itself.

        NumPy arrays stay, and are moved when the mask is lowered.

        Args:
            device: A torch device.
            **options: Options of `torch.Tensor.to`, such as ``non_blocking``.

        Example:
            >>> from attnspan import causal
            >>> causal().to("cpu")
            causal()
        """
        return _moved(self, {}, device, options)

    def _set(self, **values: Any) -> None:
        """Set fields in `__post_init__`. Instances are frozen afterwards."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check(self, **checks: Callable[[str, Any], Any]) -> None:
        """Replace each field by the result of its check. Errors name the class and the field."""
        for name, check in checks.items():
            object.__setattr__(self, name, check(f"{type(self).__name__}: {name}", getattr(self, name)))

    def __repr__(self) -> str:
        words = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            # Defaults are attributes of the class. A compiler cannot trace dataclasses.MISSING.
            if not hasattr(type(self), field.name):
                words.append(short(value))
            elif is_array(value) or value != getattr(type(self), field.name):
                words.append(f"{field.name}={short(value)}")
        return f"{type(self).__name__}({', '.join(words)})"


def short(value: object) -> str:
    """Format a value for a repr. An array is shown as its dtype and shape."""
    if is_array(value):
        dtype = str(value.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
        return f"{dtype}[{', '.join([shown(n) for n in value.shape])}]"  # type: ignore[attr-defined]
    if isinstance(value, int | tuple):
        return shown(value)
    return getattr(value, "__name__", None) or repr(value)


def register_pytrees(registrar: Registrar) -> None:
    """Register masks, spans and biases as pytrees of a framework, including classes that are defined later.

    Args:
        registrar: A function that is called as registrar(cls, flatten, unflatten) for each class.
            flatten(x) returns (children, context), and unflatten(children, context) returns x. The context is
            hashable.

    Example:
        >>> from attnspan import global_keys
        >>> seen = {}
        >>> register_pytrees(lambda cls, flatten, unflatten, seen=seen: seen.update({cls.__name__: flatten}))
        >>> seen["global_keys"](global_keys(4))
        ((), ((), (('n', 4),)))
    """
    _registrars.append(registrar)
    for cls in _classes:
        registrar(cls, _flatten, partial(_unflatten, cls))


def arrays_in(x: Any) -> list[Any]:
    """The arrays of a node and of the nodes in it."""
    found = []
    # `k_len` is left out, because a trace that reads it makes it a constant.
    for value in [getattr(x, field.name) for field in fields(x) if field.init and field.name != "k_len"]:
        for part in value if type(value) is tuple else (value,):
            if isinstance(part, Node):
                found += arrays_in(part)
            elif is_array(part):
                found.append(part)
    return found


def nodes_in(x: Node) -> Iterator[Node]:
    """A node and the nodes in it, at any depth."""
    yield x
    for field in fields(x):  # type: ignore[arg-type]
        value = getattr(x, field.name)
        for part in value if type(value) is tuple else (value,):
            if isinstance(part, Node):
                yield from nodes_in(part)


def _structure(x: Node) -> tuple[Any, ...] | None:
    """The class and the attributes of a node and of the nodes in it, or None if there are arrays."""
    parts: list[Any] = [type(x)]
    names = [field.name for field in fields(x)]  # type: ignore[arg-type]
    # A user's class may derive attributes from more than its fields.
    derived = [] if type(x) in library_classes else [name for name in vars(x) if name not in names]
    for name in (*names, *derived):
        value = getattr(x, name)
        for part in value if type(value) is tuple else (value,):
            if is_array(part):
                return None
            inner = _structure(part) if isinstance(part, Node) else (type(part), part)
            if inner is None:
                return None
            parts.append(inner)
        parts.append(len(value) if type(value) is tuple else None)
    return tuple(parts)


def _moved(x: Any, moved: dict[int, Any], device: Any, options: dict[str, Any]) -> Any:
    """Move the tensors of a node. A tensor in two places stays one, because masks compare identity."""
    if type(x) is tuple:
        return tuple(_moved(part, moved, device, options) for part in x)
    if isinstance(x, Node):
        children, context = _flatten(x)
        found = tuple(_moved(child, moved, device, options) for child in children)
        same = all(old is new for old, new in zip(children, found, strict=True))
        return x if same else _unflatten(type(x), found, context)
    if not (is_array(x) and hasattr(x, "to") and hasattr(x, "requires_grad")):
        return x
    if id(x) not in moved:
        moved[id(x)] = x.to(device, **options)
    return moved[id(x)]


def _is_child(value: object) -> bool:
    if value is None or isinstance(value, (int, float, str)):  # Dynamo cannot read their module
        return False
    several = isinstance(value, tuple) and all(isinstance(x, Node) for x in value)
    return several or isinstance(value, Node) or is_array(value) or _is_placeholder(value)


def _is_placeholder(value: object) -> bool:
    """Whether JAX has replaced an array by a placeholder, as in programs that are compiled ahead of time."""
    return type(value) is object or type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def _flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values = [(f.name, getattr(x, f.name)) for f in fields(x) if f.init]
    names = x._children or tuple(name for name, value in values if _is_child(value))
    static = tuple((name, value) for name, value in values if name not in names)
    return tuple(value for name, value in values if name in names), (names, static)


def _unflatten(cls: type, children: Any, context: Any) -> Any:
    names, static = context
    # Without __init__, because frameworks also pass placeholders in place of arrays.
    x: Any = object.__new__(cls)
    for name, value in (*zip(names, children, strict=True), *static):
        object.__setattr__(x, name, value)
    if not all(map(_is_child, children)):
        object.__setattr__(x, "_children", names)
    return x
