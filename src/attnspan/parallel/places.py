"""Index arrays of one rank's plan: places of a group's rows and keys.

Shapes: L planes, N rows and S keys of a group, K keys of a stage. Keys are flat: plane * k_len + key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnspan.errors import ShapeError, expect

from .intervals import Ints, below, expand
from .needs import Needs

#: Numbers of rows or keys, int32.
Places = NDArray[np.int32]


def take_rows(bounds: Any, rows: Places, planes: int) -> Places:
    """Take the bounds of some rows, (planes, H|1, N, R, 2). Padding sees no key."""
    at = np.maximum(rows, 0)
    taken = np.stack([bounds[x % len(bounds)][:, at[x % len(rows)]] for x in range(planes)])
    taken[np.broadcast_to((rows < 0)[:, None], taken.shape[:3])] = 0
    return taken


def padding_last(rows: Places) -> Places:
    """Give padding the largest number, so that it comes last in ascending order."""
    return np.where(rows < 0, np.iinfo(np.int32).max, rows)


def ascending(rows: Places) -> Places:
    """Sort rows in ascending order, padding last."""
    return np.take_along_axis(rows, np.argsort(padding_last(rows), axis=1, kind="stable"), 1)


def key_order(slots: Places, planes: int) -> Places:
    """List the slots of a group's keys in ascending order of the keys, padding last."""
    order = np.argsort(padding_last(slots), axis=1, kind="stable")
    flat = np.broadcast_to(order, (planes, order.shape[1])) + np.arange(planes)[:, None] * order.shape[1]
    found: Places = flat.reshape(-1).astype(np.int32)
    return found


class Slots:
    """Places of flat keys among the keys of a group, which may be in any order.

    Attributes:
        keys: int64 (n,), flat keys that the group holds, ascending.
    """

    def __init__(self, rows: Places, planes: int, k_len: int) -> None:
        whole = np.broadcast_to(rows, (planes, rows.shape[1]))
        flat = (whole + np.arange(planes, dtype=np.int64)[:, None] * k_len).reshape(-1)
        slots = np.flatnonzero(whole.reshape(-1) >= 0)
        order = np.argsort(flat[slots], kind="stable")
        self.keys, self._slots = flat[slots][order], slots[order].astype(np.int32)

    def __call__(self, flat: Ints) -> Places:
        return self._slots[np.searchsorted(self.keys, flat)]


@dataclass(frozen=True, eq=False)
class Kept:
    """Keys that a group needs, as ascending ranges of flat keys, and the place of each key among them.

    Attributes:
        lo: int64 (n,), first flat key of each range.
        sums: int64 (n + 1,), number of keys before each range.
        before: int64 (planes,), number of keys in the planes before each plane.
        k_len: Keys of a plane.
        keys: int32 (planes, K), global indices of the keys of each plane, 0 after the last key.
    """

    lo: Ints
    sums: Ints
    before: Ints
    k_len: int
    keys: Places

    @classmethod
    def of(cls, needs: Needs, group: int, planes: int, k_len: int) -> Kept:
        """Collect the keys of one group.

        Example:
            >>> needs = Needs(np.array([0, 2]), np.array([1, 6]), np.array([3, 8]))
            >>> Kept.of(needs, 0, planes=1, k_len=8).keys.tolist()
            [[1, 2, 6, 7]]
        """
        at = slice(needs.starts[group], needs.starts[group + 1])
        lo, hi = needs.lo[at], needs.hi[at]
        sums = np.append(0, np.cumsum(hi - lo))
        k_len = max(k_len, 1)  # a divisor, also without keys
        before = below(lo, sums, np.arange(planes + 1) * k_len)
        most = int(np.diff(before).max(initial=0))
        check_places(planes, most)
        keys = np.zeros((planes, most), np.int32)
        flat = expand(lo, hi)
        plane = flat // k_len
        keys[plane, np.arange(len(flat)) - before[plane]] = flat % k_len
        return cls(lo, sums, before[:-1], k_len, keys)

    def count(self, flat: Ints) -> Ints:
        """Count the kept keys below each flat key."""
        return below(self.lo, self.sums, flat)

    def has(self, flat: Ints) -> NDArray[np.bool_]:
        """Return whether each flat key is kept."""
        return self.count(flat + 1) > self.count(flat)

    def place(self, flat: Ints) -> Places:
        """Return the place of each kept key: plane * K + place in the plane."""
        plane = flat // self.k_len
        found: Places = (plane * self.keys.shape[1] + self.count(flat) - self.before[plane]).astype(np.int32)
        return found


def check_places(planes: int, keys: int) -> None:
    """Check that places of keys fit into int32.

    Raises:
        ShapeError: They do not fit.
    """
    # Numbers that wrap around would silently move other keys.
    remedy = "Use more ranks, fewer batch elements, or one mask for all batch elements"
    what, wanted = "context parallelism: mask", f"batch size times keys of a group below {2**31:,}"
    expect(planes * keys < 2**31, what, wanted, f"{planes:,} x {keys:,}", remedy, error=ShapeError)
