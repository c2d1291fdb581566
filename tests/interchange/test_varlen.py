"""Offsets of packed documents: flash-attn's, cuDNN's and Transformer Engine's, both directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from every_mask import every_mask

import attnspan as a
from attnspan.interchange import from_varlen, to_varlen


def by_definition(
    cu_q: Any, cu_k: Any, *, causal: bool, window: Any, align: str = "bottom-right", padded: Any = None
) -> np.ndarray:
    """Pairs from flash-attn's README: keys i + k - q - left to i + k - q + right, within each document."""
    places_q, places_k = (cu_q, cu_k) if padded is None else padded
    found = np.zeros((places_q[-1], places_k[-1]), bool)
    left, right = window[0], 0 if causal else window[1]
    for d in range(len(cu_q) - 1):
        n, m = cu_q[d + 1] - cu_q[d], cu_k[d + 1] - cu_k[d]
        at = np.arange(n)[:, None] + (m - n if align == "bottom-right" else 0)
        key = np.arange(m)
        seen = ((left < 0) | (key >= at - left)) & ((right < 0) | (key <= at + right))
        found[places_q[d] : places_q[d] + n, places_k[d] : places_k[d] + m] = seen
    return found


def _random(rng: np.random.Generator, least: int = 0) -> tuple[Any, ...]:
    n = rng.integers(1, 6)
    lengths = rng.integers(least, 6, (2, n))
    cu = np.concatenate([np.zeros((2, 1), int), lengths.cumsum(1)], 1)
    return cu[0], cu[1], bool(rng.integers(2)), tuple(rng.integers(-1, 4, 2).tolist())


def dense(mask: a.Mask, q_len: int, k_len: int) -> np.ndarray:
    return mask.prepare(int(q_len), int(k_len)).dense()[0, 0]


@pytest.mark.slow
def test_500_random_masks_have_the_pairs_of_the_definition_and_are_written_back() -> None:
    rng = np.random.default_rng(0)
    for n in range(500):
        cu_q, cu_k, causal, window = _random(rng)
        cu_k = cu_q if n % 3 == 0 else cu_k
        align = ("bottom-right", "top-left")[n % 2]
        options = {"causal": causal, "align": align}
        mask = from_varlen(cu_q, cu_k, window_size=window, **options)
        wanted = by_definition(cu_q, cu_k, window=window, **options)
        sizes = wanted.shape
        np.testing.assert_array_equal(dense(mask, *sizes), wanted)
        if cu_k is cu_q or align == "bottom-right":
            assert "documents" in repr(mask)
            q, k, most_q, most_k, is_causal, sides = to_varlen(mask, *sizes)
            np.testing.assert_array_equal(by_definition(q, k, causal=is_causal, window=sides), wanted)
            assert (most_q, most_k) == (np.diff(q).max(), np.diff(k).max())


@pytest.mark.slow
def test_500_random_padded_masks_have_the_pairs_of_the_definition() -> None:
    rng = np.random.default_rng(1)
    for n in range(500):
        cu_q, cu_k, causal, window = _random(rng)
        room = rng.integers(0, 3, (2, len(cu_q) - 1))
        padded = [
            np.concatenate([[0], (np.diff(cu) + x).cumsum()])
            for cu, x in zip((cu_q, cu_k), room, strict=True)
        ]
        options = {"causal": causal, "align": ("bottom-right", "top-left")[n % 2]}
        names = {"cu_seqlens_q_padded": padded[0], "cu_seqlens_k_padded": padded[1]}
        mask = from_varlen(cu_q, cu_k, window_size=window, **options, **names)
        wanted = by_definition(cu_q, cu_k, window=window, padded=padded, **options)
        np.testing.assert_array_equal(dense(mask, *wanted.shape), wanted)


def test_every_mask_is_written_exactly_or_refused() -> None:
    written = 0
    for x in every_mask():
        for plane in x.dense.reshape(-1, *x.dense.shape[2:])[:2]:
            try:
                q, k, _, _, causal, window = to_varlen(a.from_dense(plane), *plane.shape)
            except ValueError:
                continue
            np.testing.assert_array_equal(by_definition(q, k, causal=causal, window=window), plane, x.name)
            written += 1
    assert written > 50


def test_a_mask_that_torch_flash_runs_stays_an_expression() -> None:
    cu = np.array([0, 3, 8])
    assert repr(from_varlen(cu)) == "documents(int64[3])"
    assert repr(from_varlen(cu, causal=True)) == "documents(int64[3]) & causal()"
    assert repr(from_varlen(cu, window_size=(4, 0))) == "documents(int64[3]) & window(4)"
    assert from_varlen(cu, cu, causal=True).band() is not None


def test_a_refusal_names_the_first_query() -> None:
    with pytest.raises(ValueError, match="got query 3, which sees several spans of keys"):
        to_varlen(a.causal() & (a.window(1) | a.global_keys(1)), 6)
    two_windows = np.tri(8, dtype=bool) & ~np.tri(8, k=-3, dtype=bool)
    two_windows[6, 3] = True
    with pytest.raises(ValueError, match="got query 6, which does not fit a window of 2 keys to the left"):
        to_varlen(a.from_dense(two_windows), 8)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_results_are_of_the_framework_of_the_input(framework: str) -> None:
    module = pytest.importorskip(framework)
    make = module.tensor if framework == "torch" else module.numpy.asarray
    cu = make(np.array([0, 2, 5], np.int32))
    assert isinstance(from_varlen(cu, cu_seqlens_q_padded=cu).bounds, type(cu))
    found = to_varlen(from_varlen(cu, causal=True), 5)
    assert isinstance(found.cu_seqlens_q, type(cu))
    assert found.cu_seqlens_k.tolist() == [0, 2, 5]


CU = [0, 2, 5]
BAD = [
    (lambda: from_varlen([0.0, 2.0]), "cu_seqlens_q: expected an integer array, got float64"),
    (lambda: from_varlen([2]), "at least 2 offsets"),
    (lambda: from_varlen(CU, [0, 5]), "as many documents for keys as for queries, 2, got 1"),
    (lambda: from_varlen(CU, [0, 5], align="top-left", causal=True), "keys as for queries, 2, got 1"),
    (lambda: from_varlen(CU, align="left"), "bottom-right or top-left, got left"),
    (lambda: from_varlen(CU, window_size=3), "two numbers, left and right, got 3"),
    (lambda: from_varlen(CU, window_size=(-2, 0)), "numbers of at least -1, got -2"),
    (lambda: from_varlen(CU, causal=1), "True or False, got int"),
    (lambda: from_varlen(CU, cu_seqlens_q_padded=[0, 4]), "as many offsets as without padding, 3, got 2"),
    (lambda: from_varlen(CU, cu_seqlens_q_padded=[0, 4, 6]), "got 2 places for document 1 of 3 tokens"),
    (lambda: from_varlen(CU, cu_seqlens_q_padded=[0, 9, 6]), "ascending offsets that start at 0"),
    (lambda: from_varlen([1, 2], cu_seqlens_q_padded=[0, 4]), r"start at 0, got \[1, 2\]"),
    (lambda: to_varlen(CU, 5), "to_varlen: mask"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_mistakes_are_explained(number: int) -> None:
    call, message = BAD[number]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
