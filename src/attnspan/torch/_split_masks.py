"""Masks with DTensors among their arrays: each rank lowers its own part."""

import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnspan.base.arrays import own
from attnspan.base.pytrees import arrays_in
from attnspan.errors import OptionError, ShapeError, expect
from attnspan.masks import Mask, Prepared
from attnspan.masks.bounds import Spans

from .dtensor import BATCH, HEADS, Follower, Places, batch_dim, check_follower, is_dtensor


def lower_parts(
    mask: Any, places: Places | None, q: Tensor, k_len: Any, q_index: Tensor | None, k_index: Tensor | None
) -> Prepared | None:
    """Lower a mask with DTensors among its arrays. Return None for any other mask, and for a lowered mask.

    Plain arrays of a mask describe the global batch and are the same on all ranks. Such masks are lowered as
    a whole, as on one rank. Sharded arrays cannot be lowered as a whole. In this case the mask is sliced to
    this rank's part, lowered, and assembled as a DTensor. No data is moved.

    Raises:
        OptionError: An array is sharded differently from q, or q is plain, or the mask has a function of
            batch or heads.
        ShapeError: An array has another batch size.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return None
    if isinstance(mask, (Prepared, Spans)):
        for array in _lowered_arrays(mask):
            check_follower(places, *array)
        return None
    split = [x for x in (q_index, k_index, *arrays_in(mask)) if is_dtensor(x)]
    if split and places is None:
        check_follower(None, f"mask {mask!r}: an array", split[-1], None, None)
    if places is None or not split:
        return None
    local: Any = q.to_local()  # type: ignore[attr-defined]
    cutter = _Cutter(places, q, local)
    here = cutter.cut(mask)
    rows, keys = cutter.part("q_index", q_index, batch_dim(q_index, 1)), cutter.part("k_index", k_index, None)
    sizes = {"batch": local.shape[0], "heads": local.shape[1]}
    placed = here.spans(q.shape[2], k_len, **sizes, q_index=rows, k_index=keys, like=local.detach())
    spans = Spans(cutter.join(placed.lowered.bounds, 0, 1), placed.lowered.k_len)
    return Prepared(spans, cutter.join(placed.q_index, 0), cutter.join(placed.k_index))


def _lowered_arrays(mask: Prepared | Spans) -> list[Follower]:
    if isinstance(mask, Spans):
        return [("bounds of the mask", mask.bounds, 0, 1)]
    indices = (
        ("q_index of the mask", mask.q_index, 0, None),
        ("k_index of the mask", mask.k_index, None, None),
    )
    return [*_lowered_arrays(mask.lowered), *indices]


class _Cutter:
    """Slicer of one mask's arrays to this rank's part. It records the sliced dims."""

    def __init__(self, places: Places, q: Tensor, local: Tensor) -> None:
        self.places = places
        self.sizes = {BATCH: (q.shape[0], local.shape[0]), HEADS: (q.shape[1], local.shape[1])}
        self.split: set[str] = set()
        self._known: list[tuple[Tensor, Tensor]] = []

    def cut(self, x: Any) -> Any:
        """A mask, or a field of a mask, for this rank's batch elements and heads."""
        if isinstance(x, tuple):
            return tuple([self.cut(part) for part in x])
        if isinstance(x, Prepared):
            bounds, rows, _ = (self.part(*array) for array in _lowered_arrays(x))
            return Prepared(Spans(bounds, x.lowered.k_len), rows, bare=x.bare)
        if not isinstance(x, Mask):
            return x
        remedy = "Pass the arrays of the global batch as plain tensors, or prepare the mask"
        if hasattr(x, "fn") and {BATCH, HEADS} & set(self.places.roles):
            expected = "no function of batch and heads next to arrays that are DTensors, because q is sharded"
            got = "a function, which would number this rank's batch elements and heads from 0"
            raise OptionError(f"mask {x!r}", expected=expected, got=got, remedy=remedy)
        kind, changes = type(x).__name__, {}
        for name in [field.name for field in fields(x)]:  # type: ignore[arg-type]
            value = getattr(x, name)
            if not isinstance(value, (Tensor, np.ndarray)):
                changes[name] = self.cut(value)
                continue
            if x.array_dims is None:
                expected = "a mask that declares the dims of its arrays, because some are DTensors"
                raise OptionError(f"mask {x!r}", expected=expected, got=kind, remedy=remedy)
            per_document = getattr(x, "cu_seqlens", None) is not None
            batch, heads = batch_dim(value, x.array_dims + per_document), 1 if value.ndim > 3 else None
            changes[name] = self.part(f"mask {kind}: {name}", value, batch, heads)
        return replace(x, **changes)  # type: ignore[type-var]

    def part(self, name: str, x: Any, batch: int | None, heads: int | None = None) -> Any:
        """This rank's part of an array. Its batch and head dims must have q's sizes, or 1."""
        if x is None:
            return None
        for known, found in self._known:  # Masks that share an array must share its part too.
            if known is x:
                return found
        for role, dim in ((BATCH, batch), (HEADS, heads)):
            if dim is not None and x.shape[dim] != 1:
                expected, size = f"1 or {{}} along the {role} dim, as the global q has", self.sizes[role][0]
                remedy = "Arrays next to DTensors must be global, not this rank's part"
                expect(x.shape[dim] == size, name, expected, x.shape, remedy, size, error=ShapeError)
                self.split |= {role} & set(self.places.roles)
        self._known.append((x, self.places.part(name, torch.as_tensor(own(x)), batch, heads)))
        return self._known[-1][1]

    def join(self, x: Any, batch: int | None = None, heads: int | None = None) -> Any:
        """DTensor of the parts that the ranks have made. Sliced dims have this rank's sizes."""
        if x is None:
            return None
        dims = {role: dim for role, dim in ((BATCH, batch), (HEADS, heads)) if dim is not None}
        dims = {role: dim for role, dim in dims.items() if role in self.split}
        shape, here = list(x.shape), list(x.shape)
        for role, dim in dims.items():
            shape[dim], here[dim] = self.sizes[role]
        return self.places.join(x.expand(here).contiguous(), shape, dims)
