"""What a prepared mask does with indices: those that it cannot use raise, those that it has are kept."""

from typing import Any

import numpy as np
import pytest

import attnspan as a
from attnspan.library import per_head, per_row

ROWS = np.array([2, 5, 0])


def test_indices_given_to_a_prepared_mask_are_refused() -> None:
    prepared = a.causal().prepare(3, 6)
    for lower in (prepared.spans, prepared.spans, prepared.prepare):
        with pytest.raises(ValueError, match=r"q_index: expected None with a prepared mask, .*take_queries"):
            lower(3, 6, q_index=ROWS)
        with pytest.raises(ValueError, match=r"q_index: expected None with a prepared mask"):
            lower(3, 2, q_index=ROWS, k_index=np.array([0, 3]))


_OTHER_ROWS = "q_index of a prepared mask: expected the rows that it was prepared for"
_FIRST = np.arange(8)


@pytest.mark.parametrize("join", [lambda x, y: x & y, lambda x, y: y & x, lambda x, y: x | y])
@pytest.mark.parametrize(
    ("own", "other", "q_index"),
    [
        (a.window(3), a.causal(), _FIRST),
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
    for prepared in (own.prepare(8, 16), own.prepare(8, 16, q_index=np.arange(8, 16))):
        with pytest.raises(ValueError, match=_OTHER_ROWS):
            join(prepared, other).spans(8, 16, batch=2, q_index=q_index)
        want = join(own, a.causal()).spans(8, 16).bounds
        for same in (None, np.arange(8, 16)):
            np.testing.assert_array_equal(
                join(prepared, a.causal()).spans(8, 16, q_index=same).dense(),
                a.Spans(want, 16).dense(),
            )


@pytest.mark.parametrize("wrap", [lambda x: per_row([x, x]), lambda x: per_head([x, x])])
def test_a_mixture_of_prepared_masks_has_their_rows(wrap: Any) -> None:
    mask = wrap(a.causal().prepare(8, 16))
    np.testing.assert_array_equal(
        mask.spans(8, 16, batch=2, heads=2).dense(), wrap(a.causal()).spans(8, 16, batch=2, heads=2).dense()
    )
    with pytest.raises(ValueError, match=_OTHER_ROWS):
        (mask & a.cache(np.array([8, 12]))).spans(8, 16, batch=2, heads=2)


def test_keys_that_are_left_do_not_move_the_rows() -> None:
    prepared, some = a.causal().prepare(4, 8), np.arange(4)
    with pytest.raises(ValueError, match=_OTHER_ROWS):
        (prepared & a.window(3)).spans(4, 4, k_index=some)
    mask = (prepared & a.window(3)).spans(4, 4, k_index=some, q_index=np.arange(4, 8))
    want = (a.causal() & a.window(3)).spans(4, 4, k_index=some, q_index=np.arange(4, 8))
    np.testing.assert_array_equal(mask.bounds, want.bounds)


def test_spans_describe_rows_as_they_come() -> None:
    lengths = np.array([8, 12])
    for bare in (a.spans(a.key_padding(6).spans(8, 16)), a.spans(a.key_padding(6).spans(8, 16).bounds)):
        want = (a.key_padding(6) & a.causal() & a.cache(lengths)).spans(8, 16, batch=2).bounds
        mask = bare & a.causal() & a.cache(lengths)
        np.testing.assert_array_equal(mask.spans(8, 16, batch=2).bounds, want)
