"""What ranks do for the tests of `ContextParallel` that need real ones."""

import torch
import torch.distributed as dist
from torch import Tensor
from worlds import mesh

from attnspan import causal, full
from attnspan.parallel import ContextParallel

SHAPES = [(37,), (2, 37), (2, 37, 3), (37, 2, 3), (2, 3, 37)]


def gather(strategy: str, method: str) -> list[str]:
    """Take the whole apart and put it together, with gradients, along each dimension of 37 rows.

    Returns:
        What went wrong.
    """
    cp = ContextParallel(
        mesh(dist.get_world_size())["cp"],
        mask=causal(),
        q_len=37,
        heads=(4, 2),
        strategy=strategy,
        method=method,  # type: ignore[arg-type]
        rows_per_chunk=3,
    )
    wrong = []
    for shape in SHAPES:
        for dim in (shape.index(37), shape.index(37) - len(shape)):
            whole = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
            x = cp.shard(whole, dim=dim, fill=torch.nan).requires_grad_()
            found = cp.unshard(x, dim=dim)
            if not torch.equal(found, whole):
                wrong.append(f"{shape} along {dim}: rows")
            # Each rank weighs the whole in another way: the gradient is the sum of what all of them find.
            (found * _weights(shape, dist.get_rank())).sum().backward()
            total = sum(_weights(shape, rank) for rank in range(dist.get_world_size()))
            assert isinstance(total, Tensor)
            assert x.grad is not None
            if not torch.equal(x.grad, cp.shard(total, dim=dim)):
                wrong.append(f"{shape} along {dim}: gradient")
    return wrong


def _weights(shape: tuple[int, ...], rank: int) -> Tensor:
    # Whole numbers, whose sums are exact in any order.
    return torch.randint(100, shape, generator=torch.Generator().manual_seed(rank)).float()


def next_steps() -> list[tuple[str, str, bool]]:
    """Masks of later steps, for which "auto" would choose otherwise: strategy and whether rows add up."""
    cp = ContextParallel(mesh(dist.get_world_size())["cp"], mask=full(), q_len=64, heads=(4, 2), head_dim=16)
    steps = [cp, cp.with_mask(causal()), cp.with_mask(causal(), q_len=41)]
    return [
        (cp.strategy.name, repr(cp), cp.unshard(cp.positions, dim=0).unique().numel() == cp.q_len)
        for cp in steps
    ]
