"""Paged caches: the results of a static cache, wherever pages lie; nothing written where nothing may be."""

import re
from contextlib import nullcontext
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attnspan import cache as cache_mask
from attnspan import causal, window
from attnspan.call.options import alibi
from attnspan.errors import DtypeError, OptionError, UsageError
from attnspan.experimental import triton
from attnspan.torch import PagedCache, StaticCache, attention
from attnspan.torch._cache_write import LOST
from attnspan.torch._paged_cache import _forward_op, _write_op

HEADS, KV, D, DV = 4, 2, 16, 8


def paged(pages: int = 12, batch: int = 3, max_len: int = 20) -> PagedCache:
    return PagedCache(pages, 4, KV, D, DV, batch=batch, max_len=max_len)


def chunk(n: int, batch: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, KV, n, D), torch.randn(batch, KV, n, DV)


ALL = {"softcap": 4.0, "bias": alibi(torch.rand(HEADS)), "sinks": torch.randn(HEADS), "return_lse": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "all_options"),
    [(None, False), (None, True), ("cpu", False), ("math", True), ("triton", True)],
)
def test_a_few_steps_equal_those_of_a_static_cache(backend: str | None, all_options: bool) -> None:
    options: dict[str, Any] = ALL if all_options else {}
    torch.manual_seed(0)
    ours, theirs = paged(), StaticCache(3, KV, 20, D, DV)
    for n, counts in ((5, [5, 2, 0]), (1, None), (3, [1, 3, 2]), (1, None)):
        own = torch.tensor(counts) if counts else torch.full((3,), n)
        ours.reserve(ours.lengths + own)
        k, v = chunk(n)
        ours.update(k, v, own if counts else None)
        keys, values = theirs.update(k, v, own if counts else None)
        q = torch.randn(3, HEADS, n, D)
        wanted = attention(q, keys, values, mask=theirs.mask(n), backend="math", **options)
        with triton.interpreted() if backend == "triton" else nullcontext():
            found = ours.attention(q, backend=backend, **options)
        pairs = zip(found, wanted, strict=True) if options else [(found, wanted)]
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert ours.lengths.equal(theirs.lengths)


def test_rows_that_go_on_as_others_share_full_pages() -> None:
    # test_any_cache.py has what they then hold.
    cache = paged(pages=9)
    cache.reserve([6, 6, 6])
    cache.update(*chunk(6))
    cache.reorder([0, 0, 2])
    assert cache.table[0, 0] == cache.table[1, 0] != cache.table[2, 0]
    writable = cache.table[:, 1].tolist()
    assert len(set(writable)) == 3
    assert cache.free_pages == 9 - 2 - 3
    full = paged(pages=4)
    full.reserve([16, 0, 0])
    with pytest.raises(OptionError, match="expected 8 free pages, got 0"):
        full.reorder([0, 0, 0])
    assert full.table[1:].eq(-1).all()
    # Where it is written, a page belongs to one row.
    cache.truncate(cache.lengths - 3)
    with pytest.raises(OptionError, match=r"that another element uses\. Call reorder\(range\(batch\)\)"):
        cache.update(*chunk(1))
    cache.reset([1])
    assert cache.table[1].eq(-1).all()
    cache.reorder(range(3))
    cache.reserve(cache.lengths + 1)
    cache.update(*chunk(1))


def test_numbers_that_are_no_pages_give_nan_to_their_row_alone() -> None:
    # tests/kernels/test_paged_keys.py has each query.
    cache, q = paged(), torch.randn(3, HEADS, 1, D)
    cache.reserve([6] * 3)
    cache.update(*chunk(6))
    for bad in (12, 99, -1):  # 12: the scratch page
        cache.table[1, 1] = bad
        keys, _ = cache.gathered()
        assert keys[1, :, 4:8].isnan().all()
        assert keys[1, :, :4].isfinite().all()
        for backend in (None, "triton") if bad == 99 else (None,):
            with triton.interpreted() if backend else nullcontext():
                out = cache.attention(q, backend=backend)
            assert out[1].isnan().all()
            assert out[[0, 2]].isfinite().all()


def test_pages_go_back_and_serve_others() -> None:
    cache = paged(pages=4)
    cache.reserve([16, 0, 0])
    with pytest.raises(OptionError, match="1 free pages, got 0"):
        cache.reserve([16, 1, 0])
    assert cache.table[1:].eq(-1).all()
    assert cache.free_pages == 0
    cache.reset(torch.tensor([True, False, False]))
    cache.reserve([0, 8, 8])
    assert sorted(cache.table[cache.table >= 0].tolist()) == [0, 1, 2, 3]
    cache.reserve([0, 4, 0])  # less than they have
    assert cache.free_pages == 0
    before = cache.table.clone()
    cache.truncate(0)
    assert torch.equal(cache.table, before), "rows keep their pages"
    cache.table.fill_(99)  # pages of other code that do not exist
    assert cache.free_pages == 4
    cache.reset()
    for lengths, text in (([0, 8, 21], "at most 20 tokens, got 21"), ([0, -1, 0], "expected 0 to .*got -1")):
        with pytest.raises(OptionError, match=text):
            cache.reserve(lengths)
    with pytest.raises(DtypeError, match=r"lengths\[0\]: expected an int, got float"):
        cache.reserve([2.5, 0, 0])
    sizes = f"pages=4, page_len=4, kv_heads={KV}, head_dim={D}, v_dim={DV}, batch=3, max_len=20"
    assert repr(cache) == f"PagedCache({sizes})"


def test_a_row_without_pages_raises_before_anything_is_written() -> None:
    cache, (k, v) = paged(), chunk(2)
    cache.reserve([2, 2, 0])
    with pytest.raises(OptionError, match="element 2: expected pages for 2 more tokens"):
        cache.update(k, v)
    assert not cache._keys.any()
    assert not cache.lengths.any()
    cache.update(k, v, torch.tensor([2, 1, 0]))
    assert cache.lengths.tolist() == [2, 1, 0]


@pytest.mark.parametrize("bad", [-1, 99])
def test_elsewhere_it_is_lost_and_others_are_not(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, (k, v) = paged(), chunk(2)
    cache.reserve([2, 2, 2])
    cache.table[1, 0] = bad
    monkeypatch.setattr(Tensor, "is_cpu", False)
    cache.update(k, v)
    monkeypatch.undo()
    assert cache.lengths.tolist() == [2, LOST, 2]
    held = cache.table[2, 0]
    assert torch.equal(cache._keys[held, :, :2], k[2])
    assert not cache._keys[:-1].flatten(1).any(1)[[i for i in range(12) if i not in cache.table[:, 0]]].any()


def test_pages_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, (k, v) = paged(), chunk(6)
    cache.reserve([6] * 3)
    cache.update(k, v)
    q = torch.randn(3, HEADS, 2, D)
    wanted = cache.attention(q, backend="math")
    with torch.autocast("cpu", torch.bfloat16):  # which casts keys, here float32 ones
        cast = cache.attention(q)
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), wanted, rtol=0.02, atol=0.02)
    leaf = q.clone().requires_grad_()
    cache.attention(leaf).sum().backward()
    cache.attention(q_math := q.clone().requires_grad_(), backend="math").sum().backward()
    torch.testing.assert_close(leaf.grad, q_math.grad, rtol=1e-4, atol=1e-5)
    near = causal() & window(3) & cache_mask(cache.lengths)
    wanted_near = attention(q, k, v, mask=causal() & window(3))
    torch.testing.assert_close(cache.attention(q, mask=near), wanted_near, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(PagedCache, "gathered", lambda _: pytest.fail("a copy of all pages"))
    for backend in (None, "cpu"):
        torch.testing.assert_close(cache.attention(q, backend=backend), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(OptionError, match=r"mask: expected spans over k_len=20 keys .* got spans over 16"):
        cache.attention(q, mask=cache.mask(2).prepare(2, 16, batch=3, like=q))


@pytest.mark.slow
def test_a_compiled_step_is_compiled_once() -> None:
    cache, counter = paged(), CompileCounterWithBackend("aot_eager")

    @torch.no_grad()
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.update(k, v)
        return cache.attention(q)  # type: ignore[no-any-return]

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for length in (1, 2, 5):
        cache.reserve([length] * 3)
        inputs = torch.randn(3, HEADS, 1, D), *chunk(1)
        found = compiled(*inputs)
        wanted = attention(inputs[0], *cache.gathered(), mask=cache.mask(1), backend="math")
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


# tests/torch/test_kv_cache_errors.py has those of every cache.
def test_wrong_calls() -> None:
    cache, q = paged(), torch.randn(3, HEADS, 1, D, requires_grad=True)
    with triton.interpreted(), pytest.raises(OptionError, match="without gradients"):
        cache.attention(q, backend="triton")
    with pytest.raises(UsageError, match="is_causal"):
        cache.attention(q.detach(), is_causal=True)
    with pytest.raises(OptionError, match="page_len"):
        PagedCache(4, 0, 1, 8, batch=1, max_len=4)


@pytest.mark.slow
def test_operators() -> None:
    cache, (k, v) = paged(), chunk(2)
    cache.reserve([2] * 3)
    torch.library.opcheck(_write_op, (cache._keys, cache._values, cache.lengths, cache.table, k, v, None, 20))
    bounds = cache.mask(1).spans(1, 20, batch=3, like=k).lowered.bounds.contiguous()
    pool = cache._keys[:-1], cache._values[:-1], cache.table
    torch.library.opcheck(_forward_op, (torch.randn(3, HEADS, 1, D), *pool, bounds, 0.25))


def _wants_large_pages(address: int) -> bool:
    """What Linux was told of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"(\w+)-(\w+) ", line):
            low, high = (int(x, 16) for x in found.groups())
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@pytest.mark.slow
@pytest.mark.compiled_module("asks the system for large pages")
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no pages of 2 MiB"
)
def test_keys_and_values_are_wished_to_lie_in_large_pages() -> None:
    pages = PagedCache(1024, 16, 2, 64, batch=1, max_len=16384)
    converted = torch.nn.Sequential(PagedCache(1024, 16, 2, 64, batch=1, max_len=16384)).to(torch.float64)[0]
    for made in (StaticCache(1, 2, 16384, 64), pages, converted):
        for x in (made._keys, made._values):
            assert _wants_large_pages(x.data_ptr() + x.numel() * 2)
            assert not x.any()
    plain = torch.frombuffer(mmap(-1, 1 << 23), dtype=torch.uint8)  # a heap may hold what was a cache before
    assert not _wants_large_pages(plain.data_ptr() + plain.numel() // 2)
