"""Attention and its gradients in NumPy float64, one query row at a time: what every backend is compared with.

A row touches only the keys it may see, so a NaN in any other key cannot reach it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .errors import ShapeError
from .spans import Spans

Float = np.ndarray[Any, np.dtype[np.float64]]


def forward(q: Any, k: Any, v: Any, bounds: Any, scale: float) -> tuple[Float, Float]:
    """Softmax attention over the visible keys of each row.

    With s_j = scale * q_i . k_j: lse_i = log sum_j exp(s_j) and out_i = sum_j exp(s_j - lse_i) v_j (Vaswani
    et al. 2017, equation 1, restricted to visible keys).

    Args:
        q: (B, Hq, Sq, D), anything `np.asarray` takes.
        k: (B, Hkv, Sk, D); Hq is a multiple of Hkv, and query head h uses key head h // (Hq / Hkv).
        v: (B, Hkv, Sk, Dv).
        bounds: integer (B|1, Hq|1, Sq, R, 2), see `attnspan.Spans`.
        scale: factor of the scores.

    Returns:
        out (B, Hq, Sq, Dv) and lse (B, Hq, Sq), natural logarithm. A row that sees nothing: out 0, lse -inf.

    Raises:
        ShapeError: for shapes that do not fit.
        OptionError: for illegal spans.

    Example:
        >>> x = np.eye(2)[None, None]
        >>> out, lse = forward(x, x, x, np.array([[[[[0, 1]], [[0, 0]]]]]), scale=1.0)
        >>> out[0, 0].tolist(), lse[0, 0].tolist()
        ([[1.0, 0.0], [0.0, 0.0]], [1.0, -inf])
    """
    q, k, v = _float64(q, k, v)
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    lse = np.full(q.shape[:3], -np.inf)
    for b, h, i, g, keys in _rows(q, k, v, bounds):
        p, lse[b, h, i] = _softmax(scale * (k[b, g, keys] @ q[b, h, i]))
        out[b, h, i] = p @ v[b, g, keys]
    return out, lse


def backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, bounds: Any, scale: float
) -> tuple[Float, Float, Float]:
    """Gradients of sum(out * dout) + sum(lse * dlse).

    With p the row's probabilities and dp_j = dout_i . v_j: ds_j = p_j (dp_j - sum_l p_l dp_l + dlse_i), dq_i
    = scale * sum_j ds_j k_j, dk_j = scale * sum_i ds_j q_i, dv_j = sum_i p_j dout_i (Dao et al. 2022,
    appendix B.2, with the term of dlse, since d lse / d s_j = p_j).

    Args:
        dout: (B, Hq, Sq, Dv).
        dlse: (B, Hq, Sq), or None for zeros.
        q, k, v, bounds, scale: as in `forward`.

    Returns:
        dq, dk, dv with the shapes of q, k, v. A row that sees nothing contributes nothing.

    Raises:
        ShapeError, OptionError: as in `forward`.

    Example:
        >>> x = np.eye(2)[None, None]
        >>> dq, dk, dv = backward(x, None, x, x, x, np.array([[[[[0, 1]], [[0, 0]]]]]), scale=1.0)
        >>> dv[0, 0].tolist()
        [[1.0, 0.0], [0.0, 0.0]]
    """
    q, k, v, dout = _float64(q, k, v, dout)
    dlse = np.zeros(q.shape[:3]) if dlse is None else np.asarray(dlse, np.float64)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, h, i, g, keys in _rows(q, k, v, bounds):
        p, _ = _softmax(scale * (k[b, g, keys] @ q[b, h, i]))
        dp = v[b, g, keys] @ dout[b, h, i]
        ds = scale * p * (dp - p @ dp + dlse[b, h, i])
        dq[b, h, i] = ds @ k[b, g, keys]
        dk[b, g, keys] += np.outer(ds, q[b, h, i])
        dv[b, g, keys] += np.outer(p, dout[b, h, i])
    return dq, dk, dv


def _float64(*arrays: Any) -> list[Float]:
    return [np.asarray(x).astype(np.float64) for x in arrays]


def _softmax(scores: Float) -> tuple[Float, float]:
    # Infinite scores give NaN, as they do in every implementation; that is no accident to warn of here.
    with np.errstate(invalid="ignore"):
        top = scores.max()
        lse = top + np.log(np.exp(scores - top).sum())
        return np.exp(scores - lse), float(lse)


def _rows(
    q: Float, k: Float, v: Float, bounds: Any
) -> Iterator[tuple[int, int, int, int, np.ndarray[Any, Any]]]:
    """Batch, query head, row, key head and visible keys of each row that sees anything."""
    bounds = np.asarray(bounds)
    batch, heads, q_len, head_dim = q.shape
    kv_heads, k_len = k.shape[1:3]
    fits = k.shape == (batch, kv_heads, k_len, head_dim) and v.shape[:3] == k.shape[:3]
    grouped = kv_heads > 0 and heads % kv_heads == 0
    rows = bounds.shape[0] in (1, batch) and bounds.shape[1] in (1, heads) and bounds.shape[2] == q_len
    if not (fits and grouped and rows):
        raise ShapeError(
            "reference",
            expected="q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), bounds (B|1, Hq|1, Sq, R, 2)",
            got=f"{q.shape}, {k.shape}, {v.shape}, {bounds.shape}",
            remedy="Make the sizes fit; Hq is a multiple of Hkv",
        )
    Spans(bounds, k_len).validate()
    bounds = np.broadcast_to(bounds, (batch, heads, *bounds.shape[2:]))
    for b, h, i in np.ndindex(batch, heads, q_len):
        keys = np.concatenate([np.arange(lo, hi) for lo, hi in bounds[b, h, i]])
        if len(keys) > 0:
            yield b, h, i, h // (heads // kv_heads), keys
