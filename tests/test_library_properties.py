"""Masks of the library at random sizes: their spans are what their definitions say, pair by pair."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from samples import library as samples
from samples.masks import Sample

import attnspan as a
from attnspan import library as lib


def _check(sample: Sample) -> Any:
    spans = sample.mask().spans(sample.q_len, sample.keys, q_index=np.arange(sample.q_len)).validate()
    pairs = np.ndindex(sample.q_len, sample.keys)
    want = np.array([sample.sees(0, 0, i, j) for i, j in pairs], bool).reshape(sample.q_len, sample.keys)
    np.testing.assert_array_equal(np.asarray(spans.dense())[0, 0], want)
    assert sample.runs is None or spans.runs == sample.runs
    return spans


@st.composite
def _grids(draw, most):
    """A canvas of at most `most` tokens, and a kernel, dilation and stride that fit it."""
    canvas, kernel, dilation, stride = [], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.integers(1, max(most // max(int(np.prod(canvas)), 1), 1)))
        k = draw(st.integers(1, n))
        canvas.append(n)
        kernel.append(k)
        dilation.append(draw(st.integers(1, n // k)))
        stride.append(draw(st.integers(1, k)))
    return tuple(map(tuple, (canvas, kernel, dilation, stride)))


@st.composite
def _packs(draw):
    return np.cumsum([0, *draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))])


def _tables(values, size):
    return st.lists(values, min_size=size, max_size=size)


@given(_grids(40), st.integers(0, 2), st.data())
def test_natten(grid, text, data):
    canvas, kernel, dilation, stride = grid
    causal = tuple(data.draw(_tables(st.booleans(), len(canvas))))
    _check(samples.natten("", canvas, kernel, text, dilation=dilation, stride=stride, causal=causal))


@given(st.integers(3, 7), st.data())
def test_natten_is_that_of_attention_gym(n, data):
    # Its even kernels are one larger, and no larger than the canvas.
    _check(samples.as_gym(n, data.draw(st.integers(1, (n - 1) // 2 * 2))))


@given(_grids(10), st.integers(0, 2), st.data())
def test_sliding_tiles(grid, text, data):
    tiles, reach, _, _ = grid
    tile = tuple(data.draw(st.integers(1, 2)) for _ in tiles)
    canvas, kernel = (tuple(x * t for x, t in zip(y, tile, strict=True)) for y in (tiles, reach))
    _check(samples.sta(canvas, kernel, tile, text))


@given(st.integers(1, 20), st.integers(1, 8))
def test_block_diffusion(n, block):
    _check(samples.block_diffusion(n, block))


@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 20))
def test_draft_blocks(prefix, block, drafted):
    _check(samples.draft_blocks(prefix, block, prefix + drafted))


@st.composite
def _trees(draw):
    return np.array([draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 14)))])


@given(_trees(), st.integers(0, 6), st.integers(0, 3), st.integers(0, 3))
def test_tree(parents, prefix, room, spare):
    sample = samples.tree("", parents, prefix, room=room)
    spans, mask = _check(sample), sample.mask()
    _check(samples.tree("", parents, prefix, mask.depth + spare, room))
    nodes = mask.spans(len(parents), sample.keys)
    np.testing.assert_array_equal(nodes.dense(), spans.dense()[:, :, prefix : prefix + len(parents)])


@given(_packs(), st.data())
def test_shared_prefix(cu, data):
    of = np.array(data.draw(_tables(st.integers(0, len(cu) - 2), len(cu) - 1)))
    _check(samples.shared_prefix(cu, of, int(cu[-1]) + 2))


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_selected_blocks(data, rows, picks, block):
    table = np.array(data.draw(_tables(st.integers(-1, 5), rows * picks))).reshape(1, 1, rows, picks)
    sizes = np.array(data.draw(_tables(st.integers(0, block), 6)))
    _check(samples.selected_blocks("", table, block, sizes, runs=None, keys=6 * block))


@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 6), st.floats(0, 4))
def test_temporal_heads(prompt, frames, frame, width):
    _check(samples.temporal_heads(prompt, frames, frame, width))


@given(st.sets(st.integers(0, 12), min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_flamingo(places, length, earlier):
    _check(samples.flamingo(np.array(sorted(places)), length, earlier))


@given(st.integers(0, 20), st.integers(1, 6), st.booleans(), st.integers(1, 30))
def test_dilated_is_a_window_in_strided_order(window, dilation, causal, n):
    sample, order = samples.dilated(window, dilation, causal, n), lib.strided_order(n, dilation)
    banded = a.segments(order % dilation) & a.window(window // dilation, 0 if causal else window // dilation)
    sees = lambda b, h, i, j: sample.sees(b, h, order[i], order[j])  # noqa: E731
    _check(samples.own("dilated, in its order", lambda: banded, sees, keys=n, runs=1))
