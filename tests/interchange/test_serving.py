"""FlashInfer's, sglang's and vLLM's formats: bits as NumPy packs them, and caches that read the pages."""

from __future__ import annotations

import numpy as np
import pytest
from every_mask import every_mask

import attnspan as a
from attnspan.interchange import from_bits, page_table_from_blocks, page_table_from_csr, to_bits


def _offsets(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.concatenate([[0], rng.integers(0, 7, n).cumsum()])


@pytest.mark.slow
def test_500_random_masks_have_the_pairs_of_their_bits() -> None:
    """FlashInfer packs the pairs of each request by themselves, by `packbits(..., bitorder="little")`."""
    rng = np.random.default_rng(0)
    for n in range(500):
        count = int(rng.integers(1, 5))
        q, k = _offsets(rng, count), _offsets(rng, count)
        q[1:] += 1  # at least one query
        parts = [rng.random((q[r + 1] - q[r], k[r + 1] - k[r])) < 0.6 for r in range(count)]
        wanted = np.zeros((q[-1], k[-1]), bool)
        for r, part in enumerate(parts):
            wanted[q[r] : q[r + 1], k[r] : k[r + 1]] = part
        packed = [np.packbits(x, axis=None, bitorder="little") for x in parts]
        indptr = np.cumsum([0, *map(len, packed)])
        given = [np.concatenate(packed), q, k, *([indptr] if n % 2 else [])]
        mask = from_bits(*given)
        found = mask.prepare(*wanted.shape).dense()[0, 0]
        np.testing.assert_array_equal(found, wanted)
        flat = from_bits(np.concatenate([x.ravel() for x in parts]), q, k)
        np.testing.assert_array_equal(flat.prepare(*wanted.shape).dense()[0, 0], wanted)
        written = to_bits(mask, q, k)
        assert written.packed.dtype == np.uint8
        np.testing.assert_array_equal(written.packed, given[0])
        np.testing.assert_array_equal(written.indptr, indptr)


def test_every_mask_is_written_exactly_as_one_request() -> None:
    for x in every_mask()[::2]:
        plane = x.dense[-1, -1]
        q_len, k_len = plane.shape
        bits, _ = to_bits(a.from_dense(plane), [0, q_len], [0, k_len])
        np.testing.assert_array_equal(bits, np.packbits(plane, axis=None, bitorder="little"), x.name)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_results_are_of_the_framework_of_the_input(framework: str) -> None:
    module = pytest.importorskip(framework)
    make = module.tensor if framework == "torch" else module.numpy.asarray
    bits = make(np.array([217, 1], np.uint8))
    mask = from_bits(bits, [0, 3], [0, 3])
    assert isinstance(mask.bounds, type(bits))
    written = to_bits(mask, [0, 3], [0, 3])
    assert written.packed.tolist() == [217, 1]
    assert written.packed.dtype == bits.dtype
    table = page_table_from_blocks(make(np.array([[7, 4], [5, 0]])), make(np.array([9, 8])), 8)
    assert isinstance(table.table, type(bits))
    assert table.table.tolist() == [[7, 4], [5, -1]]


def test_a_paged_cache_reads_the_pages_of_both_tables() -> None:
    """Random page tables: the cache gathers the tokens that the pages hold, in order."""
    torch = pytest.importorskip("torch")
    from attnspan.torch import PagedCache

    rng = np.random.default_rng(0)
    for _ in range(10):
        lengths = rng.integers(1, 25, 3)
        count = -(-lengths // 8)
        pages = rng.permutation(12)[: count.sum()]
        starts = np.concatenate([[0], count.cumsum()])
        by_csr = page_table_from_csr(starts, pages, (lengths - 1) % 8 + 1, 8)
        rows = rng.integers(0, 99, (3, 3))
        for b in range(3):
            rows[b, : count[b]] = pages[starts[b] : starts[b + 1]]
        by_blocks = page_table_from_blocks(rows, lengths, 8)
        assert by_csr.lengths.tolist() == by_blocks.lengths.tolist() == lengths.tolist()
        width = count.max()
        np.testing.assert_array_equal(by_csr.table, by_blocks.table[:, :width])
        assert (by_blocks.table[:, width:] == -1).all()
        cache = PagedCache(pages=12, page_len=8, kv_heads=1, head_dim=4, batch=3, max_len=24)
        cache.table.copy_(torch.from_numpy(by_blocks.table))
        pool = torch.randn(12, 1, 8, 4)
        cache._keys[:12] = pool
        cache._values[:12] = pool
        cache.lengths.copy_(torch.from_numpy(by_blocks.lengths))
        keys = cache.gathered()[0]
        for b, n in enumerate(lengths.tolist()):
            wanted = torch.cat([pool[p, 0] for p in pages[starts[b] : starts[b + 1]]])[:n]
            assert torch.equal(keys[b, 0, :n], wanted)


BITS, Q = np.array([217, 1], np.uint8), [0, 3]
BAD = [
    (lambda: from_bits(BITS.astype(int), Q, Q), "uint8 or bool, got int64"),
    (lambda: from_bits(BITS[None], Q, Q), "one axis, got \\(1, 2\\)"),
    (lambda: from_bits(BITS[:1], Q, Q), "at least 2 bytes, got 1"),
    (lambda: from_bits(BITS, Q, [0, 3, 4]), "as many requests as qo_indptr, 1, got 2"),
    (
        lambda: from_bits(BITS, [0, 3, 2], [0, 3, 4]),
        "qo_indptr: expected ascending offsets .*got \\[0, 3, 2\\]",
    ),
    (lambda: from_bits(BITS, Q, [1, 3]), "kv_indptr: expected ascending offsets that start at 0"),
    (lambda: from_bits(BITS, Q, Q, [0]), "indptr: expected as many requests as qo_indptr, 1, got 0"),
    (lambda: from_bits(BITS, Q, [0.0, 3.0]), "an integer array, got float64"),
    (
        lambda: to_bits(a.causal(), [0, 2, 4], [0, 2, 4]),
        "got query 2 of request 1, which sees a key of another request",
    ),
    (lambda: to_bits(BITS, Q, Q), "to_bits: mask"),
    (lambda: page_table_from_csr([0, 2], [1], [1], 8), "indices: expected 2 pages, got 1"),
    (lambda: page_table_from_csr([0, 1], [1], [9], 8), "1 to 8, got 9 for batch element 0"),
    (lambda: page_table_from_csr([0, 1], [1], [0], 8), "1 to 8, got 0 for batch element 0"),
    (lambda: page_table_from_csr([0, 1], [-1], [1], 8), "page numbers of at least 0, got -1 for batch"),
    (lambda: page_table_from_csr([0, 1], [1], [1, 1], 8), "a length for each of 1 batch elements, got 2"),
    (lambda: page_table_from_csr([0, 1], [1], [1], 0), "page_len: expected 1 to"),
    (lambda: page_table_from_blocks([[1, 2]], [17], 8), "0 to 16, got 17 for batch element 0"),
    (lambda: page_table_from_blocks([[1, -1]], [9], 8), "page numbers of at least 0, got -1"),
    (lambda: page_table_from_blocks([[1, 2]], [1, 2], 8), "a length for each of 1 batch elements, got 2"),
    (lambda: page_table_from_blocks([1, 2], [1, 2], 8), "an array with 2 axes"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_mistakes_are_explained(number: int) -> None:
    call, message = BAD[number]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
