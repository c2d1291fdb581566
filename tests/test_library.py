"""Each mask of the library against its definition, pair by pair, in every way it can be lowered."""

import numpy as np
import pytest
import torch
from library_samples import BATCH, HEADS, IDS, SAMPLES

import attnspan.torch  # noqa: F401  (registers pytrees)
from attnspan.arrays import Arrays

SIZES = {"batch": BATCH, "heads": HEADS}
BY_DATA = {"reordered", "tiled_natten", "morton_natten"}
# Their formulas mean something for a row before the first key, as `window`'s does.
BY_FORMULA = {"dilated", "global_sliding", "prefix_lm", "spatial_heads"}


def _check(spans, want):
    """The spans are legal, and their dense form is the wanted one."""
    spans.validate()
    assert "int32" in str(spans.bounds.dtype)
    np.testing.assert_array_equal(np.broadcast_to(np.asarray(spans.dense()), want.shape), want)


def _rows(sample):
    return np.arange(sample.keys if sample.rows is None else sample.rows)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_equals_its_definition(sample):
    q_index, k_index = _rows(sample), np.arange(sample.keys)
    spans = sample.mask().spans(len(q_index), sample.keys, q_index=q_index, **SIZES)
    _check(spans, sample.dense(q_index, k_index))
    if sample.runs is not None:
        assert spans.runs == sample.runs


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_rows_by_global_index(sample):
    outside = 7 if sample.function in BY_FORMULA else -1
    q_index = np.array([3, 0, len(_rows(sample)) - 1, outside, 3])
    spans = sample.mask().spans(5, sample.keys, q_index=q_index, **SIZES)
    _check(spans, sample.dense(q_index, np.arange(sample.keys)))


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_some_of_the_rows_and_keys(sample):
    q_index = np.array([5, 1, len(_rows(sample)) - 1])
    k_index = np.flatnonzero(np.arange(sample.keys) % 5 != 1)
    whole = sample.mask().spans(len(_rows(sample)), sample.keys, q_index=_rows(sample), **SIZES)
    want = sample.dense(q_index, k_index)
    _check(whole.take_queries(q_index).take_keys(k_index), want)
    _check(sample.mask().spans(3, len(k_index), q_index=q_index, k_index=k_index, **SIZES), want)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_torch_gives_the_same_spans(sample):
    rows = {"q_index": _rows(sample), **SIZES}
    want = sample.mask().spans(len(_rows(sample)), sample.keys, **rows)
    rows["q_index"] = torch.from_numpy(_rows(sample))
    got = sample.mask(torch.from_numpy).spans(len(_rows(sample)), sample.keys, like=torch.zeros(1), **rows)
    assert got.bounds.dtype == torch.int32
    np.testing.assert_array_equal(got.bounds.numpy(), want.bounds)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_values_need_not_be_readable(sample, monkeypatch):
    mask = sample.mask()
    want = mask.spans(5, sample.keys, q_index=np.array([0, 3, 5, 4, 2]), **SIZES)
    monkeypatch.setattr(Arrays, "concrete", lambda *_: False)
    if sample.function in BY_DATA:
        with pytest.raises(ValueError, match=r"reordered: expected values.*prepare"):
            mask.spans(5, sample.keys, q_index=np.array([0, 3, 5, 4, 2]), **SIZES)
        return
    got = mask.spans(5, sample.keys, q_index=np.array([0, 3, 5, 4, 2]), **SIZES)
    np.testing.assert_array_equal(got.bounds, want.bounds)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_prepared_is_the_same_mask(sample):
    q_index = _rows(sample)
    prepared = sample.mask().prepare(len(q_index), sample.keys, q_index=q_index, **SIZES)
    _check(prepared.spans(len(q_index), sample.keys, **SIZES), sample.dense(q_index, np.arange(sample.keys)))


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_pytree(sample):
    arrays = [torch.from_numpy(x) for x in sample.arrays]
    mask = sample.build(*arrays)
    leaves, spec = torch.utils._pytree.tree_flatten(mask)
    assert {id(x) for x in arrays} <= {id(x) for x in leaves}
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert repr(again) == repr(mask)
    rows = {"q_index": torch.from_numpy(_rows(sample)), **SIZES}
    want, got = (x.spans(len(_rows(sample)), sample.keys, **rows) for x in (mask, again))
    assert torch.equal(got.bounds, want.bounds)
