"""Values that ranks must share are compared, others are not; rows without a plan are told of."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import mesh, raising, ranks

from attnspan import alibi, causal, segments, window
from attnspan.parallel import Layout, ShardedCache
from attnspan.torch import MissingPlanWarning, _unplanned, attention


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
@ranks(4)
def test_options_of_the_heads_and_batch_rows_of_other_groups_may_differ(strategy: str) -> None:
    # Heads are split over "inter", or batch rows are: each group of "intra" has options of its own.
    both = mesh(2, 2)
    part, rank = both.get_coordinate()
    layout = Layout.of(causal(), q_len=37, ranks=2)
    generator = torch.Generator().manual_seed(part)
    q, k, v = (torch.randn(2, heads, 37, 16, generator=generator) for heads in (5, 1, 1))
    options = {
        "sinks": torch.randn(5, generator=generator),
        "bias": alibi(torch.rand(2, 5, generator=generator)),
        "softcap": 20.0 + part,
        "dropout_p": 0.25,
        "dropout_seed": torch.randint(2**40, (2, 5), generator=generator),
    }
    for _ in range(2):
        rows = layout.shard({}, rank)
        plan = layout.plan(heads=(5, 1), batch=2, strategy=strategy).on(both["intra"], rows=rows)
        mine = (layout.shard(x, rank, dim=2) for x in (q, k, v))
        found = layout.gather(attention(*mine, mask=plan, **options), both["intra"], dim=2)
        torch.testing.assert_close(found, attention(q, k, v, mask=causal(), **options), rtol=0, atol=1e-5)


OTHERWISE: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": torch.ones(4)},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": alibi(torch.ones(4))},
    "mask of the cache": {"mask": window(2)},
    "mask of the cache, its ids": {"mask": segments(torch.tensor([[0, 1]]))},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERWISE)
@ranks(2)
def test_a_cache_whose_ranks_attend_otherwise_is_refused_on_all(what: str) -> None:
    usual = {"sinks": torch.zeros(4), "bias": alibi(torch.zeros(4)), "scale": 0.25, "softcap": 9.0}
    usual["mask"] = segments(torch.tensor([[0, 0]])) if "ids" in what else window(1)
    cache = ShardedCache(mesh(2)["cp"], batch=1, kv_heads=2, max_len=2, head_dim=8)
    new = [torch.randn(1, heads, 1, 8) for heads in (4, 2, 2)]
    odd = OTHERWISE[what] if dist.get_rank() else {}
    text = (
        f"PlanMismatchError: .*the same {what.partition(',')[0]} on every rank, got a different one on rank 1"
    )
    with raising(text):
        cache.attend(*new, **{**usual, **odd})
    assert cache.length == 0
    cache.attend(*new, **usual)
    with raising("PlanMismatchError: .*the same order of batch elements on every rank"):
        ShardedCache(mesh(2)["cp"], batch=2, kv_heads=2, max_len=2, head_dim=8).reorder([dist.get_rank(), 0])


@contextlib.contextmanager
def warned(times: int) -> Any:
    _unplanned._warned.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    texts = [str(x.message) for x in found if x.category is MissingPlanWarning]
    assert len(texts) == times, texts
    assert all("Pass the plan" in text for text in texts)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@ranks(2)
def test_rows_of_a_rank_without_their_plan_are_told_of_once(layout: Any) -> None:
    ids = torch.arange(40)[None] // 9
    split = Layout.of(causal() & segments(ids), q_len=40, ranks=2)
    rows = split.shard({"ids": ids}, dist.get_rank())
    plan = split.plan(heads=(4, 2)).on(mesh(2)["cp"], rows=rows)

    def call(q_len: int = 20, k_len: int = 20, heads: int = 4, mask: Any = None) -> None:
        shapes = (1, heads, q_len, 8), (1, 2, k_len, 8), (1, 2, k_len, 8)
        q, k, v = (torch.randn(x) if layout == "bhsd" else torch.randn(x).transpose(1, 2) for x in shapes)
        attention(q, k, v, mask=mask, layout=layout)

    with warned(0):
        call(mask=plan)
        call(k_len=7)  # Cross attention to keys that each rank has.
        call(q_len=5, k_len=5)  # Attention within blocks of rows.
        call(q_len=40, k_len=40, mask=causal())  # The whole on one rank.
        call(heads=2)
    with warned(1):
        for _ in range(3):
            call(mask=causal() & segments(rows["ids"]))
    del plan
    with warned(0):
        call(mask=causal())
