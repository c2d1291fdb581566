"""What a prepared mask does with indices: those that it cannot use raise, those that it has are kept."""

import numpy as np
import pytest
import torch

import attnspan as a

ROWS = np.array([2, 5, 0])


def test_indices_given_to_a_prepared_mask_are_refused() -> None:
    prepared = a.causal().prepare(3, 6)
    for lower in (prepared.spans, prepared.placed, prepared.prepare):
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
    np.testing.assert_array_equal(mask.placed(3, 6).q_index, ROWS[None])


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
