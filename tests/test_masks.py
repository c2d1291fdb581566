"""Each mask, the library's too, against its definition, pair by pair, in every way to lower it."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import re

import numpy as np
import pytest
import torch
from samples.library import LIBRARY
from samples.masks import BATCH, KEYS, SAMPLES

import attnspan as a
import attnspan.torch
from attnspan.base.arrays import Arrays

# Their R is read from data.
BY_DATA = {"reordered", "tiled_natten", "morton_natten"}
# Their formulas mean something for a row before the first key, as `window`'s does.
BY_FORMULA = {"dilated", "global_sliding", "prefix_lm", "spatial_heads"}
EACH = pytest.mark.parametrize("sample", [*SAMPLES, *LIBRARY], ids=lambda sample: sample.name)


def _check(spans, want):
    """The spans are legal, and their dense form is the wanted one."""
    spans.validate()
    assert "int32" in str(spans.bounds.dtype)
    np.testing.assert_array_equal(np.broadcast_to(np.asarray(spans.dense()), want.shape), want)


def _rows(sample, q_len):
    """The last rows and how to ask for them, where a mask of the library does not have all by default."""
    if sample in SAMPLES:
        return sample.default_q_index(q_len), {}
    rows = np.arange(sample.q_len)[-q_len:]
    every = q_len == sample.q_len and "room to spare" not in sample.name
    return rows, {} if every else {"q_index": rows}


@EACH
def test_equals_its_definition(sample):
    for q_len in (sample.q_len, 5, 1, *([KEYS + 6] if sample in SAMPLES else [])):
        rows, given = _rows(sample, q_len)
        spans = sample.mask().spans(q_len, sample.keys, **given, **sample.sizes)
        _check(spans, sample.dense(rows, np.arange(sample.keys)))
        assert sample.runs is None or spans.runs == sample.runs


@EACH
def test_rows_by_global_index(sample):
    outside, last = 7 if sample.function in BY_FORMULA else -1, sample.q_len - 1
    shared, own = [3, 0, last, outside, 3], [[1, 2, last - 1, 3, 3], [last, last, 0, outside, 4]]
    for q_index in (shared, own) if sample in SAMPLES else (shared,):
        spans = sample.mask().spans(5, sample.keys, q_index=np.array(q_index), **sample.sizes)
        _check(spans, sample.dense(q_index, np.arange(sample.keys)))


@EACH
def test_some_of_the_rows_and_keys(sample):
    q_index, k_index = np.array([5, 1, sample.q_len - 1]), np.flatnonzero(np.arange(sample.keys) % 5 != 1)
    want, whole = sample.dense(q_index, k_index), np.arange(sample.q_len)
    spans = sample.mask().spans(sample.q_len, sample.keys, q_index=whole, **sample.sizes)
    _check(spans.take_queries(q_index).take_keys(k_index), want)
    mask, given = sample.mask(), {"q_index": q_index, "k_index": k_index, **sample.sizes}
    if "left" in sample.name:
        # It is counted from the end of the global sequence, whose length only other masks' arrays can give.
        with pytest.raises(ValueError, match="key_padding: expected the length of the global key sequence"):
            mask.spans(3, len(k_index), **given)
        mask = mask & a.segments(np.zeros(KEYS, int))
    _check(mask.spans(3, len(k_index), **given), want)


def test_rows_default_to_the_last_of_the_keys_that_are_here():
    spans = a.causal().spans(2, 3, k_index=np.array([1, 5, 6]))
    assert spans.bounds[0, 0, :, 0].tolist() == [[0, 2], [0, 3]]


@EACH
def test_torch_and_values_that_nobody_can_read_give_the_same_spans(sample, monkeypatch):
    for q_len in (sample.q_len, 7):
        _, given = _rows(sample, q_len)
        given |= sample.sizes
        want = sample.mask().spans(q_len, sample.keys, **given)
        tensors = {**given, "q_index": torch.from_numpy(given["q_index"])} if "q_index" in given else given
        got = sample.mask(torch.from_numpy).spans(q_len, sample.keys, like=torch.zeros(1), **tensors)
        assert got.bounds.dtype == torch.int32
        np.testing.assert_array_equal(got.bounds.numpy(), want.bounds)
        mask = sample.mask()
        with monkeypatch.context() as patch:
            patch.setattr(Arrays, "concrete", lambda *_: False)
            if sample.function in BY_DATA:
                with pytest.raises(ValueError, match=r"reordered: expected readable values.*prepare"):
                    mask.spans(q_len, sample.keys, **given)
                continue
            got = mask.spans(q_len, sample.keys, **given)
        np.testing.assert_array_equal(got.bounds, want.bounds)


@EACH
def test_prepared_is_the_same_mask(sample):
    rows, given = _rows(sample, 6)
    prepared, every = sample.mask().prepare(6, sample.keys, **given, **sample.sizes), np.arange(sample.keys)
    spans = prepared.spans(6, sample.keys, **sample.sizes)
    _check(spans, sample.dense(rows, every))
    assert sample.runs is None or spans.runs <= sample.runs
    assert spans.bounds.flags.c_contiguous
    assert prepared.spans(6, sample.keys, **sample.sizes) is spans
    if sample in SAMPLES:
        half = prepared & a.global_keys(12)
        _check(half.spans(6, KEYS, batch=BATCH), sample.dense(rows, every) & (every < 12))


@EACH
def test_pytrees_round_trip(sample):
    arrays = [torch.from_numpy(x) for x in sample.arrays]
    mask, (rows, given) = sample.build(*arrays), _rows(sample, 5)
    given = {"q_index": torch.from_numpy(rows)} if given else {}
    prepared = mask.prepare(5, sample.keys, **given, **sample.sizes)
    for x, own in ((mask, given), (prepared, {})):
        leaves, spec = torch.utils._pytree.tree_flatten(x)
        hash(spec)
        again = torch.utils._pytree.tree_unflatten(leaves, spec)
        assert repr(again) == repr(x)
        want, got = (y.spans(5, sample.keys, **own, **sample.sizes) for y in (x, again))
        np.testing.assert_array_equal(got.bounds, want.bounds)
        if x is mask:
            assert {id(y) for y in arrays} <= {id(y) for y in leaves}


@EACH
@pytest.mark.parametrize("other", [0, "axis", None])
def test_what_stands_in_the_place_of_arrays_keeps_the_structure(sample, other):
    """Axes of vmap and shardings are trees of a mask's structure."""
    pytree = torch.utils._pytree
    mask = sample.build(*(torch.from_numpy(x) for x in sample.arrays))
    leaves, spec = pytree.tree_flatten(mask)
    axes = pytree.tree_map(lambda _: other, mask)
    assert pytree.tree_flatten(axes) == ([other] * len(leaves), spec)
    again = pytree.tree_map(lambda _, x: x, axes, mask)
    assert repr(again) == repr(mask)
    assert pytree.tree_structure(again) == spec


def test_separate_ids_for_rows_and_keys():
    q_ids, kv_ids = np.array([[2, 9, 0], [5, 5, 1]]), np.array([0, 0, 2, 2, 5])
    same = (q_ids[:, :, None] == kv_ids)[:, None]
    _check(a.segments(q_ids, kv_ids).spans(3, 5, batch=2), same)
    _check(
        a.segments(q_ids, kv_ids, padding_id=5).spans(3, 5, batch=2), same & (q_ids != 5)[:, None, :, None]
    )


def test_documents_with_their_own_rows():
    mask = a.documents(np.array([0, 2, 2, 5]), np.array([0, 6, 7, 9]))
    same = np.array([0, 0, 2, 2, 2, -1])[:, None] == np.array([0] * 6 + [1] + [2] * 2)
    # The last row of each document is aligned with its last key; a row in no document sees nothing.
    causal = np.arange(9) <= np.array([4, 5, 6, 7, 8, -1])[:, None]
    for each, want in ((mask, same), (a.causal() & mask, same & causal), (a.causal() | mask, same | causal)):
        _check(each.spans(6, 9), want[None, None])


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("shape", [(5, 9), (2, 5, 9), (2, 3, 5, 9), (1, 3, 5, 9)])
def test_from_dense(shape, convert):
    visible = np.random.default_rng(0).random(shape) < 0.4
    spans = a.from_dense(convert(visible)).spans(5, 9, batch=2, heads=3)
    want = visible.reshape(-1, 1, 5, 9) if len(shape) < 4 else visible
    _check(spans, want)
    starts = want & ~np.pad(want, ((0, 0),) * 3 + ((1, 0),))[..., :-1]
    assert spans.runs == starts.sum(-1).max()


@pytest.mark.parametrize("like", [None, torch.zeros(1)])
def test_from_predicate(like, monkeypatch):
    def sees(b, h, q, k):
        return ((q - k) % (h + 2) == 0) & (q >= k) & (k >= b)

    mask = a.from_predicate(sees)
    b, h, q, k = np.ogrid[:2, :3, 3:9, :9]
    _check(mask.spans(6, 9, batch=2, heads=3, like=like), sees(b, h, q, k))
    # A chunk of one row gives the same, with as many spans.
    whole = mask.spans(6, 9, batch=2, heads=3)
    monkeypatch.setattr("attnspan.masks.by_value.CHUNK_PAIRS", 9)
    np.testing.assert_array_equal(mask.spans(6, 9, batch=2, heads=3).bounds, whole.bounds)


def test_a_predicate_on_nothing_but_keys_or_rows():
    q, k = np.ogrid[1:5, :5]
    for fn in (lambda b, h, q, k: k < 3, lambda b, h, q, k: q > 2, lambda b, h, q, k: True):
        _check(a.from_predicate(fn).spans(4, 5), np.broadcast_to(fn(0, 0, q, k), (1, 1, 4, 5)))


def test_from_block_mask_counts_rows_from_zero():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    block_mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 6, device="cpu")
    spans = a.from_block_mask(block_mask).spans(4, 6)
    assert isinstance(spans.bounds, torch.Tensor)
    _check(spans, np.tri(4, 6, dtype=bool)[None, None])


def test_explicit_spans():
    bounds = np.array([[[[0, 2], [3, 4]], [[1, 1], [0, 5]], [[2, 2], [0, 0]]]])[None]
    spans = a.spans(bounds).spans(3, 5)
    want = np.array([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], bool)
    _check(spans, want[None, None])
    _check((a.spans(spans) & a.global_keys(1)).spans(3, 5), (want & (np.arange(5) < 1))[None, None])


@pytest.mark.slow
def test_dense_masks_that_alternate_too_often_are_named():
    checkered = (np.indices((2048, 2048)).sum(0) % 2).astype(bool)
    with pytest.warns(a.SpansLargerThanMask, match="up to 1024 runs, so its spans take 16 MiB"):
        a.from_dense(checkered).spans(2048, 2048)


def test_empty_problems():
    assert a.causal().spans(0, 4).bounds.shape == (1, 1, 0, 1, 2)
    assert a.segments(np.zeros(0, int)).spans(2, 0).bounds.tolist() == [[[[[0, 0]], [[0, 0]]]]]
    assert a.causal().spans(4, 4).take_keys(np.zeros(0, int)).coverage() == 0
    assert a.from_predicate(lambda b, h, q, k: q >= k).spans(0, 4).q_len == 0
    assert a.library.reordered(a.causal(), [1, 0]).spans(0, 2).bounds.shape == (1, 1, 0, 1, 2)


def test_masks_are_immutable():
    with pytest.raises(AttributeError):
        a.window(3).left = 4


def test_text_names_masks():
    for text in (
        "causal() & (window(4, right=2) | global_keys(1))",
        "documents(int64[3])",
        "key_padding(3, side='left')",
        "causal() & window(128)",
    ):
        written = text.replace("int64[3]", "[0, 3, 5]").replace("causal()", "causal")
        assert repr(a.parse(f" {written} ")) == text
    dense = a.parse("from_dense([[True, False], [True, True]])").spans(2, 2).dense()
    assert dense.tolist() == [[[[True, False], [True, True]]]]
    # Equal lists are one array, as documents and prefix want it.
    text = "(causal() | prefix([2, 1], [0, 4, 6])) & documents([0, 4, 6])"
    assert a.parse(text).spans(6, 6).runs == 1


#: Text => the error of `parse`.
NO_MASKS = """
causal & => got invalid syntax at column
window( => '(' was never closed
 => expected mask calls with numbers and lists of numbers, composed with & and |
\0 => expected mask calls
casual => expected the name of a mask, got casual. Write causal
causal & documents(cu) => got cu. Write the value of cu in its place, such as [0, 10, 22, 32].
documents([0, [1]]) => got rows of several lengths in '[0, [1]]'
documents([0, 1.5]) => expected an integer array, got float64
window => expected arguments that window() takes
window(-1) => window: left: expected 0 to
window(2 ** 9) => got '2 ** 9'
window(*[3]) => got '*[3]'
window(left=1, left=2) => got 'window(left=1, left=2)'
strided_order(4, 2) => got 'strided_order(4, 2)'
not causal => got 'not causal'
causal() + full() => got 'causal() + full()'
causal().prepare(4, 4) => got 'causal().prepare(4, 4)'
__import__('os').getcwd() => expected mask calls
"""


@pytest.mark.parametrize("row", NO_MASKS.strip("\n").splitlines())
def test_text_that_names_no_mask_is_explained_and_not_run(row):
    text, message = row.split(" => ")
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        a.parse(text)
