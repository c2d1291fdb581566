"""Exchange of keys between devices, and of their gradients back to the owners.

Shapes of one device: B batch elements, p planes (B or 1), h key heads, m keys that it holds, K keys of a
stage of each plane, D and Dv head dims, C parts of the sequence, N capacity for rows that travel. A row that
travels holds the key and the value of all heads: (B / p, h, D + Dv).
"""

from __future__ import annotations

from functools import partial

from jax import Array, lax
from jax import numpy as jnp

from .route import NOWHERE, Exchange


def fetch(k: Array, v: Array, lists: Exchange, piece: int, axis: tuple[str, ...]) -> tuple[Array, Array]:
    """Fetch the keys of the stage, (B, h, K, D), and their values. Unused capacity is 0.

    Args:
        k: Shape (B, h, m, D).
        v: Shape (B, h, m, Dv).
        lists: Exchange of this device.
        piece: Most rows between two parts.
        axis: Mesh axes that split the sequence.
    """
    batch, _, held, dim = k.shape
    planes = len(lists.own) // held
    rows = _to_rows(jnp.concatenate([k, v], -1), planes)
    send, receive, there, _ = lists.counts
    received = _travel(_take(rows, lists.send), send, receive, there, piece, axis)
    stage = _take(jnp.concatenate([rows, received]), lists.source)
    both = _from_rows(stage, planes, batch)
    return both[..., :dim], both[..., dim:]


def give_back(
    dk: Array, dv: Array, held: int, lists: Exchange, piece: int, axis: tuple[str, ...]
) -> tuple[Array, Array]:
    """Return the gradients of the device's keys, (B, h, m, D), and of their values, in float32 or wider.

    They are sums over the stages of all devices, in the order of the devices. Arguments are as for `fetch`.
    """
    batch, dim = dk.shape[0], dk.shape[3]
    planes = len(lists.own) // held
    both = jnp.concatenate([dk, dv], -1)
    stage = _to_rows(both.astype(jnp.promote_types(both.dtype, jnp.float32)), planes)
    send, receive, _, back = lists.counts
    returned = _travel(_take(stage, lists.place), receive, send, back, piece, axis)
    # Each key gathers its parts and sums them, because a scatter adds in no fixed order.
    total = _take(returned, lists.back).sum(1)
    found = _from_rows(_take(stage, lists.own) + total, planes, batch)
    return found[..., :dim], found[..., dim:]


def _travel(
    rows: Array, send: Array, receive: Array, there: Array, piece: int, axis: tuple[str, ...]
) -> Array:
    """Exchange rows ordered by destination, (N, ...), for rows ordered by source, 0 after the last one.

    TPUs and GPUs send exactly these rows. On other platforms, pieces are padded to the largest piece.

    Args:
        rows: Rows to send.
        send, receive: int32 (C,), numbers of rows for and from each part.
        there: int32 (C,), begin of this part's rows among the rows that each part receives.
        piece, axis: See `fetch`.
    """
    ragged, padded = partial(_ragged, axis), partial(_padded, piece, axis)
    platforms = {"tpu": ragged, "cuda": ragged, "rocm": ragged}
    found: Array = lax.platform_dependent(rows, send, receive, there, default=padded, **platforms)
    return found


def _ragged(axis: tuple[str, ...], rows: Array, send: Array, receive: Array, there: Array) -> Array:
    # JAX can vmap it only if the numbers are mapped like the rows, so they become mapped here.
    mapped = jnp.isnan(rows.reshape(-1)[:1]) & False
    send, receive, there = (x + mapped for x in (send, receive, there))
    begins = jnp.cumsum(send) - send
    room = jnp.zeros_like(rows)
    found: Array = lax.ragged_all_to_all(rows, room, begins, send, there, receive, axis_name=axis)
    return found


def _padded(
    piece: int, axis: tuple[str, ...], rows: Array, send: Array, receive: Array, there: Array
) -> Array:
    del there
    at = jnp.arange(piece)
    begins = jnp.cumsum(send) - send
    index = jnp.where(at < send[:, None], begins[:, None] + at, NOWHERE)
    pieces = lax.all_to_all(_take(rows, index.reshape(-1)), axis, 0, 0, tiled=True)
    ends, place = jnp.cumsum(receive), jnp.arange(rows.shape[0])
    source = jnp.searchsorted(ends, place, side="right")
    inside = place - (ends - receive)[source]
    return _take(pieces, jnp.where(place < ends[-1], source * piece + inside, NOWHERE))


def _take(rows: Array, index: Array) -> Array:
    """Take rows by number, 0 for a number beyond the end."""
    return rows.at[index].get(mode="fill", fill_value=0)


def _to_rows(x: Array, planes: int) -> Array:
    """Turn (B, h, S, E) into (p * S, B / p, h, E)."""
    batch, heads, length, width = x.shape
    x = x.reshape(planes, batch // planes, heads, length, width).transpose(0, 3, 1, 2, 4)
    return x.reshape(planes * length, batch // planes, heads, width)


def _from_rows(rows: Array, planes: int, batch: int) -> Array:
    """Turn (p * S, B / p, h, E) into (B, h, S, E)."""
    flat, inner, heads, width = rows.shape
    x = rows.reshape(planes, flat // planes, inner, heads, width).transpose(0, 2, 3, 1, 4)
    return x.reshape(batch, heads, flat // planes, width)
