"""Pairs, bytes and memory of one call for each rank, computed from counts without data.

Shapes: P ranks, u members of a group, r groups. P = u * r, and rank p = b * u + a is member a of group b.

Bytes are the sizes of the arrays that a rank receives from or sends to *other* ranks, without headers.
Scatter, gather and ring move whole shards, padding included, and do not depend on the mask. An exchange moves
only the keys that are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnspan.errors import expect

from .intervals import Ints, read_only
from .needs import foreign, lent
from .strategy import HeadSlice, Strategy, split_heads

if TYPE_CHECKING:
    from .plan import Plan


Floats = NDArray[np.float64]

#: Most parts, by heads, into which an exchange is cut. While one part is computed, the next ones travel.
_PARTS = 4


class Sizes(NamedTuple):
    """Sizes of a call that are not in its mask: heads, head dims, bytes of an element, batch size."""

    q_heads: int
    kv_heads: int
    head_dim: int = 128
    v_dim: int = 128
    itemsize: int = 2
    batch: int = 1

    @property
    def heads(self) -> tuple[int, int]:
        """Query heads and key heads, (Hq, Hkv)."""
        return self.q_heads, self.kv_heads

    @property
    def wide(self) -> int:
        """Bytes of an element of lse and of summed gradients: 4, or 8 for float64."""
        return max(4, self.itemsize)


class Phase(NamedTuple):
    """Bytes of one phase for each rank, int64 (P,). "across" counts only bytes between nodes."""

    received: Ints
    sent: Ints
    received_across: Ints
    sent_across: Ints


@dataclass(frozen=True, eq=False)
class Cost:
    """Cost of a strategy.

    Attributes:
        strategy: The strategy.
        pairs: Visible (query, key, head) triples that each rank computes, float64 (P,).
        fetched: Keys that each rank's group receives, padding of a ring included, int64 (P,).
        least_fetched: Lower bound of `fetched` for the busiest group, over all layouts with groups of this
            size. The query that sees the most keys needs all of them, and its group owns only its own rows.
        forward: Bytes by phase: "scatter" (q, k, v to the members that own the heads), "exchange" or "ring"
            (k, v between groups), "gather" (out and lse back to the ranks that own the rows).
        backward: Bytes by phase: "scatter" (the gradient of out), "exchange" or "ring" (k and v again),
            "gradients" (dk, dv in float32 to the groups that own the keys), "gather" (dq, dk, dv to the ranks
            that own the rows).
        memory: Bytes of the buffers of one call and of the arrays kept for backward, besides q, k, v and out,
            int64 (P,).
        parts: Number of parts into which the work between groups is cut, so that they overlap.
    """

    strategy: Strategy
    pairs: Floats
    fetched: Ints
    least_fetched: int
    forward: Mapping[str, Phase]
    backward: Mapping[str, Phase]
    memory: Ints
    parts: int

    def __post_init__(self) -> None:
        read_only(self)

    @property
    def balance(self) -> float:
        """Pairs of the busiest rank over the mean, 1.0 if there are no visible pairs."""
        mean = self.pairs.mean()
        return float(self.pairs.max() / mean) if mean else 1.0

    def received(self, direction: str = "both") -> Ints:
        """Count the bytes that each rank receives in "forward", "backward" or "both", int64 (P,).

        Raises:
            OptionError: `direction` is unknown.
        """
        names, wanted = ("forward", "backward"), "'forward', 'backward' or 'both'"
        expect(direction in (*names, "both"), "direction", wanted, repr(direction), "Pass one")
        chosen = [getattr(self, name) for name in names if direction in (name, "both")]
        total = np.zeros(len(self.pairs), np.int64)
        for phases in chosen:
            total += sum(phase.received for phase in phases.values())
        return total


def exchange_parts(heads: list[HeadSlice]) -> int:
    """Count the parts, by heads, into which an exchange is cut. All ranks cut into the same number.

    Example:
        >>> exchange_parts(split_heads(32, 8, members=4)), exchange_parts(split_heads(12, 3, members=2))
        (2, 1)
    """
    if any(tuple(part.kv_map) != tuple(range(len(part.kv))) for part in heads):
        return 1
    return max(1, min(_PARTS, *(len(part.kv) for part in heads)))


def cost_of(plan: Plan, strategy: Strategy, node_size: int | None = None) -> Cost:
    """Predict what a plan's call costs under a strategy.

    Args:
        plan: The problem. Its own strategy does not matter.
        strategy: The strategy to predict.
        node_size: Ranks of a node. None if all ranks are in one node. If a group lies in two nodes, its
            exchange is counted as if all other groups were in other nodes.

    Example:
        >>> from attnspan import causal
        >>> from attnspan.parallel import Layout
        >>> plan = Layout.of(causal(), q_len=64, ranks=2, method="zigzag").plan(heads=(4, 2), strategy="ring")
        >>> cost_of(plan, plan.strategy).balance
        1.0
    """
    members, groups, ranks = strategy.members, strategy.groups, strategy.ranks
    node_size = ranks if node_size is None else node_size
    heads, node = split_heads(*plan.sizes.heads, members), np.arange(ranks) // node_size
    call = _Elements(plan, heads)
    forward: dict[str, Phase] = {}
    backward: dict[str, Phase] = {}
    fetched = np.full(groups, (groups - 1) * members * plan.keys.rows_per_rank * plan.planes)
    returned = np.zeros(groups, np.int64)
    if members > 1:
        forward["scatter"], backward["scatter"] = call.scatter(node)
    if groups > 1 and strategy.kind == "ring":
        forward["ring"], backward["gradients"] = call.ring(groups, node)
        backward["ring"] = forward["ring"]
    elif groups > 1:
        needs, holders = plan.needs(strategy), plan.holders(strategy)
        fetched, returned = foreign(needs, holders), lent(needs, holders)
        near = max(1, node_size // members)
        across = foreign(needs, holders, near) if near < groups else np.zeros(groups, np.int64)
        # Bytes sent to other nodes are estimated: their share equals the share of the received bytes.
        sent_across = (returned * (across.sum() / max(fetched.sum(), 1))).astype(np.int64)
        forward["exchange"] = backward["exchange"] = _weighed(
            (fetched, returned, across, sent_across), call.row * call.itemsize
        )
        backward["gradients"] = _weighed((returned, fetched, sent_across, across), call.row * call.wide)
    if members > 1:
        forward["gather"], backward["gather"] = call.gather(node)
    of_head = plan.pairs(strategy) / plan.bounds.shape[1] * (plan.sizes.batch / plan.planes)
    parts = groups if strategy.kind == "ring" else exchange_parts(heads)
    return Cost(
        strategy,
        np.outer(of_head, [each.heads for each in heads]).reshape(-1),
        np.repeat(fetched, members),
        max(0, int(plan.mask.lowered.cost().max(initial=0)) - members * plan.keys.rows_per_rank),
        forward,
        backward,
        call.memory(strategy, fetched, returned, parts),
        parts,
    )


class _Elements:
    """Elements of one rank's rows that each member attends with, int64 (u,): q, out, lse, and k with v.

    `row` counts the elements of one key that travels, for all batch elements that share its plane.
    """

    def __init__(self, plan: Plan, heads: list[HeadSlice]) -> None:
        sizes = plan.sizes
        rows = sizes.batch * plan.layout.rows_per_rank
        kv = np.array([len(part.kv) for part in heads], np.int64) * (sizes.head_dim + sizes.v_dim)
        self.lse = rows * np.array([part.heads for part in heads], np.int64)
        self.q, self.out = self.lse * sizes.head_dim, self.lse * sizes.v_dim
        self.kv = sizes.batch * plan.keys.rows_per_rank * kv
        self.row = sizes.batch // plan.planes * kv
        self.itemsize, self.wide = sizes.itemsize, sizes.wide

    def scatter(self, node: Ints) -> tuple[Phase, Phase]:
        """Bytes that a member receives from each other member. They depend on its own heads."""
        forward, backward = (self.q + self.kv) * self.itemsize, self.out * self.itemsize
        return _inside(forward[:, None], node), _inside(backward[:, None], node)

    def gather(self, node: Ints) -> tuple[Phase, Phase]:
        """Bytes that a member receives from another member. They depend on the other member's heads."""
        forward = self.out * self.itemsize + self.lse * self.wide
        backward = self.q * self.itemsize + self.kv * self.wide
        return _inside(forward[None], node), _inside(backward[None], node)

    def ring(self, groups: int, node: Ints) -> tuple[Phase, Phase]:
        """Bytes from the same member of the previous group. Gradients travel along, a full turn."""
        members = len(self.kv)
        keys = np.tile((groups - 1) * members * self.kv * self.itemsize, groups)
        gradients = np.tile(groups * members * self.kv * self.wide, groups)
        into, out = ((node != np.roll(node, step)).astype(np.int64) for step in (members, -members))
        return Phase(keys, keys, keys * into, keys * out), Phase(
            gradients, gradients, gradients * into, gradients * out
        )

    def memory(self, strategy: Strategy, fetched: Ints, returned: Ints, parts: int) -> Ints:
        """Bytes of buffers in backward, where they are largest, int64 (P,)."""
        members, groups = strategy.members, strategy.groups
        own = members * self.kv
        if groups == 1:
            used = own * self.wide
        elif strategy.kind == "ring":
            # Two blocks of keys, two blocks of gradients, and dq and a part of it in float32.
            used = 2 * own * (self.itemsize + self.wide) + 2 * members * self.q * self.wide
        else:
            # Fetched keys, as received and (one part at a time) in order, and gradients of fetched, lent and
            # own keys.
            rows, lent_rows = np.outer(fetched, self.row), np.outer(returned, self.row)
            used = rows * self.itemsize + (rows + own) // parts * self.itemsize
            used = used + (rows + lent_rows + 2 * own) * self.wide
        if members > 1:  # q, out, k, v and lse of the group's rows are kept for backward.
            used = used + members * ((self.q + self.out + self.kv) * self.itemsize + self.lse * 8)
        return np.broadcast_to(used, (groups, members)).reshape(-1).astype(np.int64)


def _weighed(rows: tuple[Ints, ...], weight: Ints) -> Phase:
    """Phase of bytes per rank, from keys per group and bytes per key."""
    return Phase(*(np.outer(x, weight).reshape(-1) for x in rows))


def _inside(size: Ints, node: Ints) -> Phase:
    """Phase inside each group: size[a, c] bytes go from member c to member a."""
    members = max(size.shape)
    size = np.where(~np.eye(members, dtype=bool), size, 0)
    place = node.reshape(-1, members)
    across = size * (place[:, :, None] != place[:, None, :])  # (groups, receiver, sender)
    received, sent = (np.tile(size.sum(axis), len(place)) for axis in (1, 0))
    return Phase(received, sent, across.sum(2).reshape(-1), across.sum(1).reshape(-1))
