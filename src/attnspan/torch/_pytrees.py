"""Masks and biases as torch pytrees, so that torch.export and the like take them as inputs."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from .._pytrees import register_pytrees
from ..spans import Spans


def _register(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    def flatten_to_list(x: Any) -> tuple[list[Any], Any]:
        children, context = _spans_as_data(x) or flatten(x)
        return list(children), context

    def flatten_with_keys(x: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        children, context = _spans_as_data(x) or flatten(x)
        names, _ = context
        return [(GetAttrKey(name), child) for name, child in zip(names, children, strict=True)], context

    def unflatten_children(children: Iterable[Any], context: Any) -> Any:
        return unflatten(tuple(children), context)

    register_pytree_node(
        cls,
        flatten_to_list,
        unflatten_children,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
        # JSON has lists alone.
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_as_tuples,
    )
    # torch.export.load reads the example inputs of a program, which masks may be among.
    torch.serialization.add_safe_globals([cls])


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _spans_as_data(x: Any) -> tuple[tuple[Any, ...], Any] | None:
    """Spans with their number of keys among the leaves: in the context it would tie a program to itself."""
    if type(x) is not Spans or x._k_len is None:
        return None
    return (x.bounds, x._k_len), (("bounds", "_k_len"), ())


register_pytrees(_register)
