"""Masks that compare indices, such as `causal()` and `window(...)`.

An argument described as an array may come from NumPy, torch or JAX. Lists of integers become NumPy arrays.
Arguments that do not fit raise a ShapeError, DtypeError or OptionError when the mask is made or lowered.
Wrong data raise if they can be read at no cost, which is on the host and not under a tracer. Otherwise, the
spans of the queries become illegal, and kernels report them. Arrays that belong to keys always describe the
whole, global key sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from attnspan.base import checks
from attnspan.base.arrays import INT32_MAX, Array
from attnspan.errors import expect

from .bands import Band
from .bounds import Spans
from .by_value import Explicit
from .expression import Mask, Prepared
from .intervals import FULL, Interval, Rows
from .lowering import Lowering


class full(Mask):
    """Every query sees every key. R = 1.

    Example:
        >>> full().spans(1, 3).bounds.tolist()
        [[[[[0, 3]]]]]
    """

    _in_numbers = True
    _separates = False

    def band(self) -> Band:
        return Band()

    def _lower(self, low: Lowering) -> Rows:
        del low
        return Rows((FULL,))


class causal(Mask):
    """Query i sees key j iff j <= i, in global indices. R = 1.

    Example:
        >>> causal().spans(2, 3).bounds[0, 0, :, 0].tolist()
        [[0, 2], [0, 3]]
    """

    _in_numbers = True
    _separates = False

    def band(self) -> Band:
        return Band(right=0)

    def _lower(self, low: Lowering) -> Rows:
        return Rows((Interval(None, low.q_index + 1, anchored=True),))


class window(Mask):
    """Query i sees key j iff i - left <= j <= i + right, in global indices. R = 1.

    Hugging Face's `sliding_window=W` is `window(W - 1)`. flash-attn's `window_size=(l, r)` is `window(l, r)`,
    with None instead of -1.

    Args:
        left: Number of keys before the query that it sees, at least 0. None means all.
        right: Number of keys after the query that it sees, at least 0. None means all.

    Raises:
        DtypeError: If a side is neither an int nor None.
        OptionError: If a side is negative.

    Example:
        >>> window(1).spans(3, 3).bounds[0, 0, :, 0].tolist()
        [[0, 1], [0, 2], [1, 3]]
    """

    _in_numbers = True
    _separates = False

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        remedy = "Write window(left, right), and None for all keys of a side (flash-attn: -1)"
        side = checks.optional(partial(checks.count, remedy=remedy))
        self._check(left=side, right=side)

    def band(self) -> Band:
        return Band(self.left, self.right)

    def _lower(self, low: Lowering) -> Rows:
        lo = None if self.left is None else low.shifted(-self.left)
        hi = None if self.right is None else low.shifted(min(self.right + 1, INT32_MAX))
        return Rows((Interval(lo, hi, anchored=True),))


class key_padding(Mask):
    """Queries see only the valid keys of their batch element.

    With `start` or `stop`, only a part of the keys may be padded, for example padded text next to image
    tokens. All queries see the keys outside that part. R = 1, or 2 with valid keys on both sides of padding.

    Args:
        lengths: int or integer (B,), the number of valid keys in each batch element. It is at most k_len, or
            at most the number of keys from `start` to `stop`.
        side: Side of the padding: "right" (valid keys come first) or "left".
        start: First key of the part that may be padded.
        stop: First key after that part. None means k_len.

    Raises:
        DtypeError: If the lengths are not integers. For a boolean mask of valid keys, use `keys`.
        ShapeError: If the number of lengths does not fit the batch. Lowering checks this.
        OptionError: If `side` is unknown, the part does not fit the keys, or a length is negative or too
            large. Lowering checks lengths that can be read on the host. Otherwise, the spans become illegal.

    Example:
        >>> key_padding(2, side="left").spans(1, 3).bounds.tolist()
        [[[[[1, 3]]]]]
        >>> key_padding(2, stop=4).spans(1, 7).bounds.tolist()  # 4 text tokens, 2 of them real, then an image
        [[[[[0, 2], [4, 7]]]]]
    """

    array_dims = 0
    _separates = False

    lengths: int | Array
    side: str = "right"
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        sides, remedy = ("right", "left"), "Pass the side of the padding"
        known = isinstance(self.side, str) and self.side in sides
        expect(known, "key_padding: side", '"right" or "left"', repr(self.side), remedy)
        self._check(lengths=checks.lengths, start=checks.count)
        remedy = "Pass the first key after the part that may be padded"
        self._check(stop=checks.optional(partial(checks.count, least=self.start, remedy=remedy)))

    def _lower(self, low: Lowering) -> Rows:
        if self.stop is None and self.side == "left":
            low.needs_keys("key_padding")
        end = low.top if self.stop is None else self.stop
        # The number of keys may be a symbol, so it is compared only if a part was passed.
        if self.start > 0 or self.stop is not None:
            fits, got = self.start <= end <= low.top, f"keys {self.start} to {end}"
            remedy = "Pass where the part that may be padded begins and ends"
            expect(fits, "key_padding: start, stop", "a part of the {} keys", got, remedy, low.top)
        lengths, illegal = low.lengths("key_padding", self.lengths, below=end - self.start)
        # The valid keys of the part join the keys before it, or the keys after it.
        if self.side == "right":
            valid, rest = Interval(None, self.start + lengths), Interval(end, None)
            return Rows((valid,) if self.stop is None else (valid, rest), illegal)
        rest, valid = Interval(None, self.start), Interval(end - lengths, None)
        return Rows((valid,) if self.start == 0 else (rest, valid), illegal)


class cache(Mask):
    """Mask of a KV cache that is not full: the first keys are valid, and the queries are the last valid keys.

    The default `q_index` of an expression with `cache` is the last q_len valid indices of each batch element.
    Use `causal() & cache(lengths)` for decoding and for chunked prefill. R = 1.

    Args:
        lengths: int or integer (B,), the number of valid keys, including the keys of the queries. It is at
            most k_len.

    Raises:
        DtypeError: If the lengths are not integers.
        ShapeError: If the number of lengths does not fit the batch. Lowering checks this.
        OptionError: If a length is negative or larger than k_len. Lowering checks lengths that can be read on
            the host. Otherwise, the spans become illegal.

    Example:
        >>> from attnspan import causal
        >>> (causal() & cache([2, 4])).spans(2, 5, batch=2).bounds[:, 0, :, 0].tolist()
        [[[0, 1], [0, 2]], [[0, 3], [0, 4]]]
    """

    array_dims = 0
    _separates = False

    lengths: int | Array

    def __post_init__(self) -> None:
        self._check(lengths=checks.lengths)

    def _anchor(self) -> tuple[Any, ...]:
        return ("cache", self.lengths)

    def _anchor_index(self, low: Lowering) -> Array:
        lengths, _ = low.lengths("cache", self.lengths, below=low.top)
        return low.arrays.arange(low.q_len)[None, None] + (lengths - low.q_len)

    def _lower(self, low: Lowering) -> Rows:
        lengths, illegal = low.lengths("cache", self.lengths, below=low.top)
        return Rows((Interval(None, lengths),), illegal)


class global_keys(Mask):
    """Every query sees the first n keys, for example attention sinks.

    Use `causal() & (window(w) | global_keys(4))` for a sliding window with four sinks. R = 1.

    Args:
        n: Number of keys. A number beyond the keys means all keys.

    Raises:
        DtypeError: If `n` is not an int.
        OptionError: If `n` is negative.

    Example:
        >>> (causal() & (window(0) | global_keys(1))).spans(3, 3).bounds[0, 0, 2].tolist()
        [[0, 1], [2, 3]]
    """

    _in_numbers = True
    _separates = False

    n: int

    def __post_init__(self) -> None:
        self._check(n=checks.count)

    def _first_keys(self) -> int:
        return self.n

    def _lower(self, low: Lowering) -> Rows:
        del low
        return Rows((Interval(None, self.n),))


def spans(bounds: Array) -> Mask:
    """Make a mask from spans.

    Args:
        bounds: integer (B|1, H|1, q_len, R, 2), the spans of the queries of the call, over global keys (see
            `attnspan.Spans`). Or a lowered mask, which then has no query indices and fits any queries.

    Raises:
        DtypeError: If the bounds are not integers.
        ShapeError: If the bounds do not fit the queries, the batch or the heads. Lowering checks the sizes.
        OptionError: If a span is illegal and can be read on the host. Lowering checks this.

    Example:
        >>> import numpy as np
        >>> bounds = np.array([[0, 1], [0, 2]]).reshape(1, 1, 2, 1, 2)
        >>> spans(bounds).spans(2, 2).dense()[0, 0].tolist()
        [[True, False], [True, True]]
    """
    bounds = bounds.lowered if isinstance(bounds, Prepared) else bounds
    return Prepared(bounds, bare=True) if isinstance(bounds, Spans) else Explicit(bounds)
