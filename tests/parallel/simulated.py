"""All ranks of a plan in one process: keys, as their own flat numbers, moved as each rank's lists say."""

from dataclasses import dataclass

import numpy as np
from attnspan.parallel.choose import Call
from attnspan.parallel.planning import Request
from hypothesis import strategies as st
from random_problems import any_spans

from attnspan import Prepared, Spans
from attnspan.parallel.local import LocalPlan, Transfer
from attnspan.parallel.partition import Partition
from attnspan.parallel.plan import Plan
from attnspan.parallel.strategy import Strategy

#: Where nothing was written.
NOTHING = -7
HEADS = (4, 2)
STRATEGIES = [
    Strategy(kind, members, groups)  # type: ignore[arg-type]
    for kind in ("exchange", "ring")
    for members, groups in [(1, 1), (1, 2), (1, 3), (1, 5), (2, 1), (2, 2), (3, 2), (2, 4), (5, 1)]
]


def dealt(length: int, strategy: Strategy, size: int, seed: int) -> Partition:
    """Chunks dealt to the groups at random, as many to each as static shapes ask for."""
    chunks = -(-length // size)
    owner = np.random.default_rng(seed).permutation(np.arange(chunks) % strategy.groups)
    return Partition.of_owner(
        owner, q_len=length, groups=strategy.groups, members=strategy.members, size=size
    )


@st.composite
def any_plan(draw: st.DrawFn) -> Plan:
    """Any spans; keys that lie like the rows, or in order, or anyhow."""
    strategy, seed = draw(st.sampled_from(STRATEGIES)), draw(st.integers(0, 99))
    square = draw(st.booleans())
    spans = draw(any_spans(square=square))
    rows = dealt(spans.q_len, strategy, draw(st.integers(1, 12)), seed)
    request = Request(strategy.ranks, Call(*HEADS), strategy)
    keys = draw(
        st.sampled_from(
            [request.keys_for(strategy, spans.k_len), dealt(spans.k_len, strategy, 3, seed + 1)]
            + [rows] * square
        )
    )
    return Plan(Prepared(spans), strategy, rows, keys, *HEADS)


@dataclass(frozen=True, eq=False)
class Arrival:
    """What a rank has at hand in one stage: int64 (planes, K), flat key numbers, `NOTHING` elsewhere."""

    local: LocalPlan
    stage: int
    flat: np.ndarray

    @property
    def keys(self) -> np.ndarray:
        """The stage's own word for it: int32 (planes|1, K)."""
        return self.local.stages[self.stage].keys

    @property
    def bounds(self) -> np.ndarray:
        return self.local.stages[self.stage].bounds


def held(plan: Plan, group: int) -> np.ndarray:
    """The flat key in each slot of a group, int64 (planes * key_slots,); `NOTHING` in padding."""
    keys = plan.keys.group_rows(group).astype(np.int64)
    flat = np.arange(plan.planes)[:, None] * plan.k_len + keys
    return np.where(keys < 0, NOTHING, flat).reshape(-1)


def arrivals(plan: Plan) -> list[list[Arrival]]:
    """The stages of each rank, as keys arrive there."""
    every = [plan.local(rank) for rank in range(plan.strategy.ranks)]
    if every[0].transfer is None:
        return [_round(plan, local) for local in every]
    return [[_exchange(plan, every, local)] for local in every]


def _round(plan: Plan, local: LocalPlan) -> list[Arrival]:
    """In a ring each group passes on what it has: after some steps, what the group so far before it held."""
    groups = plan.strategy.groups
    blocks = [held(plan, (local.group - step) % groups) for step in range(groups)]
    return [Arrival(local, step, x.reshape(plan.planes, -1)) for step, x in enumerate(blocks)]


def _exchange(plan: Plan, every: list[LocalPlan], local: LocalPlan) -> Arrival:
    mine = lists(local)
    received = [
        sent(plan, every[peer_of(local, group)])[local.group] for group in range(plan.strategy.groups)
    ]
    assert [len(part) for part in received] == mine.receive_counts.tolist(), "who sends what is awaited"
    stage = np.full(local.stages[0].keys.size, NOTHING, np.int64)
    places = np.concatenate([mine.own_place, mine.place])
    assert len(set(places.tolist())) == len(places), "no key is overwritten"
    stage[mine.own_place] = held(plan, local.group)[mine.own]
    stage[mine.place] = np.concatenate(received)
    return Arrival(local, 0, stage.reshape(local.stages[0].keys.shape))


def sent(plan: Plan, local: LocalPlan) -> list[np.ndarray]:
    """The flat keys that a rank sends to each group."""
    mine = lists(local)
    assert mine.send_counts.sum() == len(mine.send)
    return np.split(held(plan, local.group)[mine.send], np.cumsum(mine.send_counts)[:-1])


def returned(plan: Plan, local: LocalPlan, found: list[list[Arrival]]) -> list[np.ndarray]:
    """The flat keys whose gradients come back from each group, in the order in which they arrive."""
    back = []
    for group in range(plan.strategy.groups):
        peer = peer_of(local, group)
        theirs = lists(found[peer][0].local)
        leaving = found[peer][0].flat.reshape(-1)[theirs.place]
        back.append(np.split(leaving, np.cumsum(theirs.receive_counts)[:-1])[local.group])
    return back


def peer_of(local: LocalPlan, group: int) -> int:
    """The rank of another group that has the same heads."""
    return group * local.strategy.members + local.member


def lists(local: LocalPlan) -> Transfer:
    assert local.transfer is not None
    return local.transfer


def visible(arrival: Arrival) -> np.ndarray:
    """Bool (planes, H|1, rows of the group, K), after a check that the bounds are legal."""
    spans = Spans(arrival.bounds, arrival.flat.shape[1]).validate()
    return np.asarray(spans.dense())
