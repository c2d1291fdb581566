"""Masks and biases as torch pytrees, so that torch.export and the like take them as inputs."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils._pytree import register_pytree_node

from .. import library, masks, options


def _register(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    def flatten_to_list(x: Any) -> tuple[list[Any], Any]:
        children, context = flatten(x)
        return list(children), context

    def unflatten_children(children: Iterable[Any], context: Any) -> Any:
        return unflatten(tuple(children), context)

    register_pytree_node(
        cls,
        flatten_to_list,
        unflatten_children,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )


masks.register_pytrees(_register)
library.register_pytrees(_register)
options.register_pytrees(_register)
