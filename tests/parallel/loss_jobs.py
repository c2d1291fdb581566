"""What ranks compute of one loss; whole inputs come from the test, each rank takes its part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from worlds import mesh

from attnspan.parallel.torch.loss import global_token_count, sum_gradients, sum_over, token_mean


def part_of(x: Tensor, uneven: int) -> Tensor:
    """Rows of this rank: the first takes ``uneven`` more than its share."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    borders = [0, *(len(x) * (each + 1) // ranks + uneven for each in range(ranks - 1)), len(x)]
    return x[borders[rank] : borders[rank + 1]]


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(8, 5, dtype=dtype)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 8), nn.ReLU(), head)


def gradients(tokens: Tensor, targets: Tensor, sizes: tuple[int, ...], bucket_bytes: int) -> Any:
    """(sum of the ranks' parts of the loss, count, gradients) of a model that all ranks have."""
    ranks, model = mesh(*sizes), model_of()
    mine, wanted = part_of(tokens, 2), part_of(targets, 2)
    count = global_token_count(wanted, ranks)
    total = functional.cross_entropy(model(mine), wanted, reduction="sum")
    part = token_mean(total, count)
    part.backward()
    sum_gradients(model.parameters(), ranks, bucket_bytes=bucket_bytes)
    return float(sum_over(part, ranks)), int(count), [parameter.grad for parameter in model.parameters()]


def unused_on_one_rank() -> list[float]:
    """A parameter that only the last rank uses, and a frozen one."""
    used, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    if dist.get_rank() == dist.get_world_size() - 1:
        (3 * used).sum().backward()
    sum_gradients([frozen, used], dist.group.WORLD)
    assert frozen.grad is None
    return used.grad.tolist()  # type: ignore[union-attr]


def two_dtypes() -> list[Any]:
    model = model_of()
    model[3].to(torch.float64)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
    sum_gradients(model.parameters(), mesh(dist.get_world_size()))
    return [(parameter.grad.dtype, parameter.grad.unique().tolist()) for parameter in model.parameters()]


def refused(how: str) -> None:
    model = nn.Embedding(4, 4, sparse=how == "sparse")
    if how == "sharded":
        fully_shard(model, mesh=mesh(dist.get_world_size()))
    else:
        model(torch.tensor([1])).sum().backward()
    sum_gradients(model.parameters(), mesh(dist.get_world_size()))
