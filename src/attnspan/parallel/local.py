"""What one rank must know to attend, as arrays; and these arrays as two flat ones.

A plan is data, as a mask is: it passes through compilers, checkpointing and operators as a tensor, and may be
another one at each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .strategy import Strategy

__all__ = ["LocalPlan", "Stage", "Transfer", "decode", "encode"]


@dataclass(frozen=True, eq=False)
class Stage:
    """Keys that a group attends to in one call, and the mask on them.

    Attributes:
        keys: int32 (planes|1, K), their global numbers, ascending; 0 behind the last one of a plane.
        bounds: int32 (planes, H|1, rows of the group, R, 2), on these keys.
        visible: whether any row sees any of them.
    """

    keys: Any
    bounds: Any
    visible: bool = True


@dataclass(frozen=True, eq=False)
class Transfer:
    """Which keys an exchange sends and receives, in slots: plane * (keys of the group) + place among them.

    Attributes:
        send: int32 (n,), slots to send, by destination group and then ascending.
        place: int32 (m,), where received keys go: plane * K + place among the stage's keys, by source group.
        own: int32 (l,), slots of own keys that the group itself needs.
        own_place: int32 (l,), where they go.
        send_counts, receive_counts: int32 (groups,), how many go to and come from each group; once decoded,
            Python integers, as collectives are told them by the host.
    """

    send: Any
    place: Any
    own: Any
    own_place: Any
    send_counts: Any
    receive_counts: Any


@dataclass(frozen=True, eq=False)
class LocalPlan:
    """All that one rank needs to know, in arrays of NumPy or, once decoded, of a framework.

    Attributes:
        strategy: of all ranks.
        rank: its number.
        planes: batch rows of the mask.
        key_slots: keys of a group, padding included.
        q_index: int32 (planes|1, rows of the group), global indices of the rows; 0 for padding.
        stages: one for an exchange, one for each group in a ring, in the order in which they come by.
        transfer: of an exchange; None for a ring.
        fingerprint: of the whole plan, the same on all ranks; 0 where ranks are not to be compared.
    """

    strategy: Strategy
    rank: int
    planes: int
    key_slots: int
    q_index: Any
    stages: tuple[Stage, ...]
    transfer: Transfer | None
    fingerprint: int = 0

    @property
    def group(self) -> int:
        """The group that the rank belongs to."""
        return self.rank // self.strategy.members

    @property
    def member(self) -> int:
        """Its place in the group."""
        return self.rank % self.strategy.members


def encode(plan: LocalPlan) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """A rank's plan as two flat arrays, which pass through compilers and operators like any other data.

    Returns:
        data: int32, all arrays one after the other.
        meta: int64, numbers and the shapes of the arrays.
    """
    arrays = _arrays(plan)
    shapes = [n for x in arrays for n in (x.ndim, *x.shape)]
    strategy, transfer = plan.strategy, plan.transfer
    numbers = [
        plan.fingerprint,
        strategy.kind == "ring",
        strategy.members,
        strategy.groups,
        plan.rank,
        plan.planes,
        plan.key_slots,
    ]
    # The host reads these at each call: from a device it would have to wait for them.
    numbers += [len(plan.stages), *(stage.visible for stage in plan.stages), transfer is not None]
    if transfer is not None:
        numbers += [*transfer.send_counts, *transfer.receive_counts]
    data = np.concatenate([np.ravel(x) for x in arrays]).astype(np.int32, copy=False)
    return data, np.array([*numbers, *shapes], np.int64)


def decode(data: Any, meta: Sequence[int]) -> LocalPlan:
    """What `encode` has put away; arrays are views of `data`, of whichever framework that is.

    Args:
        data: int32 (n,).
        meta: the numbers, as Python integers.

    Example:
        >>> stage = Stage(np.zeros((1, 2), np.int32), np.ones((1, 1, 2, 1, 2), np.int32))
        >>> plan = LocalPlan(Strategy("ring", 1, 1), 0, 1, 2, np.zeros((1, 2), np.int32), (stage,), None)
        >>> data, meta = encode(plan)
        >>> decode(data, meta.tolist()).stages[0].bounds.shape
        (1, 1, 2, 1, 2)
    """
    fingerprint, ring, members, groups, rank, planes, key_slots, stages = meta[:8]
    visible, has_transfer = meta[8 : 8 + stages], meta[8 + stages]
    at = 9 + stages
    counts = tuple(meta[at : at + groups]), tuple(meta[at + groups : at + 2 * groups])
    at += 2 * groups * has_transfer
    arrays, offset = [], 0
    while at < len(meta):
        shape = tuple(meta[at + 1 : at + 1 + meta[at]])
        size = math.prod(shape)
        arrays.append(data[offset : offset + size].reshape(shape))
        at, offset = at + 1 + len(shape), offset + size
    q_index, *rest = arrays
    found = tuple(Stage(rest[2 * i], rest[2 * i + 1], bool(visible[i])) for i in range(stages))
    transfer = None
    if has_transfer:
        send, place, own, own_place = rest[2 * stages :]
        transfer = Transfer(send, place, own, own_place, *counts)
    strategy = Strategy("ring" if ring else "exchange", members, groups)
    return LocalPlan(strategy, rank, planes, key_slots, q_index, found, transfer, fingerprint)


def _arrays(plan: LocalPlan) -> list[Any]:
    arrays = [plan.q_index]
    for stage in plan.stages:
        arrays += [stage.keys, stage.bounds]
    if plan.transfer is not None:
        t = plan.transfer
        arrays += [t.send, t.place, t.own, t.own_place]
    return arrays
