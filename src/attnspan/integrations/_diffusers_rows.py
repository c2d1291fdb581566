"""Tokens of a sequence on the ranks that share it: cut, gathered, and attended to from every rank.

A sequence is one stream of tokens or several in a row, such as text and image. Each stream is cut into
contiguous runs, one for each rank, whose sizes differ by at most one. A rank holds its run of each stream.
Shapes: B batch elements, n tokens of a rank, H heads, D head dim, P ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnspan.masks import full
from attnspan.parallel.layout import Layout
from attnspan.parallel.local import LocalPlan
from attnspan.parallel.strategy import Strategy, split_heads
from attnspan.parallel.torch.agreement import agreement_of, gathered
from attnspan.parallel.torch.ops import backend_for_parts, sharded_attention
from attnspan.torch import compat
from attnspan.torch.choice import torchs_backend


def share(rows: int, ranks: int, rank: int) -> int:
    """Return the number of a stream's tokens that a rank holds.

    Example:
        >>> [share(7, 3, rank) for rank in range(3)]
        [3, 2, 2]
    """
    return (rows + ranks - 1 - rank) // ranks


def begin(rows: int, ranks: int, rank: int) -> int:
    """Return the number of a stream's tokens that earlier ranks hold."""
    return sum(share(rows, ranks, other) for other in range(rank))


def cut(x: Tensor, dim: int, streams: Sequence[int], ranks: int, rank: int) -> Tensor:
    """Return a rank's tokens of a sequence.

    The gradient is zero for other ranks' tokens. `entered` and the mean over ranks add the gradients up.

    Args:
        x: A tensor with the tokens of all streams along ``dim``.
        dim: The dimension of the tokens.
        streams: Tokens of each stream.
        ranks: Number of ranks, P.
        rank: This rank.

    Example:
        >>> cut(torch.arange(8), 0, (3, 5), ranks=2, rank=1).tolist()
        [2, 6, 7]
    """
    parts, start = [], 0
    for rows in streams:
        parts.append(x.narrow(dim, start + begin(rows, ranks, rank), share(rows, ranks, rank)))
        start = start + rows
    # A view's strides would cause a recompilation.
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


@torch.library.custom_op("attnspan::gather_tokens", mutates_args=())
def _gather(x: Tensor, dim: int, streams: Sequence[int], ranks: int, rank: int, group: str) -> Tensor:
    del rank
    most, whole = sum(share(rows, ranks, 0) for rows in streams), compat.resolve_process_group(group)
    parts = gathered(_padded(x, dim, most), whole, "gather of tokens")
    starts, found = [0] * ranks, []
    for rows in streams:
        for other in range(ranks):
            found.append(parts[other].narrow(dim, starts[other], share(rows, ranks, other)))
            starts[other] += share(rows, ranks, other)
    return torch.cat(found, dim)


@_gather.register_fake
def _(x: Tensor, dim: int, streams: Sequence[int], ranks: int, rank: int, group: str) -> Tensor:
    del ranks, rank, group
    shape = list(x.shape)
    shape[dim] = sum(streams)
    return x.new_empty(shape)


def _ungather(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dim, streams, ranks, rank, _ = ctx.given
    return cut(grad, dim, streams, ranks, rank) * ranks, *(None,) * len(ctx.given)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    _, *ctx.given = inputs


_gather.register_autograd(_ungather, setup_context=_remember)


class Part:
    """This rank's place among ranks that share tokens or batch elements, and the name of their group."""

    def __init__(self, group: Any) -> None:
        self.ranks, self.rank, self.group = group.size(), group.rank(), str(group.group_name)

    def share(self, rows: Any) -> Any:
        """Return the number of a stream's tokens that this rank holds."""
        return share(rows, self.ranks, self.rank)

    def begin(self, rows: Any) -> Any:
        """Return the number of a stream's tokens that earlier ranks hold."""
        return begin(rows, self.ranks, self.rank)

    def cut(self, x: Tensor, dim: int, streams: tuple[int, ...]) -> Tensor:
        """Return this rank's tokens, as `cut`."""
        return cut(x, dim, streams, self.ranks, self.rank)

    def gather(self, x: Tensor, dim: int, streams: tuple[int, ...]) -> Tensor:
        """Gather the tokens of all ranks on every rank. It undoes `cut`.

        The gradient is this rank's part, times the number of ranks: the loss is the same on every rank, and
        the *mean* over ranks of a parameter's gradients is its gradient.
        """
        return _gather(x, dim, streams, self.ranks, self.rank, self.group)  # type: ignore[no-any-return]


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    missing = rows - x.shape[dim]
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


@torch.library.custom_op("attnspan::entered", mutates_args=())
def entered(x: Tensor, group: str, sizes: Sequence[int]) -> Tensor:
    """Mark an input that all ranks hold, before they split it. Its gradient is the mean over the ranks.

    Args:
        x: Any shape.
        group: Name of the group of all ranks.
        sizes: Numbers that must be the same on all ranks. If empty, nothing is compared.

    Raises:
        PlanMismatchError: Sizes differ between ranks. If collectives do not block the host (NCCL), the next
            call raises the error.
    """
    if sizes:
        agreement = agreement_of(compat.resolve_process_group(group))
        agreement.note({"call": "inputs", "shape": list(sizes)})
        if not agreement.early:
            agreement.start({}, x.device.type)
    return x.clone()


@entered.register_fake
def _(x: Tensor, group: str, sizes: Sequence[int]) -> Tensor:
    del group, sizes
    return torch.empty_like(x)


def _leave(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    group = ctx.given[0]
    total = compat.all_reduce(grad.contiguous(), "sum", group)
    return total / compat.resolve_process_group(group).size(), None, None


entered.register_autograd(_leave, setup_context=_remember)


@functools.lru_cache(maxsize=64)
def _local_plan(strategy: Strategy, rank: int, heads: tuple[int, int], streams: tuple[int, ...]) -> LocalPlan:
    """Return one rank's plan of full attention to the tokens of all ranks, numbered rank by rank."""
    ranks = strategy.ranks
    held = [sum(share(rows, ranks, other) for rows in streams) for other in range(ranks)]
    rows, start = np.full((ranks, 1, held[0]), -1, np.int32), 0
    for other, count in enumerate(held):
        rows[other, 0, :count] = np.arange(start, start + count)
        start += count
    return Layout(start, rows).plan(full(), heads=heads, strategy=strategy).local(rank)


def _sizes(strategy: Strategy, streams: Sequence[int]) -> tuple[int, int]:
    """Return the maximum size of a plan's data, and the size of its numbers."""
    slots = strategy.members * sum(share(rows, strategy.ranks, 0) for rows in streams)
    # The strategy alone decides how many numbers there are.
    smallest = _local_plan(strategy, 0, (strategy.ranks, strategy.ranks), (strategy.ranks,))
    return slots * (3 * strategy.groups + 5), smallest.numbers.size


@torch.library.custom_op("attnspan::plan_of_rows", mutates_args=())
def _plan_of_rows(
    like: Tensor, strategy: str, ranks: int, rank: int, heads: Sequence[int], streams: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Make a plan and its numbers for `sharded_attention`. It is an operator because it uses NumPy."""
    parsed, (q_heads, kv_heads) = Strategy.parse(strategy, ranks), heads
    plan = _local_plan(parsed, rank, (q_heads, kv_heads), tuple(streams))
    length, numbers = _sizes(parsed, streams)
    assert plan.data.size <= length, (plan.data.size, length)
    assert plan.numbers.size == numbers, (plan.numbers.size, numbers)
    data = np.zeros(length, np.int32)
    data[: plan.data.size] = plan.data
    return torch.from_numpy(data).to(like.device), torch.from_numpy(plan.numbers.copy())


@_plan_of_rows.register_fake
def _(
    like: Tensor, strategy: str, ranks: int, rank: int, heads: Sequence[int], streams: Sequence[int]
) -> tuple[Tensor, Tensor]:
    del rank, heads
    data, numbers = _sizes(Strategy.parse(strategy, ranks), streams)
    return like.new_empty((data,), dtype=torch.int32), torch.empty(numbers, dtype=torch.int64, device="cpu")


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    streams: tuple[int, ...],
    strategy: Strategy,
    part: Part,
) -> Tensor:
    """Attend from this rank's tokens to all ranks' tokens.

    Args:
        q: Shape (B, n, Hq, D).
        k: Shape (B, n, Hkv, D).
        v: Shape (B, n, Hkv, Dv).
        bias: Added to the scores of this rank's keys, (B|1, n, Hkv|1), or None.
        scale: Factor of the scores.
        streams: Tokens of each stream, over all ranks.
        strategy: How the ranks share the work.
        part: The ranks that share the tokens.

    Returns:
        Contiguous, shape (B, n, Hq, Dv).
    """
    rows, heads = q.shape[1], (q.shape[2], k.shape[2])
    if bias is not None:
        q, k = _with_bias(q, k, bias, scale)
    most = sum(share(each, part.ranks, 0) for each in streams)
    q, k, v = (_padded(x, 1, most).transpose(1, 2) for x in (q, k, v))
    here = split_heads(*heads, strategy.members)[part.rank % strategy.members]
    plan = _plan_of_rows(q, strategy.name, part.ranks, part.rank, heads, streams)
    backend = backend_for_parts(q, k, v, sum(streams), (), torchs_backend())
    shared = *plan, part.group, strategy.members, here.heads, len(here.kv), backend, scale
    out = sharded_attention(q, k, v, *shared)[0]
    return out.transpose(1, 2)[:, :rows].contiguous()  # type: ignore[no-any-return]


def _with_bias(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Append the bias to the keys as one more column, which is sent with them. Queries have 1 there.

    Columns of zeros keep the rows aligned.
    """
    most = 6e4 if k.dtype == torch.float16 else 1e30  # Sums with other products stay finite.
    column = (bias / scale).clamp(-most, most).to(k.dtype)[..., None].expand(*k.shape[:3], 1)
    extra = -k.shape[3] % 8 or 8
    ones = q.new_ones((*q.shape[:3], 1))
    zeros = [x.new_zeros((*x.shape[:3], extra - 1)) for x in (q, k)]
    return torch.cat([q, ones, zeros[0]], 3), torch.cat([k, column, zeros[1]], 3)
