"""Do all ranks have the same plan? Asked before anything is exchanged, since a wrong answer could hang."""

from typing import Any

import torch
import torch.distributed as dist

from ._collectives import raise_broken
from .errors import PlanMismatchError
from .plan import Plan

_REMEDY = {
    "mask": "Give every rank of the mesh the mask of the whole batch, with the same global ids",
    "partition": "Pass the same method and rows_per_chunk on every rank",
    "strategy": "Pass the same strategy, and for 'auto' the same machine, on every rank",
    "heads": "Pass the same heads on every rank",
}


def check_agreement(plan: Plan, group: Any, device: str) -> None:
    """Compare fingerprints of the plan over a group.

    Args:
        plan: This rank's.
        group: The process group.
        device: Type of the group's device.

    Raises:
        PlanMismatchError: Not all ranks have the same; on all of them.
        CommunicationError: A rank did not answer.
    """
    names = sorted(plan.digest)
    # 60 bits of each: a row of a tensor that every engine can gather.
    mine = torch.tensor([int(plan.digest[name][:15], 16) for name in names], device=device)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    try:
        dist.all_gather(rows, mine, group=group)
    except RuntimeError as error:
        raise_broken(group, "comparison of plans", error)
    every = torch.stack(rows)
    different = (every != every[0]).any(0).tolist()
    if not any(different):
        return
    first = different.index(True)
    odd = (every[:, first] != every[0, first]).nonzero().flatten().tolist()
    raise PlanMismatchError(
        f"context parallelism on {group.size()} ranks ({group.group_name})",
        expected="the same plan on every rank",
        got=f"another {names[first]} on {'ranks' if len(odd) > 1 else 'rank'} "
        f"{', '.join(map(str, odd))} than on rank 0",
        remedy=_REMEDY[names[first]],
    )
