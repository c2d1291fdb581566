"""Matrix products over visible pairs only. No derivative multiplies a masked 0 by a NaN.

The two primitives are each other's derivatives. Each is linear in either factor. From their rules, JAX
therefore derives forward and reverse mode, every order, and vmap.

All arrays have the same number of axes. In `visible`, the axes before the last two may have size 1.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attnspan.jax.varying import axes_of_types


def pair_product(a: Array, b: Array, visible: Array) -> Array:
    """Return a @ b^T for visible pairs, 0 for others: (..., m, d) and (..., n, d) to (..., m, n).

    Example:
        >>> a, b = jnp.ones((2, 1)), jnp.array([[1.0], [jnp.nan]])
        >>> pair_product(a, b, jnp.array([[True, False], [True, True]])).tolist()
        [[1.0, 0.0], [1.0, nan]]
    """
    return _pair.bind(a, b, visible)  # type: ignore[no-any-return]


def row_product(w: Array, x: Array, visible: Array) -> Array:
    """Return w @ x over visible pairs: (..., m, n) and (..., n, e) to (..., m, e).

    w must be 0 for other pairs. If an element of x is not finite, the rows that see it become NaN.

    Example:
        >>> w, x = jnp.array([[1.0, 0.0], [0.5, 0.5]]), jnp.array([[1.0], [jnp.inf]])
        >>> row_product(w, x, jnp.array([[True, False], [True, True]])).tolist()
        [[1.0], [nan]]
    """
    return _row.bind(w, x, visible)  # type: ignore[no-any-return]


def _flip(x: Array) -> Array:
    return x.swapaxes(-1, -2)


def _matmul(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _pair_value(a: Array, b: Array, visible: Array) -> Array:
    return jnp.where(visible, _matmul(a, _flip(b)), 0)


def _row_value(w: Array, x: Array, visible: Array) -> Array:
    finite = jnp.isfinite(x)
    out = _matmul(w, jnp.where(finite, x, 0))
    hits = _matmul(visible.astype(w.dtype), (~finite).astype(w.dtype))
    return jnp.where(hits > 0, jnp.nan, out)


def _pair_transposed(cotangent: Array, a: Any, b: Any, visible: Array) -> list[Any]:
    if ad.is_undefined_primal(a):
        return [row_product(jnp.where(visible, cotangent, 0), b, visible), None, None]
    flipped = _flip(visible)
    return [None, row_product(jnp.where(flipped, _flip(cotangent), 0), a, flipped), None]


def _row_transposed(cotangent: Array, w: Any, x: Any, visible: Array) -> list[Any]:
    if ad.is_undefined_primal(w):
        return [pair_product(cotangent, x, visible), None, None]
    return [None, row_product(_flip(w), cotangent, _flip(visible)), None]


def _tangent(primitive: Primitive) -> Callable[..., Any]:
    """Return the product rule. A tangent of w is masked as w itself is. Pair products mask their result."""

    def rule(primals: Any, tangents: Any) -> Any:
        a, b, visible = primals
        da, db, _ = tangents
        out, known = primitive.bind(a, b, visible), []
        if not isinstance(da, ad.Zero):
            da = jnp.where(visible, da, 0) if primitive is _row else da
            known.append(primitive.bind(da, b, visible))
        if not isinstance(db, ad.Zero):
            known.append(primitive.bind(a, db, visible))
        return out, sum(known[1:], known[0]) if known else ad.Zero.from_primal_value(out)  # type: ignore[attr-defined]

    return rule


def _batch(primitive: Primitive) -> Callable[..., Any]:
    """Return the rule that adds an axis in front. Only the mask may have size 1 there."""

    def rule(args: Any, dims: Any) -> Any:
        size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
        moved = [x[None] if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
        factors = (jnp.broadcast_to(x, (size, *x.shape[1:])) for x in moved[:2])
        return primitive.bind(*factors, moved[2]), 0

    return rule


def _make(name: str, value: Callable[..., Array], columns: int, transposed: Callable[..., Any]) -> Primitive:
    """Make a primitive with all of its rules. Its result has `b.shape[columns]` columns."""
    primitive = Primitive(name)
    primitive.def_impl(value)

    def shape(a: Any, b: Any, visible: Any) -> ShapedArray:
        del visible
        sizes = (*a.shape[:-1], b.shape[columns])
        # Inside `shard_map`, types say over which axes arrays vary. Both arrays vary over the same axes here.
        return a.update(shape=sizes) if axes_of_types(a, b) else ShapedArray(sizes, a.dtype)

    primitive.def_abstract_eval(shape)
    mlir.register_lowering(primitive, mlir.lower_fun(value, multiple_results=False))
    ad.primitive_jvps[primitive] = _tangent(primitive)
    ad.primitive_transposes[primitive] = transposed
    batching.primitive_batchers[primitive] = _batch(primitive)
    return primitive


_pair = _make("attnspan_pair_product", _pair_value, -2, _pair_transposed)
_row = _make("attnspan_row_product", _row_value, -1, _row_transposed)
