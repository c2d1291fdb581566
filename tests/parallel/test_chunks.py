"""Chunks hold the pairs and the keys that the mask says, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_problems import any_spans, as_set, seen

from attnspan import Spans, causal, documents, window
from attnspan.errors import OptionError
from attnspan.parallel.chunks import Chunks


@given(any_spans(), st.integers(1, 45))
def test_pairs_and_keys_are_those_of_the_dense_mask(spans: Spans, size: int) -> None:
    chunks = Chunks.of(spans, size)
    sees, pairs = seen(spans), spans.dense().sum(axis=(0, 1, 3))
    assert len(chunks) == -(-spans.q_len // size) == len(chunks.starts) - 1
    assert (chunks.q_len, chunks.k_len, chunks.size) == (spans.q_len, spans.k_len, size)
    assert chunks.planes == spans.bounds.shape[0]
    for c in range(len(chunks)):
        rows, here = slice(c * size, (c + 1) * size), slice(chunks.starts[c], chunks.starts[c + 1])
        assert chunks.pairs[c] == pairs[rows].sum()
        assert as_set(chunks.lo[here], chunks.hi[here]) == set(np.flatnonzero(sees[rows].any(axis=0)))


def test_a_packed_causal_mask_leaves_one_interval_per_chunk() -> None:
    chunks = Chunks.of((causal() & documents([0, 5, 11, 16])).spans(16, 16), 4)
    assert chunks.lo.tolist() == [0, 0, 5, 11]
    assert chunks.hi.tolist() == [4, 8, 12, 16]
    assert chunks.pairs.tolist() == [10, 5 + 1 + 2 + 3, 4 + 5 + 6 + 1, 2 + 3 + 4 + 5]


def test_torch_bounds_are_read() -> None:
    spans = window(2).spans(9, 9)
    from_torch = Chunks.of(Spans(torch.from_numpy(np.asarray(spans.bounds)), 9), 4)
    for name in ("pairs", "starts", "lo", "hi"):
        assert getattr(from_torch, name).tolist() == getattr(Chunks.of(spans, 4), name).tolist()


def test_pairs_do_not_overflow() -> None:
    rows, keys = 64, 2**30
    bounds = np.broadcast_to(np.array([0, keys], np.int32), (1, 1, rows, 1, 2))
    assert Chunks.of(Spans(bounds, keys), rows).pairs.tolist() == [rows * keys]


def test_an_illegal_row_is_named() -> None:
    with pytest.raises(OptionError, match="batch 0, head 0, row 1"):
        Chunks.of(Spans(np.array([[[[[0, 1]], [[0, -1]]]]], np.int32), 2), 1)


def test_a_chunk_has_a_row() -> None:
    with pytest.raises(OptionError, match=r"size: expected at least 1 row, got 0\. Cut larger chunks"):
        Chunks.of(causal().spans(4, 4), 0)
