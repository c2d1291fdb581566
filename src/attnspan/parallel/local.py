"""One rank's plan as arrays, and their encoding as two flat arrays.

A plan is data, like a mask. It passes through compilers, checkpointing and operators as tensors, and may
change at each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnspan.errors import ShapeError, expect

from .intervals import read_only
from .step import step
from .strategy import Strategy


class Stage(NamedTuple):
    """Keys that a group attends to in one call, and the mask on them.

    Attributes:
        keys: int32 (planes|1, K), global indices of the keys, ascending. 0 after the last key of a plane.
        bounds: int32 (planes, H|1, rows of the group, R, 2), spans over these keys.
        visible: Whether any query sees any of the keys.
    """

    keys: Any
    bounds: Any
    visible: bool = True


class Transfer(NamedTuple):
    """Keys that an exchange sends and receives. A slot is plane * (keys of the group) + place in the group.

    Attributes:
        send: int32 (n,), slots to send, by destination group and then ascending.
        place: int32 (m,), places of received keys, plane * K + place among the stage's keys, by source group.
        own: int32 (l,), slots of own keys that the group itself needs.
        own_place: int32 (l,), places of these keys.
        send_counts, receive_counts: Numbers of keys sent to and received from each group.
    """

    send: Any
    place: Any
    own: Any
    own_place: Any
    send_counts: Sequence[int]
    receive_counts: Sequence[int]


class Numbers(NamedTuple):
    """Sizes of a rank's plan.

    Attributes:
        strategy: Strategy of all ranks.
        rank: The rank.
        planes: Batch elements of the mask.
        key_slots: Keys of a group, padding included.
        plan: Fingerprint of the whole plan, which ranks compare at each call. 0 if they do not.
    """

    strategy: Strategy
    rank: int
    planes: int
    key_slots: int
    plan: int = 0

    @property
    def group(self) -> int:
        """Group of the rank."""
        return self.rank // self.strategy.members

    @property
    def member(self) -> int:
        """Place of the rank in its group."""
        return self.rank % self.strategy.members


class Tables(NamedTuple):
    """Tables that the operator of one rank reads.

    Attributes:
        numbers: Sizes.
        q_index: int32 (planes|1, rows of the group), global indices of the queries. 0 for padding.
        key_order: int32 (planes * S,), slots of the group's keys in ascending order of the keys. Empty if the
            keys are in order, or if an exchange sorts them.
        stages: One stage for an exchange. For a ring, one stage for each group, in order of arrival.
        transfer: Transfer of an exchange. None for a ring.
    """

    numbers: Numbers
    q_index: Any
    key_order: Any
    stages: tuple[Stage, ...]
    transfer: Transfer | None


@dataclass(frozen=True, eq=False)
class LocalPlan:
    """One rank's part of a plan. It is small and picklable: make it in a data loader's worker.

    Attributes:
        strategy: Strategy of all ranks.
        rank: The rank within the mesh.
        heads: (Hq, Hkv).
        q_len, k_len: Queries and keys of the whole problem.
        rows: int32 (L, n), global indices of this rank's rows, -1 for padding.
        keys_per_rank: Keys of this rank, padding included.
        planes: Batch elements of the mask.
        natural: Whether the ranks hold rows and keys in their original order.
        layout: Fingerprint of the layout.
        facts: Named fingerprints, which ranks compare to detect different plans.
        data, numbers: The rank's tables as `encode` returned them.
        shifts: Shifts of a plan of `Layout.plan_roll`. Empty for attention.

    Example:
        >>> from attnspan import causal
        >>> from attnspan.parallel import Layout
        >>> plan = Layout.contiguous(8, ranks=2).plan(causal(), heads=(4, 2), strategy="exchange")
        >>> plan.local(1).rows.tolist()
        [[4, 5, 6, 7]]
    """

    strategy: Strategy
    rank: int
    heads: tuple[int, int]
    q_len: int
    k_len: int
    rows: NDArray[np.int32]
    keys_per_rank: int
    planes: int
    natural: bool
    layout: int
    facts: dict[str, int]
    data: NDArray[np.int32]
    numbers: NDArray[np.int64]
    shifts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        read_only(self)

    def on(self, mesh: Any, **options: Any) -> Any:
        """Put the plan on a DeviceMesh, as a mask for `attnspan.torch.attention`.

        Args:
            mesh: DeviceMesh of one dimension, or of two (nodes, ranks of a node).
            **options: The options of `Plan.on` for torch. You must pass ``rows``.

        Raises:
            OptionError: There are no ``rows``, or the mesh does not fit.
            PlanMismatchError: ``rows`` belong to another layout or rank.
            DtypeError: ``rows`` do not identify their layout.
            ShapeError: ``rows`` have another length.
        """
        return step("local plan", "torch")(self, mesh, **options)


def encode(tables: Tables) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Encode a rank's tables as two flat arrays, which compilers and operators pass on like other data.

    Returns:
        data: int32, all arrays one after the other.
        numbers: int64, their count, sizes and the shapes of the arrays, which the host reads at each call.
    """
    arrays, transfer, sizes = _arrays(tables), tables.transfer, tables.numbers
    strategy = sizes.strategy
    found = [strategy.kind == "ring", strategy.members, strategy.groups, *sizes[1:]]
    found += [len(tables.stages), *(stage.visible for stage in tables.stages), transfer is not None]
    if transfer is not None:
        found += [*transfer.send_counts, *transfer.receive_counts]
    shapes = [n for x in arrays for n in (x.ndim, *x.shape)]
    data = np.concatenate([np.ravel(x) for x in arrays]).astype(np.int32, copy=False)
    return data, np.array([1 + len(found) + len(shapes), *found, *shapes], np.int64)


def decode(data: Any, numbers: Sequence[int]) -> Tables:
    """Decode the result of `encode`. The arrays are views of `data`, in the framework of `data`.

    Raises:
        ShapeError: The plan has been cut.

    Example:
        >>> stage = Stage(np.zeros((1, 2), np.int32), np.ones((1, 1, 2, 1, 2), np.int32))
        >>> index, none = np.zeros((1, 2), np.int32), np.zeros(0, np.int32)
        >>> sizes = Numbers(Strategy("ring", 1, 1), 0, 1, 2)
        >>> data, numbers = encode(Tables(sizes, index, none, (stage,), None))
        >>> decode(data, numbers.tolist()).stages[0].bounds.shape
        (1, 1, 2, 1, 2)
    """
    whole, got = numbers[:1] == [len(numbers)], f"a part of {len(numbers)} numbers"
    remedy = "Pipelines split arguments: pass PlanStack.of(plans) to schedule.step(...)"
    expect(whole, "plan", "a whole plan", got, remedy, error=ShapeError)
    ring, members, groups, *sizes, stages = numbers[1:9]
    visible, has_transfer = numbers[9 : 9 + stages], numbers[9 + stages]
    at = 10 + stages
    counts = numbers[at : at + groups], numbers[at + groups : at + 2 * groups]
    at += 2 * groups * has_transfer
    arrays, offset = [], 0
    while at < len(numbers):
        shape = tuple(numbers[at + 1 : at + 1 + numbers[at]])
        size = math.prod(shape)
        arrays.append(data[offset : offset + size].reshape(shape))
        at, offset = at + 1 + len(shape), offset + size
    q_index, key_order, *rest = arrays
    found = tuple(Stage(rest[2 * i], rest[2 * i + 1], bool(visible[i])) for i in range(stages))
    send, place, own, own_place = rest[2 * stages :] if has_transfer else [None] * 4
    transfer = Transfer(send, place, own, own_place, *counts) if has_transfer else None
    strategy = Strategy("ring" if ring else "exchange", members, groups)
    return Tables(Numbers(strategy, *sizes), q_index, key_order, found, transfer)


def _arrays(tables: Tables) -> list[Any]:
    arrays = [tables.q_index, tables.key_order]
    for stage in tables.stages:
        arrays += [stage.keys, stage.bounds]
    return arrays if tables.transfer is None else [*arrays, *tables.transfer[:4]]
