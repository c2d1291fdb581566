"""The lowered form against dense masks: subsets of rows and keys, cost, tiles, canonical form, algebra."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnspan as a
from attnspan import Spans
from attnspan.masks.encoding import encode

KEYS = 12
CONVERT = {"numpy": np.asarray, "torch": torch.from_numpy}


@st.composite
def dense_masks(draw, batch=2, heads=2):
    q_len, k_len = draw(st.integers(1, 9)), draw(st.integers(1, KEYS))
    density = draw(st.sampled_from([0.05, 0.5, 0.95]))
    seed = draw(st.integers(0, 2**32 - 1))
    return np.random.default_rng(seed).random((batch, heads, q_len, k_len)) < density


def _spans(visible, framework="numpy"):
    return Spans(CONVERT[framework](encode(visible)), visible.shape[-1])


def _dense(spans):
    return np.asarray(spans.validate().dense())


def _subset(n, seed):
    return np.flatnonzero(np.random.default_rng(seed).random(n) < 0.6)


@pytest.mark.parametrize("framework", CONVERT)
@given(visible=dense_masks(), seed=st.integers(0, 99))
def test_taking_rows_and_keys_is_exact(framework, visible, seed):
    spans = _spans(visible, framework)
    rows = np.random.default_rng(seed).integers(0, visible.shape[2], 5)
    keys = _subset(visible.shape[3], seed)
    convert = CONVERT[framework]
    np.testing.assert_array_equal(_dense(spans.take_queries(convert(rows))), visible[:, :, rows])
    taken = spans.take_keys(convert(keys))
    assert taken.bounds.shape == spans.bounds.shape
    np.testing.assert_array_equal(_dense(taken), visible[..., keys])
    np.testing.assert_array_equal(_dense(taken.take_queries(convert(rows))), visible[:, :, rows][..., keys])
    some = _subset(len(keys), seed + 1)
    twice, once = taken.take_keys(convert(some)), spans.take_keys(convert(keys[some]))
    np.testing.assert_array_equal(twice.bounds, once.bounds)


@pytest.mark.parametrize("framework", CONVERT)
@given(visible=dense_masks(), q_block=st.integers(1, 5), k_block=st.integers(1, 5))
def test_cost_and_tiles(framework, visible, q_block, k_block):
    spans = _spans(visible, framework)
    cost = np.asarray(spans.cost())
    assert cost.dtype == np.int64
    np.testing.assert_array_equal(cost, visible.sum(-1))
    assert spans.coverage() == pytest.approx(visible.mean(), rel=1e-15)
    q_len, k_len = visible.shape[2:]
    tiles = [
        [visible[..., i : i + q_block, j : j + k_block] for j in range(0, k_len, k_block)]
        for i in range(0, q_len, q_block)
    ]
    states = np.array([[x.any((-1, -2)).astype(int) + x.all((-1, -2)) for x in row] for row in tiles])
    states = states.transpose(2, 3, 0, 1)
    np.testing.assert_array_equal(np.asarray(spans.block_states(q_block, k_block)), states)


@given(visible=dense_masks(), seed=st.integers(0, 99))
def test_compact_is_the_smallest_canonical_form(visible, seed):
    spans = _spans(visible)
    rng = np.random.default_rng(seed)
    # Split each span at a random key, so that neighbours touch, and add empty spans between.
    lo, hi = spans.bounds[..., 0], spans.bounds[..., 1]
    middle = lo + (rng.random(lo.shape) * (hi - lo + 1)).astype(np.int32)
    pieces = [np.stack([lo, middle], -1), np.zeros_like(spans.bounds), np.stack([middle, hi], -1)]
    loose = np.stack(pieces, axis=4).reshape(*lo.shape[:3], -1, 2)
    for framework, convert in CONVERT.items():
        compact = Spans(convert(loose), visible.shape[-1]).validate().compact()
        np.testing.assert_array_equal(np.asarray(compact.bounds), encode(visible), err_msg=framework)


@pytest.mark.parametrize(
    "row",
    [[(0, 6)], [(-1, 2)], [(3, 2)], [(2, 4), (0, 1)], [(0, 3), (2, 5)], [(0, 3), (1, 1), (2, 5)], [(0, -1)]],
)
@pytest.mark.parametrize("framework", CONVERT)
def test_illegal_rows_are_named_and_stay_illegal(row, framework):
    bounds = np.zeros((1, 2, 3, len(row), 2), np.int32)
    bounds[0, 1, 2] = row
    spans = Spans(CONVERT[framework](bounds), 5)
    # Each of these would give a plausible number for them.
    for read in (spans.validate, spans.dense, spans.coverage, lambda: spans.block_states(2, 2)):
        with pytest.raises(ValueError, match=r"batch 0, head 1, query 2: expected .* in \[0, 5\], got \("):
            read()
    for illegal in (spans.take_keys(np.array([0, 3])), spans.compact()):
        assert (np.asarray(illegal.bounds)[0, 1, 2] == [0, -1]).all()
        assert (np.asarray(illegal.bounds)[0, 0] == 0).all()
    assert np.asarray(spans.take_queries(np.array([2])).bounds)[0, 1, 0].tolist() == [list(x) for x in row]


@pytest.mark.parametrize("row", [[(0, 0), (0, 5)], [(4, 4), (0, 1)], [(0, 2), (1, 1), (2, 5)]])
def test_empty_spans_may_stand_anywhere(row):
    Spans(np.array(row).reshape(1, 1, 1, -1, 2), 5).validate()


def test_bad_arguments_are_named():
    spans = a.causal().spans(4, 4)
    cases = [
        (lambda: spans.take_keys(np.array([1, 0])), "take_keys: expected strictly ascending"),
        (lambda: spans.take_keys(np.array([1, 1])), "take_keys: expected strictly ascending"),
        (lambda: spans.take_keys(np.array([0, 4])), r"take_keys: expected indices in \[0, 4\), got 0..4"),
        (lambda: spans.take_queries(np.array([-1])), r"take_queries: expected indices in \[0, 4\)"),
        (lambda: spans.take_queries(np.array([0.0])), "take_queries: expected an integer array, got float64"),
        (lambda: spans.take_queries(np.array([[0]])), r"an array with 1 axes, got \(1, 1\)"),
        (lambda: spans.block_states(0, 2), "q_block: expected at least 1, got 0"),
    ]
    for call, message in cases:
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_lowering_takes_memory_for_rows_not_for_pairs():
    import tracemalloc

    length = 1 << 16
    mask = a.causal() & a.segments(np.arange(length) // 3)
    tracemalloc.start()
    mask.spans(length, length)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A couple of dozen arrays of int64 with an entry per row; (S, S) booleans would be 4 GiB.
    assert peak < 24 * 8 * length
