"""Partitions: chunks say what rows need; work is even, few keys are foreign, few rows are lent to many."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from attnspan import Mask, Spans, causal, documents, full, global_keys, key_padding, prefix, segments, window
from attnspan.parallel import Layout
from attnspan.parallel.partition import chunk_size


@pytest.mark.parametrize("q_len", [4096, 100_003, 131_072, 65_537, 1_000_000])
@pytest.mark.parametrize("ranks", [2, 3, 7, 8, 16])
def test_less_than_one_percent_is_padding(q_len: int, ranks: int) -> None:
    layout = Layout.of(causal(), q_len=q_len, ranks=ranks, method="contiguous")
    assert layout.rows_per_rank * ranks < 1.01 * q_len
    assert 20 <= -(-q_len // chunk_size(q_len, ranks)) / ranks <= 52


def offsets(seed: int, q_len: int) -> np.ndarray:
    """Of documents whose lengths have a heavy tail, as those of text have."""
    lengths = np.random.default_rng(seed).lognormal(np.log(q_len / 40), 1.4, 400).astype(int) + 1
    ends = np.minimum(np.cumsum(lengths), q_len)
    return np.append(0, np.append(ends[ends < q_len], q_len))


def pairs_of(layout: Layout, mask: Mask, batch: int = 1) -> np.ndarray:
    """Visible pairs of each rank, from the mask's own count."""
    cost = np.broadcast_to(
        np.asarray(mask.spans(layout.q_len, layout.q_len, batch=batch).cost()).sum(1), (batch, layout.q_len)
    )
    found = np.zeros(layout.ranks)
    for rank, plane in np.ndindex(layout.ranks, batch):
        rows = layout.rows[rank, plane % layout.planes]
        found[rank] += cost[plane, rows[rows >= 0]].sum()
    assert found.sum() == cost.sum()
    return found


def most_foreign(layout: Layout, mask: Mask) -> int:
    """Key rows that the busiest rank fetches."""
    return int(layout.plan(mask, heads=(1, 1), strategy="exchange").cost().fetched.max())


S = 32_768
MASKS = {
    "full": full(),
    "causal": causal(),
    "window": causal() & window(300),
    "both sides": window(900, 900),
    "half": causal() & window(18_000),
    "documents": causal() & documents(offsets(7, S)),
    "bidirectional": documents(offsets(8, S)),
    "global": causal() & (window(500) | global_keys(64)),
    "prefix": causal() | prefix(5000),
    "padding": causal() & key_padding([24_000]),
}


EVEN = [*product(MASKS, (2, 3, 8), (1,)), ("documents", 8, 2), ("documents", 8, 4)]


@pytest.mark.parametrize(("name", "ranks", "members"), EVEN)
def test_work_is_even_over_groups(name: str, ranks: int, members: int) -> None:
    layout = Layout.of(MASKS[name], q_len=S, ranks=ranks, members=members)
    work = pairs_of(layout, MASKS[name]).reshape(-1, members).sum(1)
    assert work.max() <= 1.01 * work.mean()


def test_batch_rows_are_balanced_together() -> None:
    masks = [causal() & documents(offsets(seed, 4096)) for seed in range(4)]
    spans = Spans(np.concatenate([np.asarray(mask.spans(4096, 4096).bounds) for mask in masks]), 4096)
    layout = Layout.of(spans, q_len=4096, ranks=8, batch=4)
    assert layout.planes == 4
    assert not (layout.rows[:, 0] == layout.rows[:, 1]).all(), "each has a partition of its own"
    work = sum(pairs_of(Layout(4096, layout.rows[:, i : i + 1]), mask) for i, mask in enumerate(masks))
    assert work.max() <= 1.01 * work.mean()
    # A chunk per rank and batch row: one batch row alone has 1.7 times the mean on its last rank.
    ids = np.zeros((2, 64), int)
    ids[1, 63] = 1
    mask = causal() & segments(ids)
    two = Layout.of(mask, q_len=64, ranks=4, batch=2, rows_per_chunk=16)
    work = pairs_of(two, mask, batch=2)
    assert work.max() <= 1.05 * work.mean()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [8, 32])
def test_documents_stay_together(seed: int, ranks: int) -> None:
    q_len = 32_768
    mask = causal() & documents(offsets(seed, q_len))
    layout = Layout.of(mask, q_len=q_len, ranks=ranks)
    work = pairs_of(layout, mask)
    assert work.max() <= 1.01 * work.mean()
    # Who owns the last row of the longest document needs all of it.
    least = max(int(np.diff(offsets(seed, q_len)).max()) - layout.rows_per_rank, 0)
    assert least <= most_foreign(layout, mask) <= 1.1 * least + 0.2 * q_len


@pytest.mark.parametrize(("q_len", "ranks", "seed"), [(32_768, 32, 1), (65_536, 128, 7)])
def test_no_rank_lends_to_all_others(q_len: int, ranks: int, seed: int) -> None:
    """Of assignments that fetch about as much, others bring one rank three times that in all."""
    mask = causal() & documents(offsets(seed, q_len))
    plan = Layout.of(mask, q_len=q_len, ranks=ranks).plan(heads=(1, 1), strategy="exchange", head_dim=1)
    cost = plan.cost()
    rows = cost.received().max() / 8  # fetched twice in 2 bytes, or once as a gradient of 4 bytes: k and v
    assert rows <= 2.5 * cost.fetched.max()


def test_the_tolerance_is_kept_and_buys_locality() -> None:
    mask, foreign = causal() & documents(offsets(3, 32_768)), []
    for tolerance in (1.001, 1.01, 1.2):
        layout = Layout.of(mask, q_len=32_768, ranks=8, tolerance=tolerance)
        work = pairs_of(layout, mask)
        assert work.max() <= tolerance * work.mean()
        foreign.append(most_foreign(layout, mask))
    assert foreign[2] <= foreign[0]
