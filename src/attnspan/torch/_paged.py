"""Caches whose rows take pages from one pool, and attention over them.

The operators ``attnspan::paged_write`` and ``attnspan::paged_attention``. Spans are intervals of a row's
tokens, wherever these lie: Triton's kernel looks up pages while it reads, other backends are given a copy.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .. import masks
from ..call import Call
from ..checks import count
from ..errors import DtypeError, OptionError, ShapeError, expect
from ..kernels import triton
from ..masks import Mask
from ..options import Given, Options
from ._attention import attention
from ._backends import choose_backend
from ._cache_write import LOST, check_not_lost
from ._front import TorchFront, from_bhsd
from .ops import OPTION_SCHEMA, new_outputs, read_options, readable

__all__ = ["PagedCache"]

_library = torch.library.Library("attnspan", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "paged_write(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) lengths, Tensor table, Tensor k_new,"
    " Tensor v_new, Tensor? counts) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(  # type: ignore[no-untyped-call]
    "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor bounds, float scale,"
    f" {OPTION_SCHEMA}) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _write(keys: Tensor, values: Tensor, lengths: Tensor, table: Tensor, *new: Any) -> None:
    """New tokens behind those of each row; a row without pages for them is left alone, and `LOST`.

    The last page of keys and values is a scratch page: it takes what must not be stored.
    """
    k_new, v_new, counts = new
    pages, page, n = keys.shape[0] - 1, keys.shape[1], k_new.shape[2]
    token, start = torch.arange(n, device=keys.device), lengths.to(torch.int64)[:, None]
    own = torch.full_like(start, n) if counts is None else counts.to(torch.int64)[:, None]
    room, mine = table.shape[1] * page, token >= n - own
    at = start + token - (n - own)
    of_page = table.gather(1, at.clamp(0, room - 1) // page).to(torch.int64)
    known = (at >= 0) & (at < room) & (of_page >= 0) & (of_page < pages)
    legal = ((start >= 0) & (own >= 0) & (own <= n) & (known | ~mine)).all(1)
    if keys.is_cpu and not legal.all():
        check_not_lost(lengths.tolist())
        row = int(legal.logical_not().nonzero()[0])
        remedy = "Call reserve(...) for the tokens to come, or reset() the row; nothing was written"
        got = f"{int((table[row] >= 0).sum())} of {page} tokens, of which {int(lengths[row])} are taken"
        expect(False, f"cache row {row}", "pages for {} more tokens", got, remedy, int(own[row]))
    slot = torch.where(mine & legal[:, None], of_page * page + at % page, pages * page)
    chunks = [tokens.transpose(1, 2).contiguous() for tokens in (k_new, v_new)]
    for cache, chunk in zip((keys, values), chunks, strict=True):
        cache.view(-1, *cache.shape[2:])[slot] = chunk
    lengths.copy_(torch.where(legal, (start + own)[:, 0], LOST))


def _forward(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    table, bounds, scale, *given = rest
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    out, lse = new_outputs(q, v)
    options = read_options(Options(*given))
    arrays = readable(q), k, v, bounds.contiguous(), out, lse
    triton.forward(*arrays, scale=scale, options=options, table=table.contiguous())
    return out, lse


def _forward_fake(q: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    del keys, rest
    return new_outputs(q, values.transpose(1, 2))


def _refuse_gradients(keyset: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
    remedy = "Call the model under torch.no_grad() or inference_mode(), or detach them"
    expect(
        not wanted, "PagedCache", "queries and options without gradients", "ones that require them", remedy
    )
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)  # type: ignore[no-any-return]


_write_op, _forward_op = torch.ops.attnspan.paged_write.default, torch.ops.attnspan.paged_attention.default
_library.impl("paged_write", _write, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("attnspan::paged_write", lambda *_: None, lib=_library)
for _key in ("CPU", "CUDA"):
    _library.impl("paged_attention", _forward, _key)  # type: ignore[no-untyped-call]
_library.impl("paged_attention", _refuse_gradients, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
torch.library.register_fake("attnspan::paged_attention", _forward_fake, lib=_library)


class PagedCache(nn.Module):
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
    lengths: Tensor
    _keys: Tensor
    _values: Tensor

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
        super().__init__()
        sizes = {"pages": pages, "page_len": page_len, "kv_heads": kv_heads, "batch": batch}
        sizes |= {"max_len": max_len, "head_dim": head_dim, "v_dim": head_dim if v_dim is None else v_dim}
        for name, size in sizes.items():
            count(name, size, least=1)
        self.max_len = max_len
        for name, dim in (("_keys", head_dim), ("_values", sizes["v_dim"])):
            shape = pages + 1, page_len, kv_heads, dim  # one more, see _write
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        table = torch.full((batch, -(-max_len // page_len)), -1, dtype=torch.int32, device=device)
        self.register_buffer("table", table, persistent=False)
        lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.register_buffer("lengths", lengths, persistent=False)

    def reserve(self, lengths: Any) -> None:
        """Give rows pages until each has room for ``lengths[b]`` tokens. Waits for the device.

        Raises:
            ValueError: A length beyond ``max_len``, or fewer free pages than that takes; nothing changes.
        """
        page, wanted = self._keys.shape[1], [int(x) for x in lengths]
        rows, most = self.table.tolist(), max(wanted, default=0)
        expected = "a length for each of {} rows"
        expect(len(wanted) == len(rows), "reserve", expected, len(wanted), "Pass all", len(rows))
        remedy = "Make the cache with a larger max_len"
        expect(most <= self.max_len, "reserve", "at most {} tokens", most, remedy, self.max_len)
        taken = {x for row in rows for x in row}
        free = [x for x in range(self._keys.shape[0] - 1) if x not in taken]
        needed = [(b, i) for b, n in enumerate(wanted) for i in range(-(-n // page))]
        lacking = [(b, i) for b, i in needed if rows[b][i] < 0]
        remedy = "reset() rows that are done, or make the cache with more pages"
        expect(len(lacking) <= len(free), "reserve", "{} free pages", len(free), remedy, len(lacking))
        for (b, i), number in zip(lacking, free, strict=False):
            rows[b][i] = number
        self.table.copy_(torch.tensor(rows, dtype=torch.int32))

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
        for name, new, cache in (("k_new", k_new, self._keys), ("v_new", v_new, self._values)):
            (batch, _), (_, _, heads, dim) = self.table.shape, cache.shape
            fits = new.dim() == 4 and (new.shape[0], new.shape[1], new.shape[3]) == (batch, heads, dim)
            wanted, remedy = "shape ({}, {}, n, {})", "Make the cache for the model's sizes"
            expect(fits, name, wanted, tuple(new.shape), remedy, batch, heads, dim, error=ShapeError)
            remedy = "Make the cache with the dtype of k and v"
            expect(new.dtype == cache.dtype, name, "{}", new.dtype, remedy, cache.dtype, error=DtypeError)
            got = "ones that require them"
            expect(not new.requires_grad, name, "tokens without gradients", got, "Detach them")
        if counts is not None:
            self._check_rows("counts", counts, (torch.int32, torch.int64), "int32 or int64")
        _write_op(self._keys, self._values, self.lengths, self.table, k_new, v_new, counts)

    def _check_rows(self, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], expected: str) -> None:
        shape, remedy = self.lengths.shape, "Pass one for each row of the cache"
        expect(x.dtype in dtypes, name, expected, x.dtype, remedy, error=DtypeError)
        wanted = "one entry per batch row, shape ({},)"
        expect(x.shape == shape, name, wanted, tuple(x.shape), remedy, shape[0], error=ShapeError)

    def mask(self, q_len: int) -> Mask:
        """What the newest ``q_len`` tokens of each row may see: ``causal() & cache(lengths)``."""
        del q_len
        return masks.causal() & masks.cache(self.lengths)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Copies of the rows' keys and values, (B, Hkv, max_len, D) with whole pages; of no page, zeros."""
        held = (self.table >= 0)[:, :, None, None, None]
        picked = (x[self.table.clamp(min=0).long()] for x in (self._keys, self._values))
        k, v = (torch.where(held, x, 0).flatten(1, 2).transpose(1, 2) for x in picked)
        return k, v

    def attention(self, q: Tensor, *, mask: Mask | None = None, **options: Any) -> Any:
        """`attnspan.torch.attention` of q to the tokens of each row.

        Args:
            q: Shape (B, Hq, n, D): the newest n tokens of each row.
            mask: What they see; by default ``mask(n)``.
            **options: Of `attnspan.torch.attention`, without ``layout``. With ``backend="triton"`` the kernel
                reads the pages; every other one is given a copy of them.
        """
        mask = self.mask(q.shape[2]) if mask is None else mask
        if options.get("backend") != "triton":
            return attention(q, *self.gathered(), mask=mask, **options)
        asked = {**(attention.__kwdefaults__ or {}), **options}
        unknown = sorted(set(options) - set(attention.__kwdefaults__ or ()))
        expect(not unknown, "PagedCache.attention", "keywords of attention", unknown, "Drop them")
        expect(asked["layout"] == "bhsd", "layout", "bhsd", asked["layout"], "Transpose q", error=OptionError)
        return_lse, scale = asked.pop("return_lse"), asked.pop("scale")
        for name in ("mask", "layout"):
            del asked[name]
        backend, (batch, rows) = asked.pop("backend"), self.table.shape
        # Arrays of the right sizes without memory of their own: a call reads only their sizes.
        k, v = (
            x[0, 0, 0, :1].expand(batch, x.shape[2], rows * x.shape[1], x.shape[3])
            for x in (self._keys, self._values)
        )
        call = Call.of(TorchFront(), q, k, v, Given(**asked), mask=mask, scale=scale, layout="bhsd")
        choose_backend(call.problem, backend)
        pool = self._keys[:-1], self._values[:-1], self.table
        out, lse = _forward_op(call.q, *pool, call.bounds, call.scale, *(call.options or ()))
        return from_bhsd(out, lse, "bhsd", return_lse)

    def reset(self, rows: Tensor | None = None) -> None:
        """Empty the cache, or the rows for which ``rows``, bool (B,), is True; their pages become free.

        Raises:
            ValueError, TypeError: ``rows`` has another shape, or is not bool.
        """
        chosen = torch.ones_like(self.lengths, dtype=torch.bool) if rows is None else rows
        self._check_rows("reset: rows", chosen, (torch.bool,), "bool")
        self.table.masked_fill_(chosen[:, None], -1)
        self.lengths.masked_fill_(chosen, 0)
