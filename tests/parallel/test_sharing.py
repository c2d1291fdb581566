"""Layouts that several plans share, meshes of several kinds, pipelines, loops played wrongly."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from placed import attend, place
from samples.parallel import Case
from test_parity import FLOAT32, assert_parity
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from worlds import error, mesh, ranks, world

import attnspan
from attnspan.errors import OptionError
from attnspan.parallel import Layout, MeshPlan
from attnspan.parallel.torch.loss import global_token_count, next_token_targets, sum_gradients
from attnspan.testing import assert_same_as_one_rank
from attnspan.torch import SlowPathWarning, attention

B, S, HEADS = 2, 192, (4, 2)
CAUSAL, WINDOW = attnspan.causal(), attnspan.causal() & attnspan.window(9)


def here() -> Any:
    return mesh(dist.get_world_size())["cp"]


def on_mesh(layout: Layout, plan: Any) -> MeshPlan:
    return plan.on(here(), rows=layout.shard({}, dist.get_rank()))  # type: ignore[no-any-return]


def documents(salt: int = 3) -> attnspan.Mask:
    lengths = torch.randint(5, 60, (B, S), generator=torch.Generator().manual_seed(salt))
    ids = torch.stack([torch.repeat_interleave(torch.arange(S), row)[:S] for row in lengths])
    return CAUSAL & attnspan.segments(ids)


def inputs(keys: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((B, HEADS[0], S, 16), (B, HEADS[1], keys, 16), (B, HEADS[1], keys, 16))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def layout_of(mask: attnspan.Mask, **options: Any) -> Layout:
    return Layout.of(mask, **{"q_len": S, "ranks": dist.get_world_size(), "batch": B, **options})


def assert_alike(got: Any, wanted: Any, limit: float = FLOAT32) -> None:
    for pair in zip(got, wanted, strict=True):
        assert error(*pair) < limit


def weights_of(shape: tuple[int, ...], rank: int) -> Tensor:
    # Whole numbers, whose sums are exact in any order.
    return torch.randint(100, shape, generator=torch.Generator().manual_seed(rank)).float()


SHAPES = [(37,), (2, 37), (2, 37, 3), (37, 2, 3), (2, 3, 37)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("method", ["zigzag", "contiguous", "balanced"])
@ranks(lambda count: count)
def test_the_whole_comes_back_with_its_gradient(count: int, method: str) -> None:
    layout = Layout.of(CAUSAL, q_len=37, ranks=count, method=method, rows_per_chunk=3)  # type: ignore[arg-type]
    packed = layout_of(documents())
    for one, shape in [(layout, shape) for shape in SHAPES] + [(packed, (B, S, 3)), (packed, (B, 3, S))]:
        for dim in (shape.index(one.q_len), shape.index(one.q_len) - len(shape)):
            whole = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
            x = one.shard(whole, dist.get_rank(), dim=dim, fill=torch.nan).requires_grad_()
            found = one.gather(x, here(), dim=dim)
            assert torch.equal(found, whole), f"{shape} along {dim}"
            # Each rank weighs the whole in another way: the gradient is the sum of what all of them find.
            (found * weights_of(shape, dist.get_rank())).sum().backward()
            total = torch.stack([weights_of(shape, rank) for rank in range(count)]).sum(0)
            assert torch.equal(x.grad, one.shard(total, dist.get_rank(), dim=dim)), f"{shape} along {dim}"


@ranks(4)
def attend_on_two_levels(case: Case, strategy: str, name: str) -> dict[str, Any]:
    """Results on a mesh of two nodes of two ranks each, and what has come of the strategy."""
    placed = place(case, mesh(2, 2), strategy=strategy, node_size=2)
    assert placed.plan.strategy.name.replace(", ring", "") == name
    return attend(placed, case)


@pytest.mark.slow
def test_on_two_levels_heads_are_shared_within_a_node() -> None:
    case = Case(length=101, heads=(6, 2))
    for strategy, name in (("auto", "hybrid(2, 2)"), ("exchange", "exchange"), ("hybrid(4, 1)", "ulysses")):
        assert_parity(case, attend_on_two_levels(case, strategy, name))


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_a_dimension_of_a_mesh_is_a_world_of_its_own(strategy: str) -> None:
    case = Case(length=101, strategy=strategy)

    parts = world(4).run(lambda: attend(place(case, mesh(2, 2)["intra"]), case))
    for pair in (parts[:2], parts[2:]):
        assert_parity(case, pair)


@pytest.mark.parametrize(
    ("count", "strategies"),
    [(2, ("exchange", "exchange")), (2, ("ulysses", "exchange")), (4, ("hybrid(2, 2, ring)", "exchange"))],
)
@ranks(lambda count: count)
def test_layers_of_one_layout_have_masks_and_strategies_of_their_own(
    count: int, strategies: tuple[str, str]
) -> None:
    masks, rank = [documents(), WINDOW], dist.get_rank()
    layout = layout_of(masks[0])
    rows = layout.shard({"x": inputs()[0].transpose(1, 2)}, rank)  # Once, for both kinds of layers.
    x, whole = rows["x"].transpose(1, 2), inputs()[0]
    for mask, strategy in zip(masks, strategies, strict=True):
        plan = layout.plan(mask, heads=HEADS, strategy=strategy).on(here(), rows=rows)
        x = attention(x, x[:, ::2], x[:, 1::2], mask=plan, q_index=rows["q_index"])
        whole = attention(whole, whole[:, ::2], whole[:, 1::2], mask=mask)
    assert error(layout.gather(x, here(), dim=2), whole) < FLOAT32


@ranks(3)
def test_a_mesh_of_some_ranks_serves_these_and_refuses_others() -> None:
    some, layout, me = (2, 1), Layout.of(CAUSAL, q_len=S, ranks=2), dist.get_rank()  # In any order.
    part = DeviceMesh("cpu", some, mesh_dim_names=("cp",))
    rank = part.get_local_rank() if me in some else 0
    plan = layout.plan(heads=HEADS, strategy="ulysses").local(rank)
    text = rf"mesh: expected this rank, {me}, among its ranks, got DeviceMesh"
    with contextlib.nullcontext() if me in some else pytest.raises(OptionError, match=text):
        placed, whole = plan.on(part, rows=layout.shard({}, rank)), inputs()
        out = attention(*(layout.shard(x, rank, dim=2) for x in whole), mask=placed)
        assert error(layout.gather(out, part, dim=2), attention(*whole, mask=CAUSAL)) < FLOAT32


@pytest.mark.parametrize("count", [2, 3])
@ranks(lambda count: count)
def test_cross_attention_between_two_layouts(count: int) -> None:
    (q, k, v), rank = inputs(keys=150), dist.get_rank()
    encoder = layout_of(attnspan.window(20, 20), q_len=150)
    decoder = layout_of(documents())
    sees = attnspan.key_padding(torch.tensor([150, 77]))
    plan = decoder.plan(sees, heads=HEADS, keys=encoder, strategy="exchange")
    rows, keys = decoder.shard({"q": q}, rank, dim=2), (encoder.shard(x, rank, dim=2) for x in (k, v))
    out = attention(rows["q"], *keys, mask=plan.on(here(), rows=rows))
    assert error(decoder.gather(out, here(), dim=2), attention(q, k, v, mask=sees)) < FLOAT32


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
@ranks(2)
def test_sums_of_float64_calls_are_float64(strategy: str) -> None:
    generator = torch.Generator().manual_seed(6)
    given = [torch.randn(B, heads, 60, 8, generator=generator).double() for heads in (4, 2, 2, 4)]
    parameters = [torch.randn(4, generator=generator).double() for _ in range(2)]
    layout = Layout.of(CAUSAL, q_len=60, ranks=dist.get_world_size())
    plan = on_mesh(layout, layout.plan(heads=HEADS, strategy=strategy, batch=B))

    def gradients(mask: Any, *inputs: Tensor) -> list[Tensor]:
        *leaves, dout = (x.clone().requires_grad_() for x in inputs)
        slopes, sinks = (x.clone().requires_grad_() for x in parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowPathWarning)
            out, lse = attention(
                *leaves, mask=mask, bias=attnspan.alibi(slopes), sinks=sinks, softcap=2.0, return_lse=True
            )
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        return list(
            torch.autograd.grad((out * dout).sum() + seen.sum(), [*leaves, slopes, sinks], allow_unused=True)
        )

    mine = gradients(plan, *(layout.shard(x, dist.get_rank(), dim=2) for x in given))
    for x in mine[3:]:
        dist.all_reduce(x)
    whole = [*(layout.gather(x, here(), dim=2) for x in mine[:3]), *mine[3:]]
    assert_alike(whole, gradients(CAUSAL, *given), 1e-14)


@pytest.mark.parametrize("strategy", ["exchange", "ring"])
@ranks(2)
def test_sinks_of_nothing_have_finite_gradients(strategy: str) -> None:
    # A sink of -inf next to rows that see nothing.
    layout = layout_of(CAUSAL, q_len=S - 1)
    plan = on_mesh(layout, layout.plan(heads=HEADS, strategy=strategy, batch=B))
    sinks = torch.tensor([-torch.inf, 0.0, 1.0, -torch.inf], requires_grad=True)
    rows = (layout.shard(x[:, :, 1:], dist.get_rank(), dim=2) for x in inputs())
    attention(*rows, mask=plan, sinks=sinks).sum().backward()
    assert sinks.grad.isfinite().all()


@ranks(2)
def test_dtensors_in_their_own_order_need_a_layout_that_keeps_it() -> None:
    whole = inputs()
    spread = [distribute_tensor(x, here(), [Shard(2)]) for x in whole]
    zigzag, contiguous = (
        on_mesh(layout, layout.plan(heads=HEADS, strategy="exchange", batch=B))
        for layout in (layout_of(CAUSAL, method=method) for method in ("zigzag", "contiguous"))
    )
    with pytest.raises(OptionError, match="dtensor_rows='plan', or rows in original order"):
        attention(*spread, mask=zigzag)
    out = attention(*spread, mask=contiguous)
    assert isinstance(out, DTensor)
    assert error(out.full_tensor(), attention(*whole, mask=CAUSAL)) < FLOAT32


@pytest.mark.slow
@ranks(2)
def test_rows_of_the_step_before_in_a_compiled_model_give_nan() -> None:
    layouts = [layout_of(documents(salt)) for salt in (3, 4)]
    before, rows = (layout.shard({"x": inputs()[0]}, dist.get_rank(), dim=2) for layout in layouts)
    plan, x = layouts[1].plan(heads=HEADS, strategy="exchange").on(here(), rows=rows), rows["x"]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x: Tensor, plan: MeshPlan, q_index: Tensor) -> Tensor:
        return attention(x, x[:, ::2], x[:, 1::2], mask=plan, q_index=q_index)

    assert call(x, plan, before["q_index"]).isnan().all()
    assert not call(x, plan, rows["q_index"]).isnan().any()


UNMARKED = {
    "rightly": None,
    "labels shifted after sharding": "losses: .* the last rows of .*: labels or targets were shifted after",
    "ids of another batch": "logits: .*batch element, token.* The mask or the ids are another batch's",
    "old tensors under new marks": "x: .* on ranks .* They equal other rows of the sequence: the tensors",
    "a mean of local means": "loss: the ranks' parts add up to .* each rank averages over its own targets",
    "gradients of one rank": r"table: it differs on ranks \[0, 1\].* call sum_gradients",
}


@pytest.mark.parametrize("way", UNMARKED)
@ranks(2)
def test_a_step_next_to_one_rank_names_what_marks_cannot_tell(way: str) -> None:
    generator, rank = torch.Generator().manual_seed(9), dist.get_rank()
    tokens = torch.randint(50, (2, 40), generator=generator)
    ids, later = (torch.arange(40).expand(2, -1) // size for size in (9, 13))
    table, out = (torch.randn(50, 32, generator=generator) for _ in range(2))

    def step(batch: Any, on: Any) -> dict[str, Tensor]:
        weights = [x.clone().requires_grad_() for x in (table, out)]
        targets, mask = next_token_targets(*batch), CAUSAL & attnspan.segments(batch[1])
        rows: Any = {"tokens": batch[0], "targets": targets}
        if on is not None:
            sees = CAUSAL & attnspan.segments(later) if way == "ids of another batch" else mask
            layout = Layout.of(mask, q_len=40, ranks=on.size(), batch=2)
            rows, mask = layout.shard(rows, rank), layout.plan(sees, heads=(2, 2), strategy="ring")
            if way == "labels shifted after sharding":
                rows["targets"] = next_token_targets(rows["tokens"], layout.shard(batch[1], rank))
            if way == "old tensors under new marks":
                rows["tokens"] = Layout.contiguous(40, on.size()).shard(batch[0], rank)
            mask = mask.on(on, rows=rows)
        x = weights[0][rows["tokens"]]
        y = attention(*[x.unflatten(2, (2, 16))] * 3, mask=mask, layout="bshd").flatten(2)
        logits = (x + y) @ weights[1].T
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), rows["targets"], reduction="none", ignore_index=-100
        )
        local = None if way == "a mean of local means" else on
        loss = losses.sum() / global_token_count(rows["targets"], local)
        loss.backward()
        if on is not None and way != "gradients of one rank":
            sum_gradients(weights, on)
        grads = {"table": weights[0].grad, "out": weights[1].grad}
        index = {} if on is None else {"q_index": rows["q_index"]}
        return {"loss": loss, **grads, "x": x, "logits": logits, "losses": losses, **index}  # type: ignore[dict-item]

    text = UNMARKED[way]
    with pytest.raises(AssertionError, match=f"^{text}") if text else contextlib.nullcontext():
        assert_same_as_one_rank(step, (tokens, ids), here())


class Stage(torch.nn.Module):
    """One layer of a pipeline; the plan comes as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 128)
        self.out = torch.nn.Linear(64, 32)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (8, 16)).split([4, 2, 2], 2)
        mixed: Tensor = self.out(attention(q, k, v, mask=mask, layout="bshd").flatten(2))
        return x + mixed


def stages() -> list[Stage]:
    torch.manual_seed(5)
    return [Stage(), Stage()]


@ranks(4)
def test_pipeline_stages_take_plans_as_arguments() -> None:
    """Two pipeline stages of two ranks each, which share rows."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    both = mesh(2, 2)  # stages, and the ranks that share a sequence
    stage, rank = both.get_coordinate()
    mask = CAUSAL & attnspan.segments(torch.arange(S) // 50)
    layout = Layout.of(mask, q_len=S, ranks=2)
    x = torch.randn(4, S, 32, generator=torch.Generator().manual_seed(8))
    rows = layout.shard({"x": x}, rank)
    plan = layout.plan(heads=HEADS, strategy="exchange").on(both["intra"], rows=rows)
    model = stages()[stage]
    part = PipelineStage(model, stage, 2, torch.device("cpu"), group=both["inter"].get_group())
    loss = lambda out, target: (out.square() * target).sum()  # noqa: E731
    whole = pytree.tree_map(lambda _: _Replicate(), plan)  # every microbatch has the whole plan
    chunked = {"args_chunk_spec": (TensorChunkSpec(0),)} if stage == 0 else {}
    schedule = ScheduleGPipe(
        part, 2, loss_fn=loss, kwargs_chunk_spec={"mask": whole}, scale_grads=False, **chunked
    )
    valid = torch.from_numpy(layout.valid(rank)).float()[:, :, None].expand(4, -1, 32)
    if stage == 0:
        schedule.step(rows["x"], mask=plan)
    else:
        schedule.step(mask=plan, target=valid)
    grads = [p.grad for p in model.parameters()]
    for grad in grads:
        dist.all_reduce(grad, group=both["intra"].get_group())
    alone = stages()
    out = alone[1](alone[0](x, mask), mask)
    out.square().sum().backward()
    assert_alike(grads, (parameter.grad for parameter in alone[stage].parameters()), 5e-6)
