"""MagiAttention's ranges: the triangles of its own mask maker, both directions."""

from __future__ import annotations

import enum

import numpy as np
import pytest
from every_mask import every_mask

import attnspan as a
from attnspan.interchange import from_ranges, to_ranges


def by_definition(q: np.ndarray, k: np.ndarray, types: np.ndarray, q_len: int, k_len: int) -> np.ndarray:
    """How often a pair is visible, as MagiAttention cuts triangles from a large square for each pair."""
    count = np.zeros((q_len, k_len), int)
    for (qs, qe), (ks, ke), kind in zip(q.tolist(), k.tolist(), types.tolist(), strict=True):
        n, m = qe - qs, ke - ks
        if 0 in (n, m):
            continue
        square = np.ones((max(n, m),) * 2, int)
        part = square[:n, :m]
        part = part * np.tril(square)[-n:, -m:] if kind in (1, 3) else part
        part = part * np.triu(square)[:n, :m] if kind in (2, 3) else part
        count[qs:qe, ks:ke] += part
    return count


def _random(rng: np.random.Generator, q_len: int, k_len: int) -> tuple[np.ndarray, ...]:
    n = int(rng.integers(0, 5))
    q = np.sort(rng.integers(0, q_len + 1, (n, 2)), -1)
    k = np.sort(rng.integers(0, k_len + 1, (n, 2)), -1)
    return q, k, rng.integers(0, 4, n)


def dense(mask: a.Mask, q_len: int, k_len: int) -> np.ndarray:
    return mask.prepare(q_len, k_len).dense()[0, 0]


@pytest.mark.slow
def test_500_random_masks_have_the_pairs_of_the_definition() -> None:
    rng, read, refused = np.random.default_rng(0), 0, 0
    while read < 500:
        q_len, k_len = rng.integers(1, 20, 2).tolist()
        q, k, types = _random(rng, q_len, k_len)
        count = by_definition(q, k, types, q_len, k_len)
        if count.max() > 1:
            refused += 1
            with pytest.raises(ValueError, match=r"pairs \d and \d, which both show query"):
                from_ranges(q, k, types, q_len=q_len, k_len=k_len)
            continue
        read += 1
        mask = from_ranges(q, k, types, q_len=q_len, k_len=k_len)
        np.testing.assert_array_equal(dense(mask, q_len, k_len), count == 1)
        written = to_ranges(mask, q_len, k_len)
        np.testing.assert_array_equal(by_definition(*written, q_len, k_len), count)
    assert refused > 100


@pytest.mark.slow
def test_every_mask_is_written_exactly() -> None:
    for x in every_mask():
        for plane in x.dense.reshape(-1, *x.dense.shape[2:])[:2]:
            found = to_ranges(a.from_dense(plane), *plane.shape)
            np.testing.assert_array_equal(by_definition(*found, *plane.shape), plane, x.name)
            back = from_ranges(*found, q_len=plane.shape[0], k_len=plane.shape[1])
            np.testing.assert_array_equal(dense(back, *plane.shape), plane, x.name)


CU = [0, 5, 5, 16, 22]


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        (a.full(), 1),
        (a.causal(), 1),
        (a.window(3), 2),
        (a.documents(CU), 3),
        (a.documents(CU) & a.causal(), 3),
        (a.causal() | a.prefix(7), 2),
        (a.window(2, 3), 3),
        (a.library.block_causal(6), 4),
    ],
)
def test_a_mask_of_few_parts_needs_few_ranges(mask: a.Mask, count: int) -> None:
    assert len(to_ranges(mask, 24).types) == count


def test_names_numbers_and_members_of_an_enumeration_are_types() -> None:
    kind = enum.Enum("AttnMaskType", {"CAUSAL": "causal", "BICAUSAL": "bi_causal"})
    q, k = [[0, 3], [3, 6]], [[0, 3], [1, 6]]
    wanted = dense(a.window(2), 6, 6)
    for types in ([1, 3], ["causal", "bi_causal"], list(kind), np.array([1, 3]), np.array([1, 3]).tolist()):
        np.testing.assert_array_equal(dense(from_ranges(q, k, types), 6, 6), wanted)
    np.testing.assert_array_equal(dense(from_ranges([[0, 4]], [[0, 4]], kind.CAUSAL), 4, 4), np.tri(4) > 0)
    assert not dense(from_ranges([], [], [], q_len=2, k_len=2), 2, 2).any()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_results_are_of_the_framework_of_the_input(framework: str) -> None:
    module = pytest.importorskip(framework)
    make = module.tensor if framework == "torch" else module.numpy.asarray
    ends = make(np.array([[0, 4]], np.int32))
    mask = from_ranges(ends, ends, make(np.array([1], np.int32)))
    assert isinstance(mask.bounds, type(ends))
    found = to_ranges(mask, 4)
    assert all(isinstance(x, type(ends)) for x in found)
    assert found.types.tolist() == [1]


ONE = [[0, 4]]
BAD = [
    (lambda: from_ranges([0, 4], ONE, 0), "an array with 2 axes, got \\(2,\\)"),
    (lambda: from_ranges([[0, 4, 5]], ONE, 0), "pairs, shape \\(n, 2\\), got \\(1, 3\\)"),
    (lambda: from_ranges([[0.0, 4.0]], ONE, 0), "q_ranges: expected an integer array, got float64"),
    (
        lambda: from_ranges(ONE, [[3, 1]], 0),
        "k_ranges: expected 0 <= start <= end, got \\(3, 1\\) as range 0",
    ),
    (lambda: from_ranges(ONE, [[-1, 1]], 0), "got \\(-1, 1\\) as range 0"),
    (lambda: from_ranges(ONE, ONE * 2, 0), "as many ranges of keys as of queries, 1, got 2"),
    (lambda: from_ranges(ONE, ONE, [0, 1]), "one type for each pair, 1, got 2"),
    (lambda: from_ranges(ONE, ONE, 4), "one of 0 full, 1 causal, 2 inv_causal, 3 bi_causal, got 4"),
    (lambda: from_ranges(ONE, ONE, "casual"), "got casual"),
    (lambda: from_ranges(ONE, ONE, [None]), "numbers or names, got NoneType"),
    (lambda: from_ranges(ONE, ONE, 0, q_len=3), "q_len: expected at least 4, the largest end .*, got 3"),
    (
        lambda: from_ranges([[0, 4], [2, 5]], [[0, 3], [2, 4]], 0),
        "got pairs 0 and 1, which both show query 2 key 2. MagiAttention counts such a key twice",
    ),
    (
        lambda: to_ranges(a.segments(np.array([[0, 1], [0, 0]])), 2, batch=2),
        "one mask for all .*got \\(2, 1\\)",
    ),
    (lambda: to_ranges(ONE, 4), "to_ranges: mask"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_mistakes_are_explained(number: int) -> None:
    call, message = BAD[number]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_compiled_function_has_no_values_to_read() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(ValueError, match=r"q_ranges: .* got a traced array\. Call it outside"):
        jax.jit(lambda x: from_ranges(x, x, 0).bounds)(np.array(ONE))
