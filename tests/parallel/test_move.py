"""Rows moved by index, by the compiled module and by torch; and the buffers that are kept for them."""

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from attnspan.kernels import cpu
from attnspan.parallel.torch import comm
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
        **changes,
    }
    to, at = (np.array(x, np.int32) if isinstance(x, list) else x for x in (given["to"], given["at"]))
    with pytest.raises(ValueError, match=message):
        cpu.move_rows(given["target"], to, given["source"], at, num_threads=1)
    assert not given["target"].any()


@pytest.mark.compiled_module("rows are moved by the module itself")
def test_sums_are_wide() -> None:
    x = torch.zeros(TARGET, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="target: expected float32 to add to"):
        cpu.move_rows(x, None, x, None, num_threads=1, add=True)


KEPT = comm._WORTH_KEEPING
LIKE = torch.zeros(1)


@pytest.fixture
def ranks() -> comm.Ranks:
    """Buffers are kept for the ranks of one mesh; no process group is asked."""
    group = Mock(group_name="of this test")
    return comm.Ranks(group, group, group, Mock())


def test_a_buffer_is_used_again_by_the_next_call_and_by_nobody_before(ranks: comm.Ranks) -> None:
    with ranks.scratch() as first, ranks.scratch() as second:
        x, y = first.new("x", (KEPT // 4,), LIKE), second.new("x", (KEPT // 4,), LIKE)
        other = first.new("other", (KEPT,), LIKE, torch.uint8)
        assert len({x.data_ptr(), y.data_ptr(), other.data_ptr()}) == 3
        assert first.new("x", (KEPT // 4,), LIKE).data_ptr() == x.data_ptr(), "a name is a buffer"
    with ranks.scratch() as third:
        again = third.new("x", (2, KEPT // 4), LIKE, torch.bfloat16)
        assert again.data_ptr() in (x.data_ptr(), y.data_ptr())
        assert (again.dtype, again.is_contiguous()) == (torch.bfloat16, True)
        larger = third.new("x", (KEPT,), LIKE)
        assert larger.nbytes == 4 * KEPT, "a buffer grows"
        small = third.new("x", (10,), LIKE)
        assert small.untyped_storage().nbytes() == 40, "small ones are the allocator's"


def test_after_an_error_buffers_are_nobodys(ranks: comm.Ranks) -> None:
    used = []

    def fail() -> None:
        with ranks.scratch() as scratch:
            used.append(scratch.new("x", (KEPT,), LIKE))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with ranks.scratch() as scratch:
        assert scratch.new("x", (KEPT,), LIKE).data_ptr() != used[0].data_ptr(), (
            "an exchange may still write there"
        )
        assert scratch.size == 4 * KEPT


def test_what_is_kept_is_bounded(ranks: comm.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "_MOST_KEPT", 4 * KEPT)
    for count, kept in ((1, 1), (2, 0)):
        with ranks.scratch() as scratch:
            for i in range(count):
                scratch.new(f"{i}", (KEPT,), LIKE)
        assert len(ranks._free) == kept


def test_buffers_of_inference_mode_serve_training(ranks: comm.Ranks) -> None:
    with torch.inference_mode(), ranks.scratch() as scratch:
        first = scratch.new("x", (KEPT,), LIKE)
    with ranks.scratch() as scratch:
        x = scratch.new("x", (KEPT,), LIKE)
        assert x.data_ptr() == first.data_ptr()
        assert not x.is_inference()
        x.fill_(1.0)
