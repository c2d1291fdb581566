"""A roll over ranks gives each rank its rows of `torch.roll` of the gathered tensor, forward and backward."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from worlds import mesh, named, raising, ranks

from attnspan import causal, segments
from attnspan.errors import OptionError
from attnspan.parallel import Layout, PlanStack, roll
from attnspan.parallel.torch import comm
from attnspan.parallel.torch.comm import counted_bytes
from attnspan.torch import attention, checkpoint_policy

LENGTH, BATCH = 37, 2
SHIFTS: list[int | tuple[int, ...]] = [-1, 0, 5, LENGTH, -3 * LENGTH - 2, (-1, -2, 7)]


def ids_of(batch: int = BATCH, salt: int = 0) -> np.ndarray:
    random = np.random.default_rng(salt)
    ids = [np.repeat(np.arange(LENGTH), random.integers(1, 12, LENGTH))[:LENGTH] for _ in range(batch)]
    return np.where(np.arange(LENGTH) < LENGTH - 3, np.stack(ids), -1)


def layouts(count: int) -> dict[str, Layout]:
    """Rows in order, with an uneven last part; from both ends; of batch elements with documents."""
    sizes: dict[str, Any] = {"q_len": LENGTH, "ranks": count, "rows_per_chunk": 2}
    packed = causal() & segments(ids_of())
    return {
        "contiguous": Layout.contiguous(LENGTH, count),
        "zigzag": Layout.of(causal(), method="zigzag", **sizes),
        "documents": Layout.of(packed, batch=BATCH, **sizes),
    }


def wanted_of(x: Tensor, shift: int, ids: np.ndarray | None, fill: float) -> Tensor:
    """The definition, for whole x (B, S, ...)."""
    if ids is None:
        return torch.roll(x, shift, 1)
    rows, own = np.arange(LENGTH), np.broadcast_to(ids, (len(x), LENGTH))
    source = np.clip(rows - shift, 0, LENGTH - 1)
    seen = (source == rows - shift) & (own[:, source] == own) & (own >= 0)
    mask = torch.from_numpy(seen).reshape(*seen.shape, *[1] * (x.dim() - 2))
    return torch.where(mask, x[:, source], torch.tensor(fill, dtype=x.dtype))


def cases(count: int) -> Iterator[tuple[Any, ...]]:
    whole_ids = ids_of()
    for name, layout in layouts(count).items():
        for shifts in SHIFTS:
            for ids in (None, whole_ids[0], whole_ids):
                yield name, layout, shifts, ids


@pytest.mark.parametrize(
    "count", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
@ranks(lambda count: count)
def test_a_roll_is_that_of_the_gathered_tensor(count: int) -> None:
    where, rank = mesh(count), dist.get_rank()
    make = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, LENGTH, 3, generator=make, dtype=torch.float64)
    for name, layout, shifts, ids in cases(count):
        several = shifts if isinstance(shifts, tuple) else (shifts,)
        whole, mine = x.clone().requires_grad_(), layout.shard(x, rank).requires_grad_()
        table = None if ids is None else np.atleast_2d(ids)
        wanted = torch.stack([wanted_of(whole, shift, table, -7) for shift in several])
        plan = layout.plan_roll(shifts, within=ids).on(where, rows=layout.shard({}, rank))
        found = roll(mine, shifts, plan, fill=-7)
        got = torch.stack(found) if isinstance(shifts, tuple) else found[None]
        dout = torch.randn(wanted.shape, generator=make, dtype=torch.float64)
        with named((name, shifts, ids)):
            for y, z in zip(got, wanted, strict=True):
                assert torch.equal(y, layout.shard(z.detach(), rank, fill=-7))
            (want,) = torch.autograd.grad(wanted, whole, dout)
            local = torch.stack([layout.shard(d, rank) for d in dout])
            (grad,) = torch.autograd.grad(got, mine, local)
            torch.testing.assert_close(grad, layout.shard(want, rank), rtol=1e-15, atol=1e-15)


@pytest.mark.slow
@ranks(3)
def test_ranks_without_rows_take_part() -> None:
    where, rank = mesh(3), dist.get_rank()
    for length in (0, 1, 2, 5):
        layout = Layout.contiguous(length, 3)
        x = torch.arange(2.0 * length).reshape(2, length)
        mine = layout.shard(x, rank).requires_grad_()
        back, none = (
            roll(mine, 1, layout, mesh=where),
            roll(mine, 1, layout, mesh=where, within=np.arange(length)),
        )
        assert torch.equal(back, layout.shard(x.roll(1, 1), rank))
        assert not none.any()
        (back + none).sum().backward()
        assert torch.equal(mine.grad, layout.shard(torch.ones_like(x), rank))


DTYPES = ["float32", "bfloat16", "float16", "int64", "int32", "bool", "complex64"]
#: torch can neither index nor fill them.
DTYPES += ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.slow
@ranks(3)
def test_any_dtype_and_dimension() -> None:
    where, rank, ids = mesh(3), dist.get_rank(), ids_of(1)
    make = torch.Generator().manual_seed(1)
    for name, layout in layouts(3).items():
        for dtype in DTYPES:
            for shape, dim in (((BATCH, LENGTH), 1), ((BATCH, LENGTH), -1), ((BATCH, 2, LENGTH, 3), 2)):
                x = torch.randint(0, 9, shape, generator=make).to(getattr(torch, dtype))
                fill: Any = np.int64(-100) if dtype.startswith("int") else np.float64(1)
                fill = 1 if dtype.startswith("uint") else fill
                with named((name, dtype, shape, dim)):
                    mine = layout.shard(x, rank, dim)
                    got = roll(mine, -2, layout, mesh=where, dim=dim, within=ids, fill=fill)
                    wide = x if x.is_complex() else x.double()  # exact
                    wanted = wanted_of(wide.movedim(dim, 1), -2, ids, fill).movedim(1, dim).to(x.dtype)
                    assert got.dtype == x.dtype
                    assert got.tolist() == layout.shard(wanted, rank, dim, fill).tolist()
    line = torch.arange(LENGTH)
    layout = layouts(3)["zigzag"]
    got = roll(layout.shard(line, rank, dim=0), 1, layout, mesh=where, dim=0)
    assert torch.equal(got, layout.shard(line.roll(1), rank, dim=0))
    nothing = roll(torch.zeros(0, layout.rows_per_rank, 4), 1, layout, mesh=where)
    assert nothing.shape == (0, layout.rows_per_rank, 4)


@ranks(2)
def test_results_may_be_written_in_place() -> None:
    where, rank, layout = mesh(2), dist.get_rank(), layouts(2)["zigzag"]
    x = torch.randn(BATCH, LENGTH, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    plan = layout.plan_roll((-1, -2)).on(where, rows=layout.shard({}, rank))

    def written(y: Tensor, rolled: Any) -> Tensor:
        first, second = rolled(y * y)
        first.mul_(3)
        second[:, :, 1] = 0
        return first + second

    whole, mine = x.clone().requires_grad_(), layout.shard(x, rank).requires_grad_()
    wanted = written(whole, lambda y: (y.roll(-1, 1), y.roll(-2, 1)))
    got = written(mine, lambda y: roll(y, (-1, -2), plan))
    assert torch.equal(got, layout.shard(wanted.detach(), rank))
    wanted.sum().backward()
    got[:, plan.valid[0]].sum().backward()
    torch.testing.assert_close(mine.grad, layout.shard(whole.grad, rank), rtol=1e-15, atol=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@ranks(3)
def test_gradients_of_one_shift_are_exact_and_of_several_are_added_in_float32(dtype: str) -> None:
    where, rank, layout = mesh(3), dist.get_rank(), layouts(3)["zigzag"]
    make = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH, LENGTH, 4, generator=make).to(getattr(torch, dtype))
    for shifts in (-1, (-1, -2, 4)):
        whole, mine = x.double().requires_grad_(), layout.shard(x, rank).requires_grad_()
        several = shifts if isinstance(shifts, tuple) else (shifts,)
        dout = torch.randn(len(several), *x.shape, generator=make).to(x.dtype)
        wanted = torch.stack([whole.roll(shift, 1) for shift in several])
        (want,) = torch.autograd.grad(wanted, whole, dout.double())
        got = torch.stack(roll(mine, several, layout, mesh=where))
        (grad,) = torch.autograd.grad(got, mine, torch.stack([layout.shard(d, rank) for d in dout]))
        want = layout.shard(want, rank)
        if shifts == -1 or dtype == "bfloat16":  # rounded once
            assert torch.equal(grad, want.to(x.dtype))
        torch.testing.assert_close(grad.double(), want, rtol=torch.finfo(x.dtype).eps, atol=1e-6)


@pytest.mark.slow
@ranks(2)
def test_every_derivative_is_a_roll() -> None:
    where, rank, layout = mesh(2), dist.get_rank(), layouts(2)["zigzag"]
    x = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole, mine = x.clone().requires_grad_(), layout.shard(x, rank).requires_grad_()

    def second(y: Tensor, rolled: Any) -> Tensor:
        (first,) = torch.autograd.grad((rolled(y.sin()) * y).sum(), y, create_graph=True)
        return torch.autograd.grad(first.square().sum(), y)[0]

    got = second(mine, lambda y: roll(y, -3, layout, mesh=where))
    torch.testing.assert_close(got, layout.shard(second(whole, lambda y: y.roll(-3, 1)), rank))
    with (
        warnings.catch_warnings(),
        raising("NotImplementedError: forward-mode derivatives .* a roll is linear"),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit.script
        torch.func.jvp(lambda y: roll(y, 1, layout, mesh=where), (mine.detach(),), (mine.detach(),))


def least(layout: Layout, shifts: tuple[int, ...], ids: Any = None) -> int:
    """Rows that a rank needs and another rank owns, each once, for all batch elements."""
    planes = np.arange(BATCH)[:, None]
    owner = np.empty((BATCH, LENGTH), int)
    for rank, rows in enumerate(layout.rows):
        for b, own in enumerate(np.broadcast_to(rows, (BATCH, rows.shape[1]))):
            owner[b, own[own >= 0]] = rank
    moves = set()
    for shift in shifts:
        source = np.arange(LENGTH) - shift
        inside = source % LENGTH
        seen = np.broadcast_to(True if ids is None else (source == inside), (BATCH, LENGTH))
        seen = seen if ids is None else seen & (ids[:, inside] == ids) & (ids >= 0)
        away = seen & (owner[:, inside] != owner)
        moves |= {*zip(*(x[away] for x in np.broadcast_arrays(planes, inside, owner)), strict=True)}
    return len(moves)


@pytest.mark.slow
@ranks(4)
def test_only_rows_that_change_their_owner_travel_in_one_collective() -> None:
    where, rank, ids, calls = mesh(4), dist.get_rank(), ids_of(), []
    send = dist.all_to_all_single
    comm.dist.all_to_all_single = lambda *a, **b: calls.append(1) or send(*a, **b)  # type: ignore[assignment]
    try:
        for name, layout in layouts(4).items():
            for shifts, within in (((-1,), None), ((-1,), ids), ((-1, -2, -3), None), ((-1, -2), ids)):
                x = layout.shard(torch.randn(BATCH, LENGTH, 8, dtype=torch.bfloat16), rank).requires_grad_()
                plan = layout.plan_roll(shifts, within=within).on(where, rows=layout.shard({}, rank))
                calls.clear()
                with counted_bytes() as counts:
                    out = torch.stack(roll(x, shifts, plan))
                    forward = sum(counts.received.values())
                    out.sum().backward()
                assert len(calls) == 2, "one forward, one backward"
                both = torch.tensor([forward, sum(counts.received.values()) - forward])
                dist.all_reduce(both)
                rows = least(layout, shifts, within)
                with named((name, shifts)):
                    assert both.tolist() == [rows * 8 * 2, rows * 8 * (2 if len(shifts) == 1 else 4)]
    finally:
        comm.dist.all_to_all_single = send  # type: ignore[assignment]


class Head(torch.nn.Module):
    """Two heads: one sees the next token's hidden state."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.keep = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), keep

    def inner(self, x: Tensor, plan: Any) -> Tensor:
        first, second = roll(torch.tanh(self.one(x)), (-1, -2), plan)
        return self.two(first * second + x)

    def forward(self, x: Tensor, plan: Any) -> Tensor:
        if self.keep == "all":
            return self.inner(x, plan)
        contexts = partial(create_selective_checkpoint_contexts, checkpoint_policy)
        extra: dict[str, Any] = {"context_fn": contexts} if self.keep == "selective" else {}
        return checkpoint(self.inner, x, plan, use_reentrant=False, **extra)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", "nothing", "selective"])
@ranks(2)
def test_compiled_without_a_break_and_once_for_all_plans_and_batches(keep: str) -> None:
    torch._dynamo.reset()
    where, rank, model = mesh(2), dist.get_rank(), Head(keep)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step, batch in enumerate((2, 3, 5)):
        ids = ids_of(1, step)
        layout = Layout.of(causal() & segments(ids), q_len=LENGTH, ranks=2, rows_per_chunk=2)
        x = torch.randn(batch, LENGTH, 8, generator=torch.Generator().manual_seed(step))
        rows = layout.shard({"x": x}, rank)
        plan = layout.plan_roll((-1, -2), within=ids).on(where, rows=rows)
        whole, mine = x.clone().requires_grad_(), rows["x"].requires_grad_()
        torch._dynamo.mark_dynamic(mine, 0)
        got = compiled(mine, plan)
        hidden = torch.tanh(model.one(whole))
        wanted = model.two(wanted_of(hidden, -1, ids, 0) * wanted_of(hidden, -2, ids, 0) + whole)
        torch.testing.assert_close(got[:, plan.valid[0]], layout.shard(wanted, rank)[:, plan.valid[0]])
        model.zero_grad()
        got[:, plan.valid[0]].square().sum().backward()
        want = torch.autograd.grad(wanted.square().sum(), [whole, *model.parameters()])
        torch.testing.assert_close(mine.grad, layout.shard(want[0], rank))
        for parameter, grad in zip(model.parameters(), want[1:], strict=True):
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)
        assert counter.frame_count == 1
    with raising(r".*roll in compiled code: expected a plan, which is data, got a layout"):
        torch.compile(lambda x: roll(x, -1, layout, mesh=where), fullgraph=True, backend="eager")(mine)


def test_a_plan_is_remembered_by_its_ids_and_can_be_pickled() -> None:
    layout, ids = layouts(2)["zigzag"], ids_of(1)
    assert layout.plan_roll(-1) is layout.plan_roll((-1,)) is not layout.plan_roll(-2)
    plan = layout.plan_roll(-1, within=ids)
    assert layout.plan_roll(-1, within=torch.from_numpy(ids.copy())) is plan
    assert repr(plan) == "Plan(roll by (-1,) on 2 ranks, q_len=37)"
    ids[0, 5] += 100
    assert layout.plan_roll(-1, within=ids) is not plan
    with pytest.raises(OptionError, match=r"Plan.cost: expected a plan for attention, got a plan of a roll"):
        plan.cost()
    for one in (plan, plan.local(1)):
        assert pickle.loads(pickle.dumps(one)).shifts == (-1,)


@ranks(2)
def test_plans_of_a_loader_and_meshes_of_two_dimensions() -> None:
    layout, rank = layouts(2)["zigzag"], dist.get_rank()
    x = torch.arange(LENGTH)[None]
    rows = layout.shard({"x": x}, rank)
    for where in (mesh(2), mesh(1, 2), mesh(2, 1)):
        plan = pickle.loads(pickle.dumps(layout.plan_roll(-1).local(rank))).on(where, rows=rows)
        assert torch.equal(roll(rows["x"], -1, plan), layout.shard(x.roll(-1, 1), rank))
        assert torch.equal(roll(rows["x"], -1, layout, mesh=where), layout.shard(x.roll(-1, 1), rank))
    assert (
        repr(plan) == "MeshPlan(roll by (-1,) on 2 ranks, q_len=37, k_len=37, heads=(1, 1), rows_per_rank=20)"
    )


@ranks(2)
def test_plans_of_microbatches_are_stacked_and_split() -> None:
    where, rank, layout = mesh(2), dist.get_rank(), layouts(2)["zigzag"]
    every = [ids_of(1, salt) for salt in range(3)]
    plans = [layout.plan_roll((-1, 3), within=ids).on(where, rows=layout.shard({}, rank)) for ids in every]
    chunks = split_args_kwargs_into_chunks((), {"plan": PlanStack.of(plans)}, chunks=3)[1]
    x = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(5))
    for chunk, ids in zip(chunks, every, strict=True):
        mine, whole = layout.shard(x, rank).requires_grad_(), x.clone().requires_grad_()
        first, second = roll(mine, (-1, 3), chunk["plan"])
        wanted = [wanted_of(whole, shift, ids, 0) for shift in (-1, 3)]
        assert torch.equal(first, layout.shard(wanted[0].detach(), rank))
        (first * 2 + second).sum().backward()
        (wanted[0] * 2 + wanted[1]).sum().backward()
        assert torch.equal(mine.grad, layout.shard(whole.grad, rank))


@ranks(2)
def test_each_mistake_is_explained() -> None:
    where, rank, layout = mesh(2), dist.get_rank(), layouts(2)["zigzag"]
    n, ids = layout.rows_per_rank, ids_of()
    plan = layout.plan_roll(-1).on(where, rows=layout.shard({}, rank))
    packed = layouts(2)["documents"]
    apart = packed.plan_roll(-1).on(where, rows="unchecked")
    attends = layout.plan(causal(), heads=(1, 1)).on(where, rows="unchecked")
    x = torch.zeros(BATCH, n)
    q = torch.zeros(1, 1, n, 16)
    calls: dict[str, Any] = {
        rf"ShapeError: roll: x: expected this rank's {n} rows along dimension 1, got \(2, 3\)": lambda: roll(
            x[:, :3], -1, plan
        ),
        rf"ShapeError: roll: x: expected this rank's {n} rows along dimension 0": lambda: roll(
            x, -1, plan, dim=0
        ),
        "ShapeError: roll: x: expected this rank's .* along dimension 2": lambda: roll(x, -1, plan, dim=2),
        "ShapeError: roll: x: expected 2 batch elements as dimension 0": lambda: roll(x[:1], -1, apart),
        "DtypeError: roll: x: expected a plain tensor, got list": lambda: roll([1], -1, plan),
        "DeviceError: roll: x: expected a tensor on cpu, got meta": lambda: roll(x.to("meta"), -1, plan),
        "DtypeError: roll: shifts: expected an int, got float. Pass an int, or a tuple": lambda: roll(
            x, -1.0, plan
        ),
        "DtypeError: roll: shifts: expected an int, got Tensor": lambda: roll(x, torch.tensor(1), plan),
        "DtypeError: roll: shifts: expected an int, got bool": lambda: layout.plan_roll(True),
        "OptionError: roll: shifts: expected at least one shift, got none": lambda: roll(x, (), plan),
        r"OptionError: roll: plan: expected a plan for shifts \(2,\), got one for shifts \(-1,\)": lambda: (
            roll(x, 2, plan)
        ),
        "OptionError: roll: plan: .* got a MeshPlan that rolls nothing": lambda: roll(x, -1, attends),
        "OptionError: roll: plan: .* got a Plan that rolls nothing": lambda: roll(
            x, -1, layout.plan_roll(-1)
        ),
        "OptionError: roll: plan: .* got a Tensor that rolls nothing": lambda: roll(x, -1, x),
        "OptionError: roll with a plan: expected no within": lambda: roll(x, -1, plan, within=ids),
        "OptionError: roll: mesh: expected the mesh": lambda: roll(x, -1, layout),
        "OptionError: roll: mesh axes: expected none for": lambda: roll(
            x, -1, layout, mesh=where, sequence="x"
        ),
        "ShapeError: roll: within: expected ids of 37 rows, got .* whole sequence": lambda: layout.plan_roll(
            -1, within=ids[:, :n]
        ),
        "ShapeError: roll: within: expected ids of 2 batch elements": lambda: packed.plan_roll(
            -1, within=ids_of(3)
        ),
        "DtypeError: roll: within: expected an integer array": lambda: layout.plan_roll(-1, within=ids / 2),
        "OptionError: fill of roll: x: expected a number, got 'none'": lambda: roll(x, -1, plan, fill="none"),
        "OptionError: fill of roll: x: expected a number, got None": lambda: roll(x, -1, plan, fill=None),
        "OptionError: fill of roll: x: expected a value of float32, got 1j": lambda: roll(
            x, -1, plan, fill=1j
        ),
        r"OptionError: roll: plan: .* one microbatch, got a stack of 2 plans": lambda: roll(
            x, -1, PlanStack.of([plan, plan])
        ),
        "OptionError: fill of roll: x: expected a value of int8, got -300": lambda: roll(
            x.to(torch.int8), -1, plan, fill=-300
        ),
        "OptionError: fill of roll: x: expected a value of int64, got 0.5": lambda: roll(
            x.long(), -1, plan, fill=0.5
        ),
        "OptionError: mask with context parallelism: expected a plan for attention, got a plan of": lambda: (
            attention(q, q, q, mask=plan)
        ),
    }
    for text, call in calls.items():
        with named(text), raising(text):
            call()
    with raising("PlanMismatchError: .*expected the same plan of the call on every rank"):
        other = layout.plan_roll(-1, within=ids_of(1, salt=rank))
        other.on(where, rows="unchecked", check=None).rolled(x)
