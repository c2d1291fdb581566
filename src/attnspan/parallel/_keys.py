"""Keys and values as rows that travel, and where they lie.

Shapes: B batch rows, P planes (batch rows of the mask: B or 1), h heads, S keys of a group, K keys of a
stage. A row holds the key and the value of h heads: (B / P, h, D + Dv).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._collectives import Pending, exchange
from ._heads import Team
from .local import LocalPlan, Transfer


def to_rows(k: Tensor, v: Tensor, planes: int) -> Tensor:
    """Keys (B, h, S, D) and values (B, h, S, Dv) side by side: (P * S, B / P, h, D + Dv), contiguous."""
    batch, heads, length, dim = k.shape
    inner = batch // planes
    rows = k.new_empty((planes, length, inner, heads, dim + v.shape[3]))
    for x, part in ((k, rows[..., :dim]), (v, rows[..., dim:])):
        part.copy_(x.view(planes, inner, heads, length, x.shape[3]).permute(0, 3, 1, 2, 4))
    return rows.flatten(0, 1)


def from_rows(rows: Tensor, planes: int, dim: int) -> tuple[Tensor, Tensor]:
    """Views (B, h, S, D) and (B, h, S, Dv) of rows."""
    _, inner, heads, width = rows.shape
    x = rows.view(planes, rows.shape[0] // planes, inner, heads, width).permute(0, 2, 3, 1, 4)
    # One of the two is 1, so that they merge without a copy.
    x = x.reshape(planes * inner, *x.shape[2:])
    return x[..., :dim], x[..., dim:]


class Route(NamedTuple):
    """The exchange of a plan, with what it needs besides: ranks, splits as numbers.

    Args:
        plan: Of this rank, with an exchange.
        team: Who takes part.
        lists: The plan's transfer, in int64.
        send_rows: How many rows go to each rank.
        rows: How many come from each.
    """

    plan: LocalPlan
    team: Team
    lists: Transfer
    send_rows: list[int]
    rows: list[int]

    @classmethod
    def of(cls, plan: LocalPlan, team: Team) -> "Route":
        """Where rows go: to the rank of each group that has the same heads."""
        assert plan.transfer is not None
        members, ranks = plan.strategy.members, plan.strategy.ranks
        both = []
        for counts in (plan.transfer.send_counts, plan.transfer.receive_counts):
            every = [0] * ranks
            every[plan.member :: members] = counts
            both.append(every)
        t = plan.transfer
        # Copies by index take int64 only.
        lists = Transfer(*(x.long() for x in (t.send, t.place, t.own, t.own_place)), *both)
        return cls(plan, team, lists, *both)

    def fetch(self, rows: Tensor) -> "Fetched":
        """Start to send the rows that other groups need, and to receive those that this one does."""
        t = self.lists
        send = rows.index_select(0, t.send)
        return Fetched(self, rows, exchange(send, self.send_rows, self.rows, self.team.group, "exchange"))

    def give_back(self, grads: Tensor) -> "Returned":
        """Start to send the gradients of fetched keys to those who own them.

        Args:
            grads: Shape (P * K, B / P, h, D + Dv), float32.
        """
        t = self.lists
        send = grads.index_select(0, t.place)
        pending = exchange(send, self.rows, self.send_rows, self.team.group, "gradients")
        return Returned(self, grads, pending)

    @property
    def stage_rows(self) -> int:
        """P * K."""
        planes, keys = self.plan.stages[0].keys.shape
        return int(planes * keys)


class Fetched(NamedTuple):
    """The keys of a stage under way."""

    route: Route
    own: Tensor
    pending: Pending

    def wait(self) -> Tensor:
        """Shape (P * K, B / P, h, D + Dv), in the order of the stage's keys."""
        t = self.route.lists
        shape, filled = (self.route.stage_rows, *self.own.shape[1:]), t.own.shape[0] + t.place.shape[0]
        # Behind the last key of a plane nothing is visible, but garbage may be NaN, which has a slow way.
        rows = self.own.new_empty(shape) if filled == shape[0] else self.own.new_zeros(shape)
        rows.index_copy_(0, t.own_place, self.own.index_select(0, t.own))
        rows.index_copy_(0, t.place, self.pending.wait())
        return rows


class Returned(NamedTuple):
    """Gradients of this group's keys under way."""

    route: Route
    grads: Tensor
    pending: Pending

    def wait(self) -> Tensor:
        """Shape (P * S, B / P, h, D + Dv), float32: parts of a key's gradient, added in ranks' order."""
        t, plan = self.route.lists, self.route.plan
        total = self.grads.new_zeros((plan.planes * plan.key_slots, *self.grads.shape[1:]))
        total.index_copy_(0, t.own, self.grads.index_select(0, t.own_place))
        at = 0
        for part in torch.split(self.pending.wait(), [n for n in self.route.send_rows if n]):
            # A key occurs once in each part, so the order of the sums is that of the ranks.
            slots = t.send[at : at + part.shape[0]]
            total.index_add_(0, slots, part)
            at += part.shape[0]
        return total


def pass_on(rows: Tensor, team: Team, phase: str) -> Pending:
    """Start to send rows to the next group of the ring, and to receive those of the one before."""
    strategy = team.strategy
    send_rows, receive_rows = [0] * strategy.ranks, [0] * strategy.ranks
    send_rows[(team.rank + strategy.members) % strategy.ranks] = rows.shape[0]
    receive_rows[(team.rank - strategy.members) % strategy.ranks] = rows.shape[0]
    return exchange(rows, send_rows, receive_rows, team.group, phase)
