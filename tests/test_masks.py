"""Each mask against its definition, pair by pair, in every way it can be lowered."""

# ruff: noqa: ARG005  (functions of a fixed signature, most of which need a part of it)
import numpy as np
import pytest
import torch
from mask_samples import BATCH, IDS, KEYS, SAMPLES

import attnspan as a
from attnspan.arrays import Arrays

ALL_KEYS = np.arange(KEYS)


def _check(spans, want):
    """The spans are legal, and their dense form is the wanted one."""
    spans.validate()
    assert "int32" in str(spans.bounds.dtype)
    got = np.asarray(spans.dense())
    np.testing.assert_array_equal(np.broadcast_to(got, want.shape), want)


@pytest.mark.parametrize("q_len", [KEYS, 5, 1, KEYS + 6])
@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_equals_its_definition(sample, q_len):
    spans = sample.mask().spans(q_len, KEYS, batch=BATCH)
    _check(spans, sample.dense(sample.default_q_index(q_len), ALL_KEYS))
    assert spans.runs == sample.runs


@pytest.mark.parametrize(
    "q_index", [[3, 0, 23, 7], [[1, 2, 22, 3], [23, 23, 0, -1]]], ids=["shared", "per row"]
)
@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_rows_by_global_index(sample, q_index):
    q_index = np.array(q_index)
    spans = sample.mask().spans(4, KEYS, batch=BATCH, q_index=q_index)
    _check(spans, sample.dense(np.broadcast_to(q_index, (BATCH, 4)), ALL_KEYS))


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_some_of_the_keys(sample):
    q_index, k_index = np.array([23, 4, 11]), np.array([0, 1, 4, 9, 10, 15, 22, 23])
    mask = sample.mask()
    if "left" in sample.name:
        # It is counted from the end of the global sequence, whose length only other masks' arrays can give.
        with pytest.raises(ValueError, match="key_padding: expected the length of the global key sequence"):
            mask.spans(3, len(k_index), batch=BATCH, q_index=q_index, k_index=k_index)
        mask = mask & a.segments(np.zeros(KEYS, int))
    spans = mask.spans(3, len(k_index), batch=BATCH, q_index=q_index, k_index=k_index)
    _check(spans, sample.dense(np.broadcast_to(q_index, (BATCH, 3)), k_index))


def test_rows_default_to_the_last_of_the_keys_that_are_here():
    spans = a.causal().spans(2, 3, k_index=np.array([1, 5, 6]))
    assert spans.bounds[0, 0, :, 0].tolist() == [[0, 2], [0, 3]]


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_torch_gives_the_same_spans(sample):
    want = sample.mask().spans(7, KEYS, batch=BATCH)
    got = sample.mask(torch.from_numpy).spans(7, KEYS, batch=BATCH, like=torch.zeros(1))
    assert isinstance(got.bounds, torch.Tensor)
    assert got.bounds.dtype == torch.int32
    np.testing.assert_array_equal(got.bounds.numpy(), want.bounds)


@pytest.mark.parametrize("q_len", [KEYS, 7])
@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_values_need_not_be_readable(sample, q_len, monkeypatch):
    want = sample.mask().spans(q_len, KEYS, batch=BATCH)
    monkeypatch.setattr(Arrays, "concrete", lambda self, x: False)
    got = sample.mask().spans(q_len, KEYS, batch=BATCH)
    np.testing.assert_array_equal(got.bounds, want.bounds)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_prepared_is_the_same_mask(sample):
    q_index = sample.default_q_index(6)
    prepared = sample.mask().prepare(6, KEYS, batch=BATCH)
    spans = prepared.spans(6, KEYS, batch=BATCH)
    _check(spans, sample.dense(q_index, ALL_KEYS))
    assert spans.runs <= sample.runs
    assert spans.bounds.flags.c_contiguous
    assert prepared.spans(6, KEYS, batch=BATCH) is spans
    half = prepared & a.global_keys(12)
    _check(half.spans(6, KEYS, batch=BATCH), sample.dense(q_index, ALL_KEYS) & (ALL_KEYS < 12))


def test_separate_ids_for_rows_and_keys():
    q_ids, kv_ids = np.array([[2, 9, 0], [5, 5, 1]]), np.array([0, 0, 2, 2, 5])
    spans = a.segments(q_ids, kv_ids).spans(3, 5, batch=2)
    _check(spans, (q_ids[:, :, None] == kv_ids)[:, None])
    spans = a.segments(q_ids, kv_ids, padding_id=5).spans(3, 5, batch=2)
    _check(spans, ((q_ids[:, :, None] == kv_ids) & (q_ids[:, :, None] != 5))[:, None])


def test_documents_with_their_own_rows():
    cu_q, cu_k = np.array([0, 2, 2, 5]), np.array([0, 6, 7, 9])
    number = np.array([0, 0, 2, 2, 2, -1])
    keys = np.array([0] * 6 + [1] + [2] * 2)
    same = number[:, None] == keys
    _check(a.documents(cu_q, cu_k).spans(6, 9), same[None, None])
    # The last row of each document is aligned with its last key; a row in no document sees nothing.
    q_index = np.array([4, 5, 6, 7, 8, -1])
    causal = same & (np.arange(9) <= q_index[:, None])
    _check((a.causal() & a.documents(cu_q, cu_k)).spans(6, 9), causal[None, None])
    either = same | (np.arange(9) <= q_index[:, None])
    _check((a.causal() | a.documents(cu_q, cu_k)).spans(6, 9), either[None, None])


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
    monkeypatch.setattr("attnspan.by_value.CHUNK_PAIRS", 9)
    np.testing.assert_array_equal(mask.spans(6, 9, batch=2, heads=3).bounds, whole.bounds)


def test_a_predicate_on_nothing_but_keys_or_rows():
    _check(
        a.from_predicate(lambda b, h, q, k: k < 3).spans(4, 5),
        np.broadcast_to(np.arange(5) < 3, (1, 1, 4, 5)),
    )
    rows = a.from_predicate(lambda b, h, q, k: q > 2).spans(4, 5)
    _check(rows, np.broadcast_to(np.arange(1, 5)[:, None] > 2, (1, 1, 4, 5)))
    assert a.from_predicate(lambda b, h, q, k: True).spans(4, 5).coverage() == 1


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


def test_dense_masks_that_alternate_too_often_are_named():
    checkered = (np.indices((2048, 2048)).sum(0) % 2).astype(bool)
    with pytest.warns(a.SpansLargerThanMask, match="up to 1024 runs, so its spans take 16 MiB"):
        a.from_dense(checkered).spans(2048, 2048)


def test_empty_problems():
    assert a.causal().spans(0, 4).bounds.shape == (1, 1, 0, 1, 2)
    assert a.segments(np.zeros(0, int)).spans(2, 0).bounds.tolist() == [[[[[0, 0]], [[0, 0]]]]]
    nothing = a.causal().spans(4, 4).take_keys(np.zeros(0, int))
    assert nothing.cost().sum() == 0
    assert nothing.coverage() == 0
    assert a.from_predicate(lambda b, h, q, k: q >= k).spans(0, 4).q_len == 0


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_pytrees_round_trip(sample):
    registered = {}
    a.masks.register_pytrees(lambda cls, flatten, unflatten: registered.update({cls: (flatten, unflatten)}))
    # One tensor for one array: offsets shared by two masks are recognised by identity.
    tensors = {}

    def rebuild(x):
        if type(x) is tuple:
            return tuple(map(rebuild, x))
        if type(x) not in registered:
            return tensors.setdefault(id(x), torch.from_numpy(x))
        flatten, unflatten = registered[type(x)]
        children, context = flatten(x)
        hash(context)
        return unflatten(tuple(map(rebuild, children)), context)

    mask = sample.mask()
    for x in (mask, mask.prepare(5, KEYS, batch=BATCH)):
        got = rebuild(x).spans(5, KEYS, batch=BATCH, like=torch.zeros(1)).bounds
        assert isinstance(got, torch.Tensor)
        np.testing.assert_array_equal(got.numpy(), x.spans(5, KEYS, batch=BATCH).bounds)


def test_masks_are_immutable():
    with pytest.raises(AttributeError):
        a.window(3).left = 4
    with pytest.raises(TypeError):
        a.causal() & 3


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("causal & window(128)", "causal() & window(128)"),
        (
            "causal() & (window(4, right=2) | global_keys(1))",
            "causal() & (window(4, right=2) | global_keys(1))",
        ),
        ("documents([0, 3, 5])", "documents(int64[3])"),
        (" key_padding(3, side='left') ", "keypadding(3, side='left')"),
    ],
)
def test_parse(text, want):
    assert repr(a.parse(text)) == want.replace("keypadding", "key_padding")


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("causal &", "got invalid syntax at column"),
        ("casual", "expected the name of a mask, got casual. Write causal"),
        ("window", r"expected arguments that window\(\) takes"),
        ("window(-1)", "window: left: expected 0 to"),
        ("__import__('os')", "got __import__"),
        ("causal() + full()", r"got 'causal\(\) \+ full\(\)'"),
        ("causal().spans(3, 3)", "got 'causal"),
        ("window(2 ** 9)", r"got '2 \*\* 9'"),
        ("window(*[3])", r"got '\*\[3\]'"),
        ("not causal", "got 'not causal'"),
        ("window(1.5)", r"expected arguments that window\(\) takes, got .* expected an int, got float"),
        ("window(True)", "expected an int, got bool"),
    ],
)
def test_text_that_is_no_mask(text, got):
    with pytest.raises((ValueError, TypeError), match=got):
        a.parse(text)
