"""Ulysses: from all heads of some rows to some heads of all rows of a group, and back.

Shapes: B batch elements, n rows of a rank, u members of a group, D head dim. Pieces travel as (n, B, heads, D),
so that what arrives from all members is one array of u * n rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnspan.parallel.local import Numbers
from attnspan.parallel.strategy import HeadSlice

from .comm import Pending, Ranks, Scratch, exchange

__all__ = ["Team", "Which", "fold_heads", "gather", "key_heads", "query_heads", "repeat_heads", "scatter"]

#: Tells which of a member's heads are meant.
Which = Callable[[HeadSlice], slice]


class Team(NamedTuple):
    """A rank among the members of its group.

    Args:
        ranks: The process groups.
        numbers: The strategy, and this rank.
        heads: The heads of each member.
        scratch: Where buffers come from.
    """

    ranks: Ranks
    numbers: Numbers
    heads: Sequence[HeadSlice]
    scratch: Scratch

    @property
    def mine(self) -> HeadSlice:
        """The heads of this rank."""
        return self.heads[self.numbers.member]


def query_heads(heads: HeadSlice) -> slice:
    """The query heads of a member."""
    return slice(heads.q_start, heads.q_stop)


def key_heads(heads: HeadSlice) -> slice:
    """The key heads that a member reads: neighbours, as its query heads are."""
    return slice(heads.kv[0], heads.kv[-1] + 1) if heads.kv else slice(0, 0)


def scatter(team: Team, x: Tensor, which: Which, name: str) -> Pending:
    """Start to hand each member its heads of this rank's rows.

    Args:
        team: Who takes part.
        x: Shape (B, H, n, D), all heads; any strides.
        which: `query_heads` or `key_heads`.
        name: Of the buffer; other exchanges under way have other names.

    Returns:
        Rows of the whole group under way, (B, heads of this member, u * n, D).
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
    """Start to hand each member its rows of this rank's heads.

    Args:
        team: Who takes part.
        x: Shape (B, heads of this member, u * n, D).
        which: `query_heads` or `key_heads`; of the latter several members may have the same.
        heads: H, of all members.
        name: Of the buffers.

    Returns:
        All heads of this rank's rows under way, (B, H, n, D), stored as (B, n, H, D); heads of several
        members are summed in their order.
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
    """Key heads as the kernel is to be given them; x itself where that is all of them once."""
    if list(kv_map) == list(range(x.shape[1])):
        return x
    # An index would have to be sent to the device, for which the host waits.
    return torch.cat([x[:, head : head + 1] for head in kv_map], 1)


def fold_heads(grad: Tensor, kv_map: Sequence[int], out: Tensor) -> None:
    """Add the gradients of heads that `repeat_heads` repeated; out has each once and is overwritten."""
    if list(kv_map) == list(range(out.shape[1])):
        out.copy_(grad)
        return
    out.zero_()
    for place, head in enumerate(kv_map):
        out[:, head] += grad[:, place]
