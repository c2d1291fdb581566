"""Any sequence of updates, truncations, resets and reorderings: every cache holds what rows were given."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attnspan import alibi, causal, global_keys, window
from attnspan import cache as cache_mask
from attnspan.torch import PagedCache, RollingCache, StaticCache, attention

BATCH, HEADS, KV_HEADS, MAX_LEN, CHUNK = 3, 4, 2, 40, 5
_rows = st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH)
_counts = st.lists(st.integers(0, CHUNK), min_size=BATCH, max_size=BATCH)
_steps = st.one_of(
    st.tuples(st.just("update"), _counts),
    st.tuples(st.just("truncate"), _counts),
    st.tuples(st.just("reset"), st.sets(st.integers(0, BATCH - 1)).map(sorted)),
    st.tuples(st.just("reorder"), _rows),
)


class Rows:
    """The keys and values of each row as Python lists of tokens: what a cache is to hold."""

    def __init__(self, dtype: torch.dtype, dims: tuple[int, int], seed: int) -> None:
        self.dtype, self.dims = dtype, dims
        self.generator = torch.Generator().manual_seed(seed)
        self.held: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(BATCH)]

    def normal(self, heads: int, n: int, dim: int) -> Tensor:
        return torch.randn(BATCH, heads, n, dim, generator=self.generator).to(self.dtype)

    def whole(self) -> tuple[Tensor, Tensor]:
        """(B, Hkv, MAX_LEN, D) of each; NaN where nothing is."""
        whole = [
            torch.full((BATCH, KV_HEADS, MAX_LEN, dim), torch.nan, dtype=self.dtype) for dim in self.dims
        ]
        for b, row in enumerate(self.held):
            for i, token in enumerate(row):
                for x, y in zip(whole, token, strict=True):
                    x[b, :, i] = y
        return whole[0], whole[1]


@given(
    steps=st.lists(_steps, min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dims=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    reach=st.tuples(st.integers(0, 9), st.integers(0, 4)),
    page=st.integers(1, 9),
    layout=st.sampled_from(["bhsd", "bshd"]),
    bias=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_steps(
    steps: list[tuple[str, list[int]]],
    dtype: Any,
    dims: Any,
    reach: Any,
    page: int,
    layout: Any,
    bias: bool,
    seed: int,
) -> None:
    (width, keep), rows = reach, Rows(dtype, dims, seed)
    kind: Any = {"kv_heads": KV_HEADS, "batch": BATCH, "dtype": dtype, "head_dim": dims[0], "v_dim": dims[1]}
    static = StaticCache(max_len=MAX_LEN, layout=layout, **kind)
    rolling = RollingCache(window=width, chunk=CHUNK, keep=keep, layout=layout, **kind)
    paged = PagedCache(pages=BATCH * MAX_LEN, page_len=page, max_len=MAX_LEN, **kind)
    caches = [static, rolling, paged]
    near = window(width) | global_keys(keep)
    for name, numbers in steps:
        if name == "update":
            room = [min(n, MAX_LEN - len(row)) for n, row in zip(numbers, rows.held, strict=True)]
            _update(caches, rows, room, near, layout, {"bias": alibi([0.5, 0.2, 0.1, 0.0])} if bias else {})
        elif name == "truncate":  # tokens that are taken back
            lengths, least = torch.tensor([len(row) for row in rows.held]), rolling._least()[0]
            wanted = torch.maximum(lengths - torch.tensor(numbers), least)
            kept = torch.minimum(wanted, lengths).clamp(min=0).tolist()
            for cache in caches:
                cache.truncate(torch.tensor(kept))
            paged.reorder(range(BATCH))  # a row that was taken back to a shared page gets one of its own
            rows.held = [row[:n] for n, row in zip(kept, rows.held, strict=True)]
        else:
            for cache in caches:
                getattr(cache, name)(numbers)
            old = rows.held
            rows.held = [[] if b in numbers else row for b, row in enumerate(old)]
            if name == "reorder":
                rows.held = [list(old[b]) for b in numbers]
        for cache in caches:
            assert cache.lengths.tolist() == [len(row) for row in rows.held]


def _update(
    caches: list[Any], rows: Rows, counts: list[int], near: Any, layout: str, options: dict[str, Any]
) -> None:
    n, (static, rolling, paged) = max(counts), caches
    if n == 0:
        return
    new = [rows.normal(KV_HEADS, n, dim) for dim in rows.dims]
    for b, count in enumerate(counts):
        rows.held[b] += [tuple(x[b, :, i] for x in new) for i in range(n - count, n)]
    given, q = torch.tensor(counts), rows.normal(HEADS, n, rows.dims[0])
    turned = (lambda x: x.transpose(1, 2)) if layout == "bshd" else (lambda x: x)
    paged.reserve([len(row) for row in rows.held])
    paged.update(*new, given)
    held = {cache: cache.update(*map(turned, new), given) for cache in (static, rolling)}
    lengths = torch.tensor([len(row) for row in rows.held])
    masks = causal() & cache_mask(lengths), causal() & near & cache_mask(lengths)
    whole, local = (attention(q, *rows.whole(), mask=mask, **options) for mask in masks)
    found = {"paged": (paged.attention(q, **options), whole)}
    for cache, wanted in ((static, whole), (rolling, local)):
        got = attention(turned(q), *held[cache], mask=cache.mask(n), layout=layout, **options)
        found[type(cache).__name__] = turned(got), wanted
    real = torch.arange(n) >= n - given[:, None]
    for name, (got, wanted) in found.items():
        got, wanted = (x.transpose(1, 2)[real].float() for x in (got, wanted))
        error, unit = (got - wanted).norm(), torch.finfo(rows.dtype).eps
        assert error <= 4 * unit * wanted.norm(), f"{name}: error {error:.3g}"
