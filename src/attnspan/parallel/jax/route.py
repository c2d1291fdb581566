"""Plans of all devices as arrays that are split over the mesh like q, k and v.

A plan is data: an argument of compiled programs, not a constant in them. Each host makes the shards of its
own devices. Sizes that depend on the mask are counted for all devices, without making their lists. They are
rounded up, so that the next step's mask has the same sizes.

Shapes: C parts of the sequence with n rows and m keys each, E parts of the batch (1 if batch elements share a
plan). P planes (batch elements with different plans), p planes of one part of the batch. K keys of a stage of
each plane, N rows that travel, D devices that need one key.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from attnspan.parallel.layout import Layout
from attnspan.parallel.local import Tables
from attnspan.parallel.needs import Traffic
from attnspan.parallel.plan import Plan

from .axes import Axes

Ints = NDArray[np.int32]

#: Number of no row. Taking it gives 0.
NOWHERE = np.iinfo(np.int32).max


class Capacity(NamedTuple):
    """Sizes that depend on the mask, rounded up for other masks. A ring has only `runs`.

    Attributes:
        runs: Spans of a query, R.
        keys, rows, readers: K, N and D.
        piece: Most rows between two parts of the sequence.
    """

    runs: int
    keys: int = 0
    rows: int = 0
    piece: int = 0
    readers: int = 0

    @classmethod
    def of(cls, plan: Plan, traffic: Traffic | None, like: Capacity | None) -> Capacity:
        """Compute the sizes of a plan. They are never less than the sizes `like` of another step."""
        needed, ranks = cls(plan.bounds.shape[3]), plan.layout.ranks
        most = needed
        if traffic is not None:
            counts = traffic.counts
            held = plan.planes // counts.shape[0] * plan.keys.rows_per_rank
            rows = max(counts.sum(1).max(), counts.sum(2).max())
            needed = cls(needed.runs, traffic.keys, int(rows), int(counts.max()), traffic.readers)
            most = cls(needed.runs, plan.k_len, ranks * held, held, ranks)
        like = cls(0) if like is None else like
        return cls(*map(_capacity, needed, most, like))


def _capacity(needed: int, most: int, before: int) -> int:
    """Round a size up for coming masks, so that few different sizes occur."""
    # Lists have at least one place. The number of spans has few values, and is not rounded.
    power = most if needed == most else 1 << max(needed - 1, 0).bit_length()
    return before if max(needed, 1) <= before else max(min(power, most), 1)


class Exchange(NamedTuple):
    """Keys that each device sends and receives.

    Attributes:
        keys: int32 (p, K), global indices of the keys that the device attends to.
        source: int32 (p * K,), place of each of these keys among the device's own keys (p * m), followed by
            the received keys (N).
        send: int32 (N,), own keys to send, by destination.
        place: int32 (N,), places of received keys among p * K.
        own: int32 (p * m,), places of own keys among p * K.
        back: int32 (p * m, D), places of returned gradients of own keys among N.
        counts: int32 (4, C), for each other part: rows sent to it, rows received from it, the begin of the
            sent rows among all rows that it receives, the begin of the received rows among all that it sends.
    """

    keys: Any
    source: Any
    send: Any
    place: Any
    own: Any
    back: Any
    counts: Any


class Route(NamedTuple):
    """Index arrays of all devices, a pytree. All arrays but `rows` and `keys` have leading dims (E, C).

    Attributes:
        bounds: int32 (stages, p, H|1, n, R, 2), over the keys of each stage. An exchange has one stage. A
            ring has one stage for each part of the sequence, in order of arrival.
        q_index: int32 (p|1, n), global indices of the queries, 0 for padding.
        exchange: Lists of an exchange. None for a ring.
        rows: int32 (P|1, C * n), index of each row, -1 for padding.
        keys: int32 (P|1, C * m), index of each key of a part, -1 for padding.
    """

    bounds: Any
    q_index: Any
    exchange: Exchange | None
    rows: Any
    keys: Any

    @property
    def planes(self) -> int:
        """Number of planes, P."""
        return int(self.bounds.shape[0] * self.bounds.shape[3])

    def specs(self, axes: Axes) -> Route:
        """Partition specs of the arrays, which are split like q, k and v."""
        return jax.tree.map(lambda x: axes.spec_of(x.shape, *_DIMS[: x.ndim]), self)  # type: ignore[no-any-return]

    def own(self) -> Route:
        """Arrays of this device, without the dims (E, C)."""
        mine: Route = jax.tree.map(lambda x: x[0, 0], self._replace(rows=None, keys=None))
        return mine._replace(rows=self.rows, keys=self.keys)


# Splits of the first dims. Only arrays with heads have five dims or more, and heads are the fifth.
_DIMS = ("batch", "sequence", None, None, "heads")


def flat_rows(layout: Layout) -> Ints:
    """Rows of all ranks, one rank after the other, (L, C * n)."""
    rows: Ints = layout.rows.transpose(1, 0, 2).reshape(layout.planes, -1)
    return rows


def place_table(axes: Axes, table: Ints) -> jax.Array:
    """Place the table of `flat_rows`, split like q."""
    return _place(axes, table.shape, table.__getitem__)


def _place(axes: Axes, shape: tuple[int, ...], shard: Any) -> jax.Array:
    sharding = jax.sharding.NamedSharding(axes.mesh, axes.spec_of(shape, *_DIMS[: len(shape)]))
    return jax.make_array_from_callback(shape, sharding, shard)


def make_route(plan: Plan, axes: Axes, like: Capacity | None) -> tuple[Route, Capacity]:
    """Make the arrays of a plan. Each host makes the shards of its own devices.

    Args:
        plan: Plan of the whole problem, whose groups have one member.
        axes: Mesh axes.
        like: Sizes of another step, which are kept if they suffice.
    """
    parts, ranks = axes.size("batch") if plan.planes > 1 else 1, plan.layout.ranks
    is_ring = plan.strategy.kind == "ring" or plan.strategy.groups == 1
    traffic = None if is_ring else plan.traffic(parts)
    sizes = Capacity.of(plan, traffic, like)
    of_part = lru_cache(parts)(lambda part: plan.of_planes(part, parts))

    @lru_cache(parts * ranks)
    def of_device(part: int, rank: int) -> list[Ints]:
        counts = None if traffic is None else traffic.counts[part]
        return jax.tree.leaves(_of_device(of_part(part), rank, sizes, counts))

    def place_leaf(at: int, own: Any) -> jax.Array:
        def shard(index: Any) -> Any:
            return of_device(*(x.start or 0 for x in index[:2]))[at][index[2:]][None, None]

        return _place(axes, (parts, ranks, *own.shape), shard)

    # All devices have the same shapes. This host reads them from one of its own devices.
    grid = jax.sharding.NamedSharding(axes.mesh, axes.spec_of((parts, ranks), *_DIMS[:2]))
    local = next(iter(grid.addressable_devices_indices_map((parts, ranks)).values()))
    own = of_device(*(x.start or 0 for x in local or ()))
    rows, keys = (place_table(axes, flat_rows(layout)) for layout in (plan.layout, plan.keys))
    bounds, q_index, *lists = map(place_leaf, range(len(own)), own)
    return Route(bounds, q_index, Exchange(*lists) if lists else None, rows, keys), sizes


def _of_device(plan: Plan, rank: int, sizes: Capacity, counts: Any) -> tuple[Any, ...]:
    """Bounds with all heads, q_index and the exchange of one device."""
    tables = plan.tables(rank)
    bounds = _padded(np.stack([stage.bounds for stage in tables.stages]), sizes.runs, axis=4)
    return bounds, tables.q_index, None if counts is None else _exchange(tables, sizes, counts)


def _exchange(tables: Tables, sizes: Capacity, counts: Any) -> Exchange:
    (stage,), transfer, numbers = tables.stages, tables.transfer, tables.numbers
    assert transfer is not None
    found, room, rank = max(stage.keys.shape[1], 1), sizes.keys, numbers.rank

    def widened(place: Ints) -> Ints:
        # Places are plane * K + key. With a larger K the planes lie further apart.
        moved: Ints = place // found * room + place % found
        return moved

    held = numbers.planes * numbers.key_slots
    place, own_place = widened(transfer.place), widened(transfer.own_place)
    own = np.full(held, NOWHERE, np.int32)
    own[transfer.own] = own_place
    source = np.full(numbers.planes * room, NOWHERE, np.int32)
    source[own_place] = transfer.own
    source[place] = held + np.arange(len(place))
    order = np.argsort(transfer.send, kind="stable")
    slots = transfer.send[order]
    back = np.full((held, sizes.readers), NOWHERE, np.int32)
    back[slots, np.arange(len(slots)) - np.searchsorted(slots, slots)] = order
    begins_there, began_there = counts[:rank].sum(0), counts[:, :rank].sum(1)
    table = np.stack([counts[rank], counts[:, rank], begins_there, began_there]).astype(np.int32)
    lists = (
        source,
        _padded(transfer.send, sizes.rows, fill=NOWHERE),
        _padded(place, sizes.rows, fill=NOWHERE),
        own,
        back,
        table,
    )
    return Exchange(_padded(stage.keys, room, axis=1), *lists)


def _padded(x: Any, length: int, axis: int = 0, fill: int = 0) -> Ints:
    widths = [(0, length - size if at == axis else 0) for at, size in enumerate(x.shape)]
    padded: Ints = np.pad(x, widths, constant_values=fill)
    return padded
