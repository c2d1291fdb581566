"""Rows moved by index, by the compiled module and by torch; and the buffers that are kept for them."""

import contextlib
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from attnspan.kernels import cpu
from attnspan.parallel.torch.comm import Ranks
from attnspan.parallel.torch.keys import move

TARGET, SOURCE = (2, 7, 3, 2, 5), (3, 4, 3, 2, 5)


def _arrays(dtype: torch.dtype, strided: bool) -> tuple[Tensor, Tensor]:
    """A target and a source of other planes and lengths, contiguous or as the engine has them."""
    generator = torch.Generator().manual_seed(0)

    def one(shape: tuple[int, ...]) -> Tensor:
        if not strided:
            return torch.randn(shape, generator=generator).to(dtype)
        planes, length, inner, heads, width = shape
        # (planes, inner, heads, length, width) with more in each row, as keys beside values have.
        x = torch.randn(planes, inner, heads + 1, length, width + 3, generator=generator).to(dtype)
        return x[:, :, 1:, :, 2 : 2 + width].permute(0, 3, 1, 2, 4)

    return one(TARGET), one(SOURCE)


@pytest.mark.compiled_module("rows are moved by the module itself")
@pytest.mark.parametrize("way", ["compiled", "torch"])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize(
    ("dtype", "add"),
    [(x, False) for x in (torch.float32, torch.bfloat16, torch.float16, torch.float64)]
    + [(x, True) for x in (torch.float32, torch.float64)],
    ids=str,
)
def test_rows_go_where_the_index_says(
    way: str, dtype: torch.dtype, add: bool, strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "torch":
        monkeypatch.setattr(cpu, "core", None)
    target, source = _arrays(dtype, strided)
    to, at = np.array([13, 0, 5, 8], np.int32), np.array([11, 3, 3, 0], np.int32)
    wanted = target.clone()
    for t, s in zip(to, at, strict=True):
        row = source[s // 4, s % 4]
        wanted[t // 7, t % 7] = wanted[t // 7, t % 7] + row if add else row
    move(target, torch.from_numpy(to), source, torch.from_numpy(at), add=add)
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("way", ["compiled", "torch"])
def test_without_an_index_rows_go_in_order(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch":
        monkeypatch.setattr(cpu, "core", None)
    target, source = torch.zeros(1, 3, 1, 2, 4), torch.randn(1, 5, 1, 2, 4)
    move(target, None, source, torch.tensor([4, 0, 2], dtype=torch.int32))
    assert torch.equal(target[0], source[0, [4, 0, 2]])
    other = torch.zeros(1, 5, 1, 2, 4)
    move(other, torch.tensor([1, 4, 0], dtype=torch.int32), target, None)
    assert torch.equal(other[0, [1, 4, 0]], target[0])
    nothing = torch.zeros(1, 3, 1, 0, 4)  # of a rank that has no heads
    move(torch.zeros(1, 5, 1, 0, 4), torch.tensor([1, 4, 0], dtype=torch.int32), nothing, None)


def test_many_rows_over_threads() -> None:
    source, order = torch.randn(1, 5000, 1, 1, 3), torch.randperm(5000, dtype=torch.int32)
    target = torch.zeros_like(source)
    cpu.move_rows(target, order, source, None, num_threads=4)
    assert torch.equal(target[0, order.long()], source[0])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beyond the target": ({"to": [0, 14]}, "row 1: expected numbers below 14 and 12, got 14 and 1"),
    "beyond the source": ({"at": [0, 12]}, "row 1: .*got 1 and 12"),
    "negative": ({"to": [-1, 0]}, "row 0: .*got -1 and 0"),
    "counts": ({"to": [0]}, "from: expected as many rows as `to`, 1, got 2"),
    "dtypes": ({"source": torch.zeros(SOURCE, dtype=torch.float16)}, "source: expected rows as those"),
    "widths": ({"source": torch.zeros(3, 4, 3, 2, 6)}, "source: expected rows as those of the target"),
    "axes": ({"target": torch.zeros(2, 7, 3, 2)}, "target: expected floats"),
    "last stride": ({"source": torch.zeros(3, 4, 3, 5, 2).transpose(3, 4)}, "source: .*unit last stride"),
    "index dtype": ({"to": np.array([0, 1])}, "to: expected int32"),
    "narrow sums": (
        {"target": torch.zeros(TARGET).half(), "source": torch.ones(TARGET).half(), "add": True},
        "target: expected float32 to add to",
    ),
}


@pytest.mark.compiled_module("rows are moved by the module itself")
@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(what: str) -> None:
    changes, message = REFUSED[what]
    given = {
        "target": torch.zeros(TARGET),
        "to": [0, 1],
        "source": torch.ones(SOURCE),
        "at": [0, 1],
        "add": False,
        **changes,
    }
    to, at = (np.array(x, np.int32) if isinstance(x, list) else x for x in (given["to"], given["at"]))
    with pytest.raises(ValueError, match=message):
        cpu.move_rows(given["target"], to, given["source"], at, num_threads=1, add=given["add"])
    assert not given["target"].any()


#: Smaller buffers are the allocator's.
KEPT, LIKE = 1 << 20, torch.zeros(1)


@pytest.fixture
def ranks() -> Ranks:
    """Buffers are kept for the ranks of one mesh; no process group is asked."""
    group = Mock(group_name="of this test")
    return Ranks(group, group, group, Mock())


def test_a_buffer_is_used_again_by_the_next_call_and_by_nobody_before(ranks: Ranks) -> None:
    with torch.inference_mode(), ranks.scratch() as first, ranks.scratch() as second:
        x, y = first.new("x", (KEPT // 4,), LIKE), second.new("x", (KEPT // 4,), LIKE)
        other = first.new("other", (KEPT,), LIKE, torch.uint8)
        assert len({x.data_ptr(), y.data_ptr(), other.data_ptr()}) == 3
        assert first.new("x", (KEPT // 4,), LIKE).data_ptr() == x.data_ptr(), "a name is a buffer"
    with ranks.scratch() as third:
        again = third.new("x", (2, KEPT // 4), LIKE, torch.bfloat16)
        assert again.data_ptr() in (x.data_ptr(), y.data_ptr())
        assert (again.dtype, again.is_contiguous()) == (torch.bfloat16, True)
        again.fill_(1.0)  # Buffers of inference mode serve training.
        assert third.new("x", (KEPT,), LIKE).nbytes == 4 * KEPT, "a buffer grows"
        assert third.new("x", (10,), LIKE).untyped_storage().nbytes() == 40


def test_buffers_of_a_call_that_failed_or_was_huge_are_nobodys(ranks: Ranks) -> None:
    with contextlib.suppress(KeyError), ranks.scratch() as scratch:
        scratch.new("x", (KEPT,), LIKE)
        raise KeyError  # An exchange may still write there.
    with ranks.scratch() as scratch:
        assert scratch.size == 0
        scratch.new("x", ((1 << 29) + 1,), LIKE, torch.uint8)
    with ranks.scratch() as scratch:
        assert scratch.size == 0
