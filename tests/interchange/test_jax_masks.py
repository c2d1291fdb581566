"""Masks of splash, evaluated by the installed library, and of tokamax, from its `Mask.as_array`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel  # noqa: E402
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash  # noqa: E402

import attnspan as a  # noqa: E402
from attnspan.interchange import from_splash, from_tokamax  # noqa: E402


def dense(mask: a.Mask, q_len: int, k_len: int, **sizes: int) -> np.ndarray:
    return np.asarray(mask.prepare(q_len, k_len, **sizes).dense())


def _leaf(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    window = tuple(None if x < 0 else x for x in rng.integers(-1, 6, 2).tolist())
    return [
        lambda: splash.CausalMask(shape, int(rng.integers(-3, 6))),
        lambda: splash.CausalMask(shape, shape[1] - shape[0]),
        lambda: splash.LocalMask(shape, window, int(rng.integers(-3, 6))),
        lambda: splash.ChunkedCausalMask(shape, int(rng.integers(1, 6))),
        lambda: splash.NumpyMask(rng.random(shape) < 0.5),
        lambda: splash.FullMask(shape),
    ][rng.integers(6)]()


@pytest.mark.slow
def test_500_random_trees_have_the_pairs_that_splash_computes() -> None:
    rng = np.random.default_rng(0)
    for n in range(500):
        shape = tuple(rng.integers(1, 16, 2).tolist())
        mask = _leaf(rng, shape)
        for _ in range(n % 3):
            mask = mask & _leaf(rng, shape) if rng.random() < 0.5 else mask | _leaf(rng, shape)
        wanted = mask[: shape[0], : shape[1]]
        np.testing.assert_array_equal(dense(from_splash(mask), *shape)[0, 0], wanted, str(mask))


def test_heads_and_other_masks_are_evaluated() -> None:
    shape = (8, 8)
    heads = [splash.CausalMask(shape), splash.LocalMask(shape, (2, 1), 0), splash.ChunkedCausalMask(shape, 3)]
    found = dense(from_splash(splash.MultiHeadMask(heads)), *shape, heads=3)[0]
    np.testing.assert_array_equal(found, np.stack([x[:8, :8] for x in heads]))

    class Striped(splash.Mask):
        shape = (6, 9)

        def __getitem__(self, index: Any) -> np.ndarray:
            return (np.arange(6)[:, None] + np.arange(9))[index] % 3 > 0

    np.testing.assert_array_equal(dense(from_splash(Striped()), 6, 9)[0, 0], Striped()[:, :])

    class Reversed(splash.CausalMask):  # a subclass may compute anything
        def __getitem__(self, index: Any) -> np.ndarray:
            return ~super().__getitem__(index)

    np.testing.assert_array_equal(dense(from_splash(Reversed(shape)), *shape)[0, 0], ~np.tri(8, dtype=bool))


def test_queries_in_another_order_keep_their_rows() -> None:
    mask = splash.CausalMask((8, 8))
    mask.q_sequence = np.array([0, 7, 1, 6, 2, 5, 3, 4])  # as splash permutes it for a balanced ring
    np.testing.assert_array_equal(dense(from_splash(mask), 8, 8)[0, 0], mask[:8, :8])


def test_known_masks_stay_expressions() -> None:
    assert repr(from_splash(splash.CausalMask((4, 4)))) == "causal()"
    assert repr(from_splash(splash.LocalMask((4, 8), (3, 0), 4))) == "window(3)"
    assert repr(from_splash()) == "full()"


@pytest.mark.slow
def test_segment_ids_have_the_pairs_of_equal_ids() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        q, kv = rng.integers(0, 4, (2, 2, 9))
        ids = kernel.SegmentIds(jax.numpy.asarray(q), jax.numpy.asarray(kv))
        wanted = (q[:, :, None] == kv[:, None]) & np.tri(9, dtype=bool)
        found = dense(from_splash(splash.CausalMask((9, 9)), ids), 9, 9, batch=2)
        np.testing.assert_array_equal(found[:, 0], wanted)


def by_as_array(mask: Any, q_len: int, k_len: int) -> np.ndarray:
    """tokamax's `Mask.as_array`: all fields that are set hold."""
    q, k = np.arange(q_len)[:, None], np.arange(k_len)
    found = np.ones((1, 1, q_len, k_len), bool)
    found = found if mask.bool_mask is None else found & mask.bool_mask
    found = found if mask.q_start is None else found & (q >= mask.q_start[..., None, :])
    found = found if mask.q_end is None else found & (q < mask.q_end[..., None, :])
    found = found if mask.k_start is None else found & (k >= mask.k_start[..., None])
    found = found if mask.k_end is None else found & (k < mask.k_end[..., None])
    return found & (q >= k) if mask.is_causal else found


@pytest.mark.slow
def test_500_random_masks_of_tokamax_have_the_pairs_of_as_array() -> None:
    rng = np.random.default_rng(2)
    for _ in range(500):
        q_len, k_len = rng.integers(1, 14, 2).tolist()
        fields: dict[str, Any] = {"is_causal": bool(rng.integers(2)), "bool_mask": None}
        if rng.random() < 0.3:
            fields["bool_mask"] = rng.random((2, 3, q_len, k_len)) < 0.7
        for name in ("q_start", "q_end", "k_start", "k_end"):
            size, other = (q_len, k_len) if name[0] == "k" else (k_len, q_len)
            lead = [(2, 3), (1, 3), (3,), (), (2, 1)][rng.integers(5)]
            fields[name] = rng.integers(-2, other + 3, (*lead, size)) if rng.random() < 0.5 else None
        mask = SimpleNamespace(**fields)
        wanted = np.broadcast_to(by_as_array(mask, q_len, k_len), (2, 3, q_len, k_len))
        found = dense(from_tokamax(mask, q_len, k_len), q_len, k_len, batch=2, heads=3)
        np.testing.assert_array_equal(np.broadcast_to(found, wanted.shape), wanted)


NONE = dict.fromkeys(["bool_mask", "q_start", "q_end", "k_start", "k_end"])
BAD = [
    (
        lambda: from_splash(np.tri(4) > 0),
        "a mask of splash, got ndarray. Pass a Mask of splash_attention_mask",
    ),
    (lambda: from_splash(a.causal()), "a mask of splash, got causal"),
    (
        lambda: from_splash(splash.FullMask((4, 4)), kernel.SegmentIds(*np.ones((2, 3), int))),
        "ids for \\(4, 4\\)",
    ),
    (
        lambda: from_splash(None, kernel.SegmentIds(*np.ones((2, 3)))),
        "segment_ids.q: expected an integer array",
    ),
    (lambda: from_tokamax(None, 4, 4), "a Mask of tokamax, got NoneType"),
    (
        lambda: from_tokamax(SimpleNamespace(**NONE | {"k_end": np.ones(3, int)}, is_causal=False), 4, 4),
        "4 entries",
    ),
    (
        lambda: from_tokamax(SimpleNamespace(**NONE | {"k_end": np.ones(4)}, is_causal=False), 4, 4),
        "k_end: expected",
    ),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_mistakes_are_explained(number: int) -> None:
    call, message = BAD[number]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_compiled_function_has_no_values_to_read() -> None:
    with pytest.raises(ValueError, match=r"segment_ids\.q: .* got a traced array"):
        jax.jit(lambda x: from_splash(None, kernel.SegmentIds(x, x)).spans(3, 3).bounds)(np.ones(3, np.int32))
