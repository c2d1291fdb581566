"""Masks of the library at random sizes: their spans are what their definitions say, pair by pair."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from library_definitions import (
    ancestor,
    block_diffusion,
    drafts,
    in_document,
    last_image,
    neighbours,
    selected,
    shares_prefix,
    temporal,
    tiles_near,
)

import attnspan as a
from attnspan import library as lib


def _same(mask, rows, keys, sees, **options):
    spans = mask.spans(rows, keys, q_index=np.arange(rows), **options).validate()
    want = np.array([[sees(i, j) for j in range(keys)] for i in range(rows)], bool).reshape(rows, keys)
    np.testing.assert_array_equal(np.asarray(spans.dense())[0, 0], want)
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


@given(_grids(40), st.data())
def test_natten(grid, data):
    canvas, kernel, dilation, stride = grid
    causal = tuple(data.draw(st.lists(st.booleans(), min_size=len(canvas), max_size=len(canvas))))
    text, n = data.draw(st.integers(0, 2)), int(np.prod(canvas))
    options = {"dilation": dilation, "stride": stride, "causal": causal}
    mask = lib.natten(canvas, kernel, text=text, **options)
    spans = _same(mask, n + text, n + text, lambda i, j: neighbours(canvas, kernel, i, j, text, **options))
    runs = int(np.prod(kernel[:-1])) * (kernel[-1] if dilation[-1] > 1 else 1) + (text > 0)
    assert spans.runs == runs


@given(_grids(10), st.data())
def test_sliding_tiles(grid, data):
    tiles, reach, _, _ = grid
    tile = tuple(data.draw(st.integers(1, 2)) for _ in tiles)
    canvas, kernel = (tuple(x * t for x, t in zip(y, tile, strict=True)) for y in (tiles, reach))
    text, n = data.draw(st.integers(0, 2)), int(np.prod(canvas))
    mask = lib.sta(canvas, kernel, tile, text)
    _same(mask, n + text, n + text, lambda i, j: tiles_near(canvas, kernel, tile, i, j, text))


@given(_grids(30), st.data())
def test_reordered(grid, data):
    canvas, kernel, _, _ = grid
    n = int(np.prod(canvas))
    order = np.array(data.draw(st.permutations(range(n))))
    mask = lib.reordered(lib.natten(canvas, kernel), order)
    spans = _same(mask, n, n, lambda i, j: neighbours(canvas, kernel, int(order[i]), int(order[j])))
    assert spans.runs == spans.compact().runs


@given(st.integers(0, 20), st.integers(1, 6), st.booleans(), st.integers(1, 30))
def test_dilated(window, dilation, causal, n):
    mask = lib.dilated(window, dilation, causal)
    sees = lambda i, j: abs(i - j) <= window and (i - j) % dilation == 0 and (j <= i or not causal)  # noqa: E731
    _same(mask, n, n, sees)
    order = lib.strided_order(n, dilation)
    reach = window // dilation
    banded = a.segments(order % dilation) & a.window(reach, 0 if causal else reach)
    assert _same(banded, n, n, lambda i, j: sees(order[i], order[j])).runs == 1


@given(st.integers(1, 20), st.integers(1, 8))
def test_block_diffusion(n, block):
    mask = lib.block_diffusion(n, block)
    _same(mask, 2 * n, 2 * n, lambda i, j: block_diffusion(n, block, i, j))


@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 20))
def test_draft_blocks(prefix, block, drafted):
    keys = prefix + drafted
    _same(lib.draft_blocks(prefix, block), keys, keys, lambda i, j: drafts(prefix, block, i, j))


@st.composite
def _trees(draw):
    return np.array([draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(1, 14)))])


@given(_trees(), st.integers(0, 6), st.integers(0, 3), st.integers(0, 3))
def test_tree(parents, prefix, room, spare):
    keys = prefix + len(parents) + room
    mask = lib.tree(parents, prefix)
    spans = _same(mask, keys, keys, lambda i, j: ancestor(parents, prefix, i, j))
    deeper = lib.tree(parents, prefix, depth=mask.depth + spare)
    assert _same(deeper, keys, keys, lambda i, j: ancestor(parents, prefix, i, j)).runs == spans.runs + spare
    nodes = mask.spans(len(parents), keys)
    np.testing.assert_array_equal(nodes.dense(), spans.dense()[:, :, prefix : prefix + len(parents)])


@st.composite
def _packs(draw):
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    return np.cumsum([0, *lengths])


@given(_packs(), st.data())
def test_shared_prefix(cu, data):
    n, keys = len(cu) - 1, int(cu[-1]) + 2
    of = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
    _same(lib.shared_prefix(cu, of), keys, keys, lambda i, j: shares_prefix(cu, of, i, j))


@given(_packs(), st.integers(0, 4), st.integers(0, 3))
def test_per_document(cu, window, tokens):
    keys = int(cu[-1]) + 2
    mask = lib.per_document(lib.global_sliding(window, tokens), cu)
    inner = lambda x, y: abs(x - y) <= window or x < tokens or y < tokens  # noqa: E731
    _same(mask, keys, keys, lambda i, j: in_document(cu, i, j, inner))


@given(st.integers(1, 8), st.integers(1, 30), st.integers(1, 5), st.integers(0, 9))
def test_batchify(size, keys, block, prefix):
    inner = (lib.block_causal(block) | lib.prefix_lm(prefix)) & a.window(None, 3)
    sees = lambda x, y: (y // block <= x // block or y <= x or y < prefix) and y <= x + 3  # noqa: E731
    mask = lib.batchify(inner, size)
    _same(mask, keys, keys, lambda i, j: i // size == j // size and sees(i % size, j % size))


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_selected_blocks(data, rows, picks, block):
    chosen = data.draw(st.lists(st.integers(-1, 5), min_size=rows * picks, max_size=rows * picks))
    table = np.array(chosen).reshape(1, 1, rows, picks)
    sizes = np.array(data.draw(st.lists(st.integers(0, block), min_size=6, max_size=6)))
    mask = lib.selected_blocks(table, block, sizes)
    _same(mask, rows * block, 6 * block, lambda i, j: selected(table, block, 0, 0, i, j, sizes))


@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 6), st.floats(0, 4))
def test_temporal_heads(prompt, frames, frame, width):
    keys = prompt + frames * frame
    reach = int(width * frame // frames)
    mask = lib.temporal_heads(prompt, frames, frame, width)
    _same(mask, keys, keys, lambda i, j: temporal(prompt, frame, reach, i, j))


@given(st.sets(st.integers(0, 12), min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_flamingo(places, length, earlier):
    at = np.array(sorted(places))
    mask = lib.flamingo(at, length, earlier)
    _same(mask, 12, len(at) * length, lambda i, j: last_image(at, length, i, j, earlier))
