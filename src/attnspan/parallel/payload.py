"""What the rows of a call weigh on the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError

if TYPE_CHECKING:
    from .strategy import HeadSlice

__all__ = ["Payload"]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Payload:
    """What the rows of a call weigh.

    Attributes:
        rows: Query rows of each rank, padding included.
        q_heads: Query heads of each member of a group while it attends, (u,).
        kv_heads: Different KV heads that each member needs, (u,); their sum exceeds the number of KV heads
            where some are needed by several members.
        head_dim, v_dim: Elements of a row of q and k, and of v.
        itemsize: Bytes of an element.
        batch: Batch rows.
        planes: Batch rows of the mask: 1 where they share it, else `batch`.
        key_rows: Key rows of each rank; None in self-attention, where they are `rows`.
        dlse: Whether lse gets a gradient.

    Raises:
        ShapeError: Sizes that do not fit each other.

    Example:
        >>> Payload(rows=128, q_heads=(4, 4), kv_heads=(1, 1), head_dim=64, v_dim=64, itemsize=2).kv_bytes
        array([256, 256])
    """

    rows: int
    q_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    v_dim: int
    itemsize: int
    batch: int = 1
    planes: int = 1
    key_rows: int | None = None
    dlse: bool = False

    def __post_init__(self) -> None:
        if len(self.q_heads) != len(self.kv_heads) or not self.q_heads:
            raise ShapeError(
                "Payload",
                expected="q_heads and kv_heads of as many members, at least one",
                got=f"{len(self.q_heads)} and {len(self.kv_heads)}",
                remedy="Pass one number per member of a group",
            )
        if self.planes not in (1, self.batch):
            raise ShapeError(
                "Payload",
                expected=f"planes to be 1 or the batch, {self.batch}",
                got=str(self.planes),
                remedy="Pass the batch rows of the mask",
            )

    @classmethod
    def of(
        cls,
        heads: Sequence[HeadSlice],
        *,
        rows: int,
        head_dim: int,
        v_dim: int | None = None,
        itemsize: int,
        batch: int = 1,
        planes: int = 1,
        key_rows: int | None = None,
        dlse: bool = False,
    ) -> Payload:
        """The payload of a head split.

        Args:
            heads: What `attnspan.parallel.strategy.split_heads` gave, one slice per member.
            rows, head_dim, itemsize, batch, planes, key_rows, dlse: As the attributes.
            v_dim: None: as `head_dim`.

        Example:
            >>> from attnspan.parallel.strategy import split_heads
            >>> Payload.of(split_heads(8, 2, 4), rows=16, head_dim=64, itemsize=2).kv_heads
            (1, 1, 1, 1)
        """
        return cls(
            rows=rows,
            q_heads=tuple(part.q_stop - part.q_start for part in heads),
            kv_heads=tuple(len(part.kv) for part in heads),
            head_dim=head_dim,
            v_dim=head_dim if v_dim is None else v_dim,
            itemsize=itemsize,
            batch=batch,
            planes=planes,
            key_rows=key_rows,
            dlse=dlse,
        )

    @property
    def kv_rows(self) -> int:
        """Key rows of each rank."""
        return self.rows if self.key_rows is None else self.key_rows

    @property
    def wide(self) -> int:
        """Bytes of an element of lse, and of gradients that are summed over ranks: float32, or float64."""
        return max(4, self.itemsize)

    @property
    def kv_bytes(self) -> Ints:
        """Bytes of one row of k and v, over the KV heads of each member, int64 (u,)."""
        return self._kv * self.itemsize

    @property
    def gradient_bytes(self) -> Ints:
        """Bytes of one row of dk and dv before the sum, over the KV heads of each member, int64 (u,)."""
        return self._kv * self.wide

    @property
    def _kv(self) -> Ints:
        return np.array(self.kv_heads, np.int64) * (self.head_dim + self.v_dim)
