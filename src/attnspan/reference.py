"""Attention and its gradients in NumPy float64, one query at a time. Tests compare every backend with it.

A query reads only the keys that it may see, so a NaN in any other key cannot reach it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from attnspan.call.biases import HIDES
from attnspan.call.dropout import dropout_seeds, kept, scale_of_kept
from attnspan.call.options import ALIBI, DENSE, DISTANCE, SIGNED_ALIBI, Options
from attnspan.errors import ShapeError, expect
from attnspan.masks.bounds import Spans

__all__ = ["Float", "Index", "backward", "forward"]

#: Arrays of numbers, always float64.
Float = np.ndarray[Any, np.dtype[np.float64]]
#: Arrays of indices, always int64.
Index = np.ndarray[Any, np.dtype[np.int64]]
#: The visible keys of a query. A slice copies no keys.
_Keys = Index | slice


def forward(
    q: Any, k: Any, v: Any, bounds: Any, scale: float, options: Options | None = None
) -> tuple[Float, Float]:
    """Compute softmax attention over the visible keys of each query.

    The formulas restrict equation 1 of Vaswani et al. 2017 to visible keys:

    - x_j = scale * q_i . k_j, with softcap and bias from the options
    - lse_i = log sum_j exp(x_j)
    - out_i = sum_j exp(x_j - lse_i) v_j

    A sink is one more term of the sum, without a value. Dropout removes terms from out_i, but not from lse_i.

    Args:
        q: (B, Hq, Sq, D), of any type that `np.asarray` accepts.
        k: (B, Hkv, Sk, D). Hq is a multiple of Hkv, and query head h uses key head h // (Hq / Hkv) (GQA).
        v: (B, Hkv, Sk, Dv).
        bounds: integer (B|1, Hq|1, Sq, R, 2), see `attnspan.Spans`.
        scale: Factor of the scores.
        options: See `attnspan.call.options.Options`. Arrays are of any type that `np.asarray` accepts.

    Returns:
        out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), the natural log-sum-exp. A query that sees nothing has out 0.
        Its lse is -inf, or the sink.

    Raises:
        ShapeError: If shapes do not fit.
        OptionError: If a span is illegal.

    Example:
        >>> x = np.eye(2)[None, None]
        >>> out, lse = forward(x, x, x, np.array([[[[[0, 1]], [[0, 0]]]]]), scale=1.0)
        >>> out[0, 0].tolist(), lse[0, 0].tolist()
        ([[1.0, 0.0], [0.0, 0.0]], [1.0, -inf])
    """
    q, k, v = _float64(q, k, v)
    out, lse = np.zeros((*q.shape[:3], v.shape[-1])), np.zeros(q.shape[:3])
    terms = _Terms(options or Options(), q, k)
    for b, h, i, g, keys in _rows(q, k, v, bounds):
        p, _, lse[b, h, i], m, _ = terms.weights(scale * (k[b, g, keys] @ q[b, h, i]), b, h, i, keys)
        out[b, h, i] = (m * p) @ v[b, g, keys]
    return out, lse


def backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, bounds: Any, scale: float, options: Options | None = None
) -> tuple[Float, ...]:
    """Compute the gradients of sum(out * dout) + sum(lse * dlse).

    p_j are the probabilities of query i, and m_j are the factors of dropout. The formulas follow Dao et
    al. 2022, appendix B.2, with an additional term for dlse, since d lse / d x_j = p_j:

    - dp_j = m_j dout_i . v_j
    - dx_j = p_j (dp_j - sum_l p_l dp_l + dlse_i)
    - ds_j = dx_j * d x_j / d s_j
    - dq_i = scale * sum_j ds_j k_j
    - dk_j = scale * sum_i ds_j q_i
    - dv_j = sum_i m_j p_j dout_i

    A sink is a key with dp = 0. The parameter of a bias b_j = c_j * parameter gets the gradient c_j dx_j.

    Args:
        dout: (B, Hq, Sq, Dv).
        dlse: (B, Hq, Sq). None means zeros.
        q, k, v, bounds, scale, options: As in `forward`.

    Returns:
        dq, dk, dv. With `options`, also dbias and dsinks, of shape (0,) without a bias or sinks. A query that
        sees nothing contributes only its dlse, to its sink.

    Raises:
        ShapeError, OptionError: As in `forward`.

    Example:
        >>> x = np.eye(2)[None, None]
        >>> dq, dk, dv = backward(x, None, x, x, x, np.array([[[[[0, 1]], [[0, 0]]]]]), scale=1.0)
        >>> dv[0, 0].tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    q, k, v, dout = _float64(q, k, v, dout)
    dlse = np.zeros(q.shape[:3]) if dlse is None else np.asarray(dlse, np.float64)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    terms = _Terms(options or Options(), q, k)
    dbias, dsinks = np.zeros_like(terms.parameter), np.zeros(q.shape[1])
    for b, h, i, g, keys in _rows(q, k, v, bounds):
        p, sink_p, _, m, slope = terms.weights(scale * (k[b, g, keys] @ q[b, h, i]), b, h, i, keys)
        dp = m * (v[b, g, keys] @ dout[b, h, i])
        common = dlse[b, h, i] - p @ dp
        dx = p * (dp + common)
        if terms.sinks[h] != -np.inf:
            dsinks[h] += sink_p * common
        if terms.options.bias_kind:
            where, factor = terms.bias_of(b, h, i, keys)
            np.add.at(dbias, where, factor * dx)
        ds = scale * slope * dx
        dq[b, h, i] = ds @ k[b, g, keys]
        dk[b, g, keys] += np.outer(ds, q[b, h, i])
        dv[b, g, keys] += np.outer(m * p, dout[b, h, i])
    if options is None:
        return dq, dk, dv
    return dq, dk, dv, dbias, dsinks if options.sinks is not None else np.zeros(0)


class _Terms:
    """Terms of the options for one query."""

    def __init__(self, options: Options, q: Float, k: Float) -> None:
        batch, heads, q_len, _ = q.shape
        k_len = k.shape[2]
        self.options = options
        rows = np.arange(k_len - q_len, k_len) if options.q_index is None else options.q_index
        keys = np.arange(k_len) if options.k_index is None else options.k_index
        self.q_index: Index = np.broadcast_to(np.asarray(rows), (batch, q_len)).astype(np.int64)
        self.k_index: Index = np.broadcast_to(np.asarray(keys), (batch, k_len)).astype(np.int64)
        self.sinks = np.full(heads, -np.inf) if options.sinks is None else _float64(options.sinks)[0]
        self.parameter = _float64(np.zeros(0) if options.bias is None else options.bias)[0]
        self.multiplier: Float | None = None
        if options.dropout_p:
            seeds = np.asarray(options.dropout_seed)
            seeds = dropout_seeds(int(seeds), batch, heads) if seeds.ndim == 0 else seeds
            keep = kept(options.dropout_p, seeds, self.q_index, self.k_index)
            self.multiplier = keep * scale_of_kept(options.dropout_p)

    def weights(self, x: Float, b: int, h: int, i: int, keys: _Keys) -> tuple[Any, float, float, Any, Any]:
        """Compute p, the sink's p, the lse, dropout's factors m and the softcap's derivative from scores."""
        cap = self.options.softcap
        slope: Any = 1.0
        if cap:
            t = np.tanh(x / cap)
            x, slope = cap * t, 1 - t * t
        if self.options.bias_kind:
            where, factor = self.bias_of(b, h, i, keys)
            bias = factor * self.parameter[where]
            x = x + (np.where(bias < HIDES, -np.inf, bias) if self.options.bias_kind == DENSE else bias)
        m = 1.0 if self.multiplier is None else self.multiplier[b, h, i, keys]
        return *_softmax(x, self.sinks[h]), m, slope

    def bias_of(self, b: int, h: int, i: int, keys: _Keys) -> tuple[tuple[Any, ...], Any]:
        """The bias of each key, as an index into the parameter and a factor."""
        kind, sizes = self.options.bias_kind, self.parameter.shape
        if kind == DENSE:
            lead = [at if size > 1 else 0 for at, size in zip((b, h, i), sizes, strict=False)]
            return (*lead, keys), 1.0
        distance = self.k_index[b, keys] - self.q_index[b, i]
        if kind == DISTANCE:
            reach = sizes[1] // 2
            return (h, np.clip(distance, -reach, reach) + reach), 1.0
        assert kind in (ALIBI, SIGNED_ALIBI), kind
        slope = np.full(len(distance), b if sizes[0] > 1 else 0), h
        return slope, distance if kind == SIGNED_ALIBI else -np.abs(distance)


def _float64(*arrays: Any) -> list[Float]:
    return [np.asarray(x).astype(np.float64) for x in arrays]


def _softmax(scores: Float, sink: float) -> tuple[Float, float, float]:
    """The weights of the keys, the weight of the sink, and the lse."""
    logits = np.append(scores, sink)
    top = logits.max()
    if top == -np.inf:
        return np.zeros_like(scores), 0.0, -np.inf
    # Infinite scores give NaN, as in all backends.
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - top)
        total = weights.sum()
        return weights[:-1] / total, float(weights[-1] / total), float(top + np.log(total))


def _rows(q: Float, k: Float, v: Float, bounds: Any) -> Iterator[tuple[int, int, int, int, _Keys]]:
    """Batch element, query head, query, key head and visible keys, for each query."""
    bounds = np.asarray(bounds)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, k_len = k.shape[1:3]
    fits = k.shape == (batch, kv_heads, k_len, head_dim) and v.shape[:3] == k.shape[:3]
    grouped = kv_heads > 0 and heads % kv_heads == 0
    rows = bounds.shape[0] in (1, batch) and bounds.shape[1] in (1, heads) and bounds.shape[2] == q_len
    expect(
        fits and grouped and rows,
        "reference",
        "q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), bounds (B|1, Hq|1, Sq, R, 2)",
        f"{q.shape}, {k.shape}, {v.shape}, {bounds.shape}",
        "Make the sizes fit. Hq is a multiple of Hkv",
        error=ShapeError,
    )
    Spans(bounds, k_len).validate()
    bounds = np.broadcast_to(bounds, (batch, heads, *bounds.shape[2:]))
    for b, h, i in np.ndindex(batch, heads, q_len):
        yield b, h, i, h // (heads // kv_heads), _keys(bounds[b, h, i].tolist())


def _keys(spans: list[tuple[int, int]]) -> _Keys:
    """The keys of a query's spans."""
    filled = [(lo, hi) for lo, hi in spans if lo < hi]
    if len(filled) > 1:
        return np.concatenate([np.arange(lo, hi) for lo, hi in filled])
    return slice(*filled[0]) if filled else slice(0, 0)
