"""Ulysses: redistribution from all heads of a rank's rows to some heads of a group's rows, and back.

Shapes: B batch elements, n rows of a rank, u members of a group, D head dim. Pieces travel as (n, B, heads,
D), so that the pieces of all members arrive as one array of u * n rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.parallel.local import Numbers
from attnspan.parallel.strategy import HeadSlice

from .comm import Pending, Ranks, Scratch, exchange

#: Function that selects the query heads or key heads of a member.
Which = Callable[[HeadSlice], slice]


class Team(NamedTuple):
    """Members of a group, from the view of one rank.

    Args:
        ranks: The process groups.
        numbers: The strategy, and this rank.
        heads: The heads of each member.
        scratch: Source of buffers.
    """

    ranks: Ranks
    numbers: Numbers
    heads: Sequence[HeadSlice]
    scratch: Scratch

    @property
    def mine(self) -> HeadSlice:
        """Heads of this rank."""
        return self.heads[self.numbers.member]


def query_heads(heads: HeadSlice) -> slice:
    """Slice of the query heads of a member."""
    return slice(heads.q_start, heads.q_stop)


def key_heads(heads: HeadSlice) -> slice:
    """Slice of the key heads that a member reads. They are neighbours, like its query heads."""
    return slice(heads.kv[0], heads.kv[-1] + 1) if heads.kv else slice(0, 0)


def scatter(team: Team, x: Tensor, which: Which, name: str) -> Pending:
    """Start to send each member its heads of this rank's rows.

    Args:
        team: The members.
        x: Shape (B, H, n, D), all heads, any strides.
        which: `query_heads` or `key_heads`.
        name: Name of the buffer. Exchanges that overlap must have different names.

    Returns:
        Pending rows of the whole group, (B, heads of this member, u * n, D).
    """
    batch, _, rows, dim = x.shape
    slices = [which(heads) for heads in team.heads]
    sizes = [rows * batch * (at.stop - at.start) * dim for at in slices]
    send = team.scratch.new(f"scatter {name}", (sum(sizes),), x)
    for piece, at in zip(torch.split(send, sizes), slices, strict=True):
        piece.view(rows, batch, at.stop - at.start, dim).copy_(x[:, at].permute(2, 0, 1, 3))
    mine = which(team.mine)
    received = x.new_empty((rows * len(sizes), batch, mine.stop - mine.start, dim))  # kept for backward
    each = [received.numel() // len(sizes)] * len(sizes)
    pending = exchange(send, sizes, each, team.ranks.members, "scatter", received.view(-1))
    return pending.then(lambda _: received.permute(1, 2, 0, 3))


def gather(team: Team, x: Tensor, which: Which, heads: int, name: str) -> Pending:
    """Start to send each member its rows of this rank's heads.

    Args:
        team: The members.
        x: Shape (B, heads of this member, u * n, D).
        which: `query_heads` or `key_heads`. Several members may have the same key heads.
        heads: Number of heads of all members, H.
        name: Name of the buffers.

    Returns:
        Pending heads of this rank's rows, (B, H, n, D), stored as (B, n, H, D). Heads of several members are
        summed in the order of the members.
    """
    members = len(team.heads)
    batch, count, group_rows, dim = x.shape
    rows = group_rows // members
    send = team.scratch.new(f"gather {name}", (group_rows, batch, count, dim), x)
    send.copy_(x.permute(2, 0, 1, 3))
    slices = [which(member) for member in team.heads]
    sizes = [rows * batch * (at.stop - at.start) * dim for at in slices]
    received = team.scratch.new(f"gathered {name}", (sum(sizes),), x)

    def joined(received: Tensor) -> Tensor:
        shared = sum(at.stop - at.start for at in slices) > heads
        out = (x.new_zeros if shared else x.new_empty)((batch, rows, heads, dim)).transpose(1, 2)
        for piece, at in zip(torch.split(received, sizes), slices, strict=True):
            part = piece.view(rows, batch, at.stop - at.start, dim).permute(1, 2, 0, 3)
            out[:, at] = out[:, at] + part if shared else part
        return out

    each = [rows * batch * count * dim] * members
    return exchange(send.view(-1), each, sizes, team.ranks.members, "gather", received).then(joined)


def repeat_heads(x: Tensor, kv_map: Sequence[int]) -> Tensor:
    """Repeat key heads for the kernel. Return x itself if each is needed once."""
    if list(kv_map) == list(range(x.shape[1])):
        return x
    # Sending an index tensor to the device would synchronize.
    return torch.cat([x[:, head : head + 1] for head in kv_map], 1)


def fold_heads(grad: Tensor, kv_map: Sequence[int], out: Tensor) -> None:
    """Sum the gradients of heads that `repeat_heads` repeated into `out`, which is overwritten."""
    if list(kv_map) == list(range(out.shape[1])):
        out.copy_(grad)
        return
    out.zero_()
    for place, head in enumerate(kv_map):
        out[:, head] += grad[:, place]
