"""FlashMask: what PaddlePaddle's documentation says of each number, both directions."""

from __future__ import annotations

import numpy as np
import pytest
from every_mask import every_mask

import attnspan as a
from attnspan.interchange import FlashMask, from_flashmask, to_flashmask

FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]


def by_definition(numbers: np.ndarray, causal: bool, q_len: int) -> np.ndarray:
    """Bool (B, H, q_len, k_len), from `flashmask_to_densemask` in PaddlePaddle's documentation."""
    row, key = np.arange(q_len)[:, None], np.arange(numbers.shape[2])
    n = [numbers[..., None, :, i] for i in range(numbers.shape[-1])]
    if causal:
        hidden = (row >= n[0]) & (True if len(n) == 1 else row < n[1])
        return ~(hidden | (row < key))
    if len(n) == 2:
        return ~((row >= n[0]) | (row < n[1]))
    return ~(((row >= n[0]) & (row < n[1])) | ((row >= n[2]) & (row < n[3])))


def pairs(mask: a.Mask, q_len: int, k_len: int, batch: int, heads: int = 1) -> np.ndarray:
    found = mask.prepare(q_len, k_len, batch=batch, heads=heads).dense()
    return np.broadcast_to(found, (batch, heads, q_len, k_len))


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 7, 32])
@pytest.mark.parametrize(("causal", "count"), FORMS)
def test_500_random_masks_have_the_pairs_of_the_definition(causal: bool, count: int, n: int) -> None:
    rng = np.random.default_rng(n)
    q_len = n if causal else n + 3
    numbers = rng.integers(0, q_len + 2, (500, 1, n, count), dtype=np.int32)
    # Neighbours that are alike, as in real masks, in every second one.
    numbers[::2] = numbers[::2, :, np.arange(n) // 3]
    wanted = by_definition(numbers, causal, q_len)
    mask = from_flashmask(numbers, causal, q_len=q_len)
    np.testing.assert_array_equal(pairs(mask, q_len, n, 500), wanted)
    written = to_flashmask(mask, q_len, n, batch=500)
    assert written[0].dtype == np.int32
    np.testing.assert_array_equal(by_definition(*written, q_len), wanted)


def test_planes_of_batch_and_heads_stay_apart() -> None:
    rng = np.random.default_rng(1)
    numbers = rng.integers(0, 13, (3, 2, 12, 4))
    wanted = by_definition(numbers, False, 12).repeat(2, axis=1)
    np.testing.assert_array_equal(pairs(from_flashmask(numbers, False, heads=4), 12, 12, 3, 4), wanted)
    numbers[:] = numbers[:1]
    assert from_flashmask(numbers, False).bounds.shape[:2] == (1, 2)


def _can_be_written(dense: np.ndarray, causal: bool) -> bool:
    """Count the hidden intervals of each key, pair by pair."""
    *_, q_len, k_len = dense.shape
    row, key = np.arange(q_len)[:, None], np.arange(k_len)
    if causal and (q_len != k_len or (dense & (row < key)).any()):
        return False
    hidden = ~dense & ((row >= key) if causal else True)
    before = np.concatenate([np.zeros_like(hidden[..., :1, :]), hidden[..., :-1, :]], axis=-2)
    return bool((hidden & ~before).sum(-2).max() <= (1 if causal else 2))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_every_mask_is_written_exactly_or_refused(causal: bool) -> None:
    found = {True: 0, False: 0}
    for x in every_mask():
        can = _can_be_written(x.dense, causal)
        found[can] += 1
        if can:
            batch, heads, q_len, k_len = x.dense.shape
            numbers, form = to_flashmask(x.mask, q_len, k_len, batch=batch, heads=heads, causal=causal)
            assert form is causal
            np.testing.assert_array_equal(
                np.broadcast_to(by_definition(numbers, form, q_len), x.dense.shape), x.dense, x.name
            )
            back = from_flashmask(numbers, form, q_len=q_len)
            np.testing.assert_array_equal(pairs(back, q_len, k_len, batch, heads), x.dense, x.name)
        else:
            with pytest.raises(ValueError, match="to_flashmask"):
                to_flashmask(x.mask, **x.options(), batch=2, heads=x.dense.shape[1], causal=causal)
    assert min(found.values()) > 30


def test_the_shorter_form_is_written() -> None:
    documents = a.documents([0, 3, 3, 8])
    assert to_flashmask(documents & a.causal(), 8).startend_row_indices.tolist() == [[[[3]] * 3 + [[8]] * 5]]
    assert to_flashmask(documents, 8).causal is False
    assert to_flashmask(a.window(1, 1) | a.global_keys(1), 8)[0].shape[-1] == 2


def test_a_refusal_names_the_first_query_and_the_key() -> None:
    dense = np.ones((6, 6), bool)
    dense[[0, 2, 4], 1] = False
    with pytest.raises(ValueError, match=r"at most two hidden ranges .*, got query 4 and key 1 \(batch 0"):
        to_flashmask(a.from_dense(dense), 6)
    with pytest.raises(ValueError, match=r"causal=True, got query 0 and key 1 \(batch 0, head 0\)"):
        to_flashmask(a.window(2, 2), 6, causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_results_are_of_the_framework_of_the_input(framework: str) -> None:
    module = pytest.importorskip(framework)
    make = module.tensor if framework == "torch" else module.numpy.asarray
    numbers = make(np.array([2, 2, 4, 4], np.int32).reshape(1, 1, 4, 1))
    mask = from_flashmask(numbers, True)
    assert isinstance(mask.bounds, type(numbers))
    written = to_flashmask(mask, 4)
    assert isinstance(written[0], type(numbers))
    assert written[0].tolist() == numbers.tolist()
    assert written[0].dtype == numbers.dtype


@pytest.mark.slow
def test_the_spans_are_fewer_than_booleans_or_a_warning_says_so() -> None:
    numbers = np.zeros((1, 1, 2048, 2), np.int32)
    numbers[0, 0, ::2, 0] = 2048
    with pytest.warns(a.SpansLargerThanMask, match="from_flashmask: queries have up to 1024 spans"):
        mask = from_flashmask(numbers, False)
    assert mask.bounds.shape == (1, 1, 2048, 1024, 2)


GOOD = np.full((1, 1, 4, 1), 4)
BAD = [
    (lambda: from_flashmask(GOOD[0], True), "an array with 4 axes, got \\(1, 4, 1\\)"),
    (lambda: from_flashmask(GOOD / 1, True), "an integer array, got float64"),
    (lambda: from_flashmask(GOOD, False), "2 or 4 numbers for each key with causal=False, got 1"),
    (lambda: from_flashmask(GOOD.repeat(4, -1), True), "1 or 2 numbers for each key .*, got 4"),
    (lambda: from_flashmask(GOOD - 5, True), "query numbers of at least 0, got -1"),
    (lambda: from_flashmask(GOOD, True, q_len=5), "4 with causal=True, got 5"),
    (lambda: from_flashmask(GOOD, 1), "True or False, got int"),
    (lambda: from_flashmask(np.arange(8).reshape(1, 2, 4, 1), True, heads=3), "multiple of the 2 key heads"),
    (lambda: to_flashmask(GOOD, 4), "to_flashmask: mask"),
    (lambda: to_flashmask(a.causal(), 4, 5, causal=True), "expected q_len = k_len, got \\(4, 5\\)"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_mistakes_are_explained(number: int) -> None:
    call, message = BAD[number]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_compiled_function_has_no_values_to_read() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(ValueError, match=r"got a traced array\. Call it outside the compiled function"):
        jax.jit(lambda x: from_flashmask(x, True).bounds)(GOOD)
    torch = pytest.importorskip("torch")
    import attnspan.torch  # noqa: F401  (its errors keep their text in the compiler)

    compiled = torch.compile(lambda x: from_flashmask(x, True).bounds, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="Call it outside the compiled function"):
        compiled(torch.tensor(GOOD))


def test_the_record_has_two_names() -> None:
    assert FlashMask(GOOD, True)._fields == ("startend_row_indices", "causal")
