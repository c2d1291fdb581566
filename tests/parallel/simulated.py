"""All ranks of a plan in one process: keys, as their own flat numbers, move as each rank's tables say.

A flat key is plane * k_len + key; where no key was written stands `NOTHING`.
"""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from samples.random_spans import any_spans

from attnspan.parallel import Layout, Plan, Strategy
from attnspan.parallel.local import Tables, Transfer

NOTHING = -7
STRATEGIES = [
    Strategy(kind, members, groups)  # type: ignore[arg-type]
    for kind in ("exchange", "ring")
    for members, groups in [(1, 1), (1, 2), (1, 3), (1, 5), (2, 1), (2, 2), (3, 2), (2, 4), (5, 1)]
]


def anyhow(length: int, ranks: int, planes: int, seed: int) -> Layout:
    """Rows that lie anyhow, ascending on each rank, some ranks with fewer than others."""
    rng = np.random.default_rng(seed)
    each = -(-length // ranks) + int(rng.integers(0, 2))
    rows = np.full((planes, ranks * each), -1)
    for plane in range(planes):
        rows[plane, rng.permutation(ranks * each)[:length]] = rng.permutation(length)
    rows = rows.reshape(planes, ranks, each).transpose(1, 0, 2)
    rows = np.sort(np.where(rows < 0, length, rows), axis=2)
    return Layout(length, np.where(rows == length, -1, rows).astype(np.int32))


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    """Any mask, strategy and rows; keys that lie like the rows, or in order, or anyhow."""
    strategy, seed, square = draw(st.sampled_from(STRATEGIES)), draw(st.integers(0, 99)), draw(st.booleans())
    spans = draw(any_spans(square=square))
    planes, heads, q_len = spans.bounds.shape[:3]
    batch = planes if planes > 1 else draw(st.integers(1, 2))
    mask: Any = spans
    if draw(st.booleans()):
        sizes: dict[str, Any] = {"q_len": q_len, "k_len": spans.k_len, "ranks": strategy.ranks}
        # Of the plan's members, of others, or of none.
        members = [x for x in range(1, strategy.ranks + 1) if strategy.ranks % x == 0]
        sizes |= {"batch": planes, "heads": heads, "members": draw(st.sampled_from(members))}
        method = draw(st.sampled_from(["balanced", "zigzag", "contiguous"]))
        layout = Layout.of(spans, **sizes, method=method, rows_per_chunk=draw(st.integers(1, 12)))
        mask = draw(st.sampled_from([spans, None]))
    else:
        layout = anyhow(q_len, strategy.ranks, draw(st.sampled_from([1, batch])), seed)
    keys = [Layout.contiguous(spans.k_len, strategy.ranks)]
    keys.append(anyhow(spans.k_len, strategy.ranks, draw(st.sampled_from([1, batch])), seed + 1))
    chosen = draw(st.sampled_from([*keys, *[None] * square]))
    return layout.plan(mask, heads=(2, 1), strategy=strategy, batch=batch, keys=chosen)


def rows_of(layout: Layout, group: int, members: int) -> np.ndarray:
    """Rows of a group, member after member, (L, members * n)."""
    part = layout.rows[group * members : (group + 1) * members]
    return part.transpose(1, 0, 2).reshape(layout.planes, -1)


def held(plan: Plan, group: int) -> np.ndarray:
    """The flat key in each slot of a group, int64 (planes * slots,)."""
    keys = rows_of(plan.keys, group, plan.strategy.members).astype(np.int64)
    flat = np.arange(plan.planes)[:, None] * plan.k_len + keys
    return np.where(keys < 0, NOTHING, flat).reshape(-1)


def arrivals(plan: Plan, every: list[Tables]) -> list[list[np.ndarray]]:
    """What each rank has in each of its stages, flat keys of shape (planes, K)."""
    if every[0].transfer is None:
        return [_ring(plan, every, tables) for tables in every]
    return [[_exchange(plan, every, tables)] for tables in every]


def _ring(plan: Plan, every: list[Tables], tables: Tables) -> list[np.ndarray]:
    """Each group sorts its keys and passes on what it has: what comes is of the group some steps before."""
    found = []
    for step in range(plan.strategy.groups):
        group = (tables.numbers.group - step) % plan.strategy.groups
        keys, order = held(plan, group), every[group * plan.strategy.members].key_order
        keys = keys[order] if order.size else keys
        found.append(keys.reshape(plan.planes, -1))
    return found


def _exchange(plan: Plan, every: list[Tables], tables: Tables) -> np.ndarray:
    mine, group = lists(tables), tables.numbers.group
    received = [sent(plan, every[peer_of(tables, other)])[group] for other in range(plan.strategy.groups)]
    assert [len(part) for part in received] == list(mine.receive_counts), "what is sent is awaited"
    stage = np.full(tables.stages[0].keys.size, NOTHING, np.int64)
    places = np.concatenate([mine.own_place, mine.place])
    assert len(set(places.tolist())) == len(places), "no key is overwritten"
    stage[mine.own_place] = held(plan, group)[mine.own]
    stage[mine.place] = np.concatenate(received)
    return stage.reshape(tables.stages[0].keys.shape)


def sent(plan: Plan, tables: Tables) -> list[np.ndarray]:
    """The flat keys that a rank sends to each group."""
    mine = lists(tables)
    assert sum(mine.send_counts) == len(mine.send)
    return np.split(held(plan, tables.numbers.group)[mine.send], np.cumsum(mine.send_counts)[:-1])


def peer_of(tables: Tables, group: int) -> int:
    """The rank of another group that has the same heads."""
    return group * tables.numbers.strategy.members + tables.numbers.member


def lists(tables: Tables) -> Transfer:
    assert tables.transfer is not None
    return tables.transfer
