"""The plans of all devices as arrays that are split over the mesh like q, k and v.

A plan is data: it is an argument of compiled programs, not a constant in them. Each host makes the shards of
its own devices. Sizes that depend on the mask are counted for all devices, without their lists, and rounded
up, so that the next step's mask has the same ones.

Shapes: C parts of the sequence, E parts of the batch where batch rows have plans of their own (else 1), P
planes (such batch rows) and, of one part of the batch, p; n rows and m keys of a part of the sequence, K keys
of a stage of each plane, N rows on their way, D devices that need one key.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from ..layout import Layout
from ..local import Tables
from ..needs import Traffic
from ..plan import Plan
from .axes import Axes

__all__ = ["NOWHERE", "Exchange", "Route", "Sizes", "flat_rows", "make_route"]

Ints = NDArray[np.int32]

#: No place: what takes rows by number fills in 0 there.
NOWHERE = np.iinfo(np.int32).max


class Sizes(NamedTuple):
    """Sizes that depend on the mask, with room for other masks. A ring has runs only.

    Attributes:
        runs: Spans of a row.
        keys, rows, readers: K, N and D.
        piece: Most rows between two parts of the sequence.
    """

    runs: int
    keys: int = 0
    rows: int = 0
    piece: int = 0
    readers: int = 0

    @classmethod
    def of(cls, plan: Plan, traffic: Traffic | None, like: Sizes | None) -> Sizes:
        """The sizes of a plan, which only grow from those of another step."""
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
    """A size with room for the masks to come: few different ones ever occur."""
    # Lists have at least one place. Spans of a row have a few values only.
    power = most if needed == most else 1 << max(needed - 1, 0).bit_length()
    return before if max(needed, 1) <= before else max(min(power, most), 1)


class Exchange(NamedTuple):
    """Which keys go where.

    Attributes:
        keys: int32 (P, C * K), global numbers of the keys that each part attends to.
        source: int32 (E, C, p * K), where each of them is found: among the part's own (p * m), then among
            those received (N).
        send: int32 (E, C, N), the own keys to send, by destination.
        place: int32 (E, C, N), where received keys go, among p * K.
        own: int32 (E, C, p * m), where own keys go.
        back: int32 (E, C, p * m, D), where gradients of own keys come back, among N.
        counts: int32 (E, C, 4, C), for each other part: rows sent to it and received from it; where the first
            begin there, among all that it receives; where the second began there, among all that it sends.
    """

    keys: Any
    source: Any
    send: Any
    place: Any
    own: Any
    back: Any
    counts: Any


class Route(NamedTuple):
    """What all devices must know, a pytree.

    Attributes:
        bounds: int32 (stages, P, H|1, C * n, R, 2), on the keys of each stage. An exchange has one stage, a
            ring one for each part of the sequence, in the order in which they come by.
        q_index: int32 (P, C * n), global indices of the rows; 0 for padding.
        rows: int32 (P|1, C * n), the number of each row; -1 for padding.
        keys: int32 (P|1, C * m), the number of each key that a part holds; -1 for padding.
        exchange: Of an exchange; None for a ring.
    """

    bounds: Any
    q_index: Any
    rows: Any
    keys: Any
    exchange: Exchange | None

    @property
    def planes(self) -> int:
        """P, or p on a device."""
        return int(self.q_index.shape[0])

    def specs(self, axes: Axes) -> Route:
        """How its arrays are split: as q, k and v are."""
        rest = jax.tree.map(lambda x: axes.spec_of(x.shape, *_ROWS), self)
        return rest._replace(bounds=axes.spec_of(self.bounds.shape, *_BOUNDS))  # type: ignore[no-any-return]


# What splits the first dims of bounds, and of all other arrays.
_BOUNDS = (None, "batch", "heads", "sequence")
_ROWS = ("batch", "sequence")


def flat_rows(layout: Layout) -> Ints:
    """The rows of all ranks, one rank after the other, (L, C * n)."""
    rows: Ints = layout.rows.transpose(1, 0, 2).reshape(layout.planes, -1)
    return rows


def make_route(plan: Plan, axes: Axes, like: Sizes | None) -> tuple[Route, Sizes]:
    """The arrays of a plan, of which each host makes the shards of its own devices.

    Args:
        plan: Of the whole problem, between groups of one member.
        axes: Which axes of the mesh split what.
        like: Sizes of another step, which are kept where they suffice.
    """
    parts, ranks = axes.size("batch") if plan.planes > 1 else 1, plan.layout.ranks
    is_ring = plan.strategy.kind == "ring" or plan.strategy.groups == 1
    traffic = None if is_ring else plan.traffic(parts)
    sizes = Sizes.of(plan, traffic, like)
    of_part = lru_cache(parts)(lambda part: plan.of_planes(part, parts))

    @lru_cache(parts * ranks)
    def of_device(part: int, rank: int) -> Route:
        counts = None if traffic is None else traffic.counts[part]
        return _of_device(of_part(part), rank, sizes, counts)

    def place(at: int, own: Any) -> jax.Array:
        dims = _BOUNDS if at == 0 else _ROWS  # The bounds come first.
        planes, rows = map(dims.index, _ROWS)
        shape = list(own.shape)
        shape[planes], shape[rows] = shape[planes] * parts, shape[rows] * ranks

        def shard(index: Any) -> Any:
            starts = ((index[i].start or 0) // own.shape[i] for i in (planes, rows))
            found = jax.tree.leaves(of_device(*starts))[at]
            return found[:, :, index[2]] if at == 0 else found

        return _from_callback(axes, tuple(shape), dims, shard)

    def place_rows(layout: Layout) -> jax.Array:
        rows = flat_rows(layout)
        return _from_callback(axes, rows.shape, _ROWS, lambda index: rows[index])

    # Shapes are those of any device; this host makes those of its own.
    grid = jax.sharding.NamedSharding(axes.mesh, axes.spec_of((parts, ranks), *_ROWS))
    local = next(iter(grid.addressable_devices_indices_map((parts, ranks)).values()))
    tree: Any
    own, tree = jax.tree.flatten(of_device(*(at.start or 0 for at in local or ())))
    route = tree.unflatten(map(place, range(len(own)), own))
    return route._replace(rows=place_rows(plan.layout), keys=place_rows(plan.keys)), sizes


def _from_callback(axes: Axes, shape: tuple[int, ...], dims: tuple[str | None, ...], shard: Any) -> jax.Array:
    sharding = jax.sharding.NamedSharding(axes.mesh, axes.spec_of(shape, *dims))
    return jax.make_array_from_callback(shape, sharding, shard)


def _of_device(plan: Plan, rank: int, sizes: Sizes, counts: Any) -> Route:
    """The arrays of one device; heads are not split yet."""
    tables = plan.tables(rank)
    bounds = _padded(np.stack([stage.bounds for stage in tables.stages]), sizes.runs, axis=4)
    q_index = np.broadcast_to(tables.q_index, (plan.planes, tables.q_index.shape[1]))
    exchange = None if counts is None else _exchange(tables, sizes, counts)
    return Route(bounds, q_index, None, None, exchange)


def _exchange(tables: Tables, sizes: Sizes, counts: Any) -> Exchange:
    (stage,), transfer, numbers = tables.stages, tables.transfer, tables.numbers
    assert transfer is not None
    found, room, rank = max(stage.keys.shape[1], 1), sizes.keys, numbers.rank

    def widened(place: Ints) -> Ints:
        # Places are plane * K + key: with room for other masks the planes lie further apart.
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
    return Exchange(_padded(stage.keys, room, axis=1), *(x[None, None] for x in lists))


def _padded(x: Any, length: int, axis: int = 0, fill: int = 0) -> Ints:
    widths = [(0, length - size if at == axis else 0) for at, size in enumerate(x.shape)]
    padded: Ints = np.pad(x, widths, constant_values=fill)
    return padded
