"""Masks of packed documents (varlen) for flash-attn, Transformer Engine, cuDNN and torch's `varlen_attn`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array, arrays_for
from attnspan.errors import OptionError, ShapeError, expect
from attnspan.masks import Mask, Spans, causal, documents, window

from ._values import Host, as_mask, integers, lowered, one_plane

_ALIGNMENTS = ("bottom-right", "top-left")


class Varlen(NamedTuple):
    """A mask in the format of `flash_attn_varlen_func`. `to_varlen` returns it.

    Attributes:
        cu_seqlens_q: int32 (n + 1,), the start of each document's queries, and the number of all queries.
        cu_seqlens_k: int32 (n + 1,), the start of each document's keys, and the number of all keys.
        max_seqlen_q: The maximum number of queries of a document.
        max_seqlen_k: The maximum number of keys of a document.
        causal: The `causal` argument.
        window_size: The `window_size` argument, (left, right), with -1 for no limit.

    Raises:
        TypeError: If you leave out a field.

    Example:
        >>> from attnspan import documents
        >>> to_varlen(documents([0, 2, 5]), 5).max_seqlen_k
        3
    """

    cu_seqlens_q: Array
    cu_seqlens_k: Array
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    window_size: tuple[int, int]


def from_varlen(
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    align: str = "bottom-right",
    cu_seqlens_q_padded: Any = None,
    cu_seqlens_k_padded: Any = None,
) -> Mask:
    """Read the offsets of packed documents (varlen), with flash-attn's causal flag and window.

    Without padded offsets and with bottom-right alignment, the result is the expression
    `documents(...) & causal()` or `documents(...) & window(...)`. attnspan can then choose the kernels for
    such masks, and you can call `from_varlen` in compiled functions. Otherwise, the result is a mask from
    spans.

    Args:
        cu_seqlens_q: integer (n + 1,), ascending from 0: the cumulative lengths of the queries.
        cu_seqlens_k: The cumulative lengths of the keys. Default: `cu_seqlens_q`.
        causal: If True, a query does not see later keys of its document.
        window_size: (left, right), the numbers of keys before and after its own key that a query sees. -1
            means no limit. With `causal`, the right number is 0.
        align: "bottom-right" aligns the last query of a document with its last key, as flash-attn does.
            "top-left" aligns the first query with the first key, as cuDNN and Transformer Engine may.
        cu_seqlens_q_padded: integer (n + 1,), Transformer Engine's offsets in memory. The tokens of document
            d begin at `cu_seqlens_q_padded[d]`. Padding sees nothing.
        cu_seqlens_k_padded: The offsets of the keys in memory. If you pass no offsets for keys, the default
            is `cu_seqlens_q_padded`.

    Raises:
        DtypeError: If offsets are not integers, or if `causal` is not a bool.
        ShapeError: If queries and keys have different numbers of documents, or if offsets have other axes.
        OptionError: If offsets descend, if a document is longer than its padded place, if the window is no
            pair of numbers of at least -1, or if `align` is unknown. Also if `from_varlen` needs values that
            it cannot read.

    Example:
        >>> from_varlen([0, 2, 5], causal=True)
        documents(int64[3]) & causal()
        >>> from_varlen([0, 2, 3], cu_seqlens_q_padded=[0, 4, 8]).prepare(8, 8).cost()[0, 0].tolist()
        [2, 2, 0, 0, 1, 0, 0, 0]
    """
    causal = checks.flag("from_varlen: causal", causal)
    left, right = _window(window_size, causal)
    known, remedy = align in _ALIGNMENTS, 'Pass align="bottom-right" for flash-attn'
    expect(known, "from_varlen: align", " or ".join(_ALIGNMENTS), str(align), remedy)
    given = cu_seqlens_q, cu_seqlens_k, cu_seqlens_q_padded, cu_seqlens_k_padded
    is_padded = cu_seqlens_q_padded is not None or cu_seqlens_k_padded is not None
    own_keys = cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q
    moves = own_keys and (left is not None or right is not None)
    if not is_padded and (align == "bottom-right" or not moves):
        return _expression(cu_seqlens_q, cu_seqlens_k, left, right)
    starts_q, lengths_q, q_len = _places("cu_seqlens_q", cu_seqlens_q, cu_seqlens_q_padded)
    if cu_seqlens_k is None and cu_seqlens_k_padded is None:
        starts_k, lengths_k, k_len = starts_q, lengths_q, q_len
    else:
        cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        starts_k, lengths_k, k_len = _places("cu_seqlens_k", cu_k, cu_seqlens_k_padded)
    fits, expected = len(starts_k) == len(starts_q), "as many documents for keys as for queries, {}"
    remedy = "If a document has no keys or no queries, repeat its offset"
    expect(fits, "from_varlen", expected, len(starts_k), remedy, len(starts_q), error=ShapeError)
    bounds = packed(starts_q, lengths_q, starts_k, lengths_k, q_len, left, right, align)
    return as_mask("from_varlen", bounds, k_len, arrays_for(given, what="from_varlen"))


def packed(
    starts_q: Host,
    lengths_q: Host,
    starts_k: Host,
    lengths_k: Host,
    q_len: int,
    left: int | None,
    right: int | None,
    align: str,
) -> Host:
    """Return bounds (1, 1, q_len, 1, 2) of n documents at any places, with one window."""
    document = np.repeat(np.arange(len(starts_q)), lengths_q)
    place = np.arange(len(document)) - np.repeat(lengths_q.cumsum() - lengths_q, lengths_q)
    shift = lengths_k - lengths_q if align == "bottom-right" else np.zeros_like(lengths_q)
    ends = _ends(place + shift[document], lengths_k[document], left, right)
    bounds = np.zeros((q_len, 2), np.int64)
    bounds[starts_q[document] + place] = starts_k[document][:, None] + ends
    return bounds[None, None, :, None]


def _window(window_size: Any, causal: bool) -> tuple[int | None, int | None]:
    """Return the limits on both sides, None for no limit."""
    what, remedy = "from_varlen: window_size", "Write -1 for no limit"
    fits = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    expect(fits, what, "two numbers, left and right", str(window_size), remedy)
    sides = [checks.number(what, x) for x in window_size]
    expect(min(sides) >= -1, what, "numbers of at least -1", min(sides), remedy)
    left, right = (None if x < 0 else x for x in sides)
    return left, 0 if causal else right


def _expression(cu_q: Any, cu_k: Any, left: int | None, right: int | None) -> Mask:
    found = documents(cu_q, cu_k)
    if left is None and right is None:
        return found
    return found & (causal() if (left, right) == (None, 0) else window(left, right))


def _places(name: str, cu: Any, padded: Any) -> tuple[Host, Host, int]:
    """Return the start and length of each document, and the number of tokens with padding."""
    what = f"from_varlen: {name}"
    offsets = _offsets(what, cu)
    lengths = np.diff(offsets)
    if padded is None:
        return offsets[:-1], lengths, int(offsets[-1])
    places = _offsets(f"{what}_padded", padded)
    expected, remedy = "as many offsets as without padding, {}", "Pass the offsets of the same documents"
    count = len(offsets)
    expect(len(places) == count, f"{what}_padded", expected, len(places), remedy, count, error=ShapeError)
    too_long = np.flatnonzero(lengths > np.diff(places))
    if len(too_long):
        d = int(too_long[0])
        got = f"{np.diff(places)[d]} places for document {d} of {lengths[d]} tokens"
        expect(
            False,
            f"{what}_padded",
            "a place for each token",
            got,
            "Pass larger offsets, or shorter documents",
        )
    return places[:-1], lengths, int(places[-1])


def _offsets(what: str, x: Any) -> Host:
    found = integers(what, checks.offsets(what, x), (1,))[0]
    ascending = found[0] == 0 and (np.diff(found) >= 0).all()
    got = f"{found[:8].tolist()}"
    expect(ascending, what, "ascending offsets that start at 0", got, "Pass cumulative lengths")
    return found


def _ends(at: Host, length: Host, left: int | None, right: int | None) -> Host:
    """Return the keys (n, 2), counted in the document, that queries aligned with key `at` see."""
    lo = np.zeros_like(at) if left is None else np.clip(at - left, 0, length)
    hi = length if right is None else np.clip(at + right + 1, lo, length)
    return np.stack([lo, hi], axis=-1)


def to_varlen(
    mask: Mask | Spans, q_len: int, k_len: int | None = None, *, batch: int | None = None, heads: int = 1
) -> Varlen:
    """Write a mask as the offsets, the causal flag and the window of flash-attn's varlen functions.

    Queries that see nothing become documents without keys. Keys that no query sees become documents without
    queries.

    Args:
        mask: A mask, or lowered spans.
        q_len: Number of queries.
        k_len: Number of keys. Default: q_len.
        batch, heads: Batch size and number of heads. Arrays in the mask must fit them.

    Raises:
        OptionError: If the mask does not consist of documents with one window. The error names the first
            query that does not fit. Also if the mask differs between batch elements or heads, or if
            `mask.prepare` raises it.
        ShapeError: If arrays in the mask do not fit the sizes.

    Example:
        >>> from attnspan import causal, documents, window
        >>> found = to_varlen(documents([0, 4, 9]) & causal() & window(2), 9)
        >>> found.cu_seqlens_q.tolist(), found.causal, found.window_size
        ([0, 4, 9], True, (2, 0))
    """
    bounds, k_len, arrays = lowered("to_varlen", mask, q_len, k_len, batch, heads)
    plane = one_plane("to_varlen", bounds)
    second = (plane[:, 1:, 0] < plane[:, 1:, 1]).any(-1)
    if second.any():
        raise _refusal(int(second.argmax()), "sees several spans of keys")
    lo, hi = plane[:, 0].T.astype(np.int64)
    cu_q, cu_k = _split(lo, hi, k_len)
    document = np.repeat(np.arange(len(cu_q) - 1), np.diff(cu_q))
    length = np.diff(cu_k)[document]
    at = np.arange(q_len) - cu_q[1:][document] + length  # the query's place among the keys of its document
    lo, hi = lo - cu_k[document], hi - cu_k[document]
    empty = lo >= hi
    left = _limit("left", at - lo, (lo > 0) & ~empty, at, ~empty)
    right = _limit("right", hi - 1 - at, (hi < length) & ~empty, length - 1 - at, ~empty)
    wanted = _ends(at, length, left, right)
    different = (wanted[:, 0] < wanted[:, 1]) == empty
    different |= ~empty & ((wanted[:, 0] != lo) | (wanted[:, 1] != hi))
    if different.any():
        raise _refusal(int(different.argmax()), "does not see the window of its document")
    most_q, most_k = (int(np.diff(x).max(initial=0)) for x in (cu_q, cu_k))
    offsets_q, offsets_k = (arrays.asarray(x, "int32") for x in (cu_q, cu_k))
    sides = -1 if left is None else left, -1 if right is None else right
    return Varlen(offsets_q, offsets_k, most_q, most_k, right == 0, sides)


def _split(lo: Host, hi: Host, k_len: int) -> tuple[Host, Host]:
    """Return the offsets of the smallest documents such that no query sees a key of another document."""
    q_len, empty = len(lo), lo >= hi
    reach = np.maximum.accumulate(np.where(empty, 0, hi))
    first = np.minimum.accumulate(np.where(empty, k_len, lo)[::-1])[::-1]
    # A document may begin at a query if no earlier query reaches the keys that later queries see.
    begins = np.ones(q_len, bool)
    begins[1:] = (reach[:-1] <= first[1:]) & ~(empty[1:] & empty[:-1])
    starts = np.flatnonzero(begins)
    before = np.concatenate([[0], reach])[starts]
    # Keys between documents belong to a document without queries. Empty queries have no keys.
    own = np.where(empty[starts], before, first[starts])
    cu_q, cu_k = np.repeat(starts, 2), np.stack([before, own], -1).ravel()
    is_new = np.ones(len(cu_q), bool)
    is_new[:-1] = (cu_q[1:] != cu_q[:-1]) | (cu_k[1:] != cu_k[:-1])
    last = [q_len] if q_len and reach[-1] == k_len else [q_len, q_len]
    ends = [k_len] if len(last) == 1 else [int(reach[-1]) if q_len else 0, k_len]
    cu_q, cu_k = np.concatenate([cu_q[is_new], last]), np.concatenate([cu_k[is_new], ends])
    return cu_q.astype(np.int64), cu_k.astype(np.int64)


def _limit(side: str, seen: Host, ends: Host, most: Host, counts: Host) -> int | None:
    """Return the window's limit on a side, or None for no limit.

    All queries in `ends` must have the same limit. For the other queries in `counts`, it must be at least
    `most`.
    """
    if not ends.any():
        return None
    limit = int(seen[ends][0])
    other = ends & (seen != limit) | (counts & ~ends & (most > limit))
    if other.any() or limit < 0:
        query = int(other.argmax()) if other.any() else int(ends.argmax())
        raise _refusal(query, f"does not fit a window of {limit} keys to the {side}")
    return limit


def _refusal(query: int, text: str) -> OptionError:
    return OptionError(
        "to_varlen",
        expected="documents with one window, the same for all",
        got=f"query {query}, which {text}",
        remedy="Use to_flashmask, to_ranges or to_dense",
    )
