"""JAX's own checks of a call: NumPy arrays, tracers, masks for meshes, pytrees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from attnspan.base.mistakes import OneMask
from attnspan.base.pytrees import register_pytrees
from attnspan.call import Front, schema
from attnspan.call.backend import follow
from attnspan.call.options import NO_OPTIONS, Given
from attnspan.masks import Prepared

from . import dropout, lowering
from .lowering import TO_JAX, refuse_tensors
from .placement import Place, check_devices, check_sharding, platform_of


def _register(cls: type, flatten: Callable[..., Any], unflatten: Callable[..., Any]) -> None:
    jax.tree_util.register_pytree_node(cls, flatten, lambda context, children: unflatten(children, context))


# Masks, spans and biases pass through jit, vmap and scan as arguments.
register_pytrees(_register)
_ARRAYS = schema.names(schema.arrays(schema.OPTIONS))
_GIVEN = [field.name for field in fields(Given)]
jax.tree_util.register_dataclass(
    Given,
    data_fields=[name for name in _GIVEN if name in _ARRAYS],
    meta_fields=[name for name in _GIVEN if name not in _ARRAYS],
)


# The backend is part of the cache key of every jit, also in user code, because a program is traced for one
# backend. PyTorch/XLA brings an older JAX without such keys. Its programs name their backend themselves.
_backend = jax.make_user_context(None) if hasattr(jax, "make_user_context") else None


class _Entered(threading.local):
    def __init__(self) -> None:
        self.context: Any = None


_entered = _Entered()


def _follow(name: str | None) -> None:
    if _entered.context is not None:
        _entered.context.__exit__(None, None, None)
    _entered.context = None if name is None or _backend is None else _backend(name)
    if _entered.context is not None:
        _entered.context.__enter__()


if _backend is not None:
    follow(_follow)


class ShardedMask(OneMask):
    """A mask for a mesh, which knows which device holds which part of the problem.

    `attention` passes its calls on to the mask. `attnspan.jax.shard` makes one, and
    `attnspan.parallel.Plan.on` does for a JAX mesh.
    """

    def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """Compute `attnspan.jax.attention` of global arrays. It takes the same keywords except ``mask``."""
        raise NotImplementedError(f"{type(self).__name__} must implement attention()")


class JaxFront(Front):
    """Front for arrays of JAX or NumPy. It checks a call on the shapes of q, k and v in (B, H, S, D) order.

    Attributes:
        inputs: q, k and v as JAX arrays in the layout of the call. For "thd" they have a batch dim of size 1.
        place: Devices of the call. None if the call is traced.
        empty: Whether the values have no elements. `inputs` then has values of one element.
    """

    expected = "a JAX or NumPy array"
    convert = (
        "Convert it with jnp.asarray (a torch tensor with jax.dlpack.from_dlpack), or call its own "
        "framework's attention"
    )
    convert_foreign = TO_JAX
    seed = "an integer array or a jax.random.key"
    new_seed = "Pass a different one for each layer and step, such as jax.random.fold_in(key, step)"
    inputs: tuple[Array, Array, Array]
    place: Place | None = None

    def takes(self, x: Any) -> bool:
        return isinstance(x, jax.Array | np.ndarray)

    def check_taken(self, name: str, x: Any, expected: str) -> None:
        if not isinstance(x, jax.Array):
            super().check_taken(name, x, expected)

    def kind(self, x: Any) -> str:
        return f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}".removeprefix("builtins.")

    def enter(self, q: Any, k: Any, v: Any, mask: Any, given: Given, layout: str) -> tuple[Any, Any, Any]:
        del mask
        q, k, v = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in (q, k, v)]
        check_sharding(layout, q=q, k=k, v=v)
        for name, x in vars(given).items() if given is not NO_OPTIONS else ():
            if x is not None:
                refuse_tensors(name, x)
        self.place = check_devices(q, k, v, given)
        self.device = platform_of(self.place)
        return self.shapes(*self.widened(q, k, v), layout)

    def pad_last(self, x: Array) -> Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])

    def shapes(self, q: Array, k: Array, v: Array, layout: str) -> tuple[Any, Any, Any]:
        """Keep the inputs, and return their shapes in (B, H, S, D) order. Eager arrays are not transposed."""
        self.inputs = (q[None], k[None], v[None]) if layout == "thd" else (q, k, v)
        return tuple([Shaped.of(x, layout) for x in self.inputs])  # type: ignore[return-value]

    def like(self, q: Any) -> Array:
        del q
        return self.inputs[0]

    def lower_seed(self, seed: Any, batch: int, heads: int) -> Array:
        dropout.check_seed(seed, (batch, heads, 2))
        return dropout.lower_seed(seed, batch, heads)

    def lower(self, mask: Any, q: Any, k: Any, given: Given) -> tuple[Prepared | None, Given]:
        return lowering.lower(mask, q, k, given, self.inputs, self.place), given

    def bounds(self, placed: Prepared, mask: Any, q: Any) -> tuple[Any, None]:
        del mask, q
        return placed.lowered.bounds, None


class Shaped(NamedTuple):
    """Shape of an array in (B, H, S, D) order, and its dtype."""

    shape: tuple[Any, ...]
    dtype: Any

    @classmethod
    def of(cls, x: Array, layout: str) -> Shaped:
        """Return the shape of an array with four axes in a layout."""
        shape = x.shape
        return cls(shape if layout == "bhsd" else (shape[0], shape[2], shape[1], shape[3]), x.dtype)
