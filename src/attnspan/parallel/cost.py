"""Pairs, bytes and memory of one call, per rank: arithmetic on counts, no data.

Shapes: P ranks, u members of a group, r groups; P = u * r and rank p = b * u + a is member a of group b.

Every figure counts what a rank receives from (sends to) *other* ranks, in elements of the arrays that are
handed to the collectives: no headers, and nothing for what a rank keeps. Scatter, gather and ring move whole
shards, padding included, and do not depend on the mask; the exchange moves the rows that are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import expect
from .intervals import Ints
from .needs import foreign, lent
from .strategy import HeadSlice, Strategy, split_heads

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["Cost", "Phase", "Sizes", "cost_of", "exchange_parts"]

Floats = NDArray[np.float64]

#: An exchange is cut into so many parts by heads at most: while one is computed the next ones travel.
_PARTS = 4


class Sizes(NamedTuple):
    """The sizes of a call that its mask does not tell: heads, head dims, bytes of an element, batch rows."""

    q_heads: int
    kv_heads: int
    head_dim: int = 128
    v_dim: int = 128
    itemsize: int = 2
    batch: int = 1

    @property
    def heads(self) -> tuple[int, int]:
        """(Hq, Hkv)."""
        return self.q_heads, self.kv_heads

    @property
    def wide(self) -> int:
        """Bytes of an element of lse, and of gradients that are summed over ranks: float32, or float64."""
        return max(4, self.itemsize)


class Phase(NamedTuple):
    """Bytes of one phase, each int64 (P,): received, sent, and those of them from and to other nodes."""

    received: Ints
    sent: Ints
    received_across: Ints
    sent_across: Ints


@dataclass(frozen=True, eq=False)
class Cost:
    """What a strategy costs.

    Attributes:
        strategy: Members, groups, and what happens between groups.
        pairs: Visible (query, key, head) triples that each rank computes, float64 (P,).
        fetched: Key rows that each rank's group receives, padding of a ring included, int64 (P,).
        least_fetched: Of any layout with groups of this size, some group fetches so many: the row that sees
            the most keys must have them all, and its group owns no more than its own rows.
        forward: By phase: "scatter" (q, k, v to the members that own the heads), "exchange" or "ring" (k, v
            between groups), "gather" (out and lse back to the ranks that own the rows).
        backward: "scatter" (the gradient of out), "exchange" or "ring" (k and v anew), "gradients" (dk, dv in
            float32 to the groups that own the keys), "gather" (dq, dk, dv to the ranks that own the rows).
        memory: Bytes of the buffers of one call and of what it keeps for backward, beyond q, k, v and out,
            int64 (P,).
        parts: Into how many parts the work between groups is cut, so that they overlap.
    """

    strategy: Strategy
    pairs: Floats
    fetched: Ints
    least_fetched: int
    forward: Mapping[str, Phase]
    backward: Mapping[str, Phase]
    memory: Ints
    parts: int

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank over the mean; 1.0 where nobody sees anything."""
        mean = self.pairs.mean()
        return float(self.pairs.max() / mean) if mean else 1.0

    def received(self, direction: str = "both") -> Ints:
        """Bytes that each rank receives, int64 (P,), in "forward", "backward" or "both"."""
        known = {
            "forward": [self.forward],
            "backward": [self.backward],
            "both": [self.forward, self.backward],
        }
        expect(
            direction in known, "direction", "'forward', 'backward' or 'both'", repr(direction), "Pass one"
        )
        total = np.zeros(len(self.pairs), np.int64)
        for phase in chain.from_iterable(phases.values() for phases in known[direction]):
            total += phase.received
        return total


def exchange_parts(heads: list[HeadSlice]) -> int:
    """Into how many parts, by heads, an exchange is cut; the same number on all ranks, so that these meet.

    Example:
        >>> exchange_parts(split_heads(32, 8, members=4)), exchange_parts(split_heads(12, 3, members=2))
        (2, 1)
    """
    if any(tuple(part.kv_map) != tuple(range(len(part.kv))) for part in heads):
        return 1
    return max(1, min(_PARTS, *(len(part.kv) for part in heads)))


def cost_of(plan: Plan, strategy: Strategy, node_size: int | None = None) -> Cost:
    """What a plan's call would cost under a strategy.

    Args:
        plan: The problem; its own strategy does not matter.
        strategy: What to cost.
        node_size: Ranks of a node; None: all ranks lie in one.

    Example:
        >>> from attnspan import causal
        >>> from attnspan.parallel import Layout
        >>> plan = Layout.of(causal(), q_len=64, ranks=2, method="zigzag").plan(heads=(4, 2), strategy="ring")
        >>> cost_of(plan, plan.strategy).balance
        1.0
    """
    members, groups, ranks = strategy.members, strategy.groups, strategy.ranks
    node_size = ranks if node_size is None else node_size
    sizes, heads = plan.sizes, split_heads(*plan.sizes.heads, members)
    counts = _Counts(plan, heads)
    node = np.arange(ranks) // node_size
    forward: dict[str, Phase] = {}
    backward: dict[str, Phase] = {}
    fetched = np.full(groups, (groups - 1) * members * counts.keys * plan.planes)
    returned = np.zeros(groups, np.int64)
    least = 0
    if members > 1:
        forward["scatter"], backward["scatter"] = _scatter(counts, node)
    if groups > 1 and strategy.kind == "ring":
        forward["ring"], backward["gradients"] = _ring(counts, groups, node)
        backward["ring"] = forward["ring"]
    elif groups > 1:
        needs, holders = plan.needs(strategy), plan.holders(strategy)
        fetched, returned = foreign(needs, holders), lent(needs, holders)
        near = max(1, node_size // members)
        across = foreign(needs, holders, near) if near < groups else np.zeros(groups, np.int64)
        # What is lent to other nodes is not counted one by one: as large a share as of what is received.
        share = across.sum() / max(fetched.sum(), 1)
        moved = Phase(fetched, returned, across, (returned * share).astype(np.int64))
        forward["exchange"] = backward["exchange"] = _weighed(moved, counts.kv_bytes)
        back = Phase(moved.sent, moved.received, moved.sent_across, moved.received_across)
        backward["gradients"] = _weighed(back, counts.gradient_bytes)
        most = np.asarray(plan.mask.lowered.cost())
        least = max(0, int(most.max(initial=0)) - members * counts.keys)
    if members > 1:
        forward["gather"], backward["gather"] = _gather(counts, node)
    of_group = plan.pairs.reshape(groups, members).sum(1) / plan.bounds.shape[1]
    of_head = of_group * (sizes.batch / plan.planes)
    pairs = np.outer(of_head, [each.heads for each in heads]).reshape(-1)
    parts = groups if strategy.kind == "ring" else exchange_parts(heads)
    memory = _memory(strategy, counts, np.asarray(fetched), returned, parts)
    every = np.repeat(fetched, members)
    return Cost(strategy, pairs, every, least, forward, backward, memory, parts)


class _Counts:
    """What the rows of a call weigh: rows and keys of a rank, bytes per row for each member, int64 (u,)."""

    def __init__(self, plan: Plan, heads: list[HeadSlice]) -> None:
        sizes = plan.sizes
        self.sizes, self.rows, self.keys = sizes, plan.layout.rows_per_rank, plan.keys.rows_per_rank
        self.q_heads = np.array([part.heads for part in heads], np.int64)
        self.kv = np.array([len(part.kv) for part in heads], np.int64) * (sizes.head_dim + sizes.v_dim)
        # Keys of a plane travel for all batch rows that share it.
        self.shared = sizes.batch // plan.planes
        self.kv_bytes = self.kv * sizes.itemsize * self.shared
        self.gradient_bytes = self.kv * sizes.wide * self.shared


def _weighed(rows: Phase, weight: Ints) -> Phase:
    """Rows of each group as bytes of each rank."""
    return Phase(*(np.outer(x, weight).reshape(-1) for x in rows))


def _scatter(counts: _Counts, node: Ints) -> tuple[Phase, Phase]:
    """What a member receives from each other member depends on its own heads."""
    sizes, rows, heads = counts.sizes, counts.rows, counts.q_heads
    forward = sizes.batch * sizes.itemsize * (rows * heads * sizes.head_dim + counts.keys * counts.kv)
    backward = sizes.batch * rows * heads * sizes.v_dim * sizes.itemsize
    return _inside(forward[:, None], node), _inside(backward[:, None], node)


def _gather(counts: _Counts, node: Ints) -> tuple[Phase, Phase]:
    """What a member receives from another one depends on the other's heads."""
    sizes, rows, heads = counts.sizes, counts.rows, counts.q_heads
    forward = sizes.batch * rows * heads * (sizes.v_dim * sizes.itemsize + sizes.wide)
    backward = sizes.batch * (
        rows * heads * sizes.head_dim * sizes.itemsize + counts.keys * counts.kv * sizes.wide
    )
    return _inside(forward[None], node), _inside(backward[None], node)


def _inside(size: Ints, node: Ints) -> Phase:
    """A phase inside of each group: size[a, c] bytes go from member c to member a."""
    members = max(size.shape)
    size = np.where(~np.eye(members, dtype=bool), np.broadcast_to(size, (members, members)), 0)
    place = node.reshape(-1, members)
    across = size * (place[:, :, None] != place[:, None, :])  # (groups, receiver, sender)
    groups = len(place)
    received, sent = (np.tile(size.sum(axis), groups) for axis in (1, 0))
    return Phase(received, sent, across.sum(2).reshape(-1), across.sum(1).reshape(-1))


def _ring(counts: _Counts, groups: int, node: Ints) -> tuple[Phase, Phase]:
    """Blocks come from the same member of the group before, gradients travel along and make a full turn."""
    members, batch = len(counts.kv), counts.sizes.batch
    block = members * counts.keys * batch * counts.kv
    keys = np.tile((groups - 1) * block * counts.sizes.itemsize, groups)
    gradients = np.tile(groups * block * counts.sizes.wide, groups)
    into, out = ((node != np.roll(node, step)).astype(np.int64) for step in (members, -members))
    return tuple(Phase(x, x, x * into, x * out) for x in (keys, gradients))  # type: ignore[return-value]


def _memory(strategy: Strategy, counts: _Counts, fetched: Ints, returned: Ints, parts: int) -> Ints:
    """Bytes in backward, where they are most."""
    sizes, members, batch = counts.sizes, strategy.members, counts.sizes.batch
    own = members * counts.keys * batch * counts.kv  # elements of the group's keys and values, by member
    if strategy.kind == "ring" and strategy.groups > 1:
        # Two blocks of keys, two of gradients; dq and a part of it in float32.
        dq = 2 * members * counts.rows * batch * counts.q_heads * sizes.head_dim
        used = np.tile(2 * own * (sizes.itemsize + sizes.wide) + dq * sizes.wide, strategy.groups)
    elif strategy.groups > 1:
        # What was fetched, as received and (one part at a time) in order; gradients of all, lent and own
        # ones.
        rows = np.outer(fetched, counts.kv) * counts.shared
        lent_rows = np.outer(returned, counts.kv) * counts.shared
        used = rows * sizes.itemsize + (rows + own) // parts * sizes.itemsize
        used = (used + (rows + lent_rows + 2 * own) * sizes.wide).reshape(-1)
    else:
        used = np.tile(own * sizes.wide, strategy.groups)
    if members > 1:  # q, out, k, v and lse of the group's rows are kept for backward.
        rows = members * counts.rows * batch * counts.q_heads
        kept = (rows * (sizes.head_dim + sizes.v_dim) + own) * sizes.itemsize + rows * 8
        used = used + np.tile(kept, strategy.groups)
    return used.astype(np.int64)
