"""Keys on pages: the bits of keys in one piece, wherever pages lie; NaN for who sees a page that is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnspan import Mask, cache, causal, full, window
from attnspan.call.options import ALIBI, Options
from attnspan.kernels import cpu

pytestmark = pytest.mark.compiled_module("the program of the tests has no pages")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MASKS: dict[str, Mask] = {"causal": causal(), "window": causal() & window(37), "full": full()}
OPTIONS = {
    "none": None,
    "all": Options(
        softcap=3.0,
        bias=torch.full((1, 4), 0.01),
        bias_kind=ALIBI,
        sinks=torch.arange(4.0),
        dropout_p=0.3,
        dropout_seed=torch.tensor(5),
    ),
}


class Pool:
    """Rows of keys on pages, in the order of a random permutation, and the same in one piece."""

    def __init__(
        self, lengths: list[int], page: int, dims: tuple[int, int], dtype: torch.dtype, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, batch, columns = lengths, len(lengths), -(-max(lengths) // page)
        pages = batch * columns
        order = torch.randperm(pages, generator=generator) if seed % 3 else torch.arange(pages)
        self.table = order.view(batch, columns).int()
        pools = [torch.randn(pages, page, 2, dim, generator=generator).to(dtype) for dim in dims]
        self.paged = [x.transpose(1, 2) for x in pools]
        self.whole = [x[self.table.long()].flatten(1, 2).transpose(1, 2) for x in pools]
        for row, length in zip(self.table, lengths, strict=True):
            row[-(-length // page) :] = -1

    def bounds(self, mask: Mask, q_len: int) -> Tensor:
        k_len = self.whole[0].shape[2]
        seen = (mask & cache(torch.tensor(self.lengths))).spans(q_len, k_len, batch=len(self.lengths))
        return torch.as_tensor(seen.lowered.bounds).contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    """out and lse, which the kernel must write."""
    out, lse = q.new_full((*q.shape[:3], v.shape[3]), 7.0), torch.full(q.shape[:3], 7.0)
    cpu.forward(q, k, v, bounds, out, lse, **{"scale": 0.3, "num_threads": 2, **call})
    return out, lse


@given(
    lengths=st.lists(st.sampled_from([1, 15, 16, 17, 64, 130, 300, 1200]), min_size=1, max_size=3),
    page=st.sampled_from([1, 3, 16, 32, 48, 64]),
    q_len=st.sampled_from([1, 2, 16, 17, 70]),
    dims=st.sampled_from([(64, 64), (64, 32), (20, 7), (128, 128)]),
    dtype=st.sampled_from(list(DTYPES)),
    mask=st.sampled_from(list(MASKS)),
    options=st.sampled_from(list(OPTIONS)),
    threads=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 2**20),
)
def test_the_bits_of_one_piece(
    lengths: list[int],
    page: int,
    q_len: int,
    dims: tuple[int, int],
    dtype: str,
    mask: str,
    options: str,
    threads: int,
    seed: int,
) -> None:
    pool = Pool(lengths, page, dims, DTYPES[dtype], seed)
    q = torch.randn(len(lengths), 4, q_len, dims[0]).to(DTYPES[dtype])
    bounds = pool.bounds(MASKS[mask], q_len)
    call: dict[str, Any] = {"options": OPTIONS[options], "num_threads": threads}
    wanted = attend(q, *pool.whole, bounds, **call)
    found = attend(q, *pool.paged, bounds, table=pool.table, **call)
    for got, want in zip(found, wanted, strict=True):
        assert not want.isnan().any()
        assert torch.equal(got, want)


@pytest.mark.parametrize("q_len", [2, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_no_pages_are_nan_for_who_sees_them(dtype: str, q_len: int) -> None:
    pool = Pool([70, 64, 33], 16, (64, 64), DTYPES[dtype], seed=1)
    q = torch.randn(3, 4, q_len, 64).to(DTYPES[dtype])
    bounds = pool.bounds(causal() & window(30), q_len)
    out, lse = attend(q, *pool.paged, bounds, table=pool.table)
    assert out.isfinite().all(), "numbers behind the tokens are none of their business"
    for bad in (-1, -(2**31), len(pool.paged[0]), 2**31 - 1):
        table = pool.table.clone()
        table[1, 2] = bad
        found, its_lse = attend(q, *pool.paged, bounds, table=table)
        lost = (bounds[1, 0, :, 0, 0] < 48) & (bounds[1, 0, :, 0, 1] > 32)
        assert lost.any()
        assert found[1, :, lost].isnan().all()
        assert its_lse[1, :, lost].isnan().all()
        for got, want in ((found, out), (its_lse, lse)):
            assert torch.equal(got[[0, 2]], want[[0, 2]])
            assert torch.equal(got[1, :, ~lost], want[1, :, ~lost])


@pytest.mark.parametrize("q_len", [1, 40])
def test_what_no_query_sees_may_be_anything(q_len: int) -> None:
    pool = Pool([50, 20], 16, (64, 64), torch.float32, seed=1)
    q, bounds = torch.randn(2, 4, q_len, 64), pool.bounds(causal(), q_len)
    wanted = attend(q, *pool.paged, bounds, table=pool.table)
    for x in pool.paged:
        x[pool.table[0, 3], :, 2:] = torch.nan
        x[pool.table[1, 1], :, 4:] = torch.inf
    for got, want in zip(attend(q, *pool.paged, bounds, table=pool.table), wanted, strict=True):
        assert torch.equal(got, want)
    pool.paged[1][pool.table[1, 0], 1, 5, 0] = torch.inf
    out, _ = attend(q, *pool.paged, bounds, table=pool.table)
    assert torch.equal(out[0], wanted[0][0])
    assert out[1, 2:, -1, 0].eq(torch.inf).all()
    assert torch.equal(out[1, :2], wanted[0][1, :2])


def test_wrong_tables() -> None:
    pool = Pool([50, 20], 16, (64, 64), torch.float32, seed=1)
    q, bounds, (k, v), table = torch.randn(2, 4, 1, 64), pool.bounds(causal(), 1), pool.paged, pool.table
    shape = r"table: expected int32 \(batch, pages of a row\) with batch 2"
    for keys, values, wrong, text in (
        *((k, v, wrong, shape) for wrong in (table[:1], table.long(), table[0])),
        (k, v, table[:, :2], "mask bounds"),
        (k, v[:-1], table, "v: expected shape"),
        (k[:0], v[:0], table, "k: expected a pool of at least one page"),
    ):
        with pytest.raises(ValueError, match=text):
            attend(q, keys, values, bounds, table=wrong)
