"""Masks, spans and biases as JAX pytrees: they pass through jit, vmap and scan as arguments."""

from collections.abc import Callable
from typing import Any

from jax.tree_util import register_pytree_node

from .._pytrees import register_pytrees


def _register(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    register_pytree_node(cls, flatten, lambda context, children: unflatten(children, context))


register_pytrees(_register)
