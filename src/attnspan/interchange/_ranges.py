"""MagiAttention's pairs of query ranges and key ranges, each with a type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array, arrays_for
from attnspan.errors import DtypeError, OptionError, ShapeError, expect
from attnspan.masks import Mask, Spans
from attnspan.masks.encoding import table

from ._values import Host, as_mask, integers, lowered, one_plane

#: Names of MagiAttention's types, by number. If bit 0 is set, the last key moves with the query. If bit 1 is
#: set, the first key does.
_TYPES = ("full", "causal", "inv_causal", "bi_causal")


class Ranges(NamedTuple):
    """A mask in MagiAttention's format. `to_ranges` returns it.

    Attributes:
        q_ranges: int32 (n, 2), half-open ranges of queries.
        k_ranges: int32 (n, 2), half-open ranges of keys.
        types: int32 (n,): 0 full, 1 causal, 2 inverse causal, 3 bi-causal.

    Raises:
        TypeError: If you leave out a field.

    Example:
        >>> import numpy as np
        >>> len(Ranges(np.array([[0, 2]]), np.array([[0, 2]]), np.array([1])).types)
        1
    """

    q_ranges: Array
    k_ranges: Array
    types: Array


def from_ranges(
    q_ranges: Any, k_ranges: Any, types: Any, *, q_len: int | None = None, k_len: int | None = None
) -> Mask:
    """Read MagiAttention's pairs of a query range and a key range, each with a type.

    The type says which keys of its pair a query sees. Let n queries precede the query in its range, and let m
    queries follow it:

    - 0 or "full": the query sees all keys of the range.
    - 1 or "causal": it sees all keys but the last m. The last query sees the last key.
    - 2 or "inv_causal": it sees all keys but the first n. The first query sees the first key.
    - 3 or "bi_causal": it sees all keys but the first n and the last m.

    Args:
        q_ranges: integer (pairs, 2), half-open ranges, or an `AttnRanges` object.
        k_ranges: integer (pairs, 2), half-open ranges, or an `AttnRanges` object.
        types: The type of each pair: a number, a name or an `AttnMaskType`. You can also pass one type for
            all pairs.
        q_len, k_len: Numbers of queries and keys. Default: the largest end of a range.

    Returns:
        A mask from spans. Queries in no range see nothing.

    Raises:
        DtypeError: If ranges are not integers, or a type is neither a number nor a name.
        ShapeError: If the numbers of ranges and types differ, or if a range has not two ends.
        OptionError: If a range ends before its start or beyond the sizes, or if a type is unknown. Also if
            two pairs show a query the same key (the error names the pairs and the query), or if the values
            cannot be read.

    Example:
        >>> mask = from_ranges([[0, 2], [2, 4]], [[0, 2], [0, 4]], ["full", "causal"])
        >>> mask.prepare(4, 4).dense()[0, 0].astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
    """
    q, k = (_ranges(f"from_ranges: {x}", y) for x, y in (("q_ranges", q_ranges), ("k_ranges", k_ranges)))
    count = len(q)
    expected, remedy = "as many ranges of keys as of queries, {}", "Repeat a range that belongs to several"
    expect(len(k) == count, "from_ranges: k_ranges", expected, len(k), remedy, count, error=ShapeError)
    kinds = _kinds(types, count)
    q_len, k_len = (
        _size(f"from_ranges: {name}", x, size) for name, x, size in (("q_len", q, q_len), ("k_len", k, k_len))
    )
    arrays = arrays_for([q_ranges, k_ranges], what="from_ranges")
    return as_mask("from_ranges", _union(q, k, kinds, q_len, k_len), k_len, arrays)


def _ranges(what: str, x: Any) -> Host:
    x = x.to_naive_ranges() if hasattr(x, "to_naive_ranges") else x
    if isinstance(x, (list, tuple)) and not x:
        x = np.zeros((0, 2), np.int64)
    found = integers(what, x, (2,))[0]
    expect(found.shape[1] == 2, what, "pairs, shape (n, 2)", found.shape, "Pass ends", error=ShapeError)
    bad = np.flatnonzero((found[:, 0] < 0) | (found[:, 0] > found[:, 1]))
    if len(bad):
        got = f"{tuple(found[bad[0]].tolist())} as range {bad[0]}"
        expect(False, what, "0 <= start <= end", got, "Pass half-open ranges")
    return found


def _size(what: str, ranges: Host, size: int | None) -> int:
    last = int(ranges[:, 1].max(initial=0))
    size = last if size is None else checks.count(what, size)
    expect(last <= size, what, "at least {}, the largest end of a range", size, "Pass more", last)
    return size


def _kinds(types: Any, count: int) -> Host:
    """Return the numbers of the types, int64 (count,)."""
    several = isinstance(types, Sequence) and not isinstance(types, str)
    given = types if several else types.tolist() if hasattr(types, "tolist") else [types] * count
    given = [given] * count if isinstance(given, int) else given
    expected, remedy = "one type for each pair, {}", "Pass one type to use it for all pairs"
    expect(len(given) == count, "from_ranges: types", expected, len(given), remedy, count, error=ShapeError)
    return np.array([_kind(x) for x in given], np.int64)


def _kind(x: Any) -> int:
    """Return the number of a type. The members of MagiAttention's enumeration have names as values."""
    x, what = getattr(x, "value", x), "from_ranges: types"
    x = x.item() if isinstance(x, np.integer) else x
    fits, remedy = isinstance(x, (int, str)) and not isinstance(x, bool), "Pass a name, such as causal"
    expect(fits, what, "numbers or names", type(x).__name__, remedy, error=DtypeError)
    known = x in _TYPES if isinstance(x, str) else 0 <= x < 4
    names = ", ".join(f"{i} {name}" for i, name in enumerate(_TYPES))
    expect(known, what, f"one of {names}", f"{x}", "Pass a number or a name")
    return _TYPES.index(x) if isinstance(x, str) else int(x)


def _union(q: Host, k: Host, kinds: Host, q_len: int, k_len: int) -> Host:
    """Return bounds (1, 1, q_len, R, 2) of all pairs, which must not overlap."""
    length = q[:, 1] - q[:, 0]
    pair = np.repeat(np.arange(len(q)), length)
    row = np.arange(length.sum()) - np.repeat(length.cumsum() - length - q[:, 0], length)
    lo = k[pair, 0] + np.where(kinds[pair] & 2, row - q[pair, 0], 0)
    hi = k[pair, 1] - np.where(kinds[pair] & 1, q[pair, 1] - 1 - row, 0)
    seen = lo < hi
    row, lo, hi, pair = row[seen], lo[seen], hi[seen], pair[seen]
    order = np.argsort(row * (k_len + 1) + lo, kind="stable")
    row, lo, hi, pair = row[order], lo[order], hi[order], pair[order]
    same = row[1:] == row[:-1]
    overlapping = np.flatnonzero(same & (lo[1:] < hi[:-1]))
    if len(overlapping):
        i = int(overlapping[0])
        first, second = sorted((int(pair[i]), int(pair[i + 1])))
        raise OptionError(
            "from_ranges",
            expected="ranges that do not overlap",
            got=f"pairs {first} and {second}, which both show query {row[i]} key {lo[i + 1]}",
            remedy="MagiAttention counts such a key twice. Shorten one of the ranges",
        )
    # Spans that touch are one span.
    starts = np.flatnonzero(np.concatenate([[True] * (len(row) > 0), ~(same & (lo[1:] == hi[:-1]))]))
    stops = np.concatenate([starts[1:], [len(row)] * (len(row) > 0)]).astype(np.int64) - 1
    return table(row[starts], lo[starts], hi[stops], q_len)[None, None]


def to_ranges(
    mask: Mask | Spans, q_len: int, k_len: int | None = None, *, batch: int | None = None, heads: int = 1
) -> Ranges:
    """Write a mask as MagiAttention's ranges: rectangles, triangles and bands.

    Successive queries share a range as long as each end of their spans stays or moves by one key. Every mask
    that is equal for all batch elements and heads can be written. `len(result.types)` is the number of
    ranges: a mask without structure needs a range for each span.

    Args:
        mask: A mask, or lowered spans.
        q_len: Number of queries.
        k_len: Number of keys. Default: q_len.
        batch, heads: Batch size and number of heads. Arrays in the mask must fit them.

    Raises:
        OptionError: If the mask differs between batch elements or heads. Also if `mask.prepare` raises it.
        ShapeError: If arrays in the mask do not fit the sizes.

    Example:
        >>> from attnspan import causal, window
        >>> found = to_ranges(causal() & window(2), 6)
        >>> found.q_ranges.tolist(), found.k_ranges.tolist(), found.types.tolist()
        ([[0, 3], [3, 6]], [[0, 3], [1, 6]], [1, 3])
    """
    bounds, k_len, arrays = lowered("to_ranges", mask, q_len, k_len, batch, heads)
    plane = one_plane("to_ranges", bounds)
    row, slot = np.nonzero(plane[..., 0] < plane[..., 1])
    lo, hi = plane[row, slot].T.astype(np.int64)
    first, last, kind = _merged(row, lo, hi, k_len)
    q = np.stack([row[first], row[last] + 1], -1)
    k = np.stack([lo[first], hi[last]], -1)
    order = np.lexsort((k[:, 0], q[:, 0]))
    q, k, kind = (arrays.asarray(x[order], "int32") for x in (q, k, kind))
    return Ranges(q, k, kind)


def _merged(row: Host, lo: Host, hi: Host, k_len: int) -> tuple[Host, Host, Host]:
    """Return the first span, last span and type of each range. The spans are in the order of (row, lo)."""
    chain, kind = _chains(row, lo, hi, k_len)
    kind = kind[chain]
    # Runs of spans whose steps to the next span are equal. -1 is the last span of a chain.
    edges = np.flatnonzero(np.concatenate([[True] * (len(kind) > 0), kind[1:] != kind[:-1]]))
    first: list[int] = []
    last: list[int] = []
    kinds: list[int] = []
    start = 0
    stops = [*edges[1:].tolist(), len(kind)]
    for stop, step in zip(stops, kind[edges].tolist(), strict=False):
        if step < 0:
            # Ends of chains: single spans, except the first if a range has covered it.
            first += range(start, stop)
            last += range(start, stop)
            kinds += [0] * (stop - start)
            start = max(start, stop)
        elif start < stop:
            first.append(start)
            last.append(stop)
            kinds.append(step)
            start = stop + 1
    found = np.array([first, last, kinds], np.int64).reshape(3, -1)
    return chain[found[0]], chain[found[1]], found[2]


def _chains(row: Host, lo: Host, hi: Host, k_len: int) -> tuple[Host, Host]:
    """Return the order of spans along chains from row to row, and the type of each step, or -1 at the end."""
    count = len(row)
    numbers = row * (k_len + 2) + lo
    after = np.searchsorted(numbers, numbers + k_len + 2)
    other = np.minimum(after, count - 1)
    low, high = lo[other] - lo, hi[other] - hi
    follows = (after < count) & (row[other] == row + 1) & (low >> 1 == 0) & (high >> 1 == 0)
    kind = np.where(follows, 2 * low + high, -1)
    root = np.arange(count)
    root[other[follows]] = np.flatnonzero(follows)
    while (root[root] != root).any():
        root = root[root]
    return np.lexsort((row, root)), kind
