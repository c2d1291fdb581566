"""Steps on two ranks, most of them sick. Processes of ranks load a factory by its name in this module."""

import torch
import torch.distributed as dist
from small_models import DIM, HEADS, LENGTH, VOCABULARY, Model, fused, heads_of, of_segments, tokens
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

from attnspan import causal, segments
from attnspan.parallel import Layout
from attnspan.torch import attention


class Sharded:
    """A step on one rank, or on two with half of the rows each. ``ids_of`` says whose ids a rank takes."""

    def __init__(self, ids_of, attend):
        self.ids_of, self.attend = ids_of, attend

    def __call__(self, batch, mesh):
        torch.manual_seed(0)
        embed, ids = nn.Embedding(VOCABULARY, DIM), batch["segment_ids"]
        mask = causal() & segments(ids)
        if mesh is None:
            x = heads_of(embed(batch["input_ids"]))
            return {"out": self.attend(x, x, x, mask, None).transpose(1, 2)}
        layout = Layout.of(mask, q_len=LENGTH, ranks=2, batch=len(ids), method="zigzag")
        rows = layout.shard({"input_ids": batch["input_ids"]}, mesh.get_rank())
        own = self.ids_of(layout, ids, mesh.get_rank())
        x = heads_of(embed(rows["input_ids"]))
        keys = layout.gather(x, mesh, dim=2)
        out = self.attend(x, keys, keys, causal() & segments(own, ids), rows["q_index"])
        return {"q_index": rows["q_index"], "out": out.transpose(1, 2)}


def own_rows(layout, ids, rank):
    return layout.shard(ids, rank)


def attend_rows(q, k, v, mask, index):
    return attention(q, k, v, mask=mask, q_index=index)  # sick


def stepping(step):
    return Model(of_segments), tokens(segment_ids=torch.arange(LENGTH).expand(2, -1) // 5), {"step": step}


def healthy():
    return stepping(Sharded(own_rows, attend_rows))


def ids_of_other_rows():
    """Ids are cut into contiguous halves, rows in a zigzag: all shapes fit."""
    return stepping(Sharded(lambda _, ids, rank: ids.chunk(2, 1)[rank], attend_rows))


def attend_from_0(q, k, v, mask, index):
    index = None if index is None else torch.arange(q.shape[2])
    return attention(q, k, v, mask=mask, q_index=index)  # sick


def rows_from_0():
    """A rank counts its rows from 0, as if they were the first ones."""
    return stepping(Sharded(own_rows, attend_from_0))


def attend_by_rank(q, k, v, mask, index):
    rank = 0 if index is None else dist.get_rank()

    def scaled(x):  # sick
        return x * 1.0 if rank else (x * 2.0) * 0.5

    return attention(torch.compile(scaled, backend="eager")(q), k, v, mask=mask, q_index=index)


def branch_on_rank():
    return stepping(Sharded(own_rows, attend_by_rank))


@torch.library.custom_op("sick_ranks::attention", mutates_args=())
def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A kernel with a rule for DTensor; to find one for SDPA on a CPU takes torch half a minute."""
    return fused(q, k, v)


kernel.register_fake(lambda q, *_: torch.empty_like(q))


def placed(batch, mesh):
    """q is sharded over heads, k and v are whole on each rank."""
    x = torch.arange(2 * HEADS * 8 * 8.0).sin().reshape(2, HEADS, 8, 8)
    if mesh is None:
        return {"out": kernel(x, x, x).transpose(1, 2)}
    q, k = distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(x, mesh, [Replicate()])
    out = kernel(q, k, k)  # sick
    index, whole = torch.arange(8).chunk(2)[mesh.get_rank()], out.full_tensor().transpose(1, 2)
    return {"q_index": index, "out": whole[:, index]}


def placements():
    register_sharding(torch.ops.sick_ranks.attention.default)(lambda *_: [([Shard(1)], [Shard(1)] * 3)])
    return Model(fused), tokens(), {"step": placed}


def without_rows():
    """A sharded step that does not say which rows it holds."""

    def step(batch, mesh):
        out = torch.arange(12.0).view(1, 12, 1)
        return {"out": out if mesh is None else out.chunk(2, 1)[mesh.get_rank()]}

    return Model(fused), tokens(), {"step": step}


#: Kind of the finding and the function with its line.
FAULTS = {
    ids_of_other_rows: ("rank-rows", attend_rows),
    rows_from_0: ("rank-rows", attend_from_0),
    branch_on_rank: ("rank-graphs", attend_by_rank),
    placements: ("rank-placement", placed),
}
