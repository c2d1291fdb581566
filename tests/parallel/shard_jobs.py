"""Dealing out rows and bringing them back, and meshes of several kinds."""

from typing import Any

import torch
import torch.distributed as dist
from parity_cases import Case, segment_ids
from parity_jobs import attend, make
from worlds import mesh

import attnspan
from attnspan.parallel import ContextParallel
from attnspan.torch import attention


def round_trip(case: Case) -> dict[str, Any]:
    """What comes back, the gradient of its square, and the rows of a batch of named tensors."""
    cp = make(case)
    whole = torch.arange(2.0 * case.length * 3).view(2, case.length, 3)
    local = cp.shard(whole, dim=1).requires_grad_()
    back = cp.unshard(local, dim=1)
    last = cp.unshard(cp.shard(whole.transpose(1, 2), dim=-1), dim=-1).transpose(1, 2)
    # The loss is the sum over ranks, each with a weight of its own.
    (gradient,) = torch.autograd.grad(back.square().sum() * (cp.rank + 1), local)
    batch = {
        "tokens": torch.arange(case.length)[None],
        "ids": torch.zeros(1, case.length, dtype=torch.int64),
        "targets": torch.ones(1, case.length, dtype=torch.int64),
        "weights": torch.ones(1, case.length),
    }
    return {
        "whole": whole,
        "back": back.detach(),
        "last": last,
        "local": local.detach(),
        "gradient": gradient,
        "batch": cp.shard(batch, dim=1),
        "positions": cp.positions,
        "valid": cp.valid,
        "own": cp.partition.shard(batch, cp.rank, dim=1),
    }


def as_mask(case: Case) -> bool:
    """Whether `attention(mask=cp)` gives, to the bit, what `cp.attention` gives."""
    from parity_cases import OPTIONS
    from parity_jobs import local_inputs

    cp = make(case)
    leaves, _ = local_inputs(cp, case)
    options = OPTIONS[case.option](case)
    mine = cp.attention(*leaves, return_lse=True, layout=case.layout, **options)
    same = attention(*leaves, mask=cp, return_lse=True, layout=case.layout, **options)
    return all(torch.equal(a, b) for a, b in zip(mine, same, strict=True))


def two_levels(case: Case, strategy: str) -> tuple[str, dict[str, Any]]:
    """A mesh of two nodes of two ranks each: the strategy that came of it, and its results."""
    cp = ContextParallel(
        mesh(2, 2),
        mask=attnspan.causal() & attnspan.segments(segment_ids(case, case.batch)),
        q_len=case.length,
        heads=case.heads,
        strategy=strategy,
        batch=case.batch,
        head_dim=case.dims[0],
        dtype=torch.float32,
    )
    return cp.strategy.name, attend(cp, case)


def part_of_a_mesh(case: Case) -> dict[str, Any]:
    """Two pairs of ranks, each with the whole problem to itself; results of this rank's pair."""
    pairs = mesh(2, 2)
    cp = ContextParallel(
        pairs["intra"],
        mask=attnspan.causal() & attnspan.segments(segment_ids(case, case.batch)),
        q_len=case.length,
        heads=case.heads,
        strategy=case.strategy,
        batch=case.batch,
    )
    return {**attend(cp, case), "pair": dist.get_rank() // 2}
