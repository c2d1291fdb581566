"""What a model sees of a plan on a mesh: rows, refusals, the switch. For results, test_parity.py."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from eager_flex import eager
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining.microbatch import TensorChunkSpec, split_args_kwargs_into_chunks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

import attnspan
from attnspan import alibi, causal, segments, window
from attnspan.errors import BackendError, DtypeError, OptionError, ShapeError
from attnspan.kernels import cpu
from attnspan.parallel import Layout, MeshPlan, PlanMismatchError, PlanStack, roll
from attnspan.torch import MissingPlanWarning, attention

Q_LEN, HEADS = 37, (4, 2)
Meshes = Callable[..., DeviceMesh]


@pytest.fixture
def meshes() -> Iterator[Meshes]:
    """Meshes of ranks of which only one is real: enough where nothing depends on what is exchanged."""

    def start(*sizes: int, rank: int = 0, named: bool = True) -> DeviceMesh:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(np.prod(sizes)))
        names = ("node", "inter", "intra")[-len(sizes) :]
        return init_device_mesh("cpu", sizes, mesh_dim_names=names if named else None)

    yield start
    dist.destroy_process_group()


def layout_of(ranks: int, **changes: Any) -> Layout:
    given = {"mask": causal(), "q_len": Q_LEN, "method": "zigzag", "rows_per_chunk": 2, **changes}
    return Layout.of(given.pop("mask"), ranks=ranks, **given)


def make(mesh: DeviceMesh, layout: Layout | None = None, **changes: Any) -> MeshPlan:
    layout = layout_of(mesh.size()) if layout is None else layout
    on = {"rows": layout.shard({}, mesh.get_local_rank()) if mesh.ndim == 1 else "unchecked"}
    on |= {name: changes.pop(name) for name in ("rows", "dtensor_rows", "check") if name in changes}
    given = {"heads": HEADS, "strategy": "exchange", **changes}
    return layout.plan(given.pop("mask", causal()), **given).on(mesh, **on)  # type: ignore[no-any-return]


def tensors(rows: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    keys = rows if keys is None else keys
    return torch.randn(1, 4, rows, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)


@pytest.mark.parametrize("rank", [0, 3])
def test_rows_positions_and_padding_of_a_rank(meshes: Meshes, rank: int) -> None:
    layout = layout_of(4)
    plan, rows = make(meshes(4, rank=rank), layout), layout.rows[rank]
    assert plan.frame.rows_per_rank == plan.frame.keys_per_rank == rows.shape[1] == 10
    assert plan.q_index.tolist() == rows.tolist()
    assert plan.positions.tolist() == np.maximum(rows, 0).tolist()
    assert plan.valid.tolist() == (rows >= 0).tolist()
    assert repr(plan) == "MeshPlan(exchange on 4 ranks, q_len=37, k_len=37, heads=(4, 2), rows_per_rank=10)"


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses", "auto"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "thd", "strided"])
def test_one_line_switches(meshes: Meshes, strategy: str, layout: str) -> None:
    mask = causal() & segments(np.repeat([0, 1, 2], [9, 4, 24]))
    with torch.inference_mode():
        plan = make(meshes(1), layout_of(1, mask=mask), mask=mask, strategy=strategy)
    order = {"bhsd": lambda x: x, "bshd": lambda x: x.transpose(1, 2), "thd": lambda x: x[0].transpose(0, 1)}
    order["strided"] = lambda x: x.mT.contiguous().mT  # Without a unit last stride.
    x = [order[layout](part) for part in tensors(Q_LEN)]
    options: dict[str, Any] = {"bias": alibi(torch.rand(4)), "sinks": torch.rand(4), "softcap": 2.0}
    options |= {"dropout_p": 0.2, "dropout_seed": torch.tensor(3), "return_lse": True}
    options["layout"] = "bhsd" if layout == "strided" else layout
    got, wanted = (attention(*x, mask=each, **options) for each in (plan, mask))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives_are_refused(meshes: Meshes) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(10))
    (first,) = torch.autograd.grad(attention(q, k, v, mask=make(meshes(4))).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        first.square().sum().backward()


def test_meshes_that_do_not_fit(meshes: Meshes) -> None:
    mesh = meshes(1, 2, 2)
    with pytest.raises(OptionError, match=r"expected one dimension, or two.*got 3\. Pass a part"):
        make(mesh)
    for layout, rank, text in (
        (layout_of(3), 0, "rank 0 of 3, got rank 0"),
        (layout_of(2), 1, "rank 1 of 2, got rank 0"),
    ):
        with pytest.raises(OptionError, match=f"mesh: expected {text} of 2"):
            layout.plan(causal(), heads=HEADS).local(rank).on(mesh["intra"], rows="unchecked")
    for other in (4, None, dist.group.WORLD):
        with pytest.raises(DtypeError, match="expected a DeviceMesh, such as mesh\\['cp'\\]"):
            layout_of(2).plan(causal(), heads=HEADS).on(other, rows="unchecked")
    dist.destroy_process_group()
    with pytest.raises(OptionError, match="names of both"):
        make(meshes(2, 2, named=False))


def test_rows_that_are_not_the_plans_are_refused(meshes: Meshes) -> None:
    mesh, layout = meshes(2), layout_of(2)
    plan = layout.plan(causal(), heads=HEADS)
    for on in (plan.on, plan.local(0).on):
        text = r'shard\(...\) returned, its batch.marks, or .*rows="unchecked"'
        with pytest.raises(OptionError, match=text):
            on(mesh)
        assert on(mesh, rows="unchecked").q_index.tolist() == layout.rows[0].tolist()
    contiguous = layout_of(2, method="contiguous")
    for rows, whose in ((contiguous.shard({}, 0), "layout"), (layout.shard({}, 1), "rank")):
        text = rf"rows of plan.on\(mesh, rows=...\): expected rows of {whose}"
        with pytest.raises(PlanMismatchError, match=text):
            plan.on(mesh, rows=rows)
    other = layout_of(3)
    with pytest.raises(OptionError, match=r"Layout.gather: mesh: expected 3 ranks, got 2"):
        other.gather(other.shard(torch.zeros(1, Q_LEN), 0), mesh)


def test_a_plan_is_a_pytree_of_tensors(meshes: Meshes) -> None:
    plan = make(meshes(4))
    leaves, spec = pytree.tree_flatten({"x": plan})
    assert len(leaves) == 3
    assert all(isinstance(x, Tensor) for x in leaves)
    again = pytree.tree_unflatten(leaves, spec)["x"]
    assert torch.equal(*(attention(*tensors(10), mask=each) * 0 for each in (again, plan)))
    assert again.frame == plan.frame
    module = torch.nn.Linear(2, 2)
    module.plan = plan
    assert copy.deepcopy(module).plan is plan
    with pytest.raises(TypeError, match="Send the Plan or its local"):
        pickle.dumps(plan)


def test_export_takes_a_plan_as_an_argument(meshes: Meshes) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: MeshPlan) -> Tensor:
            return attention(q, k, v, mask=mask)

    given = (*tensors(Q_LEN), make(meshes(1)))
    program = torch.export.export(Model(), given).module()
    torch.testing.assert_close(program(*given), attention(*given[:3], mask=causal()))


@pytest.mark.parametrize("batch", [1, 2])
def test_any_form_of_the_rows_numbers(meshes: Meshes, batch: int) -> None:
    mask = segments(np.repeat([[0, 1], [2, 3]], [9, 28], axis=1)) if batch == 2 else causal()
    layout = layout_of(4, mask=mask, batch=batch)
    plan, index = make(meshes(4), layout, mask=mask), torch.tensor(layout.rows[0]).long()
    x = [x.expand(2, -1, -1, -1) for x in tensors(plan.frame.rows_per_rank)]
    shared = [index[0], index.tolist()][: 3 - batch]
    for form in (index, index.int(), index.numpy(), index.expand(2, -1), *shared):
        assert attention(*x, mask=plan, q_index=form).shape == (2, 4, plan.frame.rows_per_rank, 16)
        with pytest.raises(PlanMismatchError, match="the rows of the plan's layout"):
            attention(*x, mask=plan, q_index=torch.as_tensor(form) + 1)


def test_what_a_loader_sends_is_pickled(meshes: Meshes) -> None:
    layout = layout_of(4)
    local = pickle.loads(pickle.dumps(layout.plan(heads=HEADS, strategy="ring").local(2)))
    rows = pickle.loads(pickle.dumps(layout.shard({"x": torch.zeros(1, Q_LEN)}, 2)))
    plan = local.on(meshes(4, rank=2), rows=rows)
    assert attention(*tensors(10), mask=plan, q_index=rows["q_index"]).shape == (1, 4, 10, 16)


Inputs = dict[str, Tensor]
#: What is changed of a call that fits, the error and a part of its message.
CALLS: dict[str, tuple[dict[str, Any] | Callable[[Inputs], dict[str, Any]], type[Exception], str]] = {
    "k_index": ({"k_index": torch.arange(10)}, OptionError, "k_index with context parallelism"),
    "a backend of no parts": ({"backend": "vendor"}, BackendError, "vendor: it runs on NVIDIA's GPUs"),
    "q_index": ({"q_index": torch.arange(10)[None]}, PlanMismatchError, "the rows of the plan's layout"),
    "q_index's shape": ({"q_index": torch.arange(9)[None]}, ShapeError, r"q_index .*got \(1, 9\)"),
    "rows": (lambda x: {"q": x["q"][:, :, :9]}, ShapeError, "q .* this rank's 10 rows, padding included"),
    "all rows": ({"q": tensors(37)[0]}, ShapeError, r"got shape \(1, 4, 37, 16\) .* by layout.shard"),
    "heads": (lambda x: {"q": x["q"][:, :2]}, ShapeError, "q with context parallelism: expected 4 heads"),
    "key heads": (lambda x: {"k": x["k"][:, :1], "v": x["v"][:, :1]}, ShapeError, "k with .* 2 heads"),
    "keys": (lambda x: {"k": x["k"][:, :, :9], "v": x["v"][:, :, :9]}, ShapeError, "k with .* 10 rows"),
    "values": (lambda x: {"v": x["v"][:, :, :9]}, ShapeError, r"v \(1, 2, 9, 16\)"),
    "sinks": ({"sinks": torch.zeros(3)}, ShapeError, r"sinks: expected \(H,\) with H=4"),
    "slopes of a shard": ({"bias": alibi(torch.zeros(2))}, ShapeError, "alibi.*4"),
    "bias of the whole": ({"bias": torch.zeros(37, 37)}, OptionError, "bias with .* got a dense bias"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_attention_refuses(meshes: Meshes, name: str) -> None:
    plan = make(meshes(4), strategy="ring")
    x = dict(zip("qkv", tensors(10), strict=True))
    change, kind, message = CALLS[name]
    changed = {**x, **(change(x) if callable(change) else change)}
    assert attention(**x, mask=plan).shape == (1, 4, 10, 16), "what is refused is the change"
    with pytest.raises(kind, match=message):
        attention(**changed, mask=plan)


@pytest.mark.parametrize("strategy", ["exchange", "ring"])
@pytest.mark.parametrize("how", ["argument", "block"])
def test_the_backend_that_a_call_names_runs_its_parts(meshes: Meshes, how: str, strategy: str) -> None:
    plan, inputs = make(meshes(1), strategy=strategy), [x.requires_grad_() for x in tensors(Q_LEN)]

    def outcome(**named: Any) -> tuple[float, list[Tensor]]:
        before = sum(x["calls"] for x in cpu.counters().values())
        out = attention(*inputs, mask=plan, **named)
        found = [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]
        return sum(x["calls"] for x in cpu.counters().values()) - before, found

    calls, wanted = outcome()
    assert calls == 2
    block: Any = attnspan.backend("math") if how == "block" else nullcontext()
    with block:
        calls, found = outcome(**({"backend": "math"} if how == "argument" else {}))
    assert calls == 0
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [False, True], ids=["plain", "options"])
@pytest.mark.parametrize("backend", ["cpu", "flex", "math"])
def test_a_rank_of_padding_alone_has_no_keys(meshes: Meshes, backend: str, options: bool) -> None:
    layout = Layout.contiguous(9, ranks=4)
    plan = make(meshes(4, rank=3), layout)
    inputs = [x.requires_grad_() for x in tensors(layout.rows_per_rank)]
    slopes, sinks = torch.rand(4).requires_grad_(), torch.randn(4).requires_grad_()
    more: Any = {"bias": alibi(slopes), "sinks": sinks, "softcap": 3.0} if options else {}
    more |= {"dropout_p": 0.25, "dropout_seed": torch.tensor(7)} if options else {}
    with eager():
        out = attention(*inputs, mask=plan, backend=backend, **more)
        gradients = torch.autograd.grad(out.sum(), [*inputs, *([slopes, sinks] if options else [])])
    assert not out.any()
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_mask_per_batch_row_is_for_so_many_rows(meshes: Meshes, batch: int) -> None:
    mask = segments(np.repeat([[0, 1], [2, 3]], [9, 28], axis=1))
    plan = make(meshes(4), layout_of(4, mask=mask, batch=2), mask=mask, strategy="ring")
    inputs = [x.expand(batch, -1, -1, -1) for x in tensors(plan.frame.rows_per_rank)]
    with pytest.raises(ShapeError, match=f"expected 2 batch elements, as the plan has, got {batch}"):
        attention(*inputs, mask=plan)


def test_what_does_not_change_is_planned_once_and_what_may_change_is_not() -> None:
    documents = np.repeat([0, 1, 2], [9, 4, 24])
    masks = {"data": lambda: causal() & segments(documents), "none": lambda: causal() & window(5)}
    layouts = {name: [layout_of(2, mask=mask()) for _ in range(2)] for name, mask in masks.items()}
    assert layouts["none"][0] is layouts["none"][1]
    assert layouts["data"][0] is not layouts["data"][1]
    layout = layouts["data"][0]
    plans = [layout.plan(mask, heads=HEADS, strategy="ring") for mask in (None, causal(), masks["data"]())]
    assert layout.plan(heads=HEADS, strategy="ring") is plans[0]
    assert layout.plan(causal(), heads=HEADS, strategy="ring") is plans[1]
    assert len({id(plan) for plan in plans}) == 3
    assert layout.plan(causal(), heads=HEADS, strategy="exchange") is not plans[1]
    assert plans[1].local(0) is plans[1].local(0)
    documents[:] = 0
    assert layout.plan(masks["data"](), heads=HEADS, strategy="ring").facts["mask"] != plans[2].facts["mask"]


def test_what_is_remembered_cannot_be_written(meshes: Meshes) -> None:
    layout = Layout.of(causal(), q_len=12, ranks=2)
    plan = layout.plan(heads=HEADS)
    placed, local, cost = plan.on(meshes(2), rows=layout.shard({}, 0)), plan.local(0), plan.cost()
    shown = [layout.rows, plan.bounds, local.data, local.rows, cost.pairs, cost.fetched, cost.memory]
    shown += [pickle.loads(pickle.dumps(layout)).rows]
    assert [x.flags.writeable for x in shown] == [False] * len(shown)
    before = placed.data.clone()
    placed.data.zero_()
    placed.numbers.zero_()
    assert torch.equal(plan.on(placed.frame.mesh, rows="unchecked").data, before)
    assert Layout.of(causal(), q_len=12, ranks=2) is layout


def ids_of(*lengths: int) -> attnspan.Mask:
    return causal() & segments(np.repeat(np.arange(len(lengths)), lengths))


def test_a_stack_of_plans_is_split_into_the_plans_of_the_microbatches(meshes: Meshes) -> None:
    masks = [causal(), ids_of(9, 4, 24), causal() & (window(2) | segments(np.arange(Q_LEN) % 5, max_runs=8))]
    layouts, mesh = [layout_of(1, mask=mask) for mask in masks], meshes(1)
    plans = [make(mesh, each, mask=mask) for each, mask in zip(layouts, masks, strict=True)]
    assert len({len(plan.data) for plan in plans}) > 1
    with torch.inference_mode():
        stack = PlanStack.of(plans)
    assert not stack.data.is_inference()
    assert repr(stack) == "PlanStack(3 plans, ulysses on 1 ranks)"
    given = {"masks": {"x": stack}}
    specs = pytree.tree_map(lambda _: TensorChunkSpec(0), given)
    _, chunks = split_args_kwargs_into_chunks((), given, chunks=3, kwargs_chunk_spec=specs)
    for chunk, plan, mask in zip(chunks, plans, masks, strict=True):
        found, x = chunk["masks"]["x"], tensors(Q_LEN)
        assert type(found) is MeshPlan
        assert found.frame == plan.frame
        assert torch.equal(found.q_index, plan.q_index)
        assert torch.equal(attention(*x, mask=found), attention(*x, mask=plan))
        torch.testing.assert_close(attention(*x, mask=found), attention(*x, mask=mask))
    q, k, v = tensors(Q_LEN)
    assert len(split_args_kwargs_into_chunks((), given, chunks=4)[1]) == 3, "the schedule raises"
    stack = split_args_kwargs_into_chunks((), given, chunks=2)[1][0]["masks"]["x"]
    with pytest.raises(OptionError, match=r"one microbatch, got a stack of 2 plans\. Pass the stack to"):
        attention(q, k, v, mask=stack)


@pytest.mark.parametrize("strategy", ["exchange", "ring", "ulysses"])
def test_a_plan_that_a_schedule_has_split_says_so(meshes: Meshes, strategy: str) -> None:
    mask = segments(np.repeat([[0, 1], [2, 3]], [9, 28], axis=1))
    plan = make(meshes(4), layout_of(4, mask=mask, batch=2), mask=mask, batch=2, strategy=strategy)
    _, chunks = split_args_kwargs_into_chunks((), {"mask": plan}, chunks=2)
    inputs = [x.expand(2, -1, -1, -1) for x in tensors(plan.frame.rows_per_rank)]
    for chunk in chunks:
        with pytest.raises(ShapeError, match=r"a whole plan, got a part of .*PlanStack\.of\(plans\)"):
            attention(*inputs, mask=chunk["mask"])


STACKS: dict[str, tuple[Callable[[DeviceMesh], Any], type[Exception], str]] = {
    "nothing": (lambda _: [], OptionError, "one plan for each microbatch, got none"),
    "host": (lambda _: [layout_of(4).plan(heads=HEADS)], DtypeError, "MeshPlans, got Plan"),
    "strategy": (lambda mesh: [make(mesh, strategy="ring")], OptionError, "strategy .*exchange.*, as plans"),
    "length": (lambda mesh: [make(mesh, layout_of(4, q_len=41))], OptionError, "q_len 37, as plans.*got 41"),
    "heads": (lambda mesh: [make(mesh, heads=(2, 2))], OptionError, r"heads \(4, 2\), as .*got \(2, 2\)"),
}


@pytest.mark.parametrize("name", STACKS)
def test_plans_that_no_stack_holds(meshes: Meshes, name: str) -> None:
    others, kind, message = STACKS[name]
    mesh = meshes(4)
    given = others(mesh)
    with pytest.raises(kind, match=message):
        PlanStack.of([make(mesh), *given] if given else given)


def test_a_stack_is_in_original_order_if_all_of_its_plans_are(meshes: Meshes) -> None:
    mesh = meshes(4)
    natural, other = (make(mesh, x) for x in (Layout.contiguous(Q_LEN, ranks=4), layout_of(4)))
    for plans in ([natural, natural], [natural, other], [other, natural]):
        assert PlanStack.of(plans).frame.ordered == (other not in plans)


def test_layouts_for_each_batch_element_are_not_stacked_with_one_for_all(meshes: Meshes) -> None:
    mask, mesh = segments(np.repeat([[0, 1], [2, 3]], [9, 28], axis=1)), meshes(4)
    plans = [make(mesh, layout_of(4, mask=each, batch=2), mask=mask, batch=2) for each in (causal(), mask)]
    with pytest.raises(ShapeError, match=r"plans\[1\]: expected rows of shape \(1, 10\), .*got \(2, 10\)"):
        PlanStack.of(plans)


def test_stacks_share_the_ranks_of_their_plans_and_are_not_sent(meshes: Meshes) -> None:
    stack = PlanStack.of([make(meshes(4))])
    assert copy.deepcopy(stack) is stack
    with pytest.raises(TypeError, match=r"pickling a PlanStack: .* Send the Plan"):
        pickle.dumps(stack)


def test_masks_with_and_without_batch_elements_are_not_stacked(meshes: Meshes) -> None:
    mesh, layout, ids = meshes(4), layout_of(4, mask=causal(), batch=2), np.zeros((2, Q_LEN), int)
    plans = [make(mesh, layout, mask=causal(), batch=2)]
    plans += [make(mesh, layout, mask=causal() & segments(ids), batch=2)]
    with pytest.raises(OptionError, match=r"expected planes 1, .*got 2\. .* & segments\(ids\)"):
        PlanStack.of(plans)
    same = causal() & segments(np.zeros((2, Q_LEN), int))
    assert PlanStack.of([plans[1], make(mesh, layout, mask=same, batch=2)]).frame.planes == 2
    q, k, v = tensors(plans[1].frame.rows_per_rank)
    with pytest.raises(ShapeError, match=r"expected 2 batch elements, .* pass PlanStack\.of\(plans\)"):
        attention(q, k, v, mask=plans[1])
    rolls = layout.plan_roll(-1, within=ids).on(mesh, rows="unchecked")
    with pytest.raises(ShapeError, match=r"expected 2 batch elements .* pass PlanStack\.of\(plans\)"):
        roll(q[:, 0], -1, rolls)


def test_stacks_of_rolls_warn_of_no_call(meshes: Meshes) -> None:
    layout = layout_of(4, q_len=57)
    stack = PlanStack.of([layout.plan_roll(-1).on(meshes(4), rows="unchecked")])
    q, k, v = (x[:, :1] for x in tensors(layout.rows_per_rank))
    attention(q, k, v, mask=causal())  # Warnings are errors.
    del stack


def test_schedules_split_masks_of_tensors_without_plans() -> None:
    ids = torch.arange(Q_LEN) // torch.tensor([[3], [5], [7], [40]])
    _, chunks = split_args_kwargs_into_chunks((), {"mask": causal() & segments(ids)}, chunks=2)
    q, k, v = (x.expand(2, -1, -1, -1) for x in tensors(Q_LEN))
    for chunk, part in zip(chunks, ids.split(2), strict=True):
        wanted = attention(q, k, v, mask=causal() & segments(part))
        assert torch.equal(attention(q, k, v, mask=chunk["mask"]), wanted)


def test_a_stack_warns_of_calls_without_it_as_its_plans_do(meshes: Meshes) -> None:
    layout = layout_of(4, q_len=53)
    stack = PlanStack.of([make(meshes(4), layout)])
    with pytest.warns(MissingPlanWarning, match="expected mask=plan.on"):
        attention(*tensors(layout.rows_per_rank), mask=causal())
    del stack
