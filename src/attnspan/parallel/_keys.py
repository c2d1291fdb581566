"""Keys and values as rows that travel, and where they lie.

Shapes: B batch rows, P planes (batch rows of the mask: B or 1), h heads, S keys of a group, K keys of a
stage. A row holds the key and the value of h heads: (B / P, h, D + Dv).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._collectives import Pending, exchange
from ._heads import Team
from ._rows import move
from .local import LocalPlan, Transfer


def to_rows(k: Tensor, v: Tensor) -> Tensor:
    """Keys (B, h, S, D) and values (B, h, S, Dv) side by side: (1, S, B, h, D + Dv), contiguous."""
    batch, heads, length, dim = k.shape
    rows = k.new_empty((1, length, batch, heads, dim + v.shape[3]))
    for x, part in ((k, rows[..., :dim]), (v, rows[..., dim:])):
        part.copy_(as_rows(x, 1))
    return rows


def from_rows(rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Views (B, h, S, D) and (B, h, S, Dv) of rows (P, S, B / P, h, D + Dv)."""
    x = whole(rows)
    return x[..., :dim], x[..., dim:]


def whole(rows: Tensor) -> Tensor:
    """A view (B, h, S, width) of rows (P, S, B / P, h, width)."""
    planes, length, inner, heads, width = rows.shape
    # One of the two is 1, so that they merge without a copy.
    return rows.permute(0, 2, 3, 1, 4).reshape(planes * inner, heads, length, width)


def as_rows(x: Tensor, planes: int) -> Tensor:
    """A view (P, S, B / P, h, D) of (B, h, S, D)."""
    batch, heads, length, dim = x.shape
    return x.view(planes, batch // planes, heads, length, dim).permute(0, 3, 1, 2, 4)


class Route(NamedTuple):
    """The exchange of a plan, with what it needs besides: ranks, splits as numbers.

    Args:
        plan: Of this rank, with an exchange.
        team: Who takes part.
        send_rows: How many rows go to each rank.
        rows: How many come from each.
    """

    plan: LocalPlan
    team: Team
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
        return cls(plan, team, *both)

    @property
    def lists(self) -> Transfer:
        """Which rows go where."""
        assert self.plan.transfer is not None
        return self.plan.transfer

    def fetch(self, k: Tensor, v: Tensor) -> "Fetched":
        """Start to send the keys that other groups need, and to receive those that this one does.

        Args:
            k: Shape (B, h, S, D).
            v: Shape (B, h, S, Dv).
        """
        own = as_rows(k, self.plan.planes), as_rows(v, self.plan.planes)
        send, received = (self._new_rows(own, 1, sum(rows)) for rows in (self.send_rows, self.rows))
        for x, part in zip(own, _split(send, own), strict=True):
            move(part, None, x, self.lists.send)
        counts = self.send_rows, self.rows
        return Fetched(self, own, exchange(send[0], *counts, self.team.group, "exchange", received[0]))

    def give_back(self, grads: Tensor) -> Pending:
        """Start to send the gradients of fetched keys to those who own them.

        Args:
            grads: Shape (P, K, B / P, h, D + Dv), float32.
        """
        new, width = self.team.workspace.new, grads.shape[2:]
        send, received = (new((1, sum(rows), *width), grads) for rows in (self.rows, self.send_rows))
        move(send, None, grads, self.lists.place)
        return exchange(send[0], self.rows, self.send_rows, self.team.group, "gradients", received[0])

    def collect(self, grads: Tensor, returned: Pending, total: Tensor) -> None:
        """Add up all parts of the gradients of this group's keys, in the ranks' order.

        Args:
            grads: Shape (P, K, B / P, h, D + Dv), this group's part, of the stage's keys.
            returned: The other groups' parts.
            total: Shape (P, S, B / P, h, D + Dv), written.
        """
        if self.lists.own.shape[0] < total.shape[0] * total.shape[1]:
            total.zero_()
        move(total, self.lists.own, grads, self.lists.own_place)
        received, at = returned.wait(), 0
        for part in torch.split(received, [n for n in self.send_rows if n]):
            # A key occurs once in each part, so the order of the sums is that of the ranks.
            move(total, self.lists.send[at : at + part.shape[0]], part[None], None, add=True)
            at += part.shape[0]
        for x in (grads, received):
            self.team.workspace.give(x)

    def _new_rows(self, own: tuple[Tensor, Tensor], planes: int, length: int) -> Tensor:
        k, v = own
        shape = (planes, length, *k.shape[2:4], k.shape[4] + v.shape[4])
        return self.team.workspace.new(shape, k)


class Fetched(NamedTuple):
    """The keys of a stage under way."""

    route: Route
    own: tuple[Tensor, Tensor]
    pending: Pending

    def wait(self) -> Tensor:
        """Shape (P, K, B / P, h, D + Dv), in the order of the stage's keys."""
        t, (planes, keys) = self.route.lists, self.route.plan.stages[0].keys.shape
        rows = self.route._new_rows(self.own, planes, keys)
        if t.own.shape[0] + t.place.shape[0] < planes * keys:
            # Behind the last key of a plane nothing is visible, but garbage may be NaN, which has a slow way.
            rows.zero_()
        for x, part in zip(self.own, _split(rows, self.own), strict=True):
            move(part, t.own_place, x, t.own)
        received = self.pending.wait()
        move(rows, t.place, received[None], None)
        self.route.team.workspace.give(received)
        return rows


def _split(rows: Tensor, own: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Views of the keys and of the values among rows."""
    dim = own[0].shape[4]
    return rows[..., :dim], rows[..., dim:]


def pass_on(rows: Tensor, team: Team, phase: str) -> Pending:
    """Start to send rows (S, ...) to the next group of the ring, and to receive those of the one before."""
    strategy = team.strategy
    send_rows, receive_rows = [0] * strategy.ranks, [0] * strategy.ranks
    send_rows[(team.rank + strategy.members) % strategy.ranks] = rows.shape[0]
    receive_rows[(team.rank - strategy.members) % strategy.ranks] = rows.shape[0]
    return exchange(rows, send_rows, receive_rows, team.group, phase)
