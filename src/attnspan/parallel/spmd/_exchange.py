"""The keys that a device attends to, fetched from those that hold them, and their gradients given back.

Shapes of one device: B batch rows, p planes (B or 1), h key heads, m keys that it holds, K keys of a stage, D
and Dv head dims, C parts of the sequence, W rows of a piece. A row that travels holds the key and the value
of all heads: (B / p, h, D + Dv).
"""

from jax import Array, lax
from jax import numpy as jnp

from ._route import Exchange


def fetch(k: Array, v: Array, lists: Exchange, axis: tuple[str, ...]) -> tuple[Array, Array]:
    """The keys of the stage.

    Args:
        k: Shape (B, h, m, D).
        v: Shape (B, h, m, Dv).
        lists: Of this device.
        axis: Mesh axes that split the sequence.

    Returns:
        Shapes (B, h, K, D) and (B, h, K, Dv); 0 where a stage has fewer keys than room.
    """
    batch, _, held, dim = k.shape
    planes = lists.own.shape[-1] // held
    rows = _to_rows(jnp.concatenate([k, v], -1), planes)
    pieces = _take(rows, lists.send.reshape(-1))
    received = lax.all_to_all(pieces, axis, 0, 0, tiled=True)
    stage = _take(jnp.concatenate([rows, received]), lists.source.reshape(-1))
    both = _from_rows(stage, planes, batch)
    return both[..., :dim], both[..., dim:]


def give_back(dk: Array, dv: Array, held: int, lists: Exchange, axis: tuple[str, ...]) -> tuple[Array, Array]:
    """The gradients of the keys that a device holds: those of all stages, summed in the parts' order.

    Args:
        dk: Shape (B, h, K, D).
        dv: Shape (B, h, K, Dv).
        held: m.
        lists: Of this device.
        axis: Mesh axes that split the sequence.

    Returns:
        Shapes (B, h, m, D) and (B, h, m, Dv), float32 (float64 for float64).
    """
    batch, dim = dk.shape[0], dk.shape[3]
    planes = lists.own.shape[-1] // held
    both = jnp.concatenate([dk, dv], -1)
    stage = _to_rows(both.astype(jnp.promote_types(both.dtype, jnp.float32)), planes)
    pieces = _take(stage, lists.place.reshape(-1))
    returned = lax.all_to_all(pieces, axis, 0, 0, tiled=True)
    send = lists.send.reshape(lists.send.shape[-2:])

    def add(total: Array, part: tuple[Array, Array]) -> tuple[Array, None]:
        slots, rows = part
        # A key is in one piece once, so that the sums have one order, on all devices and in all runs.
        return total.at[slots].add(rows, mode="drop"), None

    own = _take(stage, lists.own.reshape(-1))
    total, _ = lax.scan(add, own, (send, returned.reshape(*send.shape, *returned.shape[1:])))
    found = _from_rows(total, planes, batch)
    return found[..., :dim], found[..., dim:]


def _take(rows: Array, index: Array) -> Array:
    """Rows by number, 0 for a number beyond the end."""
    return rows.at[index].get(mode="fill", fill_value=0)


def _to_rows(x: Array, planes: int) -> Array:
    """(B, h, S, E) as (p * S, B / p, h, E)."""
    batch, heads, length, width = x.shape
    x = x.reshape(planes, batch // planes, heads, length, width).transpose(0, 3, 1, 2, 4)
    return x.reshape(planes * length, batch // planes, heads, width)


def _from_rows(rows: Array, planes: int, batch: int) -> Array:
    """(p * S, B / p, h, E) as (B, h, S, E)."""
    flat, inner, heads, width = rows.shape
    x = rows.reshape(planes, flat // planes, inner, heads, width).transpose(0, 2, 3, 1, 4)
    return x.reshape(batch, heads, flat // planes, width)


def shift(x: Array, parts: int, axis: tuple[str, ...]) -> Array:
    """What the part before this one has; the first one gets that of the last."""
    return x if parts == 1 else lax.ppermute(x, axis, [(i, (i + 1) % parts) for i in range(parts)])
