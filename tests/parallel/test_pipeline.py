"""Pipelines over context parallelism: every microbatch has its own mask, and all is as on one rank."""

import contextlib
import io
import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from covering import everything
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from worlds import error, mesh, ranks, torchrun, world

from attnspan import Mask, causal, segments
from attnspan.parallel import Layout, PlanStack
from attnspan.parallel.torch.comm import counted_bytes
from attnspan.parallel.torch.loss import next_token_targets, sum_gradients, sum_over
from attnspan.torch import attention

M, B, S, WIDTH, VOCABULARY, HEADS = 4, 2, 101, 32, 19, (4, 2)


class Stage(nn.Module):
    """Some layers of a model, the first of all with the embedding, the last of all with the logits."""

    def __init__(self, layers: int, first: bool, last: bool, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, (HEADS[0] + 2 * HEADS[1]) * 8) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY) if last else None

    def forward(self, x: Tensor, index: Tensor, mask: Any) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for qkv in self.qkv:
            given = qkv, x, index, mask
            x = checkpoint(layer, *given, use_reentrant=False) if self.recompute else layer(*given)
        return x if self.head is None else self.head(x)


def layer(qkv: nn.Module, x: Tensor, index: Tensor, mask: Any) -> Tensor:
    q, k, v = qkv(x).unflatten(2, (-1, 8)).split([HEADS[0], HEADS[1], HEADS[1]], 2)
    angle = index[..., None, None] * 0.1
    q, k = q * angle.cos(), k * (angle + 1).sin()
    backend = "math" if x.dtype == torch.float64 else "cpu"
    return x + attention(q, k, v, mask=mask, q_index=index, layout="bshd", backend=backend).flatten(2)


class Microbatch(NamedTuple):
    tokens: Tensor
    targets: Tensor
    mask: Mask


def microbatches(step: int) -> list[Microbatch]:
    """Documents of about 4 tokens in the first microbatch, of about 60 in the last one."""
    found, generator = [], torch.Generator().manual_seed(step)
    for i in range(M):
        lengths = torch.randint(2, 8 + 40 * (M - i if step else i), (B, S), generator=generator)
        ids = torch.stack([torch.repeat_interleave(torch.arange(S), row)[:S] for row in lengths])
        tokens = torch.randint(VOCABULARY, (B, S), generator=generator)
        found.append(Microbatch(tokens, next_token_targets(tokens, ids), causal() & segments(ids)))
    return found


def stages_of(dtype: torch.dtype, count: int, recompute: bool = False) -> list[Stage]:
    torch.manual_seed(2)
    found = [Stage(4 // count, i == 0, i == count - 1, recompute) for i in range(count)]
    return [stage.to(dtype) for stage in found]


class Found(NamedTuple):
    """Loss of each microbatch, and the gradients of the parameters of some stages."""

    losses: list[Tensor]
    grads: list[Tensor]


def gradients(stages: list[Any]) -> list[Tensor]:
    return [p.grad for stage in stages for p in stage.parameters()]


def loss_of(logits: Tensor, targets: Tensor, count: int) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count


def targets_of(parts: list[Microbatch]) -> int:
    return sum(int((part.targets >= 0).sum()) for part in parts)


def alone(dtype: torch.dtype, count: int, mine: list[int], step: int) -> Found:
    """One rank with the whole model, of which it returns the gradients of some stages."""
    stages, parts, losses = stages_of(dtype, count), microbatches(step), []
    for tokens, targets, mask in parts:
        x = tokens
        for stage in stages:
            x = stage(x, torch.arange(S)[None], mask)
        losses.append(loss_of(x, targets, targets_of(parts)))
    torch.stack(losses).sum().backward()
    return Found([x.detach() for x in losses], gradients([stages[i] for i in mine]))


class Counted(PipelineStage):
    """A stage that counts the bytes of the tensors that it sends."""

    sent = 0

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sent += sum(op.tensor.nbytes for op in ops)
        return ops


class Pipeline:
    """Two ranks of a pipeline, each with `virtual` stages, and two ranks of context parallelism."""

    def __init__(self, dtype: torch.dtype, virtual: int = 1, backend: Any = None) -> None:
        both = mesh(2, 2)
        self.cp, (pp, self.rank), count = both["intra"], both.get_coordinate(), 2 * virtual
        self.mine = [pp + 2 * i for i in range(virtual)]
        self.first, self.last = pp == 0, pp == 1
        self.stages = [stages_of(dtype, count, backend is not None)[i] for i in self.mine]
        for stage in self.stages if backend is not None else ():
            stage.compile(fullgraph=True, backend=backend)
        where = torch.device("cpu"), None, None
        self.parts = [
            Counted(stage, i, count, *where, group=both["inter"].get_group())
            for i, stage in zip(self.mine, self.stages, strict=True)
        ]
        given: dict[str, Any] = {"loss_fn": loss_of, "scale_grads": False}
        if virtual == 1:
            self.schedule: Any = Schedule1F1B(self.parts[0], M, **given)
        else:
            self.schedule = ScheduleInterleaved1F1B(self.parts, M, **given)

    def step(self, number: int, method: str = "balanced", reverse: bool = False) -> Found:
        parts, rows, plans = microbatches(number), [], []
        self.fetched = 0
        for tokens, targets, mask in parts:
            layout = Layout.of(mask, q_len=S, ranks=2, batch=B, method=method)
            rows.append(layout.shard({"tokens": tokens, "targets": targets}, self.rank))
            plan = layout.plan(mask, heads=HEADS, batch=B, strategy="exchange", head_dim=8, itemsize=4)
            plans.append(plan.on(self.cp, rows=rows[-1]))
            self.fetched += int(plan.cost().received("forward")[self.rank])
        self.lengths = [len(plan.data) for plan in plans]
        batch = {name: torch.cat([x[name].expand(B, -1) for x in rows]) for name in rows[0]}
        losses: list[Tensor] = []
        given = {"index": batch["q_index"], "mask": PlanStack.of(plans[::-1] if reverse else plans)}
        if self.last:
            given |= {"target": batch["targets"], "losses": losses}
        for stage in self.stages:
            stage.zero_grad()
        self.schedule.step(
            *([batch["tokens"]] if self.first else []), **given, loss_kwargs={"count": targets_of(parts)}
        )
        sum_gradients([p for stage in self.stages for p in stage.parameters()], self.cp)
        return Found([sum_over(x, self.cp) for x in losses], gradients(self.stages))


def furthest(got: Found, wanted: Found) -> float:
    """The largest relative error of a loss or of a gradient."""
    losses = zip(got.losses, wanted.losses, strict=True) if got.losses else ()
    return max(error(*pair) for pair in (*losses, *zip(got.grads, wanted.grads, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [1, 2], ids=["1F1B", "interleaved"])
@ranks(4)
def test_every_microbatch_has_its_own_mask_as_on_one_rank(virtual: int) -> None:
    pipeline = Pipeline(torch.float64, virtual)
    found = pipeline.step(0)
    wanted = alone(torch.float64, 2 * virtual, pipeline.mine, 0)
    assert len(found.losses) == (M if pipeline.last else 0)
    assert furthest(found, wanted) < 1e-14, "roundings of float64"
    # Only hidden states cross to the next stage, and their gradients to the one before.
    least = M * B * -(-S // 2) * WIDTH * torch.float64.itemsize
    ends = {0: 1, 2 * virtual - 1: 1}
    assert [part.sent for part in pipeline.parts] == [(2 - ends.get(i, 0)) * least for i in pipeline.mine]


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [1, 2], ids=["1F1B", "interleaved"])
@ranks(4)
def test_compiled_and_recomputed_stages_have_one_program_for_all_plans(virtual: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    pipeline, lengths = Pipeline(torch.float32, virtual, counter), set()
    for step in range(2):
        with counted_bytes() as counts:
            found = pipeline.step(step)
        lengths |= {max(pipeline.lengths)}
        assert len(set(pipeline.lengths)) > 1
        given = 2 * virtual, pipeline.mine, step
        truth = alone(torch.float64, *given)
        rounding = furthest(alone(torch.float32, *given), truth)
        assert furthest(found, truth) < 3 * rounding, "as float32 on one rank"
    assert counts.received["exchange"] == 3 * 2 * pipeline.fetched, "three times in each of two layers"
    assert len(lengths) == 2, "plans of other sizes in each step"
    assert counter.frame_count == virtual


@pytest.mark.slow
@ranks(4)
def test_plans_in_another_order_give_other_losses_and_gradients() -> None:
    pipeline = Pipeline(torch.float64)
    wanted = alone(torch.float64, 2, pipeline.mine, 0)
    # Contiguous rows fit all plans, so that nothing but the result can differ.
    assert furthest(pipeline.step(0, method="contiguous"), wanted) < 1e-14
    assert furthest(pipeline.step(0, method="contiguous", reverse=True), wanted) > 1e-2


ROOT = Path(__file__).parents[2]
EXAMPLE, PAGE = ROOT / "examples" / "pipeline_four_ranks.py", ROOT / "docs/howto/pipeline.md"
STEP = re.compile(r"loss ([\d.]+), on one rank ([\d.]+)")


def said(interleaved: bool) -> str:
    """What the example prints on a rank."""
    torch._dynamo.reset()
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(EXAMPLE))["main"](interleaved)
    return text.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_example_prints_what_its_page_shows(interleaved: bool) -> None:
    if everything():
        printed = torchrun(4, EXAMPLE, *["interleaved"] * interleaved)
    else:
        printed = "".join(world(4).run(said, interleaved))
    page = PAGE.read_text(encoding="utf-8")
    losses = [[float(x) for pair in STEP.findall(text) for x in pair] for text in (printed, page)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert losses[0][::2] == pytest.approx(losses[0][1::2], abs=2e-5)
    (apart,) = re.findall(r"updates differ by (\S+)", printed)
    assert float(apart) < 5e-6, "roundings of float32"


def test_the_page_shows_the_whole_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert "".join(blocks).split() == EXAMPLE.read_text(encoding="utf-8").split()
