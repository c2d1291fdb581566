"""Masks of JAX's splash attention and of tokamax."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from attnspan.base.arrays import NUMPY, arrays_for
from attnspan.errors import DtypeError, ShapeError, expect
from attnspan.library import per_head
from attnspan.masks import Mask, from_dense, full, segments
from attnspan.masks.encoding import CHUNK_PAIRS, encode

from ._bands import band
from ._transpose import transpose_planes
from ._values import Host, as_mask, integers, values


def from_splash(mask: Any = None, segment_ids: Any = None) -> Mask:
    """Read a mask of JAX's splash attention, and its segment ids.

    Splash counts queries and keys from 0. For causal, local, chunked and full masks, and for `&`, `|` and
    `MultiHeadMask` of these, `from_splash` reads only their parameters. It converts a `NumpyMask` with
    `from_dense`. It evaluates any other mask for a chunk of queries at a time, as splash does.

    Args:
        mask: A mask of `splash_attention_mask`, or of tokamax's copy of splash. None shows all pairs.
        segment_ids: `SegmentIds(q, kv)`, integer (q_len,) and (k_len,), or (B, q_len) and (B, k_len). A query
            sees only keys with its own id.

    Returns:
        A mask for the sizes of `mask.shape`. If you pass a `MultiHeadMask`, also pass `heads=` to `prepare`
        and `spans`.

    Raises:
        DtypeError: If `mask` is no splash mask, or if ids are not integers.
        ShapeError: If the ids do not fit the mask.
        OptionError: If the ids cannot be read.

    Example:
        >>> from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash
        >>> from_splash(splash.CausalMask((4, 4)) & splash.LocalMask((4, 4), (2, 0), 0))
        causal() & window(2)
    """
    found = full() if mask is None else _splash(mask)
    if segment_ids is None:
        return found
    q = integers("from_splash: segment_ids.q", segment_ids.q, (1, 2))[0]
    kv = integers("from_splash: segment_ids.kv", segment_ids.kv, (1, 2))[0]
    sizes, wanted = (q.shape[-1], kv.shape[-1]), None if mask is None else tuple(mask.shape[-2:])
    expected, remedy = "ids for {} queries and keys", "Pass one id for each"
    fits = wanted is None or sizes == wanted
    expect(fits, "from_splash: segment_ids", expected, sizes, remedy, wanted or sizes, error=ShapeError)
    ids = segments(segment_ids.q, segment_ids.kv, max_runs=_most_runs(np.atleast_2d(kv)))
    return ids if mask is None else found & ids


def _most_runs(ids: Host) -> int:
    """Return the maximum number of spans of one id in a batch element."""
    starts = np.ones(ids.shape, bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    counts = [
        np.unique(row[start], return_counts=True)[1].max(initial=1)
        for row, start in zip(ids, starts, strict=True)
    ]
    return int(max(counts, default=1))


def _splash(mask: Any) -> Mask:
    fits = hasattr(mask, "shape") and hasattr(mask, "__getitem__") and not hasattr(mask, "dtype")
    remedy = "Pass a Mask of splash_attention_mask. For booleans, use from_dense"
    expect(fits, "from_splash: mask", "a mask of splash", type(mask).__name__, remedy, error=DtypeError)
    kind = type(mask)
    # A class of another module may compute anything.
    read = _READERS.get(kind.__name__) if "splash" in kind.__module__ else None
    return _evaluated(mask) if read is None else read(mask)


def _evaluated(mask: Any) -> Mask:
    """Return the mask of an object that gives booleans for slices of queries and keys."""
    *heads, q_len, k_len = mask.shape
    if heads:
        return per_head([_evaluated(_Head(mask, h)) for h in range(heads[0])])
    step = max(CHUNK_PAIRS // max(k_len, 1), 1)
    chunks = [
        encode(np.asarray(mask[slice(i, min(i + step, q_len)), slice(0, k_len)], bool)[None, None])
        for i in range(0, q_len, step)
    ]
    runs = max((x.shape[3] for x in chunks), default=1)
    padded = [np.pad(x, ((0, 0),) * 3 + ((0, runs - x.shape[3]), (0, 0))) for x in chunks]
    bounds = np.concatenate([np.zeros((1, 1, 0, runs, 2), np.int32), *padded], axis=2)
    return as_mask("from_splash", bounds, k_len, NUMPY)


class _Head:
    """One head of a mask with heads."""

    def __init__(self, mask: Any, head: int) -> None:
        self.mask, self.head, self.shape = mask, head, mask.shape[1:]

    def __getitem__(self, index: Any) -> Any:
        return self.mask[(self.head, *index)]


def _causal(mask: Any) -> Mask:
    return band("from_splash", mask.q_sequence + mask.offset, mask.shape[1], None, 0)


def _local(mask: Any) -> Mask:
    return band("from_splash", mask.q_sequence + mask.offset, mask.shape[1], *mask.window_size)


def _chunked(mask: Any) -> Mask:
    index, k_len = np.asarray(mask.q_sequence, np.int64), mask.shape[1]
    lo = (index // mask.chunk_size * mask.chunk_size).clip(0, k_len)
    bounds = np.stack([lo, np.maximum(lo, (index + 1).clip(0, k_len))], -1)
    return as_mask("from_splash", bounds[None, None, :, None], k_len, NUMPY)


#: Class of splash -> a reader of its numbers.
_READERS: dict[str, Callable[[Any], Mask]] = {
    "CausalMask": _causal,
    "ChunkedCausalMask": _chunked,
    "FullMask": lambda _: full(),
    "LocalMask": _local,
    "LogicalAnd": lambda mask: _splash(mask.left) & _splash(mask.right),
    "LogicalOr": lambda mask: _splash(mask.left) | _splash(mask.right),
    "MultiHeadMask": lambda mask: per_head([_splash(x) for x in mask.masks]),
    "NumpyMask": lambda mask: from_dense(mask.array),
}


def from_tokamax(mask: Any, q_len: int, k_len: int) -> Mask:
    """Read a mask of `tokamax.dot_product_attention`, which counts queries and keys from 0.

    Args:
        mask: A tokamax `Mask`. Its fields are booleans (B, H, q_len, k_len), `k_start` and `k_end` (B, H,
            q_len), `q_start` and `q_end` (B, H, k_len), and `is_causal`. Leading axes may be absent or 1. A
            query sees the keys that all fields show.
        q_len, k_len: Numbers of queries and keys.

    Returns:
        A combination of `causal()`, spans for the starts and ends, and `from_dense` for the booleans.

    Raises:
        DtypeError: If `mask` has no such fields, or if ends are not integers.
        ShapeError: If an array has too many axes, or if it does not fit the sizes.
        OptionError: If values cannot be read, as in a compiled function.

    Example:
        >>> from types import SimpleNamespace
        >>> import numpy as np
        >>> rest = dict.fromkeys(["bool_mask", "q_start", "q_end", "k_end"])
        >>> mask = SimpleNamespace(**rest, k_start=np.array([0, 0, 2, 2]), is_causal=True)
        >>> from_tokamax(mask, 4, 4).prepare(4, 4).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [2, 3], [2, 4]]
    """
    names = ("bool_mask", "q_start", "q_end", "k_start", "k_end", "is_causal")
    fits, remedy = all(hasattr(mask, x) for x in names), "For booleans, use from_dense"
    got = type(mask).__name__
    expect(fits, "from_tokamax: mask", "a Mask of tokamax", got, remedy, error=DtypeError)
    parts: list[Mask] = []
    if mask.is_causal:
        parts.append(band("from_tokamax", np.arange(q_len), k_len, None, 0))
    for axis, size, other in (("k", q_len, k_len), ("q", k_len, q_len)):
        start, end = getattr(mask, f"{axis}_start"), getattr(mask, f"{axis}_end")
        if start is None and end is None:
            continue
        lo = _ends(f"{axis}_start", start, size, 0).clip(0, other)
        hi = _ends(f"{axis}_end", end, size, other).clip(0, other)
        lo, hi = np.broadcast_arrays(lo, np.maximum(lo, hi))
        bounds = np.stack([lo, hi], -1)[..., None, :]
        bounds = bounds if axis == "k" else transpose_planes(bounds, q_len)
        arrays = arrays_for([start, end], what="from_tokamax")
        parts.append(as_mask("from_tokamax", bounds, k_len, arrays))
    if mask.bool_mask is not None:
        values("from_tokamax: bool_mask", mask.bool_mask)
        parts.append(from_dense(mask.bool_mask))
    return reduce(lambda a, b: a & b, parts) if parts else full()


def _ends(name: str, x: Any, size: int, default: int) -> Host:
    """Return the starts or ends of a field as (B|1, H|1, size)."""
    if x is None:
        return np.full((1, 1, size), default, np.int64)
    what = f"from_tokamax: {name}"
    found = integers(what, x, (1, 2, 3))[0]
    found = found.reshape((1,) * (3 - found.ndim) + found.shape)
    fits, remedy = found.shape[2] in (1, size), "Pass ends for each query (k_) or key (q_)"
    expect(fits, what, "{} entries", found.shape[2], remedy, size, error=ShapeError)
    return np.broadcast_to(found, (*found.shape[:2], size))
