"""Causal masks and windows whose queries are counted from 0, as expressions if possible, else as spans."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnspan.base.arrays import NUMPY
from attnspan.masks import Mask, causal, full, window

from ._values import as_mask


def band(what: str, index: Any, k_len: int, left: int | None, right: int | None) -> Mask:
    """Return a mask in which a query with index i sees keys i - left <= j <= i + right. None means no limit.

    By default, attnspan aligns the last query with the last key. If the indices fit this alignment, the
    result is an expression.
    """
    index = np.asarray(index, np.int64)
    q_len = len(index)
    if left is None and right is None:
        return full()
    is_last = bool((index == np.arange(k_len - q_len, k_len)).all())
    if is_last and (left or 0) >= 0 and (right or 0) >= 0:
        return causal() if (left, right) == (None, 0) else window(left, right)
    lo = np.zeros_like(index) if left is None else (index - left).clip(0, k_len)
    hi = np.full_like(index, k_len) if right is None else (index + right + 1).clip(0, k_len)
    bounds = np.stack([lo, np.maximum(lo, hi)], -1)
    return as_mask(what, bounds[None, None, :, None], k_len, NUMPY)
