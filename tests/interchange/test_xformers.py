"""xFormers' biases: classes with the fields of its classes, against what its `materialize` documents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import attnspan as a
from attnspan.interchange import from_xformers

torch = pytest.importorskip("torch")


def bias(name: str, **fields: Any) -> Any:
    return type(name, (), {"materialize": None, **fields})()


def corner(n: int, m: int, left: int | None, right: int | None, bottom: bool) -> np.ndarray:
    """`torch.tril` and `torch.triu` with the diagonals of `_materialize_causal_mask`, and of local masks."""
    shift = m - n if bottom else 0
    found = np.ones((n, m), bool)
    found = found if right is None else np.tril(found, shift + right)
    return found if left is None else np.triu(found, shift - left)


def _seqinfo(lengths: np.ndarray) -> Any:
    starts = [0, *lengths.cumsum().tolist()]
    return SimpleNamespace(seqstart=torch.tensor(starts, dtype=torch.int32), seqstart_py=starts)


def _placed(starts: np.ndarray, lengths: np.ndarray) -> Any:
    return SimpleNamespace(
        seqstart=torch.tensor(starts), seqstart_py=starts.tolist(), seqlen_py=lengths.tolist()
    )


#: Class -> (its window, bottom-right), with w for `_window_size` and l, r for `window_left`, `window_right`.
BLOCKS = {
    "BlockDiagonalMask": ("", True),
    "BlockDiagonalCausalMask": ("c", False),
    "BlockDiagonalCausalFromBottomRightMask": ("c", True),
    "BlockDiagonalCausalLocalAttentionMask": ("w", False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": ("w", True),
    "BlockDiagonalPaddedKeysMask": ("", True),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ("c", True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": ("w", True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": ("lr", True),
    "BlockDiagonalGappyKeysMask": ("", True),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": ("c", True),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_random_documents_have_the_pairs_of_materialize(name: str) -> None:
    window, bottom = BLOCKS[name]
    rng = np.random.default_rng(0)
    for n in range(50):
        q_lengths, k_lengths = rng.integers(0, 6, (2, rng.integers(1, 5)))
        q_lengths[0] += 1
        k_lengths = q_lengths if n % 3 == 0 else k_lengths
        w, left, right = rng.integers(1, 5), rng.integers(0, 4), rng.integers(0, 4)
        q = _seqinfo(q_lengths)
        if "Keys" in name:
            room = k_lengths + rng.integers(0, 4, len(k_lengths))
            starts = np.concatenate([[0], room.cumsum()])
            k = _placed(starts, k_lengths)
        else:
            starts = np.concatenate([[0], k_lengths.cumsum()])
            k = q if n % 3 == 0 else _seqinfo(k_lengths)
        fields = {"_window_size": int(w), "window_left": int(left), "window_right": int(right)}
        limits = {"": (None, None), "c": (None, 0), "w": (w - 1, 0), "lr": (left, right)}[window]
        wanted = np.zeros((q.seqstart_py[-1], starts[-1]), bool)
        for i, (n_q, n_k) in enumerate(zip(q_lengths, k_lengths, strict=True)):
            rows = slice(q.seqstart_py[i], q.seqstart_py[i] + n_q)
            wanted[rows, starts[i] : starts[i] + n_k] = corner(n_q, n_k, *limits, bottom)
        mask = from_xformers(bias(name, q_seqinfo=q, k_seqinfo=k, **fields))
        found = mask.prepare(*map(int, wanted.shape)).dense()[0, 0]
        assert isinstance(found, torch.Tensor)
        np.testing.assert_array_equal(found, wanted)


SEQUENCES = {
    "LowerTriangularMask": (None, 0, False),
    "LowerTriangularFromBottomRightMask": (None, 0, True),
    "LowerTriangularFromBottomRightLocalAttentionMask": (2, 0, True),
    "LocalAttentionFromBottomRightMask": (1, 2, True),
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("sizes", [(6, 6), (4, 7), (7, 4)])
def test_one_sequence_has_the_pairs_of_materialize(name: str, sizes: tuple[int, int]) -> None:
    left, right, bottom = SEQUENCES[name]
    found = from_xformers(bias(name, _window_size=3, window_left=1, window_right=2), *sizes)
    np.testing.assert_array_equal(found.prepare(*sizes).dense()[0, 0], corner(*sizes, left, right, bottom))


def test_masks_with_fast_kernels_stay_expressions() -> None:
    q, k = _seqinfo(np.array([2, 3])), _seqinfo(np.array([4, 3]))
    assert repr(from_xformers(None)) == "full()"
    causal = from_xformers(bias("BlockDiagonalCausalMask", q_seqinfo=q, k_seqinfo=q))
    assert repr(causal) == "documents(int32[3]) & causal()"
    local = bias(
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask", q_seqinfo=q, k_seqinfo=k, _window_size=3
    )
    assert repr(from_xformers(local)) == "documents(int32[3], cu_seqlens_k=int32[3]) & window(2)"
    assert repr(from_xformers(bias("LowerTriangularMask"), 5)) == "causal()"


BAD = [
    (lambda: from_xformers(a.causal()), "an AttentionBias of xFormers, got causal"),
    (lambda: from_xformers(bias("LowerTriangularMask")), "q_len: expected the number of queries, got None"),
    (
        lambda: from_xformers(bias("PagedBlockDiagonalPaddedKeysMask")),
        "keys on pages. .* page_table_from_blocks",
    ),
    (
        lambda: from_xformers(bias("LowerTriangularMaskWithTensorBias")),
        "also adds a tensor to the scores. .* tensor as bias=",
    ),
    (lambda: from_xformers(bias("MyMask")), "got MyMask. Pass from_dense"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_mistakes_are_explained(number: int) -> None:
    call, message = BAD[number]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
