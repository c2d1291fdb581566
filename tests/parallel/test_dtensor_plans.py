"""DTensors whose rows are split by a plan: results of one process, and errors that name what does not fit."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import cells, few
from dtensors import (
    BATCH,
    DIMS,
    HEADS,
    LENGTH,
    assert_same,
    grid,
    ids,
    options_of,
    parameters,
    placements,
    whole,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from worlds import named, ranks

from attnspan import causal, key_padding, segments
from attnspan.errors import OptionError, ShapeError
from attnspan.parallel import Layout
from attnspan.parallel.torch.groups import group_of
from attnspan.torch import attention

PLACES = ("R", "S0", "S1", "S2", "S3")


@dataclass(frozen=True)
class Planned:
    """A call by a plan of the mesh axis "cp".

    Attributes:
        sizes: Those of the mesh: (cp,) or (dp, cp).
        role: What dp splits: "batch", "heads", "rows", where both axes are the plan's, or "whole": nothing.
        option: Name of an option.
        place: Its tensors are "local" (plain ones of this rank's part), "whole" (plain ones of all),
            "split" (DTensors that lie as q does) or "replicated" (DTensors that each rank has whole).
    """

    sizes: tuple[int, ...] = (2,)
    role: str = "whole"
    layout: str = "bhsd"
    strategy: str = "exchange"
    option: str = "none"
    place: str = "local"
    compiled: bool = False
    k_len: int | None = None
    batch: int = BATCH
    heads: tuple[int, int] = HEADS

    def mask(self, rows: Any) -> Any:
        """For some of the batch rows."""
        if self.k_len is None:
            return causal() & segments(ids(self.batch)[rows])
        return key_padding(torch.arange(self.k_len, self.k_len - self.batch, -1)[rows])


class Part:
    """This rank's part of the whole, and the plan that goes with it."""

    def __init__(self, case: Planned) -> None:
        self.case, self.mesh = case, grid(*case.sizes)
        self.parts, self.at = 1, 0
        if case.role in ("batch", "heads"):
            self.parts, self.at = case.sizes[0], self.mesh.get_local_rank("dp")
        rows = torch.arange(case.batch)
        rows = self.cut(rows) if case.role == "batch" else rows
        heads = [len(self.cut(torch.arange(n)) if case.role == "heads" else range(n)) for n in case.heads]
        mesh, batch = self.mesh if case.role == "rows" else self.mesh["cp"], len(rows)
        self.rank, given = group_of(mesh).rank(), {"k_len": case.k_len, "batch": batch}
        self.layout = Layout.of(mask := case.mask(rows), q_len=LENGTH, ranks=mesh.size(), **given)
        plan = self.layout.plan(mask, heads=tuple(heads), strategy=case.strategy, **given)  # type: ignore[arg-type]
        rows = self.layout.shard({}, self.rank)
        self.keys, self.plan = plan.keys, plan.on(mesh, rows=rows, dtensor_rows="plan")
        self.order = (0, 2, 1) if case.layout == "bshd" else (0, 1, 2)  # of batch rows, heads, rows
        self.dims = {"batch": 0, "heads": self.order[1]}
        self.first = [Shard(self.dims[case.role])] if case.role in self.dims else [Replicate()]

    def cut(self, x: Tensor, dim: int = 0) -> Tensor:
        return x.chunk(self.parts, dim)[self.at]

    def of(self, x: Tensor, keys: bool = False) -> Tensor:
        """This rank's part of a tensor (B, H, S, ...)."""
        x = self.cut(x, {"batch": 0}.get(self.case.role, 1))
        return (self.keys if keys else self.layout).shard(x, self.rank, dim=2)

    def join(self, x: Tensor, keys: bool = False) -> DTensor:
        """The DTensor of the rows of all ranks, in the order of the plan."""
        dims = self.order if x.dim() == 4 else (0, 1, 2)
        local = self.of(x.detach(), keys)
        local = local.transpose(1, 2) if dims[1] == 2 else local
        first = self.first if x.dim() == 4 or self.case.role != "heads" else [Shard(1)]
        first = [Shard(dims[2])] if self.case.role == "rows" else first
        placed = [*first[: len(self.case.sizes) - 1], Shard(dims[2])]
        shape = [x.shape[0], x.shape[1], self.layout.ranks * local.shape[dims[2]], *x.shape[3:]]
        shape = [shape[i] for i in dims] + shape[3:]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, placed, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def option(self, x: Any) -> Any:
        """A tensor of an option, as the case has it."""
        if not isinstance(x, Tensor) or self.case.option not in DIMS:
            return x
        dim = DIMS[self.case.option].get(self.case.role) if x.dim() else None
        found = x.detach()
        if self.case.place in ("split", "replicated"):
            place = Replicate() if dim is None or self.case.place == "replicated" else Shard(dim)
            found = distribute_tensor(found, self.mesh, [place, Replicate()][2 - self.mesh.ndim :])
        elif self.case.place == "local" and dim is not None:
            found = self.cut(found, dim).clone()
        return found.requires_grad_(x.requires_grad)

    def gradient(self, x: Any, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Of a parameter: what the ranks have found together, and what it should be."""
        if isinstance(x, DTensor):
            for axis in range(self.mesh.ndim):  # One after the other: torch warns of several at once.
                placed = list(x.placements)
                placed[axis] = Replicate()
                x = x.redistribute(self.mesh, placed)
            return x.to_local(), wanted
        dim = DIMS[self.case.option].get(self.case.role)
        x = x.clone()
        dist.all_reduce(x, group=self.mesh.get_group("cp"))
        if dim is not None:
            return x, self.cut(wanted, dim)
        if self.case.role in ("batch", "rows"):
            dist.all_reduce(x, group=self.mesh.get_group("dp"))
        return x, wanted


def order_of(x: Tensor, local: Tensor) -> list[int]:
    """The dims as they are stored, but for those of one element."""
    return sorted((dim for dim in range(x.dim()) if local.shape[dim] > 1), key=lambda dim: -x.stride(dim))


def check(case: Planned) -> None:
    """Each result of a planned call is that of one process."""
    (q, k, v), dout = whole(case.batch, case.heads)
    if case.k_len is not None:
        k, v = (x.detach()[:, :, : case.k_len].contiguous().requires_grad_() for x in (k, v))
    options = options_of(case.option, case.batch, case.heads[0])
    mask, dlse = case.mask(slice(None)), dout[..., 0].contiguous()
    outs = attention(q, k, v, mask=mask, return_lse=True, **options)
    wanted = torch.autograd.grad(outs, [q, k, v, *parameters(options)], [dout, dlse])

    torch._dynamo.reset()
    part = Part(case)
    leaves = [part.join(x, keys=x is not q).requires_grad_() for x in (q, k, v)]
    given = torch.utils._pytree.tree_map(part.option, options)

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(q, k, v, mask=part.plan, layout=case.layout, return_lse=True, **options)

    call = torch.compile(call, backend="aot_eager", fullgraph=True) if case.compiled else call
    found = call(*leaves, **given)
    gradients = torch.autograd.grad(found, [*leaves, *parameters(given)], [part.join(dout), part.join(dlse)])
    results = zip((found[0], *gradients[:3], found[1]), (outs[0], *wanted[:3], outs[1]), strict=True)
    for name, (x, y) in zip(("out", "dq", "dk", "dv", "lse"), results, strict=True):
        x = x.to_local().transpose(1, 2) if case.layout == "bshd" and name != "lse" else x.to_local()
        if name == "lse":  # Padding rows see nothing: other results are 0, and so are gradients.
            x = x.masked_fill(~part.plan.valid[:, None], 0)
        with named(name):
            assert_same([x.detach()], [part.of(y.detach(), keys=name in ("dk", "dv"))])
    for x, y in zip(gradients[3:], wanted[3:], strict=True):
        x, y = part.gradient(x, y)
        assert_same([x.detach()], [y])
    assert found[0].placements == leaves[0].placements
    for x in found:
        local = x.to_local()
        assert order_of(x, local) == order_of(local, local)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["alone", *few(["heads", "whole", "rows", "batch"], 2)])
@ranks(lambda role: 2 if role == "alone" else 4)
def test_a_plan_alone_and_with_another_mesh_axis(role: str) -> None:
    base = Planned() if role == "alone" else Planned(sizes=(2, 2), role=role)
    others = [
        base,
        replace(base, layout="bshd", strategy="ulysses"),
        replace(base, strategy="ring", k_len=9),
        replace(base, option="dropout", strategy="auto"),
        # Parts of other sizes: two of three batch rows or heads on the first rank.
        replace(base, option="dropout", batch=3, heads=(3, 3)),
    ]
    places = ("local", "split", "replicated")
    options = cells(DIMS, places, strength=2 if role == "heads" else 1)
    for case in [*others, *(replace(base, option=name, place=place) for name, place in options)]:
        with named(case):
            check(case)


COMPILED = Planned(option="sinks", place="split", compiled=True)
ON_FOUR = replace(COMPILED, sizes=(2, 2), role="heads")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    few(
        [
            COMPILED,
            ON_FOUR,
            replace(ON_FOUR, role="batch", option="dropout", place="local"),
            replace(ON_FOUR, role="batch"),
            replace(ON_FOUR, option="dropout", place="local"),
        ],
        1,
    ),
)
@ranks(lambda case: math.prod(case.sizes))
def test_compiled_plans(case: Planned) -> None:
    check(case)


@pytest.mark.parametrize(("role", "size"), [("heads", 2), ("batch", 1)])
@ranks(4)
def test_plain_options_of_the_whole_are_refused_with_a_plan(role: str, size: int) -> None:
    text = rf"bias.slopes with .* expected a tensor for this rank's {role}, {size}, or a DTensor, got"
    with pytest.raises((OptionError, ShapeError), match=text):
        check(Planned(sizes=(2, 2), role=role, option="alibi per row", place="whole"))


def causal_rows(mesh: DeviceMesh, heads: tuple[int, int] = HEADS) -> tuple[Any, list[Tensor]]:
    """A plan on a mesh, and this rank's rows of q, k and v."""
    layout, (inputs, _) = Layout.of(causal(), q_len=LENGTH, ranks=mesh.size()), whole()
    rank, plan = group_of(mesh).rank(), layout.plan(heads=heads, strategy="exchange")
    rows = [layout.shard(x.detach(), rank, dim=2) for x in inputs]
    return plan.on(mesh, rows=layout.shard({}, rank), dtensor_rows="plan"), rows


def put(x: Tensor, mesh: DeviceMesh, words: str) -> Any:
    return x if words == "plain" else DTensor.from_local(x, mesh, placements(words), run_check=False)


@ranks(2)
def test_rows_that_do_not_lie_as_the_plan_are_refused() -> None:
    mesh = grid(2)
    plan, rows = causal_rows(mesh["cp"])
    for case in itertools.product((*PLACES, "plain"), repeat=3):  # "plain" is this rank's rows.
        given = [put(x, mesh, words) for x, words in zip(rows, case, strict=True)]
        with named(case):
            if case in {("S2", "S2", "S2"), ("plain", "plain", "plain")}:
                attention(*given, mask=plan)
            else:
                with pytest.raises(OptionError, match=r"^(q|k|v)\b.*: expected .*got "):
                    attention(*given, mask=plan)


@ranks(4)
def test_rows_along_another_axis_are_refused() -> None:
    mesh = grid(2, 2)
    plan, rows = causal_rows(mesh["cp"])

    def call(words: str) -> None:
        attention(*(put(x, mesh, words) for x in rows), mask=plan)

    call("R S2")
    call("S0 S2")
    # The last one would be rows of all four ranks, of which the plan knows two.
    for words in ("S2 R", "R R", "S2 S2"):
        text = r"expected Shard\(2\) along mesh axes \[1\] only: the plan's ranks hold its rows"
        with named(words), pytest.raises(OptionError, match=text):
            call(words)
    with pytest.raises(
        OptionError, match=r"^q as a DTensor with context parallelism: expected a mesh with the ranks"
    ):
        attention(*(put(x, mesh["dp"], "S2") for x in rows), mask=plan)


@ranks(2)
def test_rows_and_heads_that_are_not_the_plans_are_refused() -> None:
    """For rows in their own order under a plan that does not say so, see test_sharing.py."""
    mesh, (inputs, _) = grid(2), whole()
    plan, rows = causal_rows(mesh)
    natural = [distribute_tensor(x.detach(), mesh, placements("S2")) for x in inputs]
    with pytest.raises(ShapeError, match="q as a DTensor with context parallelism: expected 14 rows of 2"):
        attention(*natural, mask=plan)
    with pytest.raises(ShapeError, match="q with context parallelism: expected 2 heads and this rank's"):
        attention(*(put(x, mesh, "S2") for x in rows), mask=causal_rows(mesh, heads=(2, 1))[0])
