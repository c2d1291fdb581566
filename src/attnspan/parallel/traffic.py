"""How many bytes cross the network, per rank and phase: arithmetic on counts, no data.

Shapes: P ranks, u members of a group, r groups; P = u * r and rank p = b * u + a is member a of group b.

Every figure counts what a rank receives from (sends to) *other* ranks, in elements of the arrays that are
handed to the collectives: no headers, and nothing for what a rank keeps. Scatter, gather and ring move whole
shards, padding included, and do not depend on the mask; the exchange moves the rows that are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..errors import OptionError, ShapeError
from .needs import Holders, Needs
from .payload import Ints, Payload

if TYPE_CHECKING:
    from .strategy import Strategy

__all__ = ["Payload", "Phase", "Traffic", "rows_between", "traffic_of"]


@dataclass(frozen=True, eq=False)
class Phase:
    """Bytes and messages of one phase, each int64 (P,).

    Attributes:
        received, sent: Bytes from and to all other ranks.
        received_across, sent_across: Those of them that come from, or go to, another node.
        messages: Ranks that something is received from, one after the other where it comes in steps.
        messages_across: Those of them in another node.

    Example:
        >>> Phase.zeros(2).received
        array([0, 0])
    """

    received: Ints
    sent: Ints
    received_across: Ints
    sent_across: Ints
    messages: Ints
    messages_across: Ints

    @classmethod
    def zeros(cls, ranks: int) -> Phase:
        """A phase in which nothing moves.

        Example:
            >>> int(Phase.zeros(4).sent.sum())
            0
        """
        return cls(*(np.zeros(ranks, np.int64) for _ in range(6)))

    def __add__(self, other: Phase) -> Phase:
        return Phase(
            *(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def received_within(self) -> Ints:
        """Bytes received from ranks of the same node."""
        return self.received - self.received_across

    @property
    def sent_within(self) -> Ints:
        """Bytes sent to ranks of the same node."""
        return self.sent - self.sent_across


@dataclass(frozen=True, eq=False)
class Traffic:
    """The bytes of one call of attention, forward and backward.

    Attributes:
        ranks: P.
        node_size: Ranks of a node; rank p lies in node p // node_size.
        forward: "scatter" (q, k, v to the members that own the heads), "exchange" or "ring" (k, v between
            groups), "gather" (out and lse back to the ranks that own the rows). What a strategy does not do
            is not in it.
        backward: "scatter" (the gradient of out), "exchange" or "ring" (k and v anew), "gradients" (dk, dv in
            float32 back to the groups that own the keys), "gather" (dq, dk, dv back to the ranks that own the
            rows).

    Example:
        >>> from attnspan.parallel.strategy import Strategy
        >>> payload = Payload(rows=4, q_heads=(1,), kv_heads=(1,), head_dim=8, v_dim=8, itemsize=2)
        >>> traffic_of(Strategy.parse("ring", 3), payload).received("forward")
        array([256, 256, 256])
    """

    ranks: int
    node_size: int
    forward: Mapping[str, Phase] = field(default_factory=dict)
    backward: Mapping[str, Phase] = field(default_factory=dict)

    def total(self, direction: str = "both") -> Phase:
        """All phases of "forward", "backward" or "both" together.

        Raises:
            OptionError: For another direction.

        Example:
            >>> Traffic(ranks=1, node_size=1).total().sent
            array([0])
        """
        if direction not in ("forward", "backward", "both"):
            raise OptionError(
                "direction",
                expected='"forward", "backward" or "both"',
                got=repr(direction),
                remedy="Pass one of them",
            )
        phases = [*(self.forward.values() if direction != "backward" else ())]
        phases += self.backward.values() if direction != "forward" else ()
        return sum(phases, Phase.zeros(self.ranks))

    def received(self, direction: str = "both") -> Ints:
        """Bytes that each rank receives, int64 (P,).

        Args:
            direction: "forward", "backward" or "both".

        Example:
            >>> Traffic(ranks=2, node_size=1).received()
            array([0, 0])
        """
        return self.total(direction).received


def rows_between(needs: Needs, holders: Holders) -> Ints:
    """How many key rows each group needs of each other group.

    Args:
        needs: The flat keys that each group may see.
        holders: Who holds which flat keys.

    Returns:
        int64 (r, r): rows that group b (first) needs and group s holds, in flat keys; zero where b == s.
        Memory grows with r squared, time with r times the ranges of all groups.

    Example:
        >>> needs = Needs(np.array([0, 1, 2]), np.array([0, 1]), np.array([2, 4]))
        >>> rows_between(needs, Holders.contiguous(k_len=4, planes=1, groups=2)).tolist()
        [[0, 0], [1, 0]]
    """
    groups = needs.groups
    group = np.repeat(np.arange(groups), np.diff(needs.starts))
    ends = np.concatenate([needs.lo, needs.hi])
    order = np.argsort(ends, kind="stable")
    end, group = ends[order], np.tile(group, 2)[order]
    sign = np.where(order < len(needs.lo), -1, 1)
    first = np.searchsorted(holders.hi, end, side="right")  # intervals that lie before the end as a whole
    rows = np.zeros((groups, groups), np.int64)
    # A range [lo, hi) holds what lies before hi less what lies before lo, source by source.
    before, width, done = np.zeros(groups, np.int64), holders.hi - holders.lo, 0
    for number, receiver in enumerate(group.tolist()):
        if first[number] > done:
            passed = slice(done, int(first[number]))
            np.add.at(before, holders.group[passed], width[passed])
            done = passed.stop
        rows[receiver] += sign[number] * before
    cut = first < len(width)
    part = np.maximum(end[cut] - holders.lo[first[cut]], 0)
    np.add.at(rows, (group[cut], holders.group[first[cut]]), sign[cut] * part)
    np.fill_diagonal(rows, 0)
    return rows


def traffic_of(
    strategy: Strategy, payload: Payload, rows: Ints | None = None, *, node_size: int | None = None
) -> Traffic:
    """The bytes of one call.

    Args:
        strategy: Members, groups and what happens between groups.
        payload: What rows weigh.
        rows: What `rows_between` gave; only the exchange between several groups needs it.
        node_size: Ranks of a node; None: all ranks lie in one.

    Raises:
        ShapeError: The payload is one of another number of members, or `rows` is missing or of another size.

    Example:
        >>> from attnspan.parallel.strategy import Strategy
        >>> payload = Payload(rows=4, q_heads=(1,), kv_heads=(1,), head_dim=8, v_dim=8, itemsize=2)
        >>> traffic = traffic_of(Strategy.parse("exchange", 2), payload, np.array([[0, 3], [0, 0]]))
        >>> traffic.received("forward"), traffic.received("backward")
        (array([96,  0]), array([ 96, 192]))
    """
    members, groups = strategy.members, strategy.groups
    ranks = members * groups
    node_size = ranks if node_size is None else node_size
    _check(strategy, payload, rows)
    node = np.arange(ranks) // node_size
    forward: dict[str, Phase] = {}
    backward: dict[str, Phase] = {}
    if members > 1:
        forward["scatter"], backward["scatter"] = _scatter(payload, node)
    if groups > 1 and strategy.kind == "ring":
        forward["ring"], backward["gradients"] = _ring(payload, groups, node)
        backward["ring"] = forward["ring"]
    elif groups > 1:
        assert rows is not None
        weight = payload.kv_bytes * (payload.batch // payload.planes)
        forward["exchange"] = backward["exchange"] = _exchange(rows, weight, node)
        # Gradients go back the way that the rows came.
        weight = payload.gradient_bytes * (payload.batch // payload.planes)
        backward["gradients"] = _exchange(rows.T, weight, node)
    if members > 1:
        forward["gather"], backward["gather"] = _gather(payload, node)
    return Traffic(ranks, node_size, forward, backward)


def _check(strategy: Strategy, payload: Payload, rows: Ints | None) -> None:
    if len(payload.q_heads) != strategy.members:
        raise ShapeError(
            "payload",
            expected=f"heads of {strategy.members} members, as {strategy} has",
            got=str(len(payload.q_heads)),
            remedy="Split the heads over the members of the strategy",
        )
    wanted = strategy.groups > 1 and strategy.kind != "ring"
    if wanted and (rows is None or rows.shape != (strategy.groups, strategy.groups)):
        raise ShapeError(
            "rows",
            expected=f"({strategy.groups}, {strategy.groups}) rows between groups",
            got="None" if rows is None else str(rows.shape),
            remedy="Pass what rows_between gives",
        )


def _scatter(payload: Payload, node: Ints) -> tuple[Phase, Phase]:
    """What a member receives from each other member depends on its own heads."""
    q_heads = np.array(payload.q_heads, np.int64)
    q_bytes = payload.rows * q_heads * payload.head_dim * payload.itemsize
    forward = payload.batch * (q_bytes + payload.kv_rows * payload.kv_bytes)
    dlse = payload.wide if payload.dlse else 0
    backward = payload.batch * payload.rows * q_heads * (payload.v_dim * payload.itemsize + dlse)
    members = len(q_heads)
    return tuple(_inside(np.repeat(size[:, None], members, 1), node) for size in (forward, backward))  # type: ignore[return-value]


def _gather(payload: Payload, node: Ints) -> tuple[Phase, Phase]:
    """What a member receives from another one depends on the other's heads."""
    q_heads = np.array(payload.q_heads, np.int64)
    forward = payload.batch * payload.rows * q_heads * (payload.v_dim * payload.itemsize + payload.wide)
    q_bytes = payload.rows * q_heads * payload.head_dim * payload.itemsize
    backward = payload.batch * (q_bytes + payload.kv_rows * payload.gradient_bytes)
    members = len(q_heads)
    return tuple(_inside(np.repeat(size[None], members, 0), node) for size in (forward, backward))  # type: ignore[return-value]


def _inside(size: Ints, node: Ints) -> Phase:
    """A phase inside of each group: size[a, c] bytes go from member c to member a."""
    members = len(size)
    others = ~np.eye(members, dtype=bool)
    size = np.where(others, size, 0)
    place = node.reshape(-1, members)
    across = (place[:, :, None] != place[:, None, :]) & others  # (groups, receiver, sender)
    groups = len(place)
    return Phase(
        received=np.tile(size.sum(1), groups),
        sent=np.tile(size.sum(0), groups),
        received_across=(size * across).sum(2).reshape(-1),
        sent_across=(size * across).sum(1).reshape(-1),
        messages=np.full(len(node), members - 1, np.int64),
        messages_across=across.sum(2).reshape(-1),
    )


def _ring(payload: Payload, groups: int, node: Ints) -> tuple[Phase, Phase]:
    """Blocks come from the same member of the group before, gradients travel along and make a full turn."""
    members = len(payload.q_heads)
    block = members * payload.kv_rows * payload.batch
    keys = np.tile((groups - 1) * block * payload.kv_bytes, groups)
    gradients = np.tile(groups * block * payload.gradient_bytes, groups)
    from_across = (node != np.roll(node, members)).astype(np.int64)
    to_across = (node != np.roll(node, -members)).astype(np.int64)

    def phase(size: Ints, steps: int) -> Phase:
        count = np.full(len(node), steps, np.int64)
        return Phase(size, size, size * from_across, size * to_across, count, count * from_across)

    return phase(keys, groups - 1), phase(gradients, groups)


def _exchange(rows: Ints, weight: Ints, node: Ints) -> Phase:
    """Member a of each group gets rows[b, s] rows of weight[a] bytes from member a of group s."""
    groups, members = len(rows), len(weight)
    place = node.reshape(groups, members)
    columns = []
    for member in range(members):
        into, out, sources = _within(rows, place[:, member])
        total_in, total_out = rows.sum(1), rows.sum(0)
        counts = (rows > 0).sum(1)
        size = weight[member]
        received, sent = total_in * size, total_out * size
        columns.append((received, sent, received - into * size, sent - out * size, counts, counts - sources))
    return Phase(*(np.stack(parts, 1).reshape(-1) for parts in zip(*columns, strict=True)))


def _within(rows: Ints, place: Ints) -> tuple[Ints, Ints, Ints]:
    """Rows that come from, and go to, groups in the same place, and how many groups they come from."""
    borders = np.flatnonzero(np.diff(place, prepend=-1, append=-1))
    into, out, sources = (np.zeros(len(rows), np.int64) for _ in range(3))
    for start, stop in pairwise(borders):
        block = rows[start:stop, start:stop]
        into[start:stop], out[start:stop] = block.sum(1), block.sum(0)
        sources[start:stop] = (block > 0).sum(1)
    return into, out, sources
