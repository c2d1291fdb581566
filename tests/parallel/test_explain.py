"""What a plan says of itself, against counts made by hand."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from attnspan import Mask, causal, documents, full, segments
from attnspan.parallel import ContextParallel
from attnspan.torch import attention

IDS = np.repeat(np.arange(5), [30, 3, 40, 17, 10])


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks of which only the second is real: enough for what is known without asking the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def _plan(mesh: DeviceMesh, mask: Mask, strategy: str, **options: object) -> ContextParallel:
    sizes = {"q_len": 100, "heads": (6, 2), "head_dim": 8, "dtype": torch.float32}
    return ContextParallel(mesh, mask=mask, strategy=strategy, check=False, **{**sizes, **options})


@pytest.mark.parametrize("strategy", ["exchange", "hybrid(2, 2)", "ring"])
@pytest.mark.parametrize("mask", [causal(), causal() & segments(IDS), full()], ids=str)
def test_pairs_and_rows_are_those_of_the_dense_mask(mesh: DeviceMesh, strategy: str, mask: Mask) -> None:
    cp = _plan(mesh, mask, strategy, batch=3)
    found, dense = cp.explain(), mask.spans(100, 100).dense()[0, 0]
    for rank in range(4):
        group = rank // cp.strategy.members
        rows = cp.partition.group_rows(group)
        rows = rows[rows >= 0]
        heads = cp.plan.heads[rank % cp.strategy.members].heads
        assert found.pairs[rank] == dense[rows].sum() * heads * 3
        needed = dense[rows].any(0)
        needed[rows] = False
        assert found.needed[rank] == needed.sum()
    assert found.ring == 100 - 100 // cp.strategy.groups
    mean = found.pairs.mean()
    assert found.balance == pytest.approx(found.pairs.max() / mean)


def test_no_partition_needs_less_than_the_bound(mesh: DeviceMesh) -> None:
    for method in ("balanced", "greedy", "contiguous", "zigzag"):
        for mask in (causal() & segments(IDS), causal() & documents(np.array([0, 60, 100]))):
            found = _plan(mesh, mask, "exchange", method=method).explain()
            assert found.least_needed <= found.needed.max()
    assert found.least_needed == 60 - 25  # the last row of the longer document


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("auto", ["chosen by predicted time", "ulysses", "hybrid(2, 2)", "nothing was measured"]),
        ("ring", ["ring on 4 ranks: 100 rows", "the strategy was given", "75", "lower bound"]),
        ("hybrid(2, 2)", ["3, 3 while attending", "rows fetched"]),
        ("ulysses", ["2, 2, 1, 1 while attending"]),
    ],
)
def test_print(mesh: DeviceMesh, strategy: str, words: list[str]) -> None:
    text = str(_plan(mesh, causal() & segments(IDS), strategy).explain())
    for word in words:
        assert word in text
    assert all(len(line) < 240 for line in text.splitlines())


def test_a_given_strategy_is_kept_and_auto_is_decided_once(mesh: DeviceMesh) -> None:
    cp = _plan(mesh, causal() & segments(IDS), "auto")
    other = cp.with_mask(causal() & segments(IDS[::-1].copy()))
    assert other.strategy == cp.strategy
    assert "the strategy was given" in str(other.explain())


@pytest.mark.parametrize("strategy", ["exchange", "ulysses", "ring"])
def test_flops_of_one_rank_are_those_of_attention(strategy: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        cp = _plan(init_device_mesh("cpu", (1,)), causal() & segments(IDS), strategy)
        q = torch.randn(2, 6, 100, 8, requires_grad=True)
        k, v = torch.randn(2, 2, 2, 100, 8).unbind()
        counts = []
        for mask in (cp, causal() & segments(IDS)):
            with FlopCounterMode(display=False) as counter:
                attention(q, k, v, mask=mask).sum().backward()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0
    finally:
        dist.destroy_process_group()
