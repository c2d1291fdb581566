"""The plans of all devices as arrays that are split over the mesh like q, k and v.

A plan is data: it is an argument of compiled programs, not a constant in them. Sizes that depend on the mask
are rounded up, so that the next step's mask has the same ones.

Shapes: C parts of the sequence, E parts of the batch where the mask has a row per batch row (else 1), P
planes (batch rows of the mask) and, of one part of the batch, p; n rows and m keys of a part of the sequence,
K keys of a stage, W rows of a piece of an exchange.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ...masks import Prepared
from ...spans import Spans
from ..local import LocalPlan
from ..plan import Plan
from ._axes import Axes

Ints = NDArray[np.int32]

#: No place: `take` fills and additions drop what has an index beyond the end.
NOWHERE = np.iinfo(np.int32).max


class Exchange(NamedTuple):
    """Which keys go where.

    Attributes:
        keys: int32 (P, C * K), global numbers of the keys that each part attends to.
        source: int32 (E, C, p * K), where each of them is found: among the part's own (p * m), then among
            those received (C * W).
        send: int32 (E, C, C, W), the own keys that go to each part.
        place: int32 (E, C, C, W), where those received from each part go, among p * K.
        own: int32 (E, C, p * m), where own keys go.
    """

    keys: Any
    source: Any
    send: Any
    place: Any
    own: Any


class Route(NamedTuple):
    """What all devices must know, a pytree.

    Attributes:
        bounds: int32 (stages, P, H|1, C * n, R, 2), on the keys of each stage. An exchange has one stage, a
            ring one for each part of the sequence, in the order in which they come by.
        q_index: int32 (P|1, C * n), global indices of the rows; 0 for padding.
        own_keys: int32 (1, C * m), global indices of the keys that each part holds.
        exchange: Of an exchange; None for a ring.
    """

    bounds: Any
    q_index: Any
    own_keys: Any
    exchange: Exchange | None

    def specs(self, axes: Axes) -> Route:
        """How its arrays are split: as q, k and v are."""
        planes = "batch" if self.bounds.shape[1] > 1 else None
        heads = "heads" if self.bounds.shape[2] > 1 else None
        rows = "batch" if self.q_index.shape[0] > 1 else None
        each = axes.spec(planes, "sequence")
        return Route(
            axes.spec(None, planes, heads, "sequence", None, None),
            axes.spec(rows, "sequence"),
            axes.spec(None, "sequence"),
            None if self.exchange is None else Exchange(*(each for _ in Exchange._fields)),
        )

    def placed(self, axes: Axes) -> Route:
        """The arrays on the devices."""
        specs = self.specs(axes)

        def put(x: Any, spec: Any) -> Any:
            return jax.device_put(x, jax.sharding.NamedSharding(axes.mesh, spec))

        return jax.tree.map(put, self, specs)  # type: ignore[no-any-return]


def make_route(plan: Plan, batch_parts: int, before: Route | None = None) -> Route:
    """The arrays of all devices.

    Args:
        plan: Of the whole problem, between groups of one member.
        batch_parts: Into how many parts the batch is split.
        before: The route of another step, whose sizes are kept where they suffice.
    """
    parts = batch_parts if plan.planes > 1 else 1
    plans = [part_of(plan, i, parts) for i in range(parts)]
    locals_ = [[part.local(rank) for rank in range(plan.strategy.ranks)] for part in plans]
    q_index = _rows_beside([each.q_index for each in locals_[0]])
    if parts > 1 and q_index.shape[0] > 1:
        q_index = np.concatenate([_rows_beside([x.q_index for x in row]) for row in locals_])
    own_keys = np.maximum(plan.keys.rows, 0).reshape(1, -1).astype(np.int32)
    bounds = np.stack(
        [
            np.concatenate([np.concatenate([x.stages[i].bounds for x in row], 2) for row in locals_])
            for i in range(len(locals_[0][0].stages))
        ]
    )
    exchange = None
    if locals_[0][0].transfer is not None:
        exchange = _exchange(locals_, None if before is None else before.exchange)
    runs = bounds.shape[4] if before is None else max(bounds.shape[4], before.bounds.shape[4])
    return Route(_padded(bounds, runs, 4, 0), q_index, own_keys, exchange)


def part_of(plan: Plan, part: int, parts: int) -> Plan:
    """The plan of some of the batch rows: the same owners of rows and keys."""
    if parts == 1:
        return plan
    each = plan.planes // parts
    at = slice(part * each, (part + 1) * each)
    index = plan.mask.q_index
    if index is not None and np.asarray(index).shape[0] > 1:
        index = np.asarray(index)[at]
    mask = Prepared(Spans(plan.bounds[at], plan.k_len), index)
    return Plan(mask, plan.strategy, plan.rows, plan.keys, plan.q_heads, plan.kv_heads)


def capacity(needed: int, most: int, before: int) -> int:
    """A size with room for the masks to come: few different ones ever occur.

    Example:
        >>> capacity(5, 100, 0), capacity(5, 100, 32), capacity(70, 100, 32)
        (8, 32, 100)
    """
    if needed <= before:
        return before
    return min(1 << max(needed - 1, 0).bit_length(), most)


def _exchange(locals_: list[list[LocalPlan]], before: Exchange | None) -> Exchange:
    every = [x for row in locals_ for x in row]
    ranks, planes, slots = len(locals_[0]), every[0].planes, every[0].key_slots
    piece = max(int(np.max(x.transfer.send_counts)) for x in every if x.transfer is not None)
    keys = max(x.stages[0].keys.shape[1] for x in every)
    kept_piece, kept_keys = (0, 0)
    if before is not None:
        kept_piece, kept_keys = before.send.shape[3], before.keys.shape[1] // ranks
    # A piece of no rows would have no place to point at.
    width = capacity(max(piece, 1), planes * slots, kept_piece)
    length = capacity(max(keys, 1), ranks * slots, kept_keys)
    lists = [[_lists(x, length, width) for x in row] for row in locals_]
    stage_keys = [_rows_beside([_padded(x.stages[0].keys, length, 1, 0) for x in row]) for row in locals_]
    stacked = (np.stack([np.stack([x[i] for x in row]) for row in lists]) for i in range(4))
    return Exchange(np.concatenate(stage_keys), *stacked)


def _lists(local: LocalPlan, length: int, width: int) -> tuple[Ints, Ints, Ints, Ints]:
    """source, send, place and own of one device, for stages of `length` keys and pieces of `width` rows."""
    transfer, planes, found = local.transfer, local.planes, local.stages[0].keys.shape[1]
    assert transfer is not None

    def widened(place: Ints) -> Ints:
        # Places are plane * K + key: the planes lie further apart now.
        moved: Ints = place // max(found, 1) * length + place % max(found, 1)
        return moved

    held = planes * local.key_slots
    send = _pieces(transfer.send, transfer.send_counts, width)
    place = _pieces(widened(transfer.place), transfer.receive_counts, width)
    own = np.full(held, NOWHERE, np.int32)
    own[transfer.own] = widened(transfer.own_place)
    source = np.full(planes * length, NOWHERE, np.int32)
    source[widened(transfer.own_place)] = transfer.own
    real = place.reshape(-1) != NOWHERE
    source[place.reshape(-1)[real]] = held + np.flatnonzero(real)
    return source, send, place, own


def _pieces(flat: Ints, counts: Ints, width: int) -> Ints:
    """Lists one after the other as rows of a table."""
    table = np.full((len(counts), width), NOWHERE, np.int32)
    for row, part in zip(table, np.split(flat, np.cumsum(counts)[:-1]), strict=True):
        row[: len(part)] = part
    return table


def _rows_beside(parts: Iterable[Ints]) -> Ints:
    return np.concatenate(list(parts), axis=1)


def _padded(x: Ints, length: int, axis: int, fill: int) -> Ints:
    if x.shape[axis] == length:
        return x
    widths = [(0, length - size if at == axis else 0) for at, size in enumerate(x.shape)]
    padded: Ints = np.pad(x, widths, constant_values=fill)
    return padded
    return padded
