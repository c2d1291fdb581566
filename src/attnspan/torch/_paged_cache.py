"""Caches whose rows take pages from one pool, and attention over them.

The operators ``attnspan::paged_append`` and ``attnspan::paged_attention``. Spans are intervals of a row's
tokens, wherever these lie: the CPU kernel and Triton's look up pages while they read, other backends are
given a copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnspan import masks
from attnspan.base.arrays import stored
from attnspan.base.checks import count
from attnspan.call import Call, check_keywords
from attnspan.call.backend import asked as asked_for
from attnspan.call.options import Given, Options
from attnspan.errors import DtypeError, OptionError, expect
from attnspan.kernels import cpu, triton
from attnspan.masks import Mask

from . import compat
from ._attention import attention
from ._cache_rows import CacheRows, row_numbers
from ._cache_write import LOST, apart, check_new, check_room, guard
from ._front import TorchFront, from_bhsd
from .choice import backend_for
from .ops import OPTION_SCHEMA, check_k_len, new_outputs, read_options, readable

__all__ = ["PagedCache"]

_library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "paged_append(Tensor(a!) keys, Tensor(b!) values, Tensor lengths, Tensor table, Tensor k_new,"
    " Tensor v_new, Tensor? counts, int max_len) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(  # type: ignore[no-untyped-call]
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor bounds, float scale,"
    f" {OPTION_SCHEMA}, Tensor? k_len=None, str backend='cpu') -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# Defaults of the operator's arguments after `scale`: torch leaves trailing ones out.
_DEFAULTS = (*Options(), None, "cpu")


def _write(keys: Tensor, values: Tensor, lengths: Tensor, table: Tensor, *new: Any) -> Tensor:
    """New tokens behind those of each row; a row without pages for them is left alone, and `LOST`.

    The last page of keys and values is a scratch page: it takes what must not be stored.
    """
    *chunk, counts, max_len = new
    n = check_new(keys.shape[1], keys, values, lengths, *chunk, counts)
    stored(table, "cache: table")
    pages, page = keys.shape[0] - 1, keys.shape[2]
    room = min(max_len, table.shape[1] * page)
    token, start = torch.arange(n, device=keys.device), lengths.to(torch.int64)[:, None]
    own = torch.full_like(start, n) if counts is None else counts.to(torch.int64)[:, None]
    at = start + token - (n - own)
    # Another row's tokens would be overwritten in a page that two rows use.
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
        remedy = "Call reserve(...) for the tokens to come, or reset() the row; nothing was written"
        if (of_page[row][mine[row]] < pages).all():
            got = "one that another row uses"
            remedy = "reorder(range(batch)) gives each row pages of its own to write; nothing was written"
        expect(False, f"cache row {row}", "pages for {} more tokens", got, remedy, int(own[row]))
    own_page, place = torch.where(mine & legal[:, None], of_page, pages), at % page
    chunks = [x.transpose(1, 2).contiguous() for x in apart((keys, values), (chunk[0], chunk[1]))]
    for cache, x in zip((keys, values), chunks, strict=True):
        cache[own_page, :, place] = x
    return torch.where(legal, (start + own)[:, 0], LOST).to(lengths.dtype)


def _write_fake(keys: Tensor, values: Tensor, lengths: Tensor, table: Tensor, *new: Any) -> Tensor:
    del table
    check_new(keys.shape[1], keys, values, lengths, *new[:3])
    return torch.empty_like(lengths)


def _is_page(table: Tensor, pages: int) -> Tensor:
    return (table >= 0) & (table < pages)


def _forward(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    table, bounds, scale, *given = rest
    given += _DEFAULTS[len(given) :]
    k_len, backend = given[-2:]
    if k_len is not None:
        check_k_len(int(k_len), table.shape[1] * keys.shape[2])
    out, lse = new_outputs(q, values, torch.float32)
    how: dict[str, Any] = {"scale": scale, "options": read_options(Options(*given[:-2]))}
    how["table"] = table.contiguous()
    arrays = readable(q), keys, values, bounds.contiguous(), out, lse
    if backend == "triton":
        triton.forward(*arrays, **how)
    else:
        cpu.forward(*arrays, num_threads=torch.get_num_threads(), **how)
    return out, lse


def _forward_fake(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    del keys, rest
    return new_outputs(q, values, torch.float32)


def _refuse_gradients(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    wanted = torch.is_grad_enabled() and compat.any_requires_grad(*arguments)
    remedy = "Call the model under torch.no_grad() or inference_mode(), or detach them"
    expect(
        not wanted, "PagedCache", "queries and options without gradients", "ones that require them", remedy
    )
    with compat.BelowAutograd():
        return _forward_op.redispatch(keyset & compat.after_autograd, *arguments)  # type: ignore[no-any-return]


_write_op, _forward_op = torch.ops.attnspan.paged_append.default, torch.ops.attnspan.paged_attention.default
_library.impl("paged_append", _write, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("attnspan::paged_append", _write_fake, lib=_library)
guard(_library, "paged_append", _write_op)
for _key in ("CPU", "CUDA"):
    _library.impl("paged_attention", _forward, _key)  # type: ignore[no-untyped-call]
_library.impl("paged_attention", _refuse_gradients, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
torch.library.register_fake("attnspan::paged_attention", _forward_fake, lib=_library)


class PagedCache(CacheRows):
    """Keys and values of rows of very different lengths: each takes pages from one pool as it grows.

    ``reserve`` gives rows their pages, on the host, ahead of a step; ``update`` and ``attention`` of a step
    have fixed shapes and wait for nothing. Whoever manages pages elsewhere writes into ``table``.

    Args:
        pages: Pages of the pool.
        page_len: Tokens of a page.
        kv_heads: Key and value heads, Hkv.
        head_dim: Elements of a key, D.
        v_dim: Elements of a value, Dv; ``head_dim`` by default.
        batch: Rows, B.
        max_len: The most tokens that a row may have.
        dtype, device: Of keys and values.

    Attributes:
        table: Shape (B, max_len / page_len, rounded up), int32: the pages of each row, -1 for none.
        lengths: Shape (B,), int32: tokens of each row.

    Raises:
        ValueError, TypeError: A size is no positive int.

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

    def reserve(self, lengths: Any) -> None:
        """Give rows pages until each has room for ``lengths[b]`` tokens. Waits for the device.

        Raises:
            ValueError: A length below 0 or beyond ``max_len``, or fewer free pages than that takes; nothing
                changes.
            TypeError: A length that is no integer.
        """
        several, got = hasattr(lengths, "__iter__"), type(lengths).__name__
        remedy = "Pass a list: how many tokens each row has room for afterwards, in all"
        expect(several, "reserve", "a length for each row", got, remedy, error=DtypeError)
        given = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        page, rows = self._keys.shape[2], self.table.tolist()
        expected = "a length for each of {} rows"
        expect(len(given) == len(rows), "reserve", expected, len(given), "Pass all", len(rows))
        wanted = [count(f"reserve: lengths[{b}]", n) for b, n in enumerate(given)]
        most, remedy = max(wanted, default=0), "Make the cache with a larger max_len"
        expect(most <= self.max_len, "reserve", "at most {} tokens", most, remedy, self.max_len)
        needed = [(b, i) for b, n in enumerate(wanted) for i in range(-(-n // page))]
        self._take([(b, i) for b, i in needed if rows[b][i] < 0], rows, {x for row in rows for x in row})
        self.table.copy_(torch.tensor(rows, dtype=torch.int32))

    def _take(self, places: list[tuple[int, int]], rows: list[list[int]], taken: set[int]) -> None:
        """Put pages that are not taken into these places of the rows."""
        free = [x for x in range(self._keys.shape[0] - 1) if x not in taken]
        remedy = "reset() rows that are done, or make the cache with more pages"
        expect(len(places) <= len(free), "PagedCache", "{} free pages", len(free), remedy, len(places))
        for (b, i), number in zip(places, free, strict=False):
            rows[b][i] = number

    def update(self, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> None:
        """Write each row's new tokens behind those that it has, in place, and advance its length.

        Args:
            k_new: Shape (B, Hkv, n, D), without gradients.
            v_new: Shape (B, Hkv, n, Dv).
            counts: Shape (B,), integer, 0 to n: how many of the last tokens of the chunk are the row's own;
                None: all.

        Raises:
            ValueError: Sizes do not fit, or tokens require gradients; on CPU also a row without pages for its
                tokens, before anything is written. On other devices such a row is left as it is, and
                attention gives NaN until `reset`.
            TypeError: Element types do not fit.
        """
        k_new, v_new = self._chunk(k_new, v_new, counts)
        arrays = self._keys, self._values, self.lengths, self.table
        self.lengths.copy_(_write_op(*arrays, k_new, v_new, counts, self.max_len))

    def mask(self, q_len: int) -> Mask:
        """Mask of the newest ``q_len`` tokens of each row: ``causal() & cache(lengths)``."""
        self._check_count("mask", q_len, "query rows")
        return masks.causal() & masks.cache(self.lengths)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Copies of the rows' keys and values, (B, Hkv, max_len, D) with whole pages.

        Where the table names no page there are zeros, or NaN if the row has tokens there.
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
        """`attnspan.torch.attention` of q to the tokens of each row.

        The CPU kernel and Triton's read the pages where they lie, without gradients; every other backend, and
        a call on a CPU whose query or option wants one, is given a copy.

        Args:
            q: Shape (B, Hq, n, D): the newest n tokens of each row.
            mask: What they see; by default ``mask(n)``.
            **options: Of `attnspan.torch.attention`, without ``layout``.

        Returns:
            As of `attnspan.torch.attention`. A query that sees a token on a page that the pool does not have
            gets NaN.
        """
        check_keywords(attention, options)
        asked = {**(attention.__kwdefaults__ or {}), **options}
        expect(asked["layout"] == "bhsd", "layout", "bhsd", asked["layout"], "Transpose q", error=OptionError)
        mask = self.mask(q.shape[2]) if mask is None else mask
        return_lse, scale, backend = (asked.pop(name) for name in ("return_lse", "scale", "backend"))
        del asked["mask"], asked["layout"]
        batch, columns = self.table.shape
        # Arrays of the right sizes without memory of their own: a call reads only their sizes.
        k, v = (
            x[0, 0, 0, :1].expand(batch, x.shape[1], columns * x.shape[2], x.shape[3])
            for x in (self._keys, self._values)
        )
        call = Call.of(TorchFront(), q, k, v, Given(**asked), mask=mask, scale=scale, layout="bhsd")
        chosen = backend_for(call.problem, asked_for(backend))
        options_of = call.options or Options()
        wants_gradient = torch.is_grad_enabled() and compat.any_requires_grad(q, *options_of)
        cast = call.k.dtype != self._keys.dtype  # by autocast
        if cast or chosen not in ("cpu", "triton") or (chosen == "cpu" and wants_gradient):
            return attention(q, *self.gathered(), mask=mask, **options)
        pool = self._keys[:-1], self._values[:-1], self.table
        rest = *options_of, call.lowered_for, chosen
        out, lse = _forward_op(call.q, *pool, call.bounds, call.scale, *rest)
        return from_bhsd(out, lse, "bhsd", return_lse)

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> None:
        """Empty the cache, or some of its batch rows; their pages become free. See `StaticCache.reset`."""
        self._check_storage()
        chosen, _ = self._chosen(rows)
        super().reset(rows)
        self.table.masked_fill_(chosen[:, None], -1)

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make each batch row what another one was, as `StaticCache.reorder`. Waits for the device.

        Rows that continue the same one share its full pages. Each has a page of its own for the tokens to
        come, into which those of the last page are copied.

        Raises:
            ValueError, TypeError: As for a static cache, and with fewer free pages than that takes; nothing
                changes.
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
