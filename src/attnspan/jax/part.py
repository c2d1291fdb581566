"""Data of a call that JAX programs use: arrays, and the numbers that a program is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from jax import Array

from attnspan.call import Call, schema
from attnspan.masks import Mask
from attnspan.masks.bands import Band

#: The arguments of a call, as the operators of torch have them.
ROWS = (*schema.INPUTS, *schema.OPTIONS)
#: The arrays among them. Options are None if a call lacks them.
ARRAYS = schema.names(schema.arrays(ROWS))
#: The arrays that have a gradient.
GRADIENTS = schema.with_gradient(ROWS)

_FLOATS = [row.name for row in schema.OPTIONS if isinstance(row, schema.Number) and row.type == "float"]

#: The gradients of the arrays in `GRADIENTS`, or None.
Gradients = tuple[Array, Array, Array, Any, Any]


def _with_rows(cls: type) -> Any:
    """Make a class a dataclass and a pytree, with a field for each row before its own fields."""
    own = cls.__annotations__
    cls.__annotations__ = {row.name: "Any" for row in ROWS} | own
    for row in ROWS:
        if row.default is not None or getattr(row, "optional", False):
            setattr(cls, row.name, row.default)
    numbers = [name for name in cls.__annotations__ if name not in ARRAYS]
    made: Any = dataclass(frozen=True, eq=False)(cls)
    return jax.tree_util.register_dataclass(made, data_fields=list(ARRAYS), meta_fields=numbers)


@_with_rows
class JaxPart:
    """The arguments of a call, or of some of its heads and keys, as a pytree.

    The fields are the rows of `attnspan.call.schema`, in their order, and the attributes below. Arrays are
    leaves. Numbers belong to the structure, for which a program is compiled. Options have the form of
    `attnspan.call.options.Options`, with float64 arrays if q is float64.

    Attributes:
        layout: Order of the dims of q, k and v: "bhsd" or "bshd".
        band: The mask, for backends with kernels for a few masks. None if only the bounds describe it.
        want_lse: Whether the caller asks for the lse as well.
        wide: Return 16-bit results and gradients in float32, because the caller sums those of several calls.
    """

    layout: str = "bhsd"
    band: Band | None = None
    want_lse: bool = True
    wide: bool = False

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, *rows: Any, **fields: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    @property
    def k_len(self) -> int:
        """Number of keys."""
        return self.k.shape[2 if self.layout == "bhsd" else 1]  # type: ignore[no-any-return]

    def in_layout(self, layout: str) -> JaxPart:
        """Return the part with q, k and v in another layout."""
        if layout == self.layout:
            return self
        q, k, v = (x.swapaxes(1, 2) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, layout=layout)

    def with_gradients(self, found: Gradients) -> JaxPart:
        """Return the part with gradients instead of arrays, and None for arrays without a gradient."""
        gradients: dict[str, Any] = dict.fromkeys(ARRAYS) | dict(zip(GRADIENTS, found, strict=True))
        # A dense bias may have q's dtype, but its gradient is summed in float32.
        if self.bias is not None and gradients["bias"] is not None:
            gradients["bias"] = gradients["bias"].astype(self.bias.dtype)
        return replace(self, **gradients)


def part_of(call: Call, inputs: tuple[Any, Any, Any], **fields: Any) -> JaxPart:
    """Return the part of a checked call whose q, k and v are `inputs`."""
    options = call.options
    if options is not None:  # A Python integer may be too large for an array.
        floats = {name: float(getattr(options, name)) for name in _FLOATS}
        options = options._replace(**floats)
    return JaxPart(*inputs, call.bounds, float(call.scale), *(options or ()), **fields)


def band_of(mask: object, call: Call) -> Band | None:
    """Return the mask of `attention` as a band if queries and keys both count from 0, else None."""
    given, problem = call.given, call.problem
    if not isinstance(mask, Mask) or not (given.q_index is None is given.k_index):
        return None
    band = mask.band()
    if band is None or band.cu_q is not None:
        return None
    # Other libraries align the first query with the first key. attnspan aligns the last ones.
    return band if band.left is None is band.right or problem.q_len == problem.k_len else None


def result_dtype(like: Any, part: JaxPart) -> Any:
    """Return the dtype of a result or gradient that has the dtype of `like` in a plain call."""
    return jax.numpy.promote_types(like.dtype, "float32") if part.wide else like.dtype
