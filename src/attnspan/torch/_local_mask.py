"""Masks with DTensors among their arrays: each rank lowers the part of the mask that goes with its part of q.

Plain arrays of a mask describe all batch rows and are the same on all ranks: such masks are lowered whole, as
on one rank. Arrays that are split over ranks cannot be, so all of the mask is then cut down to this rank's
part, lowered, and put together again as a DTensor. Nothing is moved.
"""

import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..by_value import Explicit
from ..errors import OptionError, ShapeError
from ..expression import Combined
from ..masks import (
    Mask,
    Prepared,
    cache,
    documents,
    from_dense,
    from_predicate,
    groups,
    key_padding,
    keys,
    prefix,
    segments,
)
from ..spans import Spans
from ._placements import BATCH, HEADS, Places, is_dtensor, refuse_beside_plain

#: Number of dims of an array that has one for batch rows, in front. Prefix: see `_batch_and_heads`.
_RANKS: dict[type, int] = {cache: 1, documents: 2, groups: 2, key_padding: 1, keys: 2, segments: 2}


def has_dtensors(mask: Any, places: Places | None) -> bool:
    """Whether some arrays of a mask are DTensors.

    Args:
        mask: A mask expression, a Prepared or Spans.
        places: How q lies; None where it is plain.

    Raises:
        OptionError: There are some, and q is plain.
    """
    if places is None and "torch.distributed.tensor" not in sys.modules:
        return False
    found = [(name, x) for name, x in _arrays(mask) if is_dtensor(x)]
    if places is None:
        for name, x in found:
            refuse_beside_plain(name, x)
    return bool(found)


def _arrays(mask: Any) -> list[tuple[str, Any]]:
    if isinstance(mask, Spans):
        return [("bounds of the mask", mask.bounds)]
    if isinstance(mask, Prepared):
        indices = [("q_index of the mask", mask.q_index), ("k_index of the mask", mask.k_index)]
        return [*_arrays(mask.lowered), *indices]
    if not isinstance(mask, Mask):
        return []
    if isinstance(mask, Combined):
        return [pair for operand in mask.operands for pair in _arrays(operand)]
    return [(f"mask {type(mask).__name__}: {f.name}", getattr(mask, f.name)) for f in fields(mask)]  # type: ignore[arg-type]


def check_lowered(mask: Any, places: Places) -> None:
    """Raise unless the arrays of a mask that was lowered before are split where q is.

    Args:
        mask: A Prepared or Spans.
        places: How q lies.

    Raises:
        OptionError: They are split otherwise, or lie on another mesh.
    """
    for name, x in _arrays(mask):
        if x is not None:
            rows = {"bounds of the mask": (0, 1), "q_index of the mask": (0, None)}
            places.check(name, x, *rows.get(name, (None, None)))


def lower_parts(
    mask: Mask, places: Places, q: Tensor, k_len: Any, q_index: Tensor | None, k_index: Tensor | None
) -> Prepared:
    """Lower a mask of which some arrays are DTensors.

    Args:
        mask: An expression.
        places: How q lies.
        q: Shape (B, Hq, Sq, D).
        k_len: Sk.
        q_index: Indices of the rows, as given to `attention`, or None.
        k_index: Indices of the keys, or None.

    Returns:
        The mask with bounds and indices as DTensors on q's mesh.

    Raises:
        OptionError: An array is split otherwise than q, or the mask has a function of batch rows or heads.
        ShapeError: An array has another number of batch rows.
    """
    local: Any = q.to_local()  # type: ignore[attr-defined]
    cutter = _Cutter(places, q.shape[0], q.shape[1])
    here = cutter.cut(mask)
    if q_index is not None:
        q_index = cutter.part("q_index", q_index, 0 if q_index.dim() == 2 else None, None)
    if k_index is not None:
        k_index = cutter.part("k_index", k_index, None, None)
    placed = here.spans(
        q.shape[2],
        k_len,
        batch=local.shape[0],
        heads=local.shape[1],
        q_index=q_index,
        k_index=k_index,
        like=local.detach(),
    )
    bounds, rows = placed.lowered.bounds, placed.q_index
    batch, heads = local.shape[0], local.shape[1]
    if BATCH in cutter.split:
        bounds = bounds.expand(batch, *bounds.shape[1:])
        rows = None if rows is None else rows.expand(batch, rows.shape[1])
    if HEADS in cutter.split:
        bounds = bounds.expand(bounds.shape[0], heads, *bounds.shape[2:])
    whole = Spans(_joined(bounds, cutter, (0, 1)), placed.lowered.k_len)
    return Prepared(whole, _joined(rows, cutter, (0, None)), _joined(placed.k_index, cutter, (None, None)))


class _Cutter:
    """Cuts the arrays of one mask down to this rank's part, and remembers along what it cut.

    Args:
        places: How q lies.
        batch: Number of batch rows, of the whole.
        heads: Number of query heads, of the whole.
    """

    def __init__(self, places: Places, batch: Any, heads: Any) -> None:
        self.places, self.batch, self.heads = places, batch, heads
        self.split: set[str] = set()
        self._known: list[tuple[Tensor, Tensor]] = []

    def cut(self, mask: Mask) -> Mask:
        """The mask of this rank's batch rows and heads."""
        if isinstance(mask, Combined):
            return type(mask)(tuple(map(self.cut, mask.operands)))
        if isinstance(mask, Prepared):
            bounds = self.part("bounds of the mask", mask.lowered.bounds, 0, 1)
            rows = mask.q_index
            rows = None if rows is None else self.part("q_index of the mask", rows, 0, None)
            return Prepared(Spans(bounds, mask.lowered.k_len), rows, bare=mask.bare)
        if isinstance(mask, from_predicate) and {BATCH, HEADS} & set(self.places.roles):
            raise OptionError(
                f"mask {mask!r}",
                expected="no function of batch rows and heads beside arrays that are DTensors, as q is split",
                got="one, which would number those of this rank from 0",
                remedy="Pass the arrays of all batch rows as plain tensors, or prepare the mask",
            )
        kind, changes = type(mask), {}
        for field in fields(mask):  # type: ignore[arg-type]
            x = getattr(mask, field.name)
            if isinstance(x, Tensor | np.ndarray):
                x = torch.as_tensor(x)
                name = f"mask {kind.__name__}: {field.name}"
                changes[field.name] = self.part(name, x, *self._batch_and_heads(mask, x))
        return replace(mask, **changes) if changes else mask  # type: ignore[type-var]

    def _batch_and_heads(self, mask: Any, x: Tensor) -> tuple[int | None, int | None]:
        """Which dims of an array of a mask are those of batch rows and heads."""
        if isinstance(mask, Explicit):
            return 0, 1
        if isinstance(mask, from_dense):
            return (0 if x.dim() > 2 else None), (1 if x.dim() == 4 else None)
        rank = 1 + (mask.cu_seqlens is not None) if isinstance(mask, prefix) else _RANKS.get(type(mask))
        if rank is None:
            raise OptionError(
                f"mask {mask!r}",
                expected="arrays of a mask whose parts are known, where some are DTensors",
                got=type(mask).__name__,
                remedy="Pass the arrays of all batch rows as plain tensors, or prepare the mask",
            )
        return (0 if x.dim() == rank else None), None

    def part(self, name: str, x: Tensor, batch: int | None, heads: int | None) -> Tensor:
        """This rank's part of an array; it must have the batch rows and heads of q, or 1."""
        for known, found in self._known:  # Masks that share an array are lowered together.
            if known is x:
                return found
        for role, dim, size in ((BATCH, batch, self.batch), (HEADS, heads, self.heads)):
            if dim is None or x.shape[dim] == 1:
                continue
            if x.shape[dim] != size:
                raise ShapeError(
                    name,
                    expected=f"1 or {size} along the {role} dim, as q has in all",
                    got=str(tuple(x.shape)),
                    remedy="Arrays beside DTensors describe the whole, not this rank's part",
                )
            if role in self.places.roles:
                self.split.add(role)
        self._known.append((x, self.places.part(name, x, batch, heads)))
        return self._known[-1][1]


def _joined(x: Any, cutter: _Cutter, dims: tuple[int | None, int | None]) -> Any:
    """The DTensor of which each rank has made its part."""
    if x is None:
        return None
    at = {
        role: dim
        for role, dim in zip((BATCH, HEADS), dims, strict=True)
        if dim is not None and role in cutter.split
    }
    sizes = {BATCH: cutter.batch, HEADS: cutter.heads}
    shape = list(x.shape)
    for role, dim in at.items():
        shape[dim] = sizes[role]
    return cutter.places.join(x.contiguous(), shape, at)
