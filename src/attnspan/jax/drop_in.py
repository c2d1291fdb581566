"""A drop-in replacement for ``jax.nn.dot_product_attention``.

Axes are named as in JAX: B batch, T queries, S keys, N query heads, K key heads, H head dim.
"""

from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnspan.base.arrays import arrays_for, is_bool
from attnspan.base.plain import check_plain
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.masks import Mask, causal, from_dense, full, key_padding, spans, window
from attnspan.masks.bounds import Spans

from .attention import attention
from .front import ShardedMask
from .promotion import own_promotion


@own_promotion
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Drop-in replacement for ``jax.nn.dot_product_attention`` that runs on attnspan's kernels.

    As in JAX, masks align the first query with the first key (top-left alignment).

    Args:
        query: Queries, floating, shape (B, T, N, H) or (T, N, H).
        key: Keys, shape (B, S, K, H) or (S, K, H), in the dtype of ``query``. K divides N.
        value: Values, shaped as ``key``. The head dim may differ.
        bias: Floating, broadcasts to (B, N, T, S), added to the scaled scores. Differentiable. A -inf hides
            its key but saves no work, so prefer a mask.
        mask: Boolean, broadcasts to (B, N, T, S), True where a query may see a key. Or a mask of attnspan.
            Each call encodes a boolean array again, so prefer ``from_dense(...).prepare(...)``, made once. If
            jit traces the array, each query may have at most 8 runs of visible keys. For more, pass
            ``from_dense(mask, max_runs=...)``.
        scale: Factor of the scores. Default: 1/sqrt(H).
        is_causal: Query i sees keys 0..i, also if T != S.
        query_seq_lengths: int32 (B,). Queries from this length on are padding, and their output is 0.
        key_value_seq_lengths: int32 (B,). Keys from this length on are padding, and no query sees them.
        local_window_size: (left, right), or one int for both. Query i sees keys i - left to i + right.
        implementation: Name of a backend of `attention`. Default: the fastest that can run the call.
        return_residual: Also return the log-sum-exp of each query's scores. It is differentiable.

    Returns:
        The output, in the shape of ``query`` with the head dim of ``value``. With ``return_residual`` also
        the residual, shape (B, T, N) or (T, N), in the dtype of ``key``. A query that sees no key has output
        0 and residual -inf.

    Differences from JAX's function:

    - A query that sees no key: JAX returns the mean of all values and a large negative residual.
    - The residual has no gradient in JAX, so partial results that you merge with it get wrong gradients.
      To get JAX's behaviour here, pass the residual through ``jax.lax.stop_gradient``.
    - ``scale`` may be an array in JAX. Here, multiply ``query`` by it.
    - ``bias`` may have an integer dtype in JAX. Here, convert it to a floating dtype.
    - A side of ``local_window_size`` may be negative in JAX, which shifts the window off the diagonal.
      Here, pass such a window as a boolean ``mask``.
    - ``implementation`` takes JAX's backend names there, and the backend names of `attention` here.

    Raises:
        ValueError: Sizes or options do not fit.
        TypeError: Dtypes do not fit.

    Example:
        >>> q = jax.random.normal(jax.random.key(0), (1, 6, 4, 16))
        >>> k = jax.random.normal(jax.random.key(1), (1, 8, 2, 16))
        >>> ours = dot_product_attention(q, k, k, is_causal=True)
        >>> bool(jnp.allclose(ours, jax.nn.dot_product_attention(q, k, k, is_causal=True), atol=1e-5))
        True
    """
    q, k, v = (_four_dims(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    aligned = aligned_masks(is_causal, local_window_size)
    wanted = "no is_causal and no local_window_size with a mask of attnspan"
    remedy = "Combine masks with causal() & mask, and pass the result as mask"
    expect(not (aligned and isinstance(mask, Mask | Spans)), "mask", wanted, "both", remedy)
    padding = _padding(query_seq_lengths, key_value_seq_lengths, shape)
    options: dict[str, Any] = {} if bias is None else {"bias": bias_of(bias, shape)}
    if aligned and shape[2] != shape[3]:
        options["q_index"] = jnp.arange(shape[2], dtype=jnp.int32)
    out: jax.Array
    found = attention(
        *(q, k, v),
        mask=joined([*masks_of(mask, shape), *aligned, *padding]),
        scale=scale,
        layout="bshd",
        return_lse=return_residual,
        backend=implementation,
        **options,
    )
    out, lse = found if return_residual else (found, found)
    lead = np.shape(query)[:-1]
    out = out.reshape(*lead, out.shape[-1])
    if not return_residual:
        return out
    residual: jax.Array = lse.swapaxes(1, 2).astype(k.dtype)
    return out, residual.reshape(lead)


def _four_dims(name: str, x: Any) -> jax.Array:
    check_plain(name, x)
    known = isinstance(x, jax.Array | np.ndarray)
    expect(known, name, "a JAX or NumPy array", type(x).__name__, "Convert it first", error=DtypeError)
    wanted = "(batch, length, heads, head_dim) or (length, heads, head_dim)"
    expect(x.ndim in (3, 4), name, wanted, f"shape {x.shape}", "Add or drop axes", error=ShapeError)
    return jnp.asarray(x if x.ndim == 4 else x[None])


def aligned_masks(is_causal: bool, local_window_size: int | tuple[int, int] | None) -> list[Mask]:
    """Return the masks that compare query numbers with key numbers, both counted from 0."""
    masks: list[Mask] = [causal()] if is_causal else []
    if local_window_size is not None:
        sides = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
        masks.append(window(*sides))
    return masks


def _padding(query_lengths: Any, key_lengths: Any, shape: tuple[int, ...]) -> list[Mask]:
    batch, _, q_len, k_len = shape
    masks = []
    if query_lengths is not None:
        lengths = _lengths("query_seq_lengths", query_lengths, batch)
        ends = jnp.where(jnp.arange(q_len) < lengths[:, None], k_len, 0).astype(jnp.int32)
        masks.append(spans(jnp.stack([jnp.zeros_like(ends), ends], -1)[:, None, :, None]))
    if key_lengths is not None:
        lengths = _lengths("key_value_seq_lengths", key_lengths, batch)
        masks.append(key_padding(lengths.clip(0, k_len)))
    return masks


def _lengths(name: str, given: Any, batch: int) -> jax.Array:
    check_plain(name, given)
    x: jax.Array = jnp.asarray(given)
    integers, remedy = jnp.issubdtype(x.dtype, jnp.integer), "Pass a length for each batch element"
    expect(integers, name, "int32", str(x.dtype), "Convert it", error=DtypeError)
    expect(x.shape == (batch,), name, f"({batch},)", f"shape {x.shape}", remedy, error=ShapeError)
    return x


def masks_of(mask: Any, shape: tuple[int, ...]) -> list[Mask | Spans | ShardedMask]:
    """Return the masks of the argument `mask`: none, itself, or a boolean array encoded as spans."""
    if mask is None:
        return []
    if isinstance(mask, Mask | Spans | ShardedMask):
        return [mask]
    known = isinstance(mask, jax.Array | np.ndarray) and is_bool(mask)
    got = str(mask.dtype) if hasattr(mask, "dtype") else type(mask).__name__
    wanted, remedy = (
        "a boolean array or a mask of attnspan",
        "If the numbers are added to the scores, pass them as bias",
    )
    expect(known, "mask", wanted, got, remedy, error=DtypeError)
    return [from_dense(_whole("mask", mask, shape, (2, 3)))]


def bias_of(bias: Any, shape: tuple[int, ...]) -> jax.Array:
    """Return the argument `bias` as an array with four axes."""
    known = isinstance(bias, jax.Array | np.ndarray)
    remedy = (
        "Pass a JAX or NumPy array, or call attnspan.jax.attention, which takes alibi and relative biases"
    )
    expect(known, "bias", "an array", type(bias).__name__, remedy, error=DtypeError)
    return jnp.asarray(_whole("bias", bias, shape, (3,)))


def _whole(name: str, x: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """Return `x` with four axes. The axes in `axes` have their full size, the others stay as they are."""
    check_plain(name, x)
    x = read(x)
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    fits = x.ndim == 4 and all(a in (1, b) for a, b in zip(x.shape, shape, strict=True))
    wanted, remedy = (
        f"a shape that broadcasts to (B, N, T, S) = {shape}",
        "Its last axes are queries and keys",
    )
    expect(fits, name, wanted, f"{x.shape}", remedy, error=ShapeError)
    size = tuple(full if i in axes else own for i, (own, full) in enumerate(zip(x.shape, shape, strict=True)))
    return (np if isinstance(x, np.ndarray) else jnp).broadcast_to(x, size)  # type: ignore[no-any-return]


def read(x: Any) -> Any:
    """Return `x` as a NumPy array if its values are on the host.

    A mask is then encoded once, while jit traces, and not by every run of the program.
    """
    return np.asarray(x) if arrays_for([x]).concrete(x) else jnp.asarray(x)


def joined(masks: list[Mask | Spans | ShardedMask]) -> Mask | Spans | ShardedMask:
    """Join masks by `&`. Without masks, all keys are visible."""
    if len(masks) == 1:
        return masks[0]
    return reduce(and_, (spans(mask) if isinstance(mask, Spans) else mask for mask in masks), full())
