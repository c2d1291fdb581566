"""Random spans, and what they say pair by pair."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from attnspan import Spans


@st.composite
def any_spans(draw: st.DrawFn, square: bool = False) -> Spans:
    """Spans of any kind: per batch row, per head, several per row, empty ones and rows that see nothing."""
    planes, heads, runs = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_len = draw(st.integers(1, 40))
    k_len = q_len if square else draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = np.sort(rng.integers(0, k_len + 1, (planes, heads, q_len, 2 * runs)), axis=-1)
    bounds = ends.reshape(planes, heads, q_len, runs, 2)
    if draw(st.booleans()):
        # Neighbouring rows that see alike, as in real masks.
        bounds = bounds[:, :, np.arange(q_len) // draw(st.integers(2, 9))]
    bounds[rng.random((planes, heads, q_len, runs)) < draw(st.sampled_from([0.0, 0.5]))] = 0
    return Spans(bounds.astype(np.int32), k_len)


def seen(spans: Spans) -> np.ndarray:
    """Bool (planes * q_len, planes * k_len): which flat keys a flat row sees, for any head."""
    dense = spans.dense().any(axis=1)
    planes, rows, keys = dense.shape
    whole = np.zeros((planes, rows, planes, keys), bool)
    whole[np.arange(planes), :, np.arange(planes)] = dense
    return whole.reshape(planes * rows, planes * keys)
