"""Keys and values as rows that travel, and where they lie.

Shapes: B batch rows, P planes (batch rows of the mask: B or 1), h heads, S keys of a group, K keys of a
stage. A row holds the key and the value of h heads: (B / P, h, D + Dv).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import cpu
from ..local import Tables, Transfer
from .comm import Pending, exchange
from .heads import Team

__all__ = ["Fetched", "Route", "as_rows", "from_rows", "move", "pass_on", "to_rows", "unsorted", "whole"]

_MOVED = (torch.float32, torch.bfloat16, torch.float16)


def move(target: Tensor, to: Tensor | None, source: Tensor, at: Tensor | None, add: bool = False) -> None:
    """Copy rows of the source to rows of the target, or add them; each row of the target once.

    Arrays are (planes, length, inner, heads, width) with a unit last stride; row i is row i % length of plane
    i // length.

    Args:
        target: Written.
        to: Rows of the target, int32 (n,); None for all in order.
        source: Of the target's dtype, inner, heads and width.
        at: Rows of the source, int32 (n,); None for all in order.
        add: Add to the target.
    """
    if cpu.core is not None and target.device.type == "cpu" and target.dtype in _MOVED:
        cpu.move_rows(target, to, source, at, num_threads=torch.get_num_threads(), add=add)
        return
    rows = source.reshape(-1, *source.shape[2:]) if at is None else source[_at(source, at)]
    if to is None:
        to = torch.arange(target.shape[0] * target.shape[1], device=target.device)
    target.index_put_(_at(target, to), target[_at(target, to)] + rows if add else rows)


def _at(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    rows, length = rows.long(), max(1, x.shape[1])
    return rows // length, rows % length


def to_rows(k: Tensor, v: Tensor, planes: int, order: Tensor) -> Tensor:
    """Keys (B, h, S, D) and values (B, h, S, Dv) in ascending order: (P, S, B / P, h, D + Dv), contiguous."""
    planes = planes if order.numel() else 1
    batch, heads, length, dim = k.shape
    rows = k.new_empty((planes, length, batch // planes, heads, dim + v.shape[3]))
    for x, part in ((k, rows[..., :dim]), (v, rows[..., dim:])):
        if order.numel():
            move(part, None, as_rows(x, planes), order)
        else:
            part.copy_(as_rows(x, planes))
    return rows


def from_rows(rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Views (B, h, S, D) and (B, h, S, Dv) of rows (P, S, B / P, h, D + Dv)."""
    x = whole(rows)
    return x[..., :dim], x[..., dim:]


def unsorted(grads: Tensor, order: Tensor) -> Tensor:
    """Gradients of rows of `to_rows` where the keys lay: (P, S, B / P, h, D + Dv)."""
    if not order.numel():
        return grads
    found = torch.empty_like(grads)
    move(found, order, grads, None)
    return found


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
    """The exchange of a plan, and its buffers.

    Args:
        tables: Of this rank, with a transfer.
        team: Who takes part.
    """

    tables: Tables
    team: Team

    @property
    def lists(self) -> Transfer:
        """Which rows go where."""
        assert self.tables.transfer is not None
        return self.tables.transfer

    def fetch(self, k: Tensor, v: Tensor, part: int) -> "Fetched":
        """Start to send the keys that other groups need, and to receive those that this one does.

        Args:
            k: Shape (B, h, S, D).
            v: Shape (B, h, S, Dv).
            part: Number of the part of the heads.
        """
        lists, planes = self.lists, self.tables.numbers.planes
        own = as_rows(k, planes), as_rows(v, planes)
        width = *own[0].shape[2:4], k.shape[3] + v.shape[3]
        new = self.team.scratch.new
        send = new(f"send {part}", (1, sum(lists.send_counts), *width), k)
        received = new(f"received {part}", (sum(lists.receive_counts), *width), k)
        for x, half in zip(own, _split(send, k.shape[3]), strict=True):
            move(half, None, x, lists.send)
        counts = lists.send_counts, lists.receive_counts
        return Fetched(self, own, exchange(send[0], *counts, self.team.ranks.peers, "exchange", received))

    def give_back(self, grads: Tensor, part: int) -> Pending:
        """Start to send the gradients of fetched keys to those who own them.

        Args:
            grads: Shape (P, K, B / P, h, D + Dv), float32.
            part: Number of the part, whose keys are not under way any more.
        """
        lists, width, new = self.lists, grads.shape[2:], self.team.scratch.new
        send = new(f"received {part}", (1, sum(lists.receive_counts), *width), grads)
        received = new(f"send {part}", (sum(lists.send_counts), *width), grads)
        move(send, None, grads, lists.place)
        counts = lists.receive_counts, lists.send_counts
        return exchange(send[0], *counts, self.team.ranks.peers, "gradients", received)

    def collect(self, grads: Tensor, returned: Pending, total: Tensor) -> None:
        """Add up all parts of the gradients of this group's keys, in the groups' order.

        Args:
            grads: Shape (P, K, B / P, h, D + Dv), this group's part, of the stage's keys.
            returned: The other groups' parts.
            total: Shape (P, S, B / P, h, D + Dv), written.
        """
        lists = self.lists
        if lists.own.shape[0] < total.shape[0] * total.shape[1]:
            total.zero_()
        move(total, lists.own, grads, lists.own_place)
        at = 0
        for part in torch.split(returned.wait(), [n for n in lists.send_counts if n]):
            # A key occurs once in each part, so the order of the sums is that of the groups.
            move(total, lists.send[at : at + part.shape[0]], part[None], None, add=True)
            at += part.shape[0]


class Fetched(NamedTuple):
    """The keys of a stage under way."""

    route: Route
    own: tuple[Tensor, Tensor]
    pending: Pending

    def wait(self) -> Tensor:
        """Shape (P, K, B / P, h, D + Dv), in the order of the stage's keys; valid until the next part's."""
        t, (planes, keys) = self.route.lists, self.route.tables.stages[0].keys.shape
        received = self.pending.wait()
        dim = self.own[0].shape[4]
        rows = self.route.team.scratch.new("rows", (planes, keys, *received.shape[1:]), received)
        if t.own.shape[0] + t.place.shape[0] < planes * keys:
            # Behind the last key of a plane nothing is visible, but garbage may be NaN, which has a slow way.
            rows.zero_()
        for x, half in zip(self.own, _split(rows, dim), strict=True):
            move(half, t.own_place, x, t.own)
        move(rows, t.place, received[None], None)
        return rows


def _split(rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Views of the keys and of the values among rows."""
    return rows[..., :dim], rows[..., dim:]


def pass_on(rows: Tensor, team: Team, phase: str) -> Pending:
    """Start to send rows (P, S, ...) to the next group of the ring, and to receive the last group's."""
    numbers, groups = team.numbers, team.numbers.strategy.groups
    flat = rows.flatten(0, 1)
    send_rows, receive_rows = [0] * groups, [0] * groups
    send_rows[(numbers.group + 1) % groups] = flat.shape[0]
    receive_rows[(numbers.group - 1) % groups] = flat.shape[0]
    return exchange(flat, send_rows, receive_rows, team.ranks.peers, phase, torch.empty_like(flat))
