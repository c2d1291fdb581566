"""Masks and biases as torch pytrees, so that torch.export and the like take them as inputs."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils._pytree import register_pytree_node

from .. import library, masks, options
from ..spans import Spans


def _register(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    def flatten_to_list(x: Any) -> tuple[list[Any], Any]:
        children, context = _spans_as_data(x) or flatten(x)
        return list(children), context

    def unflatten_children(children: Iterable[Any], context: Any) -> Any:
        return unflatten(tuple(children), context)

    register_pytree_node(
        cls,
        flatten_to_list,
        unflatten_children,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )


def _spans_as_data(x: Any) -> tuple[tuple[Any, ...], Any] | None:
    """Spans with their number of keys among the leaves: in the context it would tie a program to itself."""
    if type(x) is not Spans or x._k_len is None:
        return None
    return (x.bounds, x._k_len), (("bounds", "_k_len"), ())


masks.register_pytrees(_register)
library.register_pytrees(_register)
options.register_pytrees(_register)
