"""The contestants in benchmarks/context_parallel.py: attnspan, hand-written code, and torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _cp_problem import BOTH, TALLY, Contestant, Problem, Ready, differentiated, head_tail
from _cp_ring import ZigzagRing
from torch import Tensor

from attnspan import spans
from attnspan.parallel import Layout
from attnspan.parallel.torch.comm import Pending
from attnspan.torch import attention
from attnspan_lab.machine import Machine


@dataclass(frozen=True)
class OneRank(Contestant):
    """The whole problem on one rank, with one thread per rank of the others, which wait."""

    threads: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"1 rank x {self.threads} threads"

    def prepare(self, problem: Problem, mode: str, mesh: Any) -> Ready:
        if mesh.get_local_rank() != 0:
            return Ready(None, torch.empty(0, dtype=torch.int64), {})
        inputs = problem.take(slice(None))
        mask = problem.mask.prepare(problem.q_len, problem.q_len, like=inputs[0])
        call = differentiated(lambda q, k, v: attention(q, k, v, mask=mask), inputs, mode)
        return Ready(call, torch.arange(problem.q_len), {})


@dataclass(frozen=True)
class Ours(Contestant):
    """A layout and its plan.

    Args:
        members: Number of ranks that share heads. The layout balances over their rows together.
    """

    name: str
    strategy: str
    method: Any = "balanced"
    members: int = 1
    machine: Machine | None = None

    def prepare(self, problem: Problem, mode: str, mesh: Any) -> Ready:
        rank, (length, dim) = mesh.get_local_rank(), (problem.q_len, problem.q.shape[3])
        given: dict[str, Any] = {"ranks": mesh.size(), "members": self.members, "method": self.method}
        layout = Layout.of(problem.mask, q_len=length, **given)
        sizes: dict[str, Any] = {"heads": problem.heads, "head_dim": dim, "itemsize": problem.q.itemsize}
        plan = layout.plan(strategy=self.strategy, machine=self.machine, **sizes)
        whole = {"q": problem.q, "k": problem.k, "v": problem.v, "dout": problem.dout}
        rows = layout.shard(whole, rank)
        mask, inputs = plan.on(mesh, rows=rows), tuple(rows[name].transpose(1, 2) for name in whole)
        call = differentiated(lambda q, k, v: attention(q, k, v, mask=mask), inputs, mode)
        cost = plan.cost()
        about = {
            "strategy": plan.strategy.name,
            "rows_per_rank": layout.rows_per_rank,
            "balance": cost.balance,
            "planned_bytes": int(cost.received("both" if mode == BOTH else "forward").max()),
        }
        return Ready(call, mask.q_index[0], about)


@contextmanager
def our_waits_timed() -> Iterator[None]:
    """Record the waiting times of attnspan's exchanges in the tally."""
    wait = Pending.wait

    def timed(self: Any) -> Tensor:
        with TALLY.wait():
            return wait(self)

    Pending.wait = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pending.wait = wait  # type: ignore[method-assign]


class _GatherKeys(torch.autograd.Function):
    """All-gather of keys and values in order of rows. Backward sums their gradients on their owners."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, order: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.ranks = group, group.size()
        ctx.save_for_backward(order)
        every = local.new_empty((ctx.ranks * local.shape[0], *local.shape[1:]))
        TALLY.received += (ctx.ranks - 1) * local.nbytes
        with TALLY.wait():
            dist.all_gather(list(every.chunk(ctx.ranks)), local, group=group)
        whole = torch.empty_like(every)
        whole[order] = every
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        every = grad[order]
        local = every.new_empty((every.shape[0] // ctx.ranks, *every.shape[1:]))
        # An owner receives a part of its gradients from each other rank.
        TALLY.received += (ctx.ranks - 1) * local.nbytes
        # Renamed in torch 2.13.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with TALLY.wait():
            reduce_scatter(local, every, group=ctx.group)
        return local, None, None


class AllGather(Contestant):
    """Hand-written context parallelism: zigzag rows, all-gather of keys, and attnspan's kernel."""

    name = "all-gather + our kernel"
    chunks = 2

    def prepare(self, problem: Problem, mode: str, mesh: Any) -> Ready:
        ranks, group = mesh.size(), mesh.get_group()
        every = [head_tail(problem.q_len, rank, ranks) for rank in range(ranks)]
        rows, order = every[mesh.get_local_rank()], torch.cat(every)
        inputs = problem.take(rows)
        lowered = problem.mask.spans(problem.q_len, problem.q_len).take_queries(rows.numpy())
        mask = spans(lowered.bounds).prepare(len(rows), problem.q_len, like=inputs[0])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # (n, 1, 2 Hkv, D): rows first, so that keys and values are one message.
            local = torch.cat([k.transpose(1, 2), v.transpose(1, 2)], dim=2).transpose(0, 1).contiguous()
            whole = _GatherKeys.apply(local, order, group).transpose(0, 1).transpose(1, 2)  # type: ignore[no-untyped-call]
            return attention(q, *whole.chunk(2, dim=1), mask=mask)

        return Ready(differentiated(attend, inputs, mode), rows, {})


class TorchFlex(Contestant):
    """torch's context parallelism: compiled FlexAttention on the gathered keys of all ranks."""

    name = "torch flex, all-gather"
    may_fail = True

    def prepare(self, problem: Problem, mode: str, mesh: Any) -> Ready:
        from torch.distributed.tensor.experimental import _attention as torch_cp
        from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
        from torch.distributed.tensor.parallel import parallelize_module
        from torch.nn.attention.flex_attention import flex_attention

        if mode == BOTH:
            # Without a backward pass, report it before anything is compiled.
            tiny = torch.zeros(1, 1, 128, 16, requires_grad=True)
            flex_attention(tiny, tiny, tiny)
        # Beyond the recompilation limit, calls would run uncompiled.
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        grouped, length = problem.heads[0] != problem.heads[1], problem.q_len

        class Attention(torch.nn.Module):
            def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Any:
                return compiled(query, key, value, block_mask=block_mask, enable_gqa=grouped)

        balancer = torch_cp._HeadTailLoadBalancer(length, mesh.size(), "cpu")
        block_mask = _create_cp_block_mask(_mask_mod(problem), 1, 1, length, length, mesh, balancer)
        style = torch_cp._ContextParallel(2, torch_cp._ContextParallel.AttentionType.FLEX)
        module = parallelize_module(Attention(), mesh, style)
        whole = [x.transpose(1, 2) for x in (problem.q, problem.k, problem.v, problem.dout)]
        inputs = tuple(torch_cp._context_parallel_shard(mesh, whole, [2] * 4, balancer))
        coming = (mesh.size() - 1) * (inputs[1].nbytes + inputs[2].nbytes)  # type: ignore[union-attr]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            TALLY.received += coming
            out: Tensor = module(q, k, v, block_mask)
            return out

        rows = balancer._generate_indices()[0].long().chunk(mesh.size())[mesh.get_local_rank()]
        about = {"keys_in_sparse_blocks": 1 - float(block_mask.sparsity()) / 100}
        return Ready(differentiated(attend, inputs, mode), rows, about)  # type: ignore[arg-type]


def _mask_mod(problem: Problem) -> Any:
    """Build the mask for FlexAttention."""
    if problem.offsets is not None:
        lengths = torch.from_numpy(problem.offsets).diff()
        ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])  # noqa: ARG005 (the signature is torch's)
    if problem.left is not None:
        left = problem.left
        return lambda b, h, q, k: (q >= k) & (q - k <= left)  # noqa: ARG005
    return lambda b, h, q, k: q >= k  # noqa: ARG005


class TorchRing(Contestant):
    """torch's context parallelism: a ring of `scaled_dot_product_attention`, only for causal masks."""

    name = "torch SDPA ring"
    may_fail = True
    chunks = 2
    only_causal = "it supports only a causal flag, no mask"

    def prepare(self, problem: Problem, mode: str, mesh: Any) -> Ready:
        from torch.distributed.tensor.experimental import _attention as torch_cp

        whole = [x.transpose(1, 2) for x in (problem.q, problem.k, problem.v, problem.dout)]
        balancer = torch_cp._HeadTailLoadBalancer(problem.q_len, mesh.size(), "cpu")
        inputs = tuple(torch_cp._context_parallel_shard(mesh, whole, [2] * 4, balancer))
        style = torch_cp._ContextParallel(2, torch_cp._ContextParallel.AttentionType.SDPA)
        grouped = problem.heads[0] != problem.heads[1]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            torch_cp._enable_context_parallel_dispatcher()
            try:
                (q, k, v), _ = style.sdpa_input_fn(None, (q, k, v), {}, mesh)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
                return style.sdpa_output_fn(None, None, out, mesh)  # type: ignore[no-any-return]
            finally:
                torch_cp._disable_context_parallel_dispatcher()

        rows = balancer._generate_indices()[0].long().chunk(mesh.size())[mesh.get_local_rank()]
        return Ready(differentiated(attend, inputs, mode), rows, {})  # type: ignore[arg-type]


def contestants(ranks: int, machine: Machine | None) -> list[Contestant]:
    """List all contestants. The first one is the reference for efficiency."""
    ours = [Ours("exchange", "exchange"), Ours("ring, zigzag", "ring", "zigzag")]
    ours.append(Ours("ulysses", "ulysses", members=ranks))
    if ranks > 2 and ranks % 2 == 0:
        ours.append(Ours("hybrid", f"hybrid(2, {ranks // 2})", members=2))
    ours.append(Ours("auto", "auto", machine=machine))
    return [OneRank(ranks), *ours, AllGather(), ZigzagRing(), TorchFlex(), TorchRing()]
