"""Masks as objects: compared, hashed, moved, collated; masks of a user's own class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from attnspan import Mask, causal, from_predicate, full, global_keys, key_padding, segments, window
from attnspan.masks.intervals import Interval, Rows
from attnspan.torch import attention
from attnspan.torch._lowered import _memory

IDS = torch.tensor([0, 0, 1, 1])


def test_masks_without_arrays_are_equal_by_structure() -> None:
    same = [window(3), causal() & window(3), (causal() & window(2)) | global_keys(1), from_predicate(max)]
    for mask, other in zip(same, list(map(eval, map(repr, same[:3]))), strict=False):
        assert mask == other
        assert hash(mask) == hash(other)
    assert window(3) != window(4)
    assert window(1) != window(1.0 and 2)
    assert causal() & window(3) != causal() | global_keys(3)
    assert causal() != full()
    assert len({window(3), window(3), causal()}) == 2
    assert from_predicate(max) == from_predicate(max) != from_predicate(min)


def test_masks_with_arrays_are_equal_to_themselves_alone() -> None:
    mask = causal() & segments(IDS)
    assert mask == mask
    assert mask != causal() & segments(IDS)
    assert len({mask, mask, segments(IDS), segments(IDS)}) == 3


def test_a_moved_mask_is_the_same_mask() -> None:
    mask = causal() & segments(IDS, IDS)
    moved = mask.to("meta", non_blocking=True)
    q_ids, kv_ids = moved.operands[1].q_ids, moved.operands[1].kv_ids
    assert q_ids is kv_ids
    assert q_ids.is_meta
    assert window(3).to("meta") == window(3)
    kept = segments(np.arange(4)).to("meta")
    assert isinstance(kept.q_ids, np.ndarray)
    batch = send_to_device({"mask": mask, "x": IDS}, "meta")
    assert batch["mask"].operands[1].q_ids.is_meta
    assert tree_map(lambda x: x + 1, segments(IDS)).q_ids.tolist() == [1, 1, 2, 2]


def test_masks_of_examples_are_collated() -> None:
    batch = default_collate([{"mask": causal() & segments(IDS + i), "x": IDS} for i in range(2)])
    q = torch.randn(2, 1, 4, 8)
    wanted = attention(q, q, q, mask=causal() & segments(torch.stack([IDS, IDS + 1])))
    assert torch.equal(attention(q, q, q, mask=batch["mask"]), wanted)
    assert default_collate([window(3), window(3)]) == window(3)
    for masks in ([window(3), window(4)], [segments(IDS), segments(IDS[:3])], [causal(), segments(IDS)]):
        with pytest.raises(ValueError, match=r"default_collate: expected .* Make the mask of the batch"):
            default_collate(masks)


FIRST = 1


class _Mine(Mask):
    """Sees the keys from `start` on, by methods of tensors and a number from elsewhere."""

    start: Any

    def __post_init__(self) -> None:
        self._set(doubled=self.start * 2)

    def _lower(self, low: Any) -> Rows:
        lo = self.doubled.long().add(FIRST).view(1, 1, 1)
        return Rows((Interval(lo.expand(1, 1, low.q_len), None),))


def test_a_mask_of_a_class_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, q = _Mine(torch.tensor([1])), torch.randn(1, 1, 6, 8)

    def sees(first: int) -> bool:
        seen = key_padding(6 - first, side="left") if first else full()
        return torch.equal(attention(q, q, q, mask=mask), attention(q, q, q, mask=seen))

    assert sees(3)
    assert id(mask) not in _memory._masks
    monkeypatch.setitem(globals(), "FIRST", 2)
    assert sees(4)
    assert torch.equal(attention(q, q, q, mask=mask & window(5)), attention(q, q, q, mask=mask & window(5)))
