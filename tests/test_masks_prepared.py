"""Which rows and keys a mask is for, where it was prepared, came as spans, or is made of several."""

from typing import Any

import numpy as np
import pytest
import torch

import attnspan as a
from attnspan.library import global_sliding, per_head, per_row, selected_blocks

ROWS = np.array([2, 5, 0])


def test_indices_given_to_a_prepared_mask_are_refused() -> None:
    prepared = a.causal().prepare(3, 6)
    for lower in (prepared.spans, prepared.prepare):
        with pytest.raises(ValueError, match=r"q_index: expected None with a prepared mask, .*take_queries"):
            lower(3, 6, q_index=ROWS)
        with pytest.raises(ValueError, match=r"q_index: expected None with a prepared mask"):
            lower(3, 2, q_index=ROWS, k_index=np.array([0, 3]))


def test_a_mask_over_keys_of_its_own_order_is_not_combined() -> None:
    some = a.causal().prepare(2, 2, q_index=np.array([5, 6]), k_index=np.array([3, 6]))
    for combine in (lambda: some & a.window(3), lambda: a.window(3) | some):
        with pytest.raises(ValueError, match=r"keys have indices of their own.*before one is prepared"):
            combine()


@pytest.mark.parametrize("way", ["spans", "prepare"])
def test_what_is_prepared_is_not_written_into(way: str) -> None:
    q_index, k_index = np.arange(2, 5, dtype=np.int32), np.arange(6, dtype=np.int32)
    given = {"q_index": q_index, "k_index": k_index}
    mask = getattr(a.causal() & a.segments(np.zeros(6, np.int32)), way)(3, 6, **given)
    for x in (mask.lowered.bounds, mask.q_index, mask.k_index) if way == "prepare" else ():
        with pytest.raises(ValueError, match="read-only"):
            x[...] = 0
    q_index[:], k_index[:] = 0, 0
    assert mask.q_index.tolist() == [[2, 3, 4]]
    assert mask.k_index.tolist() == [list(range(6))]
    rows = torch.arange(3, dtype=torch.int32)
    mask = getattr(a.causal(), way)(3, 3, q_index=rows)
    rows.zero_()
    assert mask.q_index.tolist() == [[0, 1, 2]]


OTHER_ROWS = "q_index of a prepared mask: expected the rows that it was prepared for"


@pytest.mark.parametrize("join", [lambda x, y: x & y, lambda x, y: y & x, lambda x, y: x | y])
@pytest.mark.parametrize(
    ("own", "other", "q_index"),
    [
        (a.window(3), a.causal(), np.arange(8)),
        (a.causal(), a.cache(np.array([8, 12])), None),
        (a.causal(), a.cache(np.array([8, 12])).prepare(8, 16, batch=2), None),
        (a.causal(), a.documents(np.array([0, 4, 8]), np.array([0, 8, 16])), None),
        (a.window(3), per_row([a.causal(), a.causal() & a.cache(np.array([9]))]), None),
    ],
    ids=["q_index", "cache", "prepared cache", "documents", "per_row"],
)
def test_rows_that_are_the_last_of_the_keys_are_these_alone(
    own: a.Mask, other: a.Mask, q_index: np.ndarray | None, join: Any
) -> None:
    want = join(own, a.causal()).spans(8, 16).dense()
    for prepared in (own.prepare(8, 16), own.prepare(8, 16, q_index=np.arange(8, 16))):
        with pytest.raises(ValueError, match=OTHER_ROWS):
            join(prepared, other).spans(8, 16, batch=2, q_index=q_index)
        for same in (None, np.arange(8, 16)):
            joined = join(prepared, a.causal()).spans(8, 16, q_index=same)
            np.testing.assert_array_equal(joined.dense(), want)


@pytest.mark.parametrize("wrap", [lambda x: per_row([x, x]), lambda x: per_head([x, x])])
def test_a_mixture_of_prepared_masks_has_their_rows(wrap: Any) -> None:
    sizes = {"q_len": 8, "k_len": 16, "batch": 2, "heads": 2}
    mask = wrap(a.causal().prepare(8, 16))
    np.testing.assert_array_equal(mask.spans(**sizes).dense(), wrap(a.causal()).spans(**sizes).dense())
    with pytest.raises(ValueError, match=OTHER_ROWS):
        (mask & a.cache(np.array([8, 12]))).spans(**sizes)


def test_default_rows_of_a_mixture() -> None:
    masks = [a.causal() & a.cache(3), a.causal()]
    rows, heads = per_row(masks).spans(2, 5, batch=2), per_head(masks).spans(2, 5, heads=2)
    assert rows.bounds[:, 0, :, 0].tolist() == [[[0, 2], [0, 3]], [[0, 4], [0, 5]]]
    assert heads.bounds[0, :, :, 0].tolist() == [[[0, 2], [0, 3]], [[0, 2], [0, 3]]]


def test_keys_that_are_left_do_not_move_the_rows() -> None:
    prepared, some = a.causal().prepare(4, 8), np.arange(4)
    with pytest.raises(ValueError, match=OTHER_ROWS):
        (prepared & a.window(3)).spans(4, 4, k_index=some)
    found, want = (
        (x & a.window(3)).spans(4, 4, k_index=some, q_index=np.arange(4, 8)) for x in (prepared, a.causal())
    )
    np.testing.assert_array_equal(found.bounds, want.bounds)


def test_spans_describe_rows_as_they_come() -> None:
    padding, cache = a.key_padding(6), a.causal() & a.cache(np.array([8, 12]))
    want = (padding & cache).spans(8, 16, batch=2).bounds
    for bare in (a.spans(padding.spans(8, 16)), a.spans(padding.spans(8, 16).bounds)):
        np.testing.assert_array_equal((bare & cache).spans(8, 16, batch=2).bounds, want)


def test_what_is_counted_from_the_first_key_says_nothing_of_rows_before_it() -> None:
    before = global_sliding(1, 2).spans(1, 4, q_index=np.array([-1]))
    assert before.dense()[0, 0].tolist() == [[True, True, False, False]]
    none = selected_blocks(np.full((1, 1, 1, 1), -(2**30)), 4).spans(4, 8, q_index=np.arange(4))
    assert none.cost().sum() == 0
