"""The mask of a whole problem, as layouts and plans read it: bounds and indices in NumPy."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from attnspan.base.arrays import frozen, is_frozen
from attnspan.base.mistakes import not_a_mask
from attnspan.errors import ShapeError, expect
from attnspan.masks import Mask, Prepared
from attnspan.masks.bounds import Spans

__all__ = ["digest", "lower"]

_PROBLEM = "Describe the whole problem, with global ids: the layout shards it; of cross attention pass k_len="


def digest(*arrays: Any) -> int:
    """60 bits of some arrays of NumPy, never 0."""
    found = hashlib.blake2b(digest_size=8)
    for x in arrays:
        x = np.ascontiguousarray(x)
        found.update(f"{x.dtype}{x.shape}".encode())
        found.update(x.data)
    return (int.from_bytes(found.digest(), "big") >> 4) or 1


def lower(
    mask: Mask | Spans, q_len: int, k_len: int, batch: int, heads: int, known: bool = False
) -> Prepared:
    """The mask of a whole problem, with bounds and indices in NumPy; `known` bounds are legal.

    Raises:
        DtypeError: It is no mask.
        ShapeError: It was lowered for another problem.
        OptionError: Its data break a promise.

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
    # A mask that was lowered for other batch rows or heads would give some of them the first ones' mask.
    for name, got, whole in zip(("batch rows", "heads"), spans.bounds.shape[:2], (batch, heads), strict=True):
        remedy = "Pass batch=... and heads=... of the whole problem, and lower the mask for these"
        wanted = f"{whole} {name}, or 1 that all share"
        expect(got in (1, whole), what, wanted, repr(spans), remedy, error=ShapeError)
    if not (is_frozen(spans.bounds) and (found.q_index is None or is_frozen(found.q_index))):
        # Plans are remembered: what is written into the caller's arrays must not change them.
        found = Prepared(Spans(frozen(_numpy(spans.bounds)), k_len), frozen(_numpy(found.q_index)))
    if isinstance(mask, Prepared) and not known:
        # On the keys of a rank an illegal span may look like a legal one.
        found.lowered.validate()
    return found


def _numpy(x: Any) -> Any:
    if x is None:
        return None
    return x.detach().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)
