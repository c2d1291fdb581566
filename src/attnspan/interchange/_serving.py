"""Formats of serving libraries: bit-packed masks and page tables of FlashInfer, sglang and vLLM."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from attnspan.base import checks
from attnspan.base.arrays import Array, Arrays, arrays_for
from attnspan.base.plain import check_plain
from attnspan.errors import DtypeError, OptionError, ShapeError, expect
from attnspan.masks import Mask, Spans
from attnspan.masks.encoding import encode

from ._values import Host, as_mask, integers, lowered, one_plane, values


class Bits(NamedTuple):
    """A bit-packed mask in FlashInfer's format. `to_bits` returns it.

    Attributes:
        packed: uint8 (n,), the bits of each request in query order, least significant bit first. Each request
            begins with a new byte.
        indptr: int32 (requests + 1,), the first byte of each request, and the number of bytes.

    Raises:
        TypeError: If you leave out a field.

    Example:
        >>> from attnspan import causal
        >>> to_bits(causal(), [0, 3], [0, 3]).packed.tolist()
        [217, 1]
    """

    packed: Array
    indptr: Array


class PageTable(NamedTuple):
    """The pages of each batch element, for `attnspan.torch.PagedCache`.

    Attributes:
        table: int32 (B, pages), the pages of each batch element, and -1 for no page. Copy it into
            `PagedCache.table`.
        lengths: int32 (B,), the number of tokens of each batch element. Copy it into `PagedCache.lengths`.

    Raises:
        TypeError: If you leave out a field.

    Example:
        >>> page_table_from_csr([0, 2, 3], [7, 4, 5], [1, 8], page_len=8).lengths.tolist()
        [9, 8]
    """

    table: Array
    lengths: Array


def from_bits(packed: Array, qo_indptr: Any, kv_indptr: Any, indptr: Any = None) -> Mask:
    """Read a bit-packed mask, such as a tree of draft tokens in speculative decoding.

    The queries of all requests are packed one after the other, and so are their keys. A query sees only keys
    of its own request.

    Args:
        packed: uint8 (n,), the bits of each request in query order, least significant bit first (FlashInfer's
            `packbits` with `bitorder="little"`). You can also pass booleans, one for each pair.
        qo_indptr: integer (requests + 1,), ascending from 0: the offsets of each request's queries.
        kv_indptr: integer (requests + 1,), ascending from 0: the offsets of each request's keys, in tokens.
        indptr: integer (requests + 1,), the first element of each request in `packed`. Default: requests
            follow each other, each from a new byte.

    Returns:
        A mask from spans, for q_len = qo_indptr[-1] and k_len = kv_indptr[-1].

    Raises:
        DtypeError: If `packed` is neither uint8 nor bool, or if offsets are not integers.
        ShapeError: If the numbers of requests differ, or if there are too few bits.
        OptionError: If offsets descend, or if values cannot be read, as in a compiled function.

    Example:
        >>> import numpy as np
        >>> bits = np.packbits([1, 0, 0, 1, 1, 0, 1, 0, 1], bitorder="little")  # a node with two children
        >>> from_bits(bits, [0, 3], [0, 3]).prepare(3, 3).dense()[0, 0].astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [1, 0, 1]])
    """
    check_plain("from_bits: packed", packed)
    arrays = arrays_for([packed], what="from_bits")
    found = values("from_bits: packed", packed)
    is_bits, kind, remedy = found.dtype == np.uint8, found.dtype, "Pass FlashInfer's packed mask, or booleans"
    fits = is_bits or found.dtype == np.bool_
    expect(fits, "from_bits: packed", "uint8 or bool", str(kind), remedy, error=DtypeError)
    expect(found.ndim == 1, "from_bits: packed", "one axis", found.shape, "Flatten it", error=ShapeError)
    q, k = _both("from_bits", qo_indptr, kv_indptr)
    starts = _starts("from_bits: indptr", q, k, is_bits, indptr)
    sizes = np.diff(q) * np.diff(k)
    needed = starts[:-1] + (-(-sizes // 8) if is_bits else sizes)
    last, remedy = int(needed.max(initial=0)), "Pass the whole mask, and its own offsets"
    expected = f"at least {{}} {'bytes' if is_bits else 'booleans'}"
    expect(len(found) >= last, "from_bits: packed", expected, len(found), remedy, last, error=ShapeError)
    chunks = []
    for r, size in enumerate(sizes.tolist()):
        part = found[starts[r] : needed[r]]
        part = np.unpackbits(part, count=size, bitorder="little").astype(bool) if is_bits else part
        spans = encode(part.reshape(1, 1, q[r + 1] - q[r], k[r + 1] - k[r]))
        # Empty spans are (0, 0), and stay empty.
        chunks.append(spans + np.int32(k[r]))
    runs = max((x.shape[3] for x in chunks), default=1)
    pads = [np.pad(x, ((0, 0),) * 3 + ((0, runs - x.shape[3]), (0, 0))) for x in chunks]
    bounds = np.concatenate(pads, axis=2) if pads else np.zeros((1, 1, 0, 1, 2), np.int32)
    return as_mask("from_bits", bounds, int(k[-1]), arrays)


def to_bits(mask: Mask | Spans, qo_indptr: Any, kv_indptr: Any) -> Bits:
    """Write a mask of packed requests as FlashInfer's bit-packed custom mask.

    The result takes one bit for each pair of a query and a key of the same request.

    Args:
        mask: A mask for qo_indptr[-1] queries and kv_indptr[-1] keys, or lowered spans.
        qo_indptr: integer (requests + 1,), ascending from 0: the offsets of each request's queries.
        kv_indptr: integer (requests + 1,), ascending from 0: the offsets of each request's keys, in tokens.

    Raises:
        DtypeError: If offsets are not integers.
        ShapeError: If the numbers of requests differ, or if arrays in the mask do not fit the sizes.
        OptionError: If offsets descend, or if a query sees a key of another request (the error names the
            first such query). Also if the mask differs between heads, or if `mask.prepare` raises it.

    Example:
        >>> from attnspan import documents
        >>> to_bits(documents([0, 2, 5]), [0, 2, 5], [0, 2, 5]).indptr.tolist()
        [0, 1, 3]
    """
    q, k = _both("to_bits", qo_indptr, kv_indptr)
    bounds, _, arrays = lowered("to_bits", mask, int(q[-1]), int(k[-1]), None, 1)
    plane = one_plane("to_bits", bounds)
    request = np.repeat(np.arange(len(q) - 1), np.diff(q))
    lo, hi = plane[..., 0], plane[..., 1]
    beyond = ((lo < hi) & ((lo < k[request][:, None]) | (hi > k[request + 1][:, None]))).any(-1)
    if beyond.any():
        i = int(beyond.argmax())
        raise OptionError(
            "to_bits",
            expected="queries that see only keys of their own request",
            got=f"query {i} of request {request[i]}, which sees a key of another request",
            remedy="Pass mask & documents(qo_indptr, kv_indptr)",
        )
    parts = [_packed_bits(plane[q[r] : q[r + 1]] - k[r], int(k[r + 1] - k[r])) for r in range(len(q) - 1)]
    packed = np.concatenate([np.zeros(0, np.uint8), *parts])
    indptr = np.cumsum([0, *map(len, parts)])
    return Bits(_like(packed, arrays), arrays.asarray(indptr, "int32"))


def _packed_bits(spans: Host, k_len: int) -> Host:
    key = np.arange(k_len)
    seen = ((spans[..., :1] <= key) & (key < spans[..., 1:])).any(1)
    return np.packbits(seen, axis=None, bitorder="little")


def _like(x: Host, arrays: Arrays) -> Array:
    """Convert a NumPy array of any dtype to an array of a framework."""
    if arrays.name == "torch":
        return arrays.xp.as_tensor(x, device=arrays.device)
    return arrays.xp.asarray(x)


def _both(what: str, qo_indptr: Any, kv_indptr: Any) -> tuple[Host, Host]:
    q, k = _offsets(f"{what}: qo_indptr", qo_indptr), _offsets(f"{what}: kv_indptr", kv_indptr)
    expected, remedy = "as many requests as qo_indptr, {}", "Pass offsets of the same requests"
    count = len(q) - 1
    expect(len(k) == len(q), f"{what}: kv_indptr", expected, len(k) - 1, remedy, count, error=ShapeError)
    return q, k


def _offsets(what: str, x: Any) -> Host:
    found = integers(what, x, (1,))[0]
    ascending = len(found) > 0 and found[0] == 0 and bool((np.diff(found) >= 0).all())
    got = f"{found[:8].tolist()}"
    expect(ascending, what, "ascending offsets that start at 0", got, "Pass cumulative numbers")
    return found


def _starts(what: str, q: Host, k: Host, is_bits: bool, indptr: Any) -> Host:
    """Return the first element of each request, and the number of elements."""
    if indptr is None:
        sizes = np.diff(q) * np.diff(k)
        return np.concatenate([[0], (-(-sizes // 8) if is_bits else sizes).cumsum()])
    found = _offsets(what, indptr)
    expected, remedy = "as many requests as qo_indptr, {}", "Pass FlashInfer's mask_indptr"
    expect(len(found) == len(q), what, expected, len(found) - 1, remedy, len(q) - 1, error=ShapeError)
    return found


def page_table_from_csr(indptr: Any, indices: Any, last_page_len: Any, page_len: int) -> PageTable:
    """Read FlashInfer's page table, which stores the lists of pages in one array (CSR).

    Args:
        indptr: integer (B + 1,), ascending from 0: the first entry of each batch element in `indices`.
        indices: integer (n,), the numbers of pages.
        last_page_len: integer (B,), the number of tokens on the last page of each batch element.
        page_len: Number of tokens on a page.

    Returns:
        The table and the lengths. Copy them into the `table` and `lengths` of a `PagedCache`.

    Raises:
        DtypeError: If an array does not hold integers.
        ShapeError: If the numbers of batch elements differ, or if there are too few indices.
        OptionError: If offsets descend, if a page is negative, or if a last page has no tokens or too many.
            Also if values cannot be read.

    Example:
        >>> page_table_from_csr([0, 2, 3], [7, 4, 5], [1, 8], page_len=8).table.tolist()
        [[7, 4], [5, -1]]
    """
    what = "page_table_from_csr"
    starts = _offsets(f"{what}: indptr", indptr)
    pages, last = integers(f"{what}: indices", indices, (1,))[0], integers(what, last_page_len, (1,))[0]
    page_len, count = checks.positive(f"{what}: page_len", page_len), np.diff(starts)
    expected, remedy = "a length for each of {} batch elements", "Pass one for each"
    fits = len(last) == len(count)
    expect(fits, f"{what}: last_page_len", expected, len(last), remedy, len(count), error=ShapeError)
    fits, remedy = len(pages) >= starts[-1], "Pass all pages"
    expect(fits, f"{what}: indices", "{} pages", len(pages), remedy, int(starts[-1]), error=ShapeError)
    wrong = np.flatnonzero((count > 0) & ((last < 1) | (last > page_len)))
    got = f"{last[wrong[0]]} for batch element {wrong[0]}" if len(wrong) else ""
    remedy = "Pass the tokens on the last page"
    expect(len(wrong) == 0, f"{what}: last_page_len", "1 to {}", got, remedy, page_len)
    real = np.arange(count.max(initial=0)) < count[:, None]
    table = np.full(real.shape, -1, np.int64)
    table[real] = pages[: starts[-1]]
    lengths = np.where(count > 0, (count - 1) * page_len + last, 0)
    return _page_table(what, table, real, lengths, arrays_for([indptr, indices, last_page_len], what=what))


def page_table_from_blocks(block_tables: Any, seq_lens: Any, page_len: int) -> PageTable:
    """Read vLLM's page table, which stores a row of pages for each batch element.

    Args:
        block_tables: integer (B, pages). Entries behind a sequence's last page have no meaning.
        seq_lens: integer (B,), the number of tokens of each batch element.
        page_len: Number of tokens on a page (vLLM's `block_size`).

    Returns:
        The table, with -1 behind the last page, and the lengths. Copy them into the `table` and `lengths` of
        a `PagedCache`.

    Raises:
        DtypeError: If an array does not hold integers.
        ShapeError: If the numbers of batch elements differ.
        OptionError: If a sequence is longer than its row of pages, if a length is negative, or if a page in
            use is negative. Also if values cannot be read.

    Example:
        >>> page_table_from_blocks([[7, 4], [5, 0]], [9, 8], page_len=8).table.tolist()
        [[7, 4], [5, -1]]
    """
    what = "page_table_from_blocks"
    table = integers(f"{what}: block_tables", block_tables, (2,))[0]
    lengths, page_len = integers(f"{what}: seq_lens", seq_lens, (1,))[0], checks.positive(what, page_len)
    expected, remedy = "a length for each of {} batch elements", "Pass one for each"
    fits = len(lengths) == len(table)
    expect(fits, f"{what}: seq_lens", expected, len(lengths), remedy, len(table), error=ShapeError)
    most = table.shape[1] * page_len
    wrong = np.flatnonzero((lengths < 0) | (lengths > most))
    got = f"{lengths[wrong[0]]} for batch element {wrong[0]}" if len(wrong) else ""
    expect(len(wrong) == 0, f"{what}: seq_lens", "0 to {}", got, "Pass a column for each page", most)
    real = np.arange(table.shape[1]) * page_len < lengths[:, None]
    return _page_table(what, table, real, lengths, arrays_for([block_tables, seq_lens], what=what))


def _page_table(what: str, table: Host, real: Host, lengths: Host, arrays: Arrays) -> PageTable:
    wrong = np.argwhere(real & (table < 0))
    got = f"{table[tuple(wrong[0])]} for batch element {wrong[0, 0]}" if len(wrong) else ""
    expect(len(wrong) == 0, what, "page numbers of at least 0", got, "Pass a page for each token")
    return PageTable(arrays.asarray(np.where(real, table, -1), "int32"), arrays.asarray(lengths, "int32"))
