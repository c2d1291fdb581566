"""The `attention_fn` of flax's modules: `nnx.MultiHeadAttention` and linen's `MultiHeadDotProductAttention`.

Axes are named as in flax: any batch axes, T queries, S keys, N query heads, K key heads, H head dim.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnspan.base.plain import check_plain
from attnspan.call.biases import Bias, alibi, relative
from attnspan.errors import OptionError, ShapeError, expect
from attnspan.masks import Mask
from attnspan.masks.bounds import Spans

from .attention import attention
from .drop_in import aligned_masks, bias_of, joined, masks_of, read
from .dropout import split_seeds
from .front import ShardedMask
from .promotion import own_promotion


@own_promotion
def attention_fn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    layer_mask: Mask | None = None,
) -> jax.Array:
    """Drop-in replacement for flax's attention function, for ``nnx.MultiHeadAttention(attention_fn=...)``.

    It has the signature of flax's `dot_product_attention` and runs on attnspan's kernels.

    Args:
        query: Queries, floating, shape (..., T, N, H).
        key: Keys, shape (..., S, K, H). K divides N.
        value: Values, shaped as ``key``. The head dim may differ.
        bias: Floating, broadcasts to (..., N, T, S), added to the scaled scores. Differentiable. Or a bias of
            attnspan (`alibi`, `relative`), which you set with `functools.partial`.
        mask: Broadcasts to (..., N, T, S), True or nonzero where a query may see a key, as from flax's
            ``make_attention_mask``. Or a mask of attnspan, which costs less, also one for a mesh
            (`attnspan.jax.shard`, `attnspan.parallel.Plan.on`). If jit traces the array, each query may have
            at most 8 runs of visible keys. For more, pass ``from_dense(mask, max_runs=...)``.
        broadcast_dropout: Drop the same weights in all batch elements and heads.
        dropout_rng: A key of `jax.random`, typed or raw. Dropout needs it.
        dropout_rate: Probability of dropping a weight, a Python number in [0, 1).
        deterministic: Disable dropout.
        dtype: Dtype of the computation. Default: the dtype that the inputs promote to.
        precision: Has no effect. It is a lower bound, and attnspan never rounds products of float32 to fewer
            bits.
        module: Must be None. flax passes the module if you ask it to sow weights, and attnspan stores none.
        is_causal: Query i sees keys 0..i, also if T != S. Except a single query, as in decoding: it is the
            last token and sees all keys that ``mask`` shows. flax's own function shows it the first key only.
        force_fp32_for_softmax: Has no effect. The softmax always uses float32 or more.
        qk_attn_weights_einsum: Must be None. It is linen's replacement for the product of queries and keys.
        attn_weights_value_einsum: Must be None. It is linen's replacement for the product of weights and
            values.
        layer_mask: A mask of attnspan for all calls of a layer, in addition to ``mask``. Set it with
            `functools.partial`. In decoding, flax's modules need an array as ``mask`` and add the cache's
            mask to it. A single query is then the last key that the array shows, which is the newest key in
            the cache.

    Returns:
        Shape (..., T, N, head dim of ``value``). A query that sees no key has output 0. In flax its output is
        the mean of all values.

    Raises:
        ValueError: Sizes or options do not fit, or an option asks for stored weights.
        TypeError: Dtypes do not fit.

    Example:
        >>> from flax import nnx
        >>> layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), attention_fn=attention_fn)
        >>> layer(jnp.ones((2, 6, 32)), is_causal=True).shape
        (2, 6, 32)
        >>> from functools import partial
        >>> from attnspan import causal, window
        >>> local = partial(attention_fn, layer_mask=causal() & window(4))
        >>> layer = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), attention_fn=local)
        >>> layer.init_cache((2, 6, 32))
        >>> layer(jnp.ones((2, 1, 32)), decode=True).shape
        (2, 1, 32)
    """
    del precision, force_fp32_for_softmax  # Both are lower bounds, which always hold.
    remedy = "Call the module without sow_weights=True, or leave this layer to flax's own attention_fn"
    expect(module is None, "module", "None", "a module to sow weights in", remedy, error=OptionError)
    products = {"qk": qk_attn_weights_einsum, "value": attn_weights_value_einsum}
    replaced = [name for name, einsum in products.items() if einsum is not None]
    remedy = "Leave quantised layers to flax's own attention_fn"
    expect(not replaced, "attention_fn", "no custom einsum", replaced, remedy, error=OptionError)
    lead = np.shape(query)[:-3]
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_plain(name, x)
        fits, wanted = np.ndim(x) >= 3 and np.shape(x)[:-3] == lead, f"(*{lead}, length, heads, head_dim)"
        expect(fits, name, wanted, f"shape {np.shape(x)}", "Add or drop axes", error=ShapeError)
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    q, k, v = (_in_one_row(jnp.asarray(x, dtype), lead) for x in (query, key, value))
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if bias is not None and not isinstance(bias, Bias):
        bias = bias_of(_in_one_row(bias, lead), shape)
    options: dict[str, Any] = {"bias": bias}
    if dropout_rate and not deterministic:
        options["dropout_p"] = dropout_rate
        options["dropout_seed"] = _seeds(dropout_rng, shape[0], shape[1], shared=broadcast_dropout)
    mask = _booleans(mask, lead)
    by_distance = layer_mask is not None or isinstance(bias, alibi | relative)
    options |= _rows(shape, mask, is_causal, by_distance)
    # A single query is the last token, and a causal mask hides no key from it.
    masks = [*masks_of(mask, shape), *aligned_masks(is_causal and shape[2] > 1, None)]
    masks += [] if layer_mask is None else [layer_mask]
    out: jax.Array = attention(q, k, v, mask=joined(masks), layout="bshd", **options)
    return out.reshape(*lead, *out.shape[1:])


def _rows(shape: tuple[int, ...], mask: Any, is_causal: bool, by_distance: bool) -> dict[str, Any]:
    """Return the option with the queries' indices, or no option if the queries are the last keys.

    `by_distance` says whether a mask or bias of the layer compares the index of a query with its keys.
    """
    _, _, q_len, k_len = shape
    if q_len == 1:
        if not by_distance or mask is None or isinstance(mask, Mask | Spans | ShardedMask):
            return {}
        shown = jnp.broadcast_to(mask, (*np.shape(mask)[:-1], k_len)).any((1, 2))
        return {"q_index": jnp.where(shown, jnp.arange(k_len, dtype=jnp.int32), -1).max(-1, keepdims=True)}
    return {"q_index": jnp.arange(q_len, dtype=jnp.int32)} if is_causal and q_len != k_len else {}


def _in_one_row(x: Any, lead: tuple[int, ...]) -> Any:
    """Return `x` (..., a, b, c) with its batch axes, which broadcast to `lead`, as one. Fewer axes stay."""
    own, rest = np.shape(x)[:-3], np.shape(x)[-3:]
    if len(rest) < 3:
        return x
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    if any(n != 1 for n in own):
        fits = len(own) <= len(lead) and all(n in (1, m) for n, m in zip(own[::-1], lead[::-1], strict=False))
        wanted = f"batch axes that broadcast to {lead}, the batch axes of query"
        expect(fits, "attention_fn", wanted, f"{own}", "Add or drop axes", error=ShapeError)
        x = xp.broadcast_to(x, (*lead, *rest))
    return xp.reshape(x, (math.prod(np.shape(x)[:-3]), *rest))


def _booleans(mask: Any, lead: tuple[int, ...]) -> Any:
    if mask is None or isinstance(mask, Mask | Spans | ShardedMask):
        return mask
    check_plain("mask", mask)
    return _in_one_row(read(mask) != 0, lead)


def _seeds(rng: Any, batch: int, heads: int, *, shared: bool) -> jax.Array:
    """Make dropout seeds (B, N, 2) from a key of any kind."""
    remedy = "Pass a key of jax.random, or deterministic=True. Modules of nnx take the key from rngs"
    expect(rng is not None, "dropout_rng", "a key where dropout_rate > 0", "None", remedy, error=OptionError)
    words = jax.random.bits(rng, (2,), "uint32")
    if shared:
        return jnp.broadcast_to(words, (batch, heads, 2))
    return split_seeds(words[0], words[1], batch, heads)
