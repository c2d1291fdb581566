"""Mask of a whole problem with bounds and indices in NumPy, as layouts and plans read it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from attnspan.base.arrays import frozen, is_frozen
from attnspan.base.mistakes import not_a_mask
from attnspan.errors import ShapeError, expect
from attnspan.masks import Mask, Prepared
from attnspan.masks.bounds import Spans

_PROBLEM = (
    "Pass a mask of the whole problem with global ids: the layout shards it. For cross attention pass k_len="
)


def digest(*arrays: Any) -> int:
    """Hash of NumPy arrays with 60 bits, never 0."""
    found = hashlib.blake2b(digest_size=8)
    for x in arrays:
        x = np.ascontiguousarray(x)
        found.update(f"{x.dtype}{x.shape}".encode())
        found.update(x.data)
    return (int.from_bytes(found.digest(), "big") >> 4) or 1


def lower(
    mask: Mask | Spans, q_len: int, k_len: int, batch: int, heads: int, known: bool = False
) -> Prepared:
    """Lower the mask of a whole problem to bounds and indices in NumPy.

    `known` says that the bounds are known to be legal.

    Raises:
        DtypeError: `mask` is no mask.
        ShapeError: The mask was lowered for another problem.
        OptionError: The mask's data are illegal.

    Example:
        >>> from attnspan import causal
        >>> lower(causal(), 4, 4, batch=1, heads=1).lowered.bounds.shape
        (1, 1, 4, 1, 2)
    """
    if isinstance(mask, Spans):
        mask = Prepared(mask)
    if not isinstance(mask, Mask):
        raise not_a_mask(mask)
    found = mask if isinstance(mask, Prepared) else mask.prepare(q_len, k_len, batch=batch, heads=heads)
    what = "keys of a mask with context parallelism"
    expect(found.k_index is None, what, "0..k_len-1", "others", _PROBLEM)
    spans = found.lowered
    fits = spans.q_len == q_len and spans.k_len == k_len
    what, wanted = "mask with context parallelism", f"{q_len} rows and {k_len} keys, the whole problem"
    expect(fits, what, wanted, repr(spans), _PROBLEM, error=ShapeError)
    # A mask lowered for fewer batch elements or heads would give the rest the mask of the first ones.
    names = ("batch elements", "heads")
    for name, got, whole in zip(names, spans.bounds.shape[:2], (batch, heads), strict=True):
        remedy = "Pass batch=... and heads=... of the whole problem, and lower the mask for these"
        wanted = f"{whole} {name}, or 1 that all share"
        expect(got in (1, whole), what, wanted, repr(spans), remedy, error=ShapeError)
    if not (is_frozen(spans.bounds) and (found.q_index is None or is_frozen(found.q_index))):
        # Plans are cached: writing into the caller's arrays must not change them.
        found = Prepared(Spans(frozen(_numpy(spans.bounds)), k_len), frozen(_numpy(found.q_index)))
    if isinstance(mask, Prepared) and not known:
        # Among the keys of one rank, an illegal span may look like a legal one.
        found.lowered.validate()
    return found


def _numpy(x: Any) -> Any:
    if x is None:
        return None
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)
