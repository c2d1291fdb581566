"""DTensor: how the operators may be sharded over a mesh axis.

Batch and heads shard freely; a bounds dim of size 1 is shared by all and stays replicated. The sequence does
not: each rank would see a part of the keys and be wrong without any error, so it is refused by name.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from ..errors import OptionError
from ._ops import backward_op, forward_op

_registered = False


def like(bounds: Tensor, q: Tensor) -> Tensor:
    """Give the bounds q's mesh if q is a DTensor; every rank lowered the same mask."""
    if type(q) is Tensor or type(q) is torch.nn.Parameter or "torch.distributed.tensor" not in sys.modules:
        return bounds
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(q, DTensor):
        return bounds
    register()
    if isinstance(bounds, DTensor):
        return bounds
    mesh = q.device_mesh
    return DTensor.from_local(bounds, mesh, [Replicate()] * mesh.ndim, run_check=False)


def register() -> None:
    """Tell DTensor the strategies, once; importing DTensor is left to those who use it, as it takes long."""
    global _registered
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(forward_op)(_forward_strategies)
    register_sharding(backward_op)(_backward_strategies)
    _registered = True


def _forward_strategies(
    q: Any, k: Any, v: Any, bounds: Any, scale: float
) -> list[tuple[list[Any], list[Any]]]:
    del scale
    _refuse_sharded_sequence(q=q, k=k, v=v)
    return [
        ([place, place], [place, place, place, bounds_place, None])
        for place, bounds_place in _placements(bounds)
    ]


def _backward_strategies(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, bounds: Any, out: Any, lse: Any, scale: float
) -> list[tuple[list[Any], list[Any]]]:
    del dout, out, lse, scale
    _refuse_sharded_sequence(q=q, k=k, v=v)
    return [
        (
            [place, place, place],
            [place, None if dlse is None else place, place, place, place, bounds_place, place, place, None],
        )
        for place, bounds_place in _placements(bounds)
    ]


def _placements(bounds: Any) -> list[tuple[Any, Any]]:
    """Placement of q, k, v and of the bounds, for each way to use one mesh axis."""
    from torch.distributed.tensor import Replicate, Shard

    shards = [(Shard(dim), Replicate() if bounds.shape[dim] == 1 else Shard(dim)) for dim in (0, 1)]
    return [(Replicate(), Replicate()), *shards]


def _refuse_sharded_sequence(**specs: Any) -> None:
    for name, spec in specs.items():
        for place in spec.placements:
            if place.is_shard() and place.dim >= 2:
                dim = ("q_len or k_len", "head_dim")[place.dim - 2]
                raise OptionError(
                    f"{name} as a DTensor",
                    expected="Shard(0) (batch), Shard(1) (heads) or Replicate()",
                    got=f"{place!r}, which splits {dim}",
                    remedy="Redistribute it; splitting the sequence needs an exchange of keys",
                )
