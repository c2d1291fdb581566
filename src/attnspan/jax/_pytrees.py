"""Masks, spans and biases as JAX pytrees: they pass through jit, vmap and scan as arguments."""

from collections.abc import Callable
from typing import Any

from jax.tree_util import register_pytree_node

from .. import library, masks, options


def _register(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    register_pytree_node(cls, flatten, lambda context, children: unflatten(children, context))


masks.register_pytrees(_register)
library.register_pytrees(_register)
options.register_pytrees(_register)
