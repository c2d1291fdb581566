"""What ranks do for the tests of DTensors whose rows are split by a plan."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from dtensor_jobs import BATCH, DIMS, HEADS, LENGTH, grid, ids, off, options_of, parameters, placements, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from attnspan import Spans, causal, key_padding, segments
from attnspan.parallel import Layout
from attnspan.parallel.torch.comm import group_of
from attnspan.torch import attention


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

    def mask(self, rows: slice) -> Any:
        """For some of the batch rows."""
        if self.k_len is None:
            return causal() & segments(ids(self.batch)[rows])
        return key_padding(torch.arange(self.k_len, self.k_len - self.batch, -1)[rows])


class Part:
    """This rank's part of the whole, and the plan that goes with it."""

    def __init__(self, case: Planned) -> None:
        self.case, self.mesh = case, grid(*case.sizes)
        two = len(case.sizes) == 2
        self.parts, self.at = (case.sizes[0], self.mesh.get_local_rank("dp")) if two else (1, 0)
        if case.role in ("whole", "rows"):
            self.parts, self.at = 1, 0
        rows = self._range(case.batch) if case.role == "batch" else slice(0, case.batch)
        heads = tuple(case.heads)
        if case.role == "heads":
            heads = tuple(self._range(n).stop - self._range(n).start for n in case.heads)
        mesh, batch = self.mesh if case.role == "rows" else self.mesh["cp"], rows.stop - rows.start
        self.rank, given = group_of(mesh).rank(), {"k_len": case.k_len, "batch": batch}
        self.layout = Layout.of(mask := case.mask(rows), q_len=LENGTH, ranks=mesh.size(), **given)
        plan = self.layout.plan(mask, heads=heads, strategy=case.strategy, **given)  # type: ignore[arg-type]
        rows = self.layout.shard({}, self.rank)
        self.keys, self.plan = plan.keys, plan.on(mesh, rows=rows, dtensor_rows="plan")
        self.order = (0, 2, 1) if case.layout == "bshd" else (0, 1, 2)  # of batch rows, heads, rows
        self.dims = {"batch": 0, "heads": self.order[1]}
        self.first = [Shard(self.dims[case.role])] if case.role in self.dims else [Replicate()]

    def _range(self, size: int) -> slice:
        each = -(-size // self.parts)
        return slice(min(each * self.at, size), min(each * (self.at + 1), size))

    def of(self, x: Tensor, keys: bool = False) -> Tensor:
        """This rank's part of a tensor (B, H, S, ...)."""
        dim = {"batch": 0, "heads": 1}.get(self.case.role)
        if dim is not None:
            at = self._range(x.shape[dim])
            x = x.narrow(dim, at.start, at.stop - at.start)
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
            found = found.chunk(self.parts, dim)[self.at].clone()
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
        if dim is not None and self.case.role != "whole":
            return x, wanted.chunk(self.parts, dim)[self.at]
        if self.case.role in ("batch", "rows"):
            dist.all_reduce(x, group=self.mesh.get_group("dp"))
        return x, wanted


def _valid(part: Part, x: Tensor) -> Tensor:
    """Which rows of a result (B, H, n, ...) are no padding."""
    valid = part.plan.valid[:, None]
    return valid.reshape(*valid.shape, *[1] * (x.dim() - 3))


def _order(x: Tensor, local: Tensor) -> list[int]:
    """The dims as they are stored, but for those of one element."""
    return sorted((dim for dim in range(x.dim()) if local.shape[dim] > 1), key=lambda dim: -x.stride(dim))


def planned(case: Planned) -> dict[str, float]:
    """The distance of each result of a planned call from that of one process."""
    (q, k, v), dout = whole(case.batch, case.heads)
    if case.k_len is not None:
        k, v = (x.detach()[:, :, : case.k_len].contiguous().requires_grad_() for x in (k, v))
    options = options_of(case.option, case.batch, case.heads[0])
    mask, dlse = case.mask(slice(None)), dout[..., 0].contiguous()
    outs = attention(q, k, v, mask=mask, return_lse=True, **options)
    wanted = torch.autograd.grad(outs, [q, k, v, *parameters(options)], [dout, dlse])

    part = Part(case)
    leaves = [part.join(x, keys=x is not q).requires_grad_() for x in (q, k, v)]
    given = torch.utils._pytree.tree_map(part.option, options)

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return attention(q, k, v, mask=part.plan, layout=case.layout, return_lse=True, **options)

    call = torch.compile(call, backend="aot_eager", fullgraph=True) if case.compiled else call
    found = call(*leaves, **given)
    gradients = torch.autograd.grad(found, [*leaves, *parameters(given)], [part.join(dout), part.join(dlse)])
    pairs = {}
    for name, x, y in zip(
        ("out", "dq", "dk", "dv", "lse"),
        (found[0], *gradients[:3], found[1]),
        (outs[0], *wanted[:3], outs[1]),
        strict=True,
    ):
        x = x.to_local().transpose(1, 2) if case.layout == "bshd" and name != "lse" else x.to_local()
        wanted_x = part.of(y.detach(), keys=name in ("dk", "dv"))
        # Padding rows see nothing: their results are 0, and so are gradients.
        pairs[name] = (x.masked_fill(~_valid(part, x), 0) if name == "lse" else x), wanted_x
    for i, (x, y) in enumerate(zip(gradients[3:], wanted[3:], strict=True)):
        pairs[f"parameter {i}"] = part.gradient(x, y)
    assert found[0].placements == leaves[0].placements
    for x in found:
        local = x.to_local()
        assert _order(x, local) == _order(local, local)
    return {name: off([x.detach()], [y.detach()]) for name, (x, y) in pairs.items()}


def plan_all(cases: list[Planned]) -> list[Any]:
    """The distances of each case, or its error in words."""
    found: list[Any] = []
    for case in cases:
        torch._dynamo.reset()
        try:
            found.append(planned(case))
        except ValueError as error:
            found.append(f"{type(error).__name__}: {error}")
        except Exception as error:
            error.add_note(repr(case))
            raise
    return found


def causal_rows(mesh: DeviceMesh, heads: tuple[int, int] = HEADS) -> tuple[Any, list[Tensor]]:
    """A plan on a mesh, and this rank's rows of q, k and v."""
    layout, (inputs, _) = Layout.of(causal(), q_len=LENGTH, ranks=mesh.size()), whole()
    rank, plan = group_of(mesh).rank(), layout.plan(heads=heads, strategy="exchange")
    rows = [layout.shard(x.detach(), rank, dim=2) for x in inputs]
    return plan.on(mesh, rows=layout.shard({}, rank), dtensor_rows="plan"), rows


def _placed(x: Tensor, mesh: DeviceMesh, words: str) -> Any:
    return x if words == "plain" else DTensor.from_local(x, mesh, placements(words), run_check=False)


def _error(*inputs: Any, mask: Any) -> str:
    try:
        attention(*inputs, mask=mask)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def misplaced(cases: list[tuple[str, str, str]], sizes: tuple[int, ...] = (2,)) -> list[str]:
    """The errors of planned calls whose q, k and v lie in these ways; "plain" is this rank's rows."""
    mesh = grid(*sizes)
    plan, rows = causal_rows(mesh["cp"])
    return [
        _error(*(_placed(x, mesh, w) for x, w in zip(rows, case, strict=True)), mask=plan) for case in cases
    ]


def on_other_meshes() -> dict[str, str]:
    """The errors of calls whose tensors do not lie on one mesh, or not on the plan's; four ranks."""
    mesh, ((q, k, v), _) = grid(2, 2), whole()
    plan, rows = causal_rows(mesh["cp"])
    both = [distribute_tensor(x.detach(), mesh, placements("R R")) for x in (q, k, v)]
    one = [distribute_tensor(x.detach(), mesh["cp"], placements("R")) for x in (q, k, v)]
    bounds = distribute_tensor(causal().spans(LENGTH, LENGTH, like=q).bounds, mesh["cp"], placements("R"))
    return {
        "k": _error(both[0], one[1], both[2], mask=causal()),
        "v": _error(one[0], one[1], both[2], mask=causal()),
        "bounds": _error(*both, mask=Spans(bounds, LENGTH)),
        "plan": _error(*(_placed(x, mesh["dp"], "S2") for x in rows), mask=plan),
    }


def of_other_sizes() -> dict[str, str]:
    """The errors of calls of other rows, heads or batch rows, and of rows in an unnamed order; two ranks."""
    mesh, (inputs, _) = grid(2), whole()
    four = [distribute_tensor(x.detach(), mesh, placements("S0")) for x in whole(batch=4)[0]]
    natural = [distribute_tensor(x.detach(), mesh, placements("S2")) for x in inputs]
    plan, rows = causal_rows(mesh)
    placed = [_placed(x, mesh, "S2") for x in rows]
    unnamed = Layout.of(causal(), q_len=LENGTH, ranks=2).plan(heads=HEADS, strategy="exchange")
    return {
        "rows": _error(*natural, mask=plan),
        "heads": _error(*placed, mask=causal_rows(mesh, heads=(2, 1))[0]),
        "order": _error(*placed, mask=unnamed.on(mesh, rows="unchecked")),
        "ids": _error(*four, mask=segments(ids(2))),
    }
