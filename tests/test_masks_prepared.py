"""What a prepared mask does with indices: those that it cannot use raise, those that it has are kept."""

from typing import Any

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("prepared_first", [False, True])
def test_its_rows_are_those_of_the_expression(prepared_first: bool) -> None:
    prepared, other = a.full().prepare(3, 6, q_index=ROWS), a.causal() & a.window(2)
    mask = prepared & other if prepared_first else other & prepared
    want = other.spans(3, 6, q_index=ROWS).bounds
    np.testing.assert_array_equal(mask.spans(3, 6).bounds, want)
    np.testing.assert_array_equal(mask.spans(3, 6, q_index=ROWS).bounds, want)
    np.testing.assert_array_equal(mask.spans(3, 6).q_index, ROWS[None])


def test_a_cache_beside_its_own_prepared_mask() -> None:
    lengths = np.array([3, 6])
    prepared = (a.causal() & a.cache(lengths)).prepare(2, 6, batch=2)
    want = (a.causal() & a.cache(lengths) & a.window(1)).spans(2, 6, batch=2).bounds
    np.testing.assert_array_equal((prepared & a.window(1)).spans(2, 6, batch=2).bounds, want)
    both = prepared & a.cache(lengths) & a.window(1)
    np.testing.assert_array_equal(both.spans(2, 6, batch=2).bounds, want)
    with pytest.raises(
        ValueError, match="q_index of a prepared mask: expected the rows that it was prepared"
    ):
        (prepared & a.cache(lengths - 1)).spans(2, 6, batch=2)


def test_other_rows_are_refused_or_illegal() -> None:
    mask = a.full().prepare(3, 6, q_index=ROWS) & a.causal()
    with pytest.raises(
        ValueError, match="q_index of a prepared mask: expected the rows that it was prepared"
    ):
        mask.spans(3, 6, q_index=np.array([2, 4, 0]))

    def lower(prepared: a.Mask, q_index: torch.Tensor) -> torch.Tensor:
        return (prepared & a.causal()).spans(3, 6, q_index=q_index).bounds

    compiled = torch.compile(lower, fullgraph=True, backend="eager")
    prepared = a.full().prepare(3, 6, q_index=torch.from_numpy(ROWS))
    bounds = compiled(prepared, torch.tensor([2, 4, 0]))
    assert bounds[0, 0, :, 0].tolist() == [[0, 3], [0, -1], [0, 1]]


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


@pytest.mark.parametrize("q_index", [None, torch.arange(8, 16)], ids=["default", "given"])
def test_compiled_code_marks_the_rows_of_other_indices(q_index: torch.Tensor | None) -> None:
    prepared = a.window(3).prepare(8, 16, q_index=q_index, like=torch.zeros(0))

    def lower(mask: a.Mask, index: torch.Tensor) -> torch.Tensor:
        return (mask & a.causal()).spans(8, 16, q_index=index).bounds

    index = torch.arange(8, 16)
    index[3] = 0
    bounds = torch.compile(lower, fullgraph=True, backend="eager")(prepared, index)
    want = (a.window(3) & a.causal()).spans(8, 16, like=index).bounds
    want[:, :, 3, 0] = torch.tensor([0, -1])
    torch.testing.assert_close(bounds, want)
