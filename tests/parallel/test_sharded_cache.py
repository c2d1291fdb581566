"""Decoding with keys that stay on their ranks, and what a sharded cache refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import FLOAT32
from torch import Tensor
from worlds import error, mesh, raising, ranks

import attnspan
from attnspan.parallel import Layout, ShardedCache
from attnspan.torch import attention

CAUSAL = attnspan.causal()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "prefill", "split"), [(2, 0, False), (3, 61, False), (2, 50, True)])
@ranks(lambda count: count)
def test_decoding_with_a_sharded_cache(count: int, prefill: int, split: bool) -> None:
    """Prefill with a plan, then decode with keys that stay where they are; against one process."""
    rank, total, batch = dist.get_rank(), prefill + 200, 2 * count if split else 2
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(batch, heads, total, 16, generator=generator) for heads in (4, 2, 2))
    sinks = torch.randn(4, generator=generator)
    mask = CAUSAL & attnspan.window(total // 2)
    cache = ShardedCache(
        mesh(dist.get_world_size())["cp"], batch=batch, kv_heads=2, max_len=total, head_dim=16
    )
    if prefill:
        layout = Layout.of(mask, q_len=prefill, ranks=count)
        rows = layout.shard({name: x[:, :, :prefill] for name, x in (("k", k), ("v", v))}, rank, dim=2)
        cache.fill(rows["k"], rows["v"], rows["q_index"], prefill)
    at = slice(rank * 2, rank * 2 + 2) if split else slice(None)
    held, outs = [cache.keys.data_ptr()], []
    half, sources = (prefill + total) // 2, [batch - 1, *range(batch - 1)]
    mixed = [torch.cat([x[sources, :, :half], x[:, :, half:]], 2) for x in (q, k, v)]
    for token in range(prefill, total):
        if token == half:
            cache.reorder(sources)
        new = (x[at, :, token : token + 1] for x in (q, k, v))
        outs.append(cache.attend(*new, mask=attnspan.window(total // 2), sinks=sinks, split_batch=split))
        held.append(cache.keys.data_ptr())
    assert len(set(held)) == 1, "keys stay where they are"
    before, after = (attention(*x, mask=mask, sinks=sinks)[at] for x in ((q, k, v), mixed))
    cache.reset()
    alone = cache.attend(*(x[at, :, :1] for x in (q, k, v)), split_batch=split)
    assert error(alone, v[at, :, :1].repeat_interleave(2, 1)) < 1e-6, "nothing is left"
    assert error(torch.cat(outs, 2), torch.cat([before[:, :, prefill:half], after[:, :, half:]], 2)) < FLOAT32


def cached() -> list[Tensor]:
    """q, k, v of seven tokens."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, heads, 7, 8, generator=generator) for heads in (4, 2, 2)]


CACHED_IDS = torch.arange(6)[None] // 2


def fill(cache: ShardedCache, heads: int = 2, rows: int = 3, length: int = 6) -> None:
    _, k, v = cached()
    index = 3 * dist.get_rank() + torch.arange(3)[None]
    cache.fill(k[:, :heads, :rows], v[:, :, :rows], index, length)


def append(cache: ShardedCache, begin: int, end: int, **changes: Any) -> Tensor:
    """Attention of new tokens; what of them changes is a function of their tensor, or an option."""
    given: dict[str, Any] = dict(zip("qkv", (x[:, :, begin:end] for x in cached()), strict=True))
    given |= {name: x(given[name]) if callable(x) else x for name, x in changes.items()}
    return cache.attend(**given, mask=attnspan.segments(CACHED_IDS))


MISUSES: dict[str, Callable[[ShardedCache], Any]] = {
    "ShapeError: ShardedCache.attend: expected at most 6 tokens, got 7": lambda x: append(x, 0, 7),
    r"ShapeError: .*attend: k: expected \(2, 2, 1, 8\), got \(2, 1, 1, 8\)": lambda x: append(
        x, 0, 1, k=lambda k: k[:, :1]
    ),
    r"ShapeError: .*attend: k: expected \(2, 2, 2, 8\), got \(2, 2, 1, 8\)": lambda x: append(
        x, 0, 2, k=lambda k: k[:, :, :1], v=lambda v: v[:, :, :1]
    ),
    r"ShapeError: .*attend: v: expected \(2, 2, 1, 8\), got \(2, 2, 1, 1\)": lambda x: append(
        x, 0, 1, v=lambda v: v[..., :1]
    ),
    "DtypeError: .*attend: k: expected torch.float32, got torch.float64": lambda x: append(
        x, 0, 1, k=torch.Tensor.double
    ),
    r"ShapeError: sinks: expected \(4,\), got \(1,\)": lambda x: append(x, 0, 1, sinks=torch.zeros(1)),
    "OptionError: softcap: expected a positive": lambda x: append(x, 0, 1, softcap=-3.0),
    r"ShapeError: .*fill: k: expected \(2, 2, 3, 8\), got \(2, 1, 3, 8\)": lambda x: fill(x, heads=1),
    r"ShapeError: .*fill: k: expected \(2, 2, 3, 8\), got \(2, 2, 2, 8\)": lambda x: fill(x, rows=2),
    "ShapeError: ShardedCache.fill: q_index: expected each of the 3 tokens on one rank": lambda x: fill(
        x, length=3
    ),
}


@pytest.mark.slow
@ranks(2)
def test_a_cache_refuses_what_does_not_fit_and_is_left_as_it_was() -> None:
    wanted = attention(*(x[:, :, :6] for x in cached()), mask=CAUSAL & attnspan.segments(CACHED_IDS))
    for text, misuse in MISUSES.items():
        cache = ShardedCache(mesh(2)["cp"], batch=2, kv_heads=2, max_len=6, head_dim=8)
        with raising(text):
            misuse(cache)
        assert cache.length == 0
        outs = []
        for i in range(6):
            outs.append(append(cache, i, i + 1))
            assert cache.length == i + 1
        assert error(torch.cat(outs, 2), wanted) < FLOAT32, text
