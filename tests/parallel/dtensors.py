"""DTensors on ranks: meshes, one small problem, options of calls, and how all of these lie."""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils._pytree import tree_leaves

from attnspan import alibi, relative
from attnspan.torch import dropout_seeds

#: Norm-wise, of float32 results.
FLOAT32 = 2e-6
LENGTH, HEADS, BATCH, DIM = 13, (4, 2), 2, 16
PLACES = {"R": Replicate(), "P": Partial(), **{f"S{dim}": Shard(dim) for dim in range(5)}}


@functools.cache
def grid(*sizes: int) -> DeviceMesh:
    """The mesh of all ranks: one axis "cp", or ("dp", "cp")."""
    names = ("cp",) if len(sizes) == 1 else ("dp", "cp")
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()).reshape(sizes), mesh_dim_names=names)


def placements(words: str) -> list[Any]:
    """Those of "S0 R", one word for each mesh axis."""
    return [PLACES[word] for word in words.split()]


def whole(batch: int = BATCH, heads: tuple[int, int] = HEADS) -> tuple[list[Tensor], Tensor]:
    """q, k, v in "bhsd" as leaves, and the gradient of the output; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = [heads[0], heads[1], heads[1], heads[0]]
    q, k, v, dout = (torch.randn(batch, n, LENGTH, DIM, generator=generator) for n in sizes)
    return [x.requires_grad_() for x in (q, k, v)], dout


def ids(batch: int = BATCH) -> Tensor:
    """Segments, of other lengths in each batch row."""
    return torch.stack([torch.arange(LENGTH) // (3 + row) for row in range(batch)])


def assert_same(got: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """Norm-wise; a rank without rows has nothing, exactly."""
    for x, y in zip(got, wanted, strict=True):
        assert x.shape == y.shape
        assert (x - y).norm() <= FLOAT32 * y.norm()


def options_of(name: str, batch: int, heads: int) -> dict[str, Any]:
    """Keywords of a call by name, of the whole problem."""
    generator = torch.Generator().manual_seed(9)
    shapes = ((heads,), (heads,), (batch, heads), (heads, 9))
    sinks, slopes, each, table = (torch.rand(x, generator=generator).requires_grad_() for x in shapes)
    seed = torch.tensor(1234567)
    return {
        "none": {},
        "sinks": {"sinks": sinks, "softcap": 2.0},
        "alibi": {"bias": alibi(slopes)},
        "alibi per row": {"bias": alibi(each)},
        "relative": {"bias": relative(table)},
        "dropout": {"dropout_p": 0.3, "dropout_seed": seed},
        "dropout seeds": {"dropout_p": 0.3, "dropout_seed": dropout_seeds(seed, batch, heads)},
    }[name]


#: The dims of each option's tensor that go with batch rows and heads.
DIMS = {
    "sinks": {"heads": 0},
    "alibi": {"heads": 0},
    "alibi per row": {"batch": 0, "heads": 1},
    "relative": {"heads": 0},
    "dropout seeds": {"batch": 0, "heads": 1},
}


def parameters(options: Any) -> list[Any]:
    return [x for x in tree_leaves(options) if isinstance(x, Tensor) and x.requires_grad]
