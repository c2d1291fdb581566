"""Backend "math": attention as plain JAX code, which stores all scores and has all derivatives.

Memory is O(q_len * k_len), so use it for higher-order derivatives and forward mode. A NaN or inf in a key, a
query or an incoming gradient reaches only results that may see it.

Shape suffixes: b batch, h kv heads, m query heads of one group times queries, s keys, d head_dim, e v_dim.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from attnspan.call import Problem
from attnspan.call.biases import HIDES
from attnspan.call.dropout import scale_of_kept
from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI
from attnspan.jax.dropout import kept
from attnspan.jax.part import JaxPart, result_dtype

from .products import pair_product, row_product
from .tiles import by_distance, capped, illegal_rows, positions_of


def supports(problem: Problem, part: JaxPart) -> str | None:
    """Return None: plain code runs everything that passed validation."""
    del problem, part
    return None


def forward(part: JaxPart) -> tuple[Array, Array]:
    """See `attnspan.backends`. Differentiable to any order and in both modes, also by bias and sinks."""
    q, k, v = part.q, part.k, part.v
    batch, q_heads, q_len, _ = q.shape
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    fold = _Fold(q_heads, k.shape[1], q_len)
    visible_bhms = fold(_visible(part.bounds, k.shape[2]))
    scores_bhms = pair_product(fold(q.astype(wide) * part.scale), k.astype(wide), visible_bhms)
    scores_bhms, _ = capped(scores_bhms, part.softcap)
    base_bhm1: Any = 0
    if part.bias_kind and k.shape[2]:
        bias_bhms, base_bhm1, visible_bhms = _bias(part, fold, visible_bhms, wide)
        scores_bhms = scores_bhms + bias_bhms
    sink_bhm1 = None
    if part.sinks is not None:
        sink_bhm1 = fold(part.sinks.astype(wide)[None, :, None, None]) - base_bhm1
    weights_bhms, lse_bhm1 = _softmax(jnp.where(visible_bhms, scores_bhms, -jnp.inf), visible_bhms, sink_bhm1)
    if part.dropout_p:
        assert part.dropout_seed is not None, "dropout needs seeds"
        keep_bhms = fold(kept(part.dropout_p, part.dropout_seed, *positions_of(part)))
        weights_bhms = jnp.where(keep_bhms, weights_bhms * scale_of_kept(part.dropout_p), 0)
    out_bhme = row_product(weights_bhms, v.astype(wide), visible_bhms)
    out = out_bhme.reshape(batch, q_heads, q_len, v.shape[3]).astype(result_dtype(q, part))
    illegal = illegal_rows(part.bounds, k.shape[2])
    lse = jnp.where(illegal, jnp.nan, (lse_bhm1 + base_bhm1).reshape(batch, q_heads, q_len))
    return jnp.where(illegal[..., None], jnp.nan, out), lse


class _Fold:
    """Reshape (B|1, Hq|1, Sq|1, n) to (B|1, Hkv, m, n): query heads of one group become rows."""

    def __init__(self, q_heads: int, kv_heads: int, q_len: int) -> None:
        self.heads, self.kv_heads, self.rows = q_heads, kv_heads, q_len

    def __call__(self, x: Array) -> Array:
        x = jnp.broadcast_to(x, (x.shape[0], self.heads, self.rows, x.shape[3]))
        return x.reshape(x.shape[0], self.kv_heads, self.heads // self.kv_heads * self.rows, x.shape[3])


def _softmax(scores: Array, visible: Array, sink: Array | None) -> tuple[Array, Array]:
    """Return the weights of each row and the log-sum-exp of its scores."""
    # The maximum cancels in every result, so it needs no derivative. Without keys it is -inf.
    top = lax.stop_gradient(scores).max(-1, keepdims=True, initial=-jnp.inf)
    if sink is not None:
        top = jnp.maximum(top, lax.stop_gradient(sink))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    # Masked again: one NaN fills a whole row of weights, which would pass it to keys that the row does not
    # see.
    weights = jnp.where(visible, weights / total, 0)
    return weights, jnp.where(empty, -jnp.inf, top + jnp.log(total))


def _visible(bounds: Array, k_len: int) -> Array:
    """Return the dense mask, (B|1, Hq|1, Sq, Sk)."""
    keys = jnp.arange(k_len, dtype=jnp.int32)
    lo, hi = bounds[..., :1], bounds[..., 1:]
    return ((lo <= keys) & (keys < hi)).any(-2)


def _bias(part: JaxPart, fold: _Fold, visible: Array, wide: Any) -> tuple[Array, Array, Array]:
    """Return the bias less its maximum per row (B|1, Hkv, m, Sk), that maximum, and the visible pairs.

    A score plus a large bias would lose the score's digits. A constant that all biases of a row share changes
    only the lse.
    """
    kind, bias = part.bias_kind, part.bias
    assert bias is not None, "a kind of bias needs its parameter"

    def largest(x: Array) -> Array:
        top = jnp.where(visible, lax.stop_gradient(x), -jnp.inf).max(-1, keepdims=True)
        return jnp.where(top == -jnp.inf, 0, top)

    if kind == DENSE:
        bias_bhms = fold(bias.astype(wide))
        visible = visible & ~(bias_bhms < HIDES)
        return bias_bhms - largest(bias_bhms), largest(bias_bhms), visible
    queries, keys = positions_of(part)
    if kind == DISTANCE:
        bias_bhms = fold(by_distance(bias, queries, keys).astype(wide))
        return bias_bhms - largest(bias_bhms), largest(bias_bhms), visible
    assert kind in (ALIBI, SIGNED_ALIBI), kind
    distance = keys[:, None, :] - queries[:, :, None]
    factor = fold((distance if kind == SIGNED_ALIBI else -jnp.abs(distance))[:, None])
    slope = fold(bias[:, :, None, None].astype(wide))
    # Distances stay integers, because float32 cannot tell neighbours apart beyond 2^24.
    up = jnp.where(slope < 0, -factor, factor)
    top = jnp.where(visible, up, np.iinfo(np.int32).min).max(-1, keepdims=True)
    seen = visible.any(-1, keepdims=True)
    origin = jnp.where(seen, jnp.where(slope < 0, -top, top), 0)
    base = jnp.where(seen, slope * origin.astype(wide), 0)  # a slope may be inf
    return slope * (factor - origin).astype(wide), base, visible
