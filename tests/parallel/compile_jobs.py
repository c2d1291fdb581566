"""Compiled, checkpointed and FSDP-sharded models over ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from parity_jobs import Placed, local_inputs, place
from samples.parallel import OPTIONS, Case, segment_ids
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from worlds import error, mesh

import attnspan
from attnspan.parallel import MeshPlan
from attnspan.parallel.torch import ops
from attnspan.parallel.torch.comm import counted_bytes
from attnspan.torch import attention, checkpoint_policy

LENGTH, BATCH, WIDTH = 101, 2, 32


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: MeshPlan, options: dict[str, Any]) -> Tensor:
    return attention(q * 1.5, k, v, mask=mask, **options) + 1.0


def _gradients(function: Callable[..., Tensor], case: Case, placed: Placed) -> list[Tensor]:
    leaves, (dout, _) = local_inputs(placed, case)
    out = function(*leaves, placed.mask, OPTIONS[case.option](case))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def first_call(case: Case, backend: str) -> float:
    """Compile in full before anything else ran; the largest difference from eager."""
    torch._dynamo.reset()
    placed = place(case)
    compiled = _gradients(torch.compile(_attend, fullgraph=True, backend=backend), case, placed)
    eager = _gradients(_attend, case, placed)
    torch._dynamo.reset()
    return max(float((a - b).abs().max()) for a, b in zip(compiled, eager, strict=True))


def many_masks(case: Case, steps: int) -> tuple[list[int], list[int], float]:
    """A new mask and plan at each step: compilations so far, rows received, largest difference."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_attend, fullgraph=True, backend=counter)
    compilations, received, worst = [], [], 0.0
    for step in range(steps):
        ids = segment_ids(case, case.batch, mean=5 + 4 * step, salt=step)
        placed = place(case, mask=attnspan.causal() & attnspan.segments(ids))
        with counted_bytes() as counts:
            found = _gradients(compiled, case, placed)
        received.append(sum(counts.received.values()))
        compilations.append(counter.frame_count)
        eager = _gradients(_attend, case, placed)
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(found, eager, strict=True)))
    torch._dynamo.reset()
    return compilations, received, worst


class Layer(nn.Module):
    """Attention between two projections, recomputed in backward as ``keep`` says."""

    def __init__(self, heads: tuple[int, int], keep: str = "all", head_dim: int = 8) -> None:
        super().__init__()
        self.heads, self.keep = heads, keep
        self.qkv = nn.Linear(WIDTH, (heads[0] + 2 * heads[1]) * head_dim)
        self.out = nn.Linear(heads[0] * head_dim, WIDTH)

    def _layer(self, x: Tensor, mask: Any) -> Tensor:
        h, g = self.heads
        q, k, v = self.qkv(x).unflatten(2, (h + 2 * g, -1)).split([h, g, g], 2)
        return x + self.out(attention(q, k, v, mask=mask, layout="bshd").flatten(2))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        if self.keep == "all":
            return self._layer(x, mask)
        contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy)
        extra: dict[str, Any] = {"context_fn": contexts} if self.keep == "attention" else {}
        out: Tensor = checkpoint(self._layer, x, mask, use_reentrant=False, **extra)
        return out


class Model(nn.Module):
    """Two such layers."""

    def __init__(self, heads: tuple[int, int], keep: str = "all") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(heads, keep) for _ in range(2))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def _problem(heads: tuple[int, int], strategy: str) -> tuple[Tensor, attnspan.Mask, Placed]:
    case = Case(length=LENGTH, batch=BATCH, heads=heads, strategy=strategy, dims=(8, 8))
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
    mask = attnspan.causal() & attnspan.segments(segment_ids(case, BATCH))
    return x, mask, place(case, mask=mask)


def _model(heads: tuple[int, int], keep: str = "all") -> Model:
    torch.manual_seed(heads[0])
    return Model(heads, keep)


def checkpointed(strategy: str, keep: str, compiled: bool) -> tuple[list[Tensor], int]:
    """Gradients of a model's parameters on this rank, and the bytes that the step sent."""
    torch._dynamo.reset()
    x, _, placed = _problem((4, 2), strategy)
    model = _model((4, 2), keep)
    if compiled:
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    with counted_bytes() as counts:
        model(placed.shard(x), placed.mask).square().sum().backward()
    torch._dynamo.reset()
    return [p.grad for p in model.parameters()], sum(counts.sent.values())


def _alone(heads: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    x, mask, _ = _problem(heads, "exchange")
    model = _model(heads)
    loss = model(x, mask.prepare(LENGTH, LENGTH, batch=BATCH)).square().sum()
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def _summed(grads: list[Tensor]) -> list[Tensor]:
    for grad in grads:
        dist.all_reduce(grad)
    return grads


def under_fsdp(strategy: str, keep: str, compiled: bool) -> float:
    """Gradients of a model sharded by FSDP2 over the same ranks, against one process."""
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    x, _, placed = _problem((4, 2), strategy)
    model = _model((4, 2), keep)
    line = mesh(dist.get_world_size())["cp"]
    for module in (*model.layers, model):
        if compiled and module is not model:
            module.compile(fullgraph=True, backend="aot_eager")
        fully_shard(module, mesh=line)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    rows = placed.mask.valid[:, :, None]  # Rows of padding have no loss.
    (model(placed.shard(x), placed.mask).square() * rows).sum().backward()
    got = [p.grad.full_tensor() for p in model.parameters()]
    torch._dynamo.reset()
    return max(map(error, got, _alone((4, 2))[1]))


def two_models(compiled: bool) -> list[float]:
    """Models of other head counts and strategies, in turn in one process, against one process each."""
    torch._dynamo.reset()
    kinds = {(4, 2): "exchange", (5, 1): "ulysses", (6, 6): "ring"}
    models = {heads: _model(heads) for heads in kinds}
    problems = {heads: _problem(heads, strategy) for heads, strategy in kinds.items()}
    if compiled:
        for model in models.values():
            model.compile(fullgraph=True, backend="aot_eager")
    found = []
    for heads in (*kinds, *kinds):
        x, _, placed = problems[heads]
        loss = (models[heads](placed.shard(x), placed.mask).square() * placed.mask.valid[:, :, None]).sum()
        got = list(torch.autograd.grad(loss, list(models[heads].parameters())))
        found.append(max(map(error, _summed(got), _alone(heads)[1])))
    torch._dynamo.reset()
    return found


def check_operators(case: Case) -> int:
    """What `torch.library.opcheck` asks of forward and backward, on the real group; how many were checked."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (ops.sharded_attention, ops.sharded_attention_backward):
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    placed = place(case)
    leaves, (dout, dlse) = local_inputs(placed, case)
    options = OPTIONS[case.option](case)
    with Recorder():
        out, lse = attention(*leaves, mask=placed.mask, return_lse=True, **options)
        torch.autograd.grad([out, lse], leaves, [dout, dlse])
    for op, arguments in calls:
        fresh = tuple(
            x.detach().clone().requires_grad_(x.is_floating_point() and op is ops.sharded_attention)
            if isinstance(x, Tensor)
            else x
            for x in arguments
        )
        torch.library.opcheck(op, fresh)
    return len(calls)
