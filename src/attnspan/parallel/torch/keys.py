"""Keys and values as rows that travel, and their places.

Shapes: B batch elements, P planes (batch elements of the mask: B or 1), h heads, S keys of a group, K keys of
a stage. A row holds the key and the value of h heads: (B / P, h, D + Dv).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.kernels import cpu
from attnspan.parallel.local import Tables, Transfer

from .comm import Pending, exchange
from .heads import Team

_MOVED = (torch.float32, torch.bfloat16, torch.float16)


def move(target: Tensor, to: Tensor | None, source: Tensor, at: Tensor | None, add: bool = False) -> None:
    """Copy rows of the source to rows of the target, or add them.

    Arrays are (planes, length, inner, heads, width) with a unit last stride. Row i is row i % length of plane
    i // length.

    Args:
        target: Array to write.
        to: Rows of the target, int32 (n,), each once. None for all in order.
        source: Array with the target's dtype, inner, heads and width.
        at: Rows of the source, int32 (n,). None for all in order.
        add: Add to the target instead of overwriting it.
    """
    if cpu.core is not None and target.device.type == "cpu" and target.dtype in _MOVED:
        cpu.move_rows(target, to, source, at, num_threads=torch.get_num_threads(), add=add)
        return
    rows = source.flatten(0, 1) if at is None else source[_at(source, at)]
    if to is None:
        to = torch.arange(target.shape[0] * target.shape[1], device=target.device)
    target.index_put_(_at(target, to), target[_at(target, to)] + rows if add else rows)


def _at(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    rows, length = rows.long(), max(1, x.shape[1])
    return rows // length, rows % length


def to_rows(k: Tensor, v: Tensor, planes: int, order: Tensor) -> Tensor:
    """Sort keys (B, h, S, D) and values (B, h, S, Dv) to contiguous rows (P, S, B / P, h, D + Dv)."""
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
    """Put gradients of rows of `to_rows` back into the order of the keys: (P, S, B / P, h, D + Dv)."""
    if not order.numel():
        return grads
    found = torch.empty_like(grads)
    move(found, order, grads, None)
    return found


def whole(rows: Tensor) -> Tensor:
    """View (B, h, S, width) of rows (P, S, B / P, h, width)."""
    planes, length, inner, heads, width = rows.shape
    # planes or inner is 1, so that they merge without a copy.
    return rows.permute(0, 2, 3, 1, 4).reshape(planes * inner, heads, length, width)


def as_rows(x: Tensor, planes: int) -> Tensor:
    """View (P, S, B / P, h, D) of (B, h, S, D)."""
    batch, heads, length, dim = x.shape
    return x.view(planes, batch // planes, heads, length, dim).permute(0, 3, 1, 2, 4)


class KeyRoute(NamedTuple):
    """Route of the keys of a plan with one stage, and of their gradients.

    Args:
        tables: Tables of this rank. Without a transfer the group has all keys that it needs.
        team: The participating ranks.
    """

    tables: Tables
    team: Team

    def fetch(self, k: Tensor, v: Tensor, part: int) -> Pending:
        """Start to send the keys that other groups need, and to receive the keys that this group needs.

        Args:
            k: Shape (B, h, S, D).
            v: Shape (B, h, S, Dv).
            part: Number of the part of the heads.

        Returns:
            Pending keys (B, h, K, D) and values in the order of the stage's keys. They are valid until you
            wait for the next part.
        """
        lists, planes, dim = self.tables.transfer, self.tables.numbers.planes, k.shape[3]
        if lists is None:
            order = self.tables.key_order
            return Pending(from_rows(to_rows(k, v, planes, order), dim) if order.numel() else (k, v))
        own = as_rows(k, planes), as_rows(v, planes)
        width = *own[0].shape[2:4], dim + v.shape[3]
        new = self.team.scratch.new
        send = new(f"send {part}", (1, sum(lists.send_counts), *width), k)
        received = new(f"received {part}", (sum(lists.receive_counts), *width), k)
        for x, half in zip(own, _split(send, dim), strict=True):
            move(half, None, x, lists.send)
        counts = lists.send_counts, lists.receive_counts
        coming = exchange(send[0], *counts, self.team.ranks.peers, "exchange", received)
        return coming.then(lambda received: from_rows(self._placed(lists, own, received), dim))

    def _placed(self, lists: Transfer, own: tuple[Tensor, Tensor], received: Tensor) -> Tensor:
        planes, keys = self.tables.stages[0].keys.shape
        rows = self.team.scratch.new("rows", (planes, keys, *received.shape[1:]), received)
        if lists.own.shape[0] + lists.place.shape[0] < planes * keys:
            # Nothing after the last key of a plane is visible, but NaN in garbage would be slow.
            rows.zero_()
        for x, half in zip(own, _split(rows, own[0].shape[4]), strict=True):
            move(half, lists.own_place, x, lists.own)
        move(rows, lists.place, received[None], None)
        return rows

    def gradients(self, k: Tensor, v: Tensor, part: int) -> Tensor:
        """Allocate rows (P, K, B / P, h, D + Dv) for gradients of fetched keys, in the dtype of sums."""
        sorted_here = self.tables.transfer is not None or self.tables.key_order.numel()
        planes = self.tables.numbers.planes if sorted_here else 1
        shape = planes, k.shape[2], k.shape[0] // planes, k.shape[1], k.shape[3] + v.shape[3]
        return self.team.scratch.new(f"grads {part}", shape, k, torch.promote_types(k.dtype, torch.float32))

    def give_back(self, grads: Tensor, part: int) -> Pending:
        """Start to send the gradients of fetched keys, rows from `gradients`, to the owners of the keys."""
        lists, width, new = self.tables.transfer, grads.shape[2:], self.team.scratch.new
        if lists is None:
            return Pending(grads)
        send = new(f"received {part}", (1, sum(lists.receive_counts), *width), grads)
        received = new(f"send {part}", (sum(lists.send_counts), *width), grads)
        move(send, None, grads, lists.place)
        counts = lists.receive_counts, lists.send_counts
        return exchange(send[0], *counts, self.team.ranks.peers, "gradients", received)

    def collect(
        self,
        returned: Sequence[tuple[slice, Tensor, Pending]],
        heads: int,
        length: int,
        one_reader: bool = False,
    ) -> Tensor:
        """Sum the gradients of this group's keys in the groups' order, (P, S, B / P, G, D + Dv).

        Args:
            returned: For each part, its heads, this group's gradients, and the other groups' gradients.
            heads: Key heads, G.
            length: Keys, S.
            one_reader: Whether at most one group needs each key, so that nothing is added, in any dtype.
        """
        lists, (_, first, _) = self.tables.transfer, returned[0]
        if lists is None:
            return unsorted(first, self.tables.key_order)
        shape = first.shape[0], length, first.shape[2], heads, first.shape[4]
        whole = self.team.scratch.new("total", shape, first)
        if lists.own.shape[0] < shape[0] * length:
            whole.zero_()
        for heads_of, grads, pending in returned:
            total, at = whole[..., heads_of, :], 0
            move(total, lists.own, grads, lists.own_place)
            for part in torch.split(pending.wait(), [n for n in lists.send_counts if n]):
                # A key occurs once in each part, so the sums follow the order of the groups.
                move(total, lists.send[at : at + part.shape[0]], part[None], None, not one_reader)
                at += part.shape[0]
        return whole


def _split(rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Views of the keys and the values in rows."""
    return rows[..., :dim], rows[..., dim:]


def pass_on(rows: Tensor, team: Team, phase: str) -> Pending:
    """Start to send rows (P, S, ...) to the next group of the ring, and to receive the previous group's."""
    numbers, groups = team.numbers, team.numbers.strategy.groups
    flat = rows.flatten(0, 1)
    send_rows, receive_rows = [0] * groups, [0] * groups
    send_rows[(numbers.group + 1) % groups] = flat.shape[0]
    receive_rows[(numbers.group - 1) % groups] = flat.shape[0]
    return exchange(flat, send_rows, receive_rows, team.ranks.peers, phase, torch.empty_like(flat))
