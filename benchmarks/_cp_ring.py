"""A zigzag ring over torch's own CPU flash kernel, after the published scheme of ring-flash-attention.

The causal sequence has 2 P chunks, and rank p holds the chunks p and 2 P - 1 - p. Blocks of keys travel
around the ring. For each block, either its first half is visible to all rows of a rank, or the whole block is
visible to the second half of the rows. Therefore all ranks have equal work at each step, and only the first
step needs a causal mask. (Zigzag: zhuzilin/ring-flash-attention. Ring: Liu, Zaharia and Abbeel 2023.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from _cp_problem import TALLY, Contestant, Problem, Ready, differentiated, head_tail
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_KEYS, _GRADIENTS = 0, 1  # tags, to distinguish messages that travel at the same time
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class ZigzagRing(Contestant):
    """The ring, for causal attention."""

    name = "zigzag ring, ATen flash"
    chunks = 2
    only_causal = "its kernel supports only a causal flag, or a dense mask"

    def prepare(self, problem: Problem, mode: str, mesh: Any) -> Ready:
        group = mesh.get_group()
        rows = head_tail(problem.q_len, group.rank(), group.size())

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = _Ring.apply(q, k, v, group)  # type: ignore[no-untyped-call]
            return out

        return Ready(differentiated(attend, problem.take(rows), mode), rows, {})


class _Passing:
    """A tensor on its way to the next rank, and a tensor from the previous rank."""

    def __init__(self, x: Tensor, group: Any, tag: int) -> None:
        self._sent, self._coming = x, torch.empty_like(x)
        me, ranks = group.rank(), group.size()
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group, tag=tag, group_peer=(me + 1) % ranks),
                dist.P2POp(dist.irecv, self._coming, group=group, tag=tag, group_peer=(me - 1) % ranks),
            ]
        )
        TALLY.received += x.nbytes

    def wait(self) -> Tensor:
        with TALLY.wait():
            for work in self._works:
                work.wait()
        return self._coming


def _round(kv: Tensor, group: Any) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield blocks of keys as they arrive, (2, 1, H, n, D), with the rows and keys that see each other."""
    rank, ranks, half = group.rank(), group.size(), kv.shape[3] // 2
    every, front, back = slice(None), slice(half), slice(half, None)
    for step in range(ranks):
        coming = _Passing(kv, group, _KEYS) if step + 1 < ranks else None
        if step == 0:
            yield kv, every, every
        elif step <= rank:
            yield kv, every, front
        else:
            yield kv, back, every
        if coming is not None:
            kv = coming.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        total = torch.zeros(q.shape, dtype=torch.float32)
        lse = torch.full(q.shape[:3], -torch.inf)
        for step, (kv, rows, keys) in enumerate(_round(torch.stack([k, v]), group)):
            part, part_lse = _flash(q[:, :, rows], *_seen(kv, keys, q), 0.0, step == 0)
            merged = torch.logaddexp(lse[:, :, rows], part_lse)
            total[:, :, rows] *= (lse[:, :, rows] - merged).exp()[..., None]
            total[:, :, rows] += part.float() * (part_lse - merged).exp()[..., None]
            lse[:, :, rows] = merged
        out = total.to(q.dtype)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros(q.shape, dtype=torch.float32)
        behind: _Passing | None = None
        for step, (kv, rows, keys) in enumerate(_round(torch.stack([k, v]), ctx.group)):
            given = (x[:, :, rows] for x in (out, lse))
            found = _flash_backward(
                dout[:, :, rows], q[:, :, rows], *_seen(kv, keys, q), *given, 0.0, step == 0
            )
            dq[:, :, rows] += found[0]
            # The gradients of a block travel one step later, so that they overlap with the next step.
            grads = torch.zeros(kv.shape, dtype=torch.float32) if behind is None else behind.wait()
            for sums, part in zip(grads, found[1:], strict=True):
                sums[:, :, keys] += _summed(part, k.shape[1])
            behind = _Passing(grads, ctx.group, _GRADIENTS)
        assert behind is not None
        dk, dv = behind.wait()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _seen(kv: Tensor, keys: slice, q: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for each query head, because the kernel does not support GQA."""
    group = q.shape[1] // kv.shape[2]
    k, v = kv[:, :, :, keys]
    return (k, v) if group == 1 else (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))


def _summed(grad: Tensor, heads: int) -> Tensor:
    """Sum the gradients of repeated heads, (1, Hq, n, D), for each key head."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).float().sum(2)
