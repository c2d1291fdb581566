"""Paged KV caches, whose batch elements take pages from one pool, and attention over them.

The operators are ``attnspan::paged_append`` and ``attnspan::paged_attention``. Spans are intervals of tokens,
on whatever pages these tokens are. Backends with ``paged``, such as the CPU kernel, look up pages while they
read. Other backends receive a copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnspan import masks
from attnspan.backends import Part, find, table
from attnspan.base.arrays import stored
from attnspan.base.checks import count
from attnspan.call import Call, check_keywords, schema
from attnspan.call.backend import asked as asked_for
from attnspan.call.options import Given, Options
from attnspan.errors import DtypeError, OptionError, expect
from attnspan.masks import Mask

from . import compat
from ._attention import attention
from ._autograd import define
from ._cache_rows import CacheRows, row_numbers
from ._cache_write import LOST, apart, check_new, check_room, guard, new_lengths, refuse_gradients
from ._front import TorchFront, from_bhsd
from ._signature import arguments, library
from .choice import backend_for
from .ops import check_k_len, new_outputs, read_options, readable

# The arguments of `attention` after q, k and v.
_ROWS = schema.FORWARD[3:]


def _write(keys: Tensor, values: Tensor, lengths: Tensor, table: Tensor, *new: Any) -> Tensor:
    """Append new tokens to each batch element. One without pages for them is not written and becomes `LOST`.

    The last page of keys and values is a scratch page for tokens that must not be stored.
    """
    *chunk, counts, max_len = new
    n = check_new(keys.shape[1], keys, values, lengths, *chunk, counts)
    stored(table, "cache: table")
    pages, page = keys.shape[0] - 1, keys.shape[2]
    room = min(max_len, table.shape[1] * page)
    token, start = torch.arange(n, device=keys.device), lengths.to(torch.int64)[:, None]
    own = torch.full_like(start, n) if counts is None else counts.to(torch.int64)[:, None]
    at = start + token - (n - own)
    # In a page that two batch elements use, one would overwrite the tokens of the other.
    used = (torch.arange(table.shape[1], device=keys.device) * page < start + own) & _is_page(table, pages)
    numbers = torch.where(used, table, pages).to(torch.int64)
    users = torch.zeros(pages + 1, dtype=torch.int64, device=keys.device)
    users.scatter_add_(0, numbers.flatten(), torch.ones_like(numbers).flatten())
    of_page = numbers.gather(1, at.clamp(0, room - 1) // page)
    known = (at >= 0) & (at < room) & (of_page < pages) & (users[of_page] == 1)
    mine = token >= n - own
    legal = ((start >= 0) & (own >= 0) & (own <= n) & (known | ~mine)).all(1)
    if keys.is_cpu and not legal.all():
        check_room(lengths.tolist(), own[:, 0].tolist(), n, room)
        row = int(legal.logical_not().nonzero()[0])
        given = int(_is_page(table[row], pages).sum())
        got = f"{given} of {page} tokens each, with {int(lengths[row])} tokens in them"
        remedy = "Call reserve(...) for the new tokens, or reset() it. Nothing was written"
        if (of_page[row][mine[row]] < pages).all():
            got = "a page that another element uses"
            remedy = "Call reorder(range(batch)) to give each element separate pages. Nothing was written"
        what = f"cache: batch element {row}"
        expect(False, what, "pages for {} more tokens", got, remedy, int(own[row]))
    own_page, place = torch.where(mine & legal[:, None], of_page, pages), at % page
    chunks = [x.transpose(1, 2).contiguous() for x in apart((keys, values), (chunk[0], chunk[1]))]
    for cache, x in zip((keys, values), chunks, strict=True):
        cache[own_page, :, place] = x
    return torch.where(legal, (start + own)[:, 0], LOST).to(lengths.dtype)


def _is_page(table: Tensor, pages: int) -> Tensor:
    return (table >= 0) & (table < pages)


def _forward(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    pages, given = rest[0], schema.by_name(_ROWS, rest[1:])
    if given["k_len"] is not None:
        check_k_len(int(given["k_len"]), pages.shape[1] * keys.shape[2])
    out, lse = new_outputs(q, values, torch.float32)
    options = read_options(Options(*(given[row.name] for row in schema.OPTIONS)))
    part = Part(readable(q), keys, values, given["bounds"].contiguous(), given["scale"], options)
    find("torch", given["backend"]).paged(part, pages.contiguous(), out, lse)  # type: ignore[misc]
    return out, lse


def _forward_fake(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    del keys, rest
    return new_outputs(q, values, torch.float32)


_BUFFERS = "Tensor(a!) keys, Tensor(b!) values, Tensor lengths, Tensor table"
_write_op = define(
    library,
    f"paged_append({_BUFFERS}, Tensor k_new, Tensor v_new, Tensor? counts, int max_len) -> Tensor",
    new_lengths,
    CompositeExplicitAutograd=_write,
)
guard(_write_op)
_forward_op = define(
    library,
    f"paged_attention(Tensor q, Tensor keys, Tensor values, Tensor table, {arguments(_ROWS)})"
    " -> (Tensor out, Tensor lse)",
    _forward_fake,
    CPU=_forward,
    CUDA=_forward,
)
refuse_gradients(_forward_op, "PagedCache", "queries and options")


class PagedCache(CacheRows):
    """Keys and values of sequences with very different lengths. Each takes pages from one pool as it grows.

    Call ``reserve`` on the host before a step to assign pages. ``update`` and ``attention`` then have fixed
    shapes and do not synchronize. If other code manages the pages, it writes into ``table``.

    Args:
        pages: Number of pages in the pool.
        page_len: Number of tokens in a page.
        kv_heads: Number of key and value heads, Hkv.
        head_dim: Elements of a key, D.
        v_dim: Elements of a value, Dv. By default it is ``head_dim``.
        batch: Batch size, B.
        max_len: Largest number of tokens of a batch element.
        dtype: Dtype of keys and values, by default torch's.
        device: Device of keys and values, by default torch's.

    Attributes:
        table: int32, shape (B, max_len / page_len, rounded up): the pages of each batch element, or -1.
        lengths: int32, shape (B,): the number of tokens of each batch element.

    Raises:
        ValueError: A size is not positive.
        TypeError: A size is not an int.

    Example:
        >>> cache = PagedCache(pages=4, page_len=2, kv_heads=1, head_dim=4, batch=2, max_len=6)
        >>> cache.reserve([3, 1])
        >>> new = torch.randn(2, 1, 3, 4)
        >>> cache.update(new, new, counts=torch.tensor([3, 1]))
        >>> cache.table.tolist(), cache.lengths.tolist()
        ([[0, 1, -1], [2, -1, -1]], [3, 1])
        >>> cache.attention(torch.randn(2, 2, 3, 4)).shape
        torch.Size([2, 2, 3, 4])
    """

    table: Tensor

    def __init__(
        self,
        pages: int,
        page_len: int,
        kv_heads: int,
        head_dim: int,
        v_dim: int | None = None,
        *,
        batch: int,
        max_len: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        pages, page_len = count("pages", pages, least=1), count("page_len", page_len, least=1)
        max_len = count("max_len", max_len, least=1)
        sizes: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": head_dim, "v_dim": v_dim, "batch": batch}
        axes, pool = (
            ("pages", "kv_heads", "page_len"),
            {"pages": pages + 1, "page_len": page_len},
        )  # see _write
        super().__init__(axes, max_len, dtype=dtype, device=device, **sizes | pool)
        self.max_len = max_len
        with torch.inference_mode(False):
            shape = batch, -(-max_len // page_len)
            table = torch.full(shape, -1, dtype=torch.int32, device=device)
            self.register_buffer("table", table, persistent=False)

    def extra_repr(self) -> str:
        # Sizes, for ``print(model)``.
        pages, heads, page, dim = self._keys.shape
        v_dim = self._values.shape[3]
        sizes = f"pages={pages - 1}, page_len={page}, kv_heads={heads}, head_dim={dim}, v_dim={v_dim}"
        return f"{sizes}, batch={len(self.table)}, max_len={self.max_len}"

    @property
    def free_pages(self) -> int:
        """Number of pages that no batch element has. Reading it synchronizes.

        Example:
            >>> cache = PagedCache(pages=4, page_len=2, kv_heads=1, head_dim=4, batch=2, max_len=6)
            >>> cache.reserve([3, 1])
            >>> cache.free_pages
            1
        """
        return len(self._free(set(self.table.flatten().tolist())))

    def _free(self, taken: set[int]) -> list[int]:
        return [x for x in range(self._keys.shape[0] - 1) if x not in taken]

    def reserve(self, lengths: Any) -> None:
        """Assign pages until batch element b has a capacity of ``lengths[b]`` tokens. Synchronizes.

        Args:
            lengths: Total capacity of each batch element, not the increment: a list or an integer tensor of B
                numbers. A number below the current capacity changes nothing.

        Raises:
            ValueError: A length is negative or exceeds ``max_len``, or too few pages are free. Then nothing
                changes.
            TypeError: A length is not an integer.
        """
        several, got = hasattr(lengths, "__iter__"), type(lengths).__name__
        remedy = "Pass a list with the total capacity of each batch element"
        expect(several, "reserve", "a length for each batch element", got, remedy, error=DtypeError)
        given = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        page, rows = self._keys.shape[2], self.table.tolist()
        expected = "a length for each of {} batch elements"
        expect(len(given) == len(rows), "reserve", expected, len(given), "Pass all", len(rows))
        wanted = [count(f"reserve: lengths[{b}]", n) for b, n in enumerate(given)]
        most, remedy = max(wanted, default=0), "Make the cache with a larger max_len"
        expect(most <= self.max_len, "reserve", "at most {} tokens", most, remedy, self.max_len)
        needed = [(b, i) for b, n in enumerate(wanted) for i in range(-(-n // page))]
        self._take([(b, i) for b, i in needed if rows[b][i] < 0], rows, {x for row in rows for x in row})
        self.table.copy_(torch.tensor(rows, dtype=torch.int32))

    def _take(self, places: list[tuple[int, int]], rows: list[list[int]], taken: set[int]) -> None:
        """Put free pages into these places of the table."""
        free = self._free(taken)
        remedy = "Call reset(rows) for finished batch elements, or make the cache with more pages"
        expect(len(places) <= len(free), "PagedCache", "{} free pages", len(free), remedy, len(places))
        for (b, i), number in zip(places, free, strict=False):
            rows[b][i] = number

    def update(self, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> None:
        """Append new tokens to each batch element, in place, and advance its length.

        On CPU, a batch element without pages for its tokens raises before anything is written. On other
        devices it is not written, and attention returns NaN for it until you call `reset`.

        Args:
            k_new: Shape (B, Hkv, n, D), without gradients.
            v_new: Shape (B, Hkv, n, Dv).
            counts: Integer, shape (B,), from 0 to n: the number of new tokens of each batch element, at the
                end of the chunk. None means n for each.

        Raises:
            ValueError: Sizes do not fit, or tokens require gradients. On CPU also if pages are missing.
            TypeError: Dtypes do not fit.
        """
        k_new, v_new = self._chunk(k_new, v_new, counts)
        arrays = self._keys, self._values, self.lengths, self.table
        self.lengths.copy_(_write_op(*arrays, k_new, v_new, counts, self.max_len))

    def mask(self, q_len: int) -> Mask:
        """Mask of the newest ``q_len`` tokens of each batch element: ``causal() & cache(lengths)``."""
        self._check_count("mask", q_len, "queries")
        return masks.causal() & masks.cache(self.lengths)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Copies of keys and values, (B, Hkv, max_len, D), with max_len rounded up to whole pages.

        If the table has no page for a place, the copies contain zeros, or NaN if tokens should be there.
        """
        self._check_storage()
        pages, page = self._keys.shape[0] - 1, self._keys.shape[2]
        real = _is_page(self.table, pages)
        first = torch.arange(self.table.shape[1], device=real.device) * page
        absent = torch.where(first < self.lengths[:, None], torch.nan, 0.0)[:, :, None, None]
        numbers = self.table.clamp(0, pages - 1).long()
        picked = (
            torch.where(real[:, :, None, None], x.transpose(0, 1)[:, numbers], absent.to(x.dtype))
            for x in (self._keys, self._values)
        )
        k, v = (x.flatten(2, 3).transpose(0, 1) for x in picked)
        return k, v

    def attention(self, q: Tensor, *, mask: Mask | None = None, **options: Any) -> Any:
        """Call `attnspan.torch.attention` with q and the tokens of each batch element.

        The CPU kernel and the Triton kernel read the pages in place, without gradients. Every other backend
        receives a copy. So does a call on CPU if a query or option requires a gradient.

        Args:
            q: Shape (B, Hq, n, D): queries of the newest n tokens of each batch element.
            mask: The keys that each query may see. By default it is ``mask(n)``.
            **options: Keywords of `attnspan.torch.attention`, without ``layout``.

        Returns:
            The same as `attnspan.torch.attention`. If a query sees a token on a page that does not exist, its
            output is NaN.

        Raises:
            ValueError: As for `attnspan.torch.attention`.
            TypeError: As for `attnspan.torch.attention`.
        """
        check_keywords(attention, options)
        asked = {**(attention.__kwdefaults__ or {}), **options}
        expect(asked["layout"] == "bhsd", "layout", "bhsd", asked["layout"], "Transpose q", error=OptionError)
        mask = self.mask(q.shape[2]) if mask is None else mask
        return_lse, scale, backend = (asked.pop(name) for name in ("return_lse", "scale", "backend"))
        del asked["mask"], asked["layout"]
        batch, columns = self.table.shape
        # A call reads only the sizes of these arrays, so they need no memory.
        k, v = (
            x[0, 0, 0, :1].expand(batch, x.shape[1], columns * x.shape[2], x.shape[3])
            for x in (self._keys, self._values)
        )
        call = Call.of(TorchFront(), q, k, v, Given(**asked), mask=mask, scale=scale, layout="bhsd")
        chosen = backend_for(call.problem, asked_for(backend))
        options_of = call.options or Options()
        wants_gradient = torch.is_grad_enabled() and compat.any_requires_grad(q, *options_of)
        cast = call.k.dtype != self._keys.dtype  # by autocast
        in_place = table("torch")[chosen].paged is not None
        if cast or not in_place or (chosen == "cpu" and wants_gradient):
            return attention(q, *self.gathered(), mask=mask, **options)
        pool = self._keys[:-1], self._values[:-1], self.table
        rest = *options_of, call.lowered_for, chosen
        out, lse = _forward_op(call.q, *pool, call.bounds, call.scale, *rest)
        return from_bhsd(out, lse, "bhsd", return_lse)

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> None:
        """Empty the cache, or some batch elements, and free their pages. See `StaticCache.reset`."""
        self._check_storage()
        chosen, _ = self._chosen(rows)
        super().reset(rows)
        self.table.masked_fill_(chosen[:, None], -1)

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Replace batch element b with the contents of element ``rows[b]``, as `StaticCache.reorder`.

        The call synchronizes. Elements that continue the same element share its full pages. Each receives a
        separate last page for new tokens, with a copy of the last page's tokens.

        Raises:
            ValueError: As for a static cache, or too few pages are free. Then nothing changes.
            TypeError: As for a static cache.
        """
        sources = row_numbers("reorder: rows", rows, self.lengths, whole=True)[0].tolist()
        page, old, lengths = self._keys.shape[2], self.table.tolist(), self.lengths.tolist()
        table = [list(old[b]) for b in sources]
        full = [max(lengths[b], 0) // page for b in sources]
        taken = {x for row, n in zip(table, full, strict=True) for x in row[:n]}
        places = []
        for b, row in enumerate(table):
            for i in range(full[b], len(row)):
                if row[i] in taken and row[i] >= 0:
                    places.append((b, i))
                taken.add(row[i])
        copied = [table[b][i] for b, i in places]
        self._take(places, table, taken)
        moved = [x[copied] for x in (self._keys, self._values)]
        for cache, x in zip((self._keys, self._values), moved, strict=True):
            cache[[table[b][i] for b, i in places]] = x
        self.table.copy_(torch.tensor(table, dtype=torch.int32))
        self.lengths.copy_(self.lengths[sources])
