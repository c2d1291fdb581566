"""A case of context parallelism on one rank: its plan, its share of the inputs, its part of the results."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from samples.parallel import MASKS, OPTIONS, Case, inputs, parameters
from torch import Tensor
from worlds import mesh

from attnspan.parallel import Layout, MeshPlan, Plan
from attnspan.torch import attention


@dataclass(frozen=True)
class Placed:
    """A case on this rank's world.

    Attributes:
        layout, keys: Who owns which rows and keys.
        plan: Of all ranks.
        mask: This rank's, on the mesh.
    """

    layout: Layout
    keys: Layout
    plan: Plan
    mask: MeshPlan

    @property
    def rank(self) -> int:
        return int(dist.get_rank() % self.layout.ranks)

    def shard(self, x: Any, dim: int = 1, fill: Any = 0) -> Any:
        return self.layout.shard(x, self.rank, dim, fill)

    def shard_keys(self, x: Any, dim: int = 1, fill: Any = 0) -> Any:
        return self.keys.shard(x, self.rank, dim, fill)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        return self.layout.gather(x, self.mask.frame.mesh, dim)  # type: ignore[no-any-return]


def place(case: Case, where: Any = None, check: bool = True, **changes: Any) -> Placed:
    """The layout and plan of a case on a mesh, by default this rank's world."""
    where = mesh(dist.get_world_size())["cp"] if where is None else where
    given = {"mask": MASKS[case.mask](case), "strategy": case.strategy, "heads": case.heads, **changes}
    mask, heads = given.pop("mask"), given.pop("heads")
    layout = given.pop("layout", None) or Layout.of(
        mask,
        q_len=given.pop("q_len", case.length),
        k_len=case.k_len,
        ranks=where.size(),
        batch=case.batch,
        heads=heads[0],
        members=case.members,
        method=given.pop("method", case.partition),
        rows_per_chunk=given.pop("rows_per_chunk", case.rows_per_chunk),
    )
    sizes = {"head_dim": case.dims[0], "v_dim": case.dims[1], "itemsize": getattr(torch, case.dtype).itemsize}
    plan = layout.plan(mask, heads=heads, batch=case.batch, k_len=case.k_len, **sizes, **given)
    return Placed(
        layout,
        plan.keys,
        plan,
        plan.on(where, rows=layout.shard({}, dist.get_rank() % where.size()), check=check),
    )


def local_inputs(placed: Placed, case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """This rank's q, k, v (leaves, in the case's layout) and gradients of out and lse."""
    whole = inputs(case)
    qkv = [placed.shard(whole.q, dim=2), *(placed.shard_keys(x, dim=2) for x in (whole.k, whole.v))]
    gradients = [placed.shard(whole.dout, dim=2), placed.shard(whole.dlse, dim=2)]
    if case.layout == "bshd":
        qkv, gradients[0] = [x.transpose(1, 2) for x in qkv], gradients[0].transpose(1, 2)
    return [x.detach().requires_grad_() for x in qkv], gradients


def attend(placed: Placed, case: Case) -> dict[str, Any]:
    """Forward and backward of one case: what this rank has of each result, in "bhsd"."""
    leaves, (dout, dlse) = local_inputs(placed, case)
    options = OPTIONS[case.option](case)
    extra = parameters(options)
    keywords = {**options, "layout": case.layout, "return_lse": case.return_lse}
    out = attention(*leaves, mask=placed.mask, **keywords)
    outs, gradients = ([out[0], out[1]], [dout, dlse]) if case.return_lse else ([out], [dout])
    got = list(torch.autograd.grad(outs, [*leaves, *extra], gradients, allow_unused=True))
    for i, x in enumerate([*leaves, *extra]):
        got[i] = torch.zeros_like(x) if got[i] is None else got[i]
    values = [outs[0].detach(), *got[:3]]
    if case.layout == "bshd":
        values = [x.transpose(1, 2) for x in values]
    found: dict[str, Any] = dict(zip(("out", "dq", "dk", "dv"), values, strict=True))
    if case.return_lse:
        found["lse"] = outs[1].detach()
    found |= {f"parameter {i}": x for i, x in enumerate(got[3:])}
    rows, keys = (torch.tensor(each.rows[placed.rank]) for each in (placed.layout, placed.keys))
    return {**found, "rows": rows, "keys": keys}
