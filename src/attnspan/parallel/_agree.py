"""Do all ranks do the same? Asked before anything is exchanged: where they do not, engines hang or abort."""

import struct
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ._collectives import raise_broken
from .errors import PlanMismatchError
from .plan import Plan

_REMEDY = {
    "mask": "Give every rank of the mesh the mask of the whole batch, with the same global ids",
    "partition": "Pass the same method and rows_per_chunk on every rank",
    "strategy": "Pass the same strategy, and for 'auto' the same machine, on every rank",
    "heads": "Pass the same heads on every rank",
}

# Calls that the ranks of each group have been asked about: of the same plan, they need not be asked again.
# What one group has agreed on must not depend on other groups: its ranks may have different ones.
_agreed: WeakKeyDictionary[Any, set[tuple[int, tuple[tuple[str, int], ...]]]] = WeakKeyDictionary()
_MOST_AGREED = 4096


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
    # 60 bits of each: a row of a tensor that every engine can gather.
    facts = {name: int(plan.digest[name][:15], 16) for name in sorted(plan.digest)}
    found = _disagreement(facts, group, torch.device(device), "comparison of plans")
    if found is not None:
        name, ranks = found
        raise PlanMismatchError(
            f"context parallelism on {group.size()} ranks ({group.group_name})",
            expected="the same plan on every rank",
            got=f"another {name} on {ranks} than on rank 0",
            remedy=_REMEDY[name],
        )


def check_call(fingerprint: int, group: Any, x: Tensor, facts: Mapping[str, int | float]) -> None:
    """Compare what a call is asked for, the first time that a plan meets such a call.

    Args:
        fingerprint: Of the plan; 0 where nothing is to be compared.
        group: The process group.
        x: Any array of the call, for its device and dtype.
        facts: Numbers that must be the same on all ranks.

    Raises:
        PlanMismatchError: They are not; on all ranks.
        CommunicationError: A rank did not answer.
    """
    if fingerprint == 0 or group.size() == 1:
        return
    numbers = {"dtype": _DTYPES.index(x.dtype), **{name: _bits(value) for name, value in facts.items()}}
    key, agreed = (fingerprint, tuple(numbers.items())), _agreed.setdefault(group, set())
    if key in agreed:
        return
    found = _disagreement(numbers, group, x.device, "comparison of calls")
    if found is not None:
        name, ranks = found
        raise PlanMismatchError(
            f"a call with context parallelism on {group.size()} ranks ({group.group_name})",
            expected="the same call on every rank",
            got=f"another {name} on {ranks} than on rank 0",
            remedy="Ranks hold parts of one problem: sizes, dtypes and options are the same for all",
        )
    if len(agreed) >= _MOST_AGREED:  # On all ranks alike, as they have made the same calls in this group.
        agreed.clear()
    agreed.add(key)


_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _bits(value: float) -> int:
    """A number as an integer that is equal for equal ones alone."""
    return value if isinstance(value, int) else int(struct.unpack("<q", struct.pack("<d", value))[0])


def _disagreement(
    facts: Mapping[str, int], group: Any, device: torch.device, phase: str
) -> tuple[str, str] | None:
    """The first fact that ranks differ in, and the ranks that differ from the first one, in words."""
    mine = torch.tensor(list(facts.values()), device=device)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    try:
        dist.all_gather(rows, mine, group=group)
    except RuntimeError as error:
        raise_broken(group, phase, error)
    every = torch.stack(rows).tolist()
    for at, name in enumerate(facts):
        odd = [str(rank) for rank, row in enumerate(every) if row[at] != every[0][at]]
        if odd:
            return name, f"{'ranks' if len(odd) > 1 else 'rank'} {', '.join(odd)}"
    return None
