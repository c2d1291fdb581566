"""Compiled models over ranks: one graph, no other one for another mask, checkpointing and FSDP2 as ever."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import everything, few
from placed import Placed, local_inputs, place
from samples.parallel import OPTIONS, Case, segment_ids
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from watching import Watching
from worlds import World, error, mesh, ranks

import attnspan
from attnspan.parallel import MeshPlan
from attnspan.parallel.torch import ops
from attnspan.parallel.torch.comm import counted_bytes
from attnspan.torch import attention, checkpoint_policy

LENGTH, BATCH, WIDTH = 101, 2, 32
#: What compiled programs have of a strategy is a plan; the long run has hybrid ones too, on four ranks.
STRATEGIES = ["exchange", "ring", "ulysses"]
STRATEGIES += ["hybrid(2, 2)", "hybrid(2, 2, ring)"] if everything() else []
#: Gradients of a model in float32: sums over all rows of products of some hundred roundings.
CLOSE = 5e-6


def ranks_of(strategy: str) -> int:
    return 4 if strategy.startswith("hybrid") else 2


def attend(q: Tensor, k: Tensor, v: Tensor, mask: MeshPlan, options: dict[str, Any]) -> Tensor:
    return attention(q * 1.5, k, v, mask=mask, **options) + 1.0


def gradients(function: Callable[..., Tensor], case: Case, placed: Placed) -> list[Tensor]:
    leaves, (dout, _) = local_inputs(placed, case)
    out = function(*leaves, placed.mask, OPTIONS[case.option](case))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_as_eager(compiled: Callable[..., Tensor], case: Case, placed: Placed) -> None:
    pairs = zip(gradients(compiled, case, placed), gradients(attend, case, placed), strict=True)
    for got, wanted in pairs:
        assert float((got - wanted).abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_fullgraph_at_the_first_call_of_a_fresh_process(backend: str) -> None:
    def first_call() -> None:
        case = Case(option="all", heads=(4, 2), return_lse=False)
        assert_as_eager(torch.compile(attend, fullgraph=True, backend=backend), case, place(case))

    fresh = World(2)
    try:
        fresh.run(first_call)
    finally:
        fresh.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", few(STRATEGIES, 1))  # An exchange, whose sizes change.
@ranks(ranks_of)
def test_a_new_mask_and_plan_at_each_step_is_no_recompilation(strategy: str) -> None:
    torch._dynamo.reset()
    case, received = Case(length=101, strategy=strategy, return_lse=False), set()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for step in range(3):
        ids = segment_ids(case, case.batch, mean=5 + 4 * step, salt=step)
        placed = place(case, mask=attnspan.causal() & attnspan.segments(ids))
        with counted_bytes() as counts:
            gradients(compiled, case, placed)
        received.add(sum(counts.received.values()))
        assert_as_eager(compiled, case, placed)
        assert counter.frame_count == 1
    if "ring" not in strategy and strategy != "ulysses":
        assert len(received) > 1, "other numbers of rows each time"


@pytest.mark.slow
@ranks(2)
def test_a_second_length_recompiles_and_further_lengths_do_not() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, found = torch.compile(attend, fullgraph=True, backend=counter), []
    for length in (101, 64, 33, 101, 210, 57, 13, 5):
        case = Case(length=length, strategy="exchange", return_lse=False)
        placed = place(case)
        gradients(compiled, case, placed)
        found.append(counter.frame_count)
        if length in (33, 5):
            assert_as_eager(compiled, case, placed)
    assert found == [1] + 7 * [2]


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


def problem_of(heads: tuple[int, int], strategy: str) -> tuple[Tensor, attnspan.Mask, Placed]:
    case = Case(length=LENGTH, batch=BATCH, heads=heads, strategy=strategy, dims=(8, 8))
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
    mask = attnspan.causal() & attnspan.segments(segment_ids(case, BATCH))
    return x, mask, place(case, mask=mask)


def model_of(heads: tuple[int, int], keep: str = "all") -> Model:
    torch.manual_seed(heads[0])
    return Model(heads, keep)


def compile_each(modules: Any) -> None:
    torch._dynamo.reset()
    for module in modules:
        module.compile(fullgraph=True, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "compiled"),
    [("exchange", True), *(pytest.param("hybrid(2, 2)", x, marks=pytest.mark.long) for x in (False, True))],
)
@ranks(ranks_of)
def test_checkpointing_keeps_attention_or_runs_it_again(strategy: str, compiled: bool) -> None:
    x, _, placed = problem_of((4, 2), strategy)

    def step(keep: str, compiled: bool) -> tuple[list[Tensor], int]:
        """Gradients of the parameters on this rank, and the bytes that the step sent."""
        model = model_of((4, 2), keep)
        if compiled:
            compile_each(model.layers)
        with counted_bytes() as counts:
            model(placed.shard(x), placed.mask).square().sum().backward()
        return [p.grad for p in model.parameters()], sum(counts.sent.values())

    wanted, sent = step("all", False)
    for keep in ("attention", "nothing"):
        # Full recomputation is compiled in the long run only.
        grads, again = step(keep, compiled and (keep == "attention" or everything()))
        assert (again == sent) if keep == "attention" else (again > sent), "how often its exchange ran"
        for got, x_wanted in zip(grads, wanted, strict=True):
            assert float(x_wanted.norm()) > 0
            torch.testing.assert_close(got, x_wanted, rtol=0, atol=1e-6 * float(x_wanted.norm()))


def assert_as_alone(heads: tuple[int, int], grads: list[Tensor]) -> None:
    """Gradients of all ranks together are those of one process."""
    x, mask, _ = problem_of(heads, "exchange")
    model = model_of(heads)
    loss = model(x, mask.prepare(LENGTH, LENGTH, batch=BATCH)).square().sum()
    for got, wanted in zip(grads, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        assert error(got, wanted) < CLOSE


def loss_of(model: nn.Module, x: Tensor, placed: Placed) -> Tensor:
    """Rows of padding have no loss."""
    out: Tensor = model(placed.shard(x), placed.mask)
    return (out.square() * placed.mask.valid[:, :, None]).sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "keep", "compiled"),
    list(product(("exchange", "hybrid(2, 2)"), ("all", "attention", "nothing"), (False, True)))
    if everything()
    else [("exchange", "attention", True), ("hybrid(2, 2)", "nothing", False)],
)
@ranks(ranks_of)
def test_fsdp_around_context_parallelism_gives_the_gradients_of_one_process(
    strategy: str, keep: str, compiled: bool
) -> None:
    x, _, placed = problem_of((4, 2), strategy)
    model = model_of((4, 2), keep)
    if compiled:
        compile_each(model.layers)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh(dist.get_world_size())["cp"])
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    loss_of(model, x, placed).backward()
    assert_as_alone((4, 2), [p.grad.full_tensor() for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("option", few(["all", "alibi", "none"], 1))
@pytest.mark.parametrize("strategy", few(STRATEGIES, 2))
@ranks(ranks_of)
def test_the_operators_keep_torchs_contract(strategy: str, option: str) -> None:
    """What `torch.library.opcheck` asks of forward and backward, on the real group."""
    case = Case(strategy=strategy, option=option, length=37, heads=(4, 2))
    both = ops.sharded_attention, ops.sharded_attention_backward
    placed = place(case)
    leaves, (dout, dlse) = local_inputs(placed, case)
    options = OPTIONS[case.option](case)
    with Watching(lambda op, named, _: (op, named.values()) if op in both else None) as watching:
        out, lse = attention(*leaves, mask=placed.mask, return_lse=True, **options)
        torch.autograd.grad([out, lse], leaves, [dout, dlse])
    for op, arguments in watching.seen:
        fresh = tuple(
            x.detach().clone().requires_grad_(x.is_floating_point() and op is ops.sharded_attention)
            if isinstance(x, Tensor)
            else x
            for x in arguments
        )
        torch.library.opcheck(op, fresh)
    assert len(watching.seen) == 2
