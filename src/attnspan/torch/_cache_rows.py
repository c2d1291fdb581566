"""Base class of all KV caches: a length per batch element, and checks before anything is written."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, TypedDict

import torch
from torch import Tensor, nn

from attnspan.base.arrays import INT32_MAX, arrays_for, stored
from attnspan.base.checks import count, number
from attnspan.errors import DtypeError, ShapeError, UsageError, expect
from attnspan.kernels import cpu

from ._cache_write import INTEGERS, LOST, check_kind

CacheLayout = Literal["bhsd", "bshd"]


class Storage(TypedDict, total=False):
    """Storage of a cache's buffers."""

    dtype: torch.dtype | None
    device: torch.device | str | None
    layout: CacheLayout


class WritableBuffers(nn.Module):
    """A module whose buffers are never inference tensors, because these are read-only outside that mode."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        with torch.inference_mode(False):  # `.to(...)` makes new ones
            return super()._apply(fn, recurse)  # type: ignore[no-any-return, no-untyped-call]


class CacheRows(WritableBuffers):
    """Keys and values of batch elements, each with a length.

    The buffers are not part of a state dict. A model's ``.to(...)`` moves and converts them.

    Attributes:
        lengths: int32, shape (B,): the number of tokens that each batch element received, without truncated
            tokens. This is the buffer itself, and it changes in place.
    """

    lengths: Tensor
    _keys: Tensor
    _values: Tensor
    _remedy = "Pass fewer tokens, or allocate a larger max_len"

    def __init__(
        self,
        axes: tuple[str, str, str],
        max_new: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layout: CacheLayout = "bhsd",
        v_dim: int | None = None,
        **sizes: int,
    ) -> None:
        super().__init__()
        unknown = sorted(set(sizes) - {*axes, "batch", "kv_heads", "head_dim"})
        wanted = "dtype, device, layout, v_dim and its sizes"
        expect(not unknown, type(self).__name__, wanted, ", ".join(unknown), "Leave it out", error=UsageError)
        sizes |= {"v_dim": sizes["head_dim"] if v_dim is None else v_dim}
        sizes = {name: count(name, size, least=1) for name, size in sizes.items()}
        known = layout in ("bhsd", "bshd")
        expect(known, "layout", "bhsd or bshd", repr(layout), "Name the order of k and v")
        self.layout, self._kv_heads, self._max_new = layout, sizes["kv_heads"], max_new
        shape, like = [sizes[axis] for axis in axes], {"dtype": dtype, "device": device}
        with torch.inference_mode(False):
            for name, dim in (("_keys", "head_dim"), ("_values", "v_dim")):
                x = torch.empty(*shape, sizes[dim], **like)  # type: ignore[arg-type]
                if arrays_for([x]).concrete(x):
                    cpu.use_large_pages(x)
                self.register_buffer(name, x.zero_(), persistent=False)
            lengths = torch.zeros(sizes["batch"], dtype=torch.int32, device=device)
            self.register_buffer("lengths", lengths, persistent=False)
        floating = self._keys.is_floating_point()
        expect(floating, "dtype", "a floating dtype", str(dtype), "Pass k's dtype", error=DtypeError)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        def in_large_pages(x: Tensor) -> Tensor:
            # `.to(...)` has written the new tensor, and large pages must be asked for before the first write.
            new: Tensor = fn(x)
            stores = x is self._keys or x is self._values
            if not stores or new is x or not new.is_cpu or not arrays_for([new]).concrete(new):
                return new
            own = torch.empty_like(new)
            cpu.use_large_pages(own)
            return own.copy_(new)

        return super()._apply(in_large_pages, recurse)

    def q_index(self, q_len: int) -> Tensor:
        """Global indices of the newest tokens, negative for padding: int32, shape (B, q_len)."""
        offset = torch.arange(q_len, dtype=torch.int32, device=self.lengths.device) - q_len
        stored(self.lengths, "cache: lengths")
        return self.lengths[:, None] + offset

    def positions(self, n: int, counts: Tensor | None = None) -> Tensor:
        """Indices of the n tokens of the next `update`, for RoPE: int32, shape (B, n).

        Args:
            n: Number of tokens in the chunk.
            counts: The ``counts`` that you will pass to `update`. Padding has indices below the length of its
                batch element.

        Raises:
            ValueError: The shape or device of ``counts`` does not fit.
            TypeError: ``counts`` is not integer.
        """
        if counts is not None:
            self._check_rows("counts", counts)
        own = n if counts is None else counts[:, None]
        return (self.q_index(n) + own).to(torch.int32)

    def truncate(self, lengths: Tensor | int) -> None:
        """Truncate batch element b to its first ``lengths[b]`` tokens, for example after rejected drafts.

        Args:
            lengths: Integer, shape (B,), or one number for all batch elements. It must not exceed the current
                lengths.

        Raises:
            ValueError: Sizes or devices do not fit. If values can be read (CPU, eager), also if a batch
                element cannot return to a length. Otherwise its masks are illegal until `reset`.
            TypeError: ``lengths`` is not integer.
        """
        if not isinstance(lengths, Tensor):
            own = number("truncate: lengths", lengths, "Pass an int, or a tensor with one per element")
            lengths = torch.full_like(self.lengths, min(max(own, LOST), INT32_MAX))
        self._check_storage()
        self._check_rows("lengths", lengths)
        wanted = lengths.to(torch.int64).clamp(LOST, INT32_MAX).to(torch.int32)
        least, most = self._least()
        legal = (wanted <= self.lengths) & ((wanted >= least) | ((wanted >= 0) & (wanted <= most)))
        if arrays_for([legal]).concrete(legal) and not legal.all():
            b = int(legal.logical_not().nonzero()[0])
            expected = f"{int(least[b])} to {int(self.lengths[b])}, whose keys the cache still holds"
            remedy = "Pass one of these, or empty the batch element with reset()"
            expect(False, f"truncate: lengths[{b}]", expected, f"{lengths[b]}", remedy)
        self._set_lengths(torch.where(legal, wanted, LOST))

    def reset(self, rows: Tensor | Sequence[int] | None = None) -> None:
        """Empty the cache, or some batch elements.

        Args:
            rows: Indices of batch elements, each once: a list, or an integer tensor of shape (n,). Or bool of
                shape (B,), True for each element to empty. None empties all.

        Raises:
            ValueError: A shape or device does not fit. If values can be read (CPU, eager), also if an index
                is out of range or occurs twice. Otherwise such an index makes all masks illegal.
            TypeError: ``rows`` is neither integer nor bool.
        """
        self._check_storage()
        chosen, legal = self._chosen(rows)
        self._set_lengths(torch.where(legal, self.lengths.masked_fill(chosen, 0), LOST))

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Replace batch element b with the contents of element ``rows[b]``, for beam search.

        Args:
            rows: Integer, shape (B,), or a list. An index may occur several times.

        Raises:
            ValueError: A shape or device does not fit. If values can be read (CPU, eager), also if an index
                is out of range, before anything is written. Otherwise the element's masks are illegal until
                `reset`.
            TypeError: ``rows`` is not integer.

        Example:
            >>> from attnspan.torch import StaticCache
            >>> cache = StaticCache(batch=3, kv_heads=1, max_len=8, head_dim=4)
            >>> new = torch.randn(3, 1, 2, 4)
            >>> keys, _ = cache.update(new, new, counts=torch.tensor([2, 1, 0]))
            >>> cache.reorder([1, 1, 0])
            >>> cache.lengths.tolist(), keys[2, :, :2].equal(new[0])
            ([1, 1, 2], True)
        """
        self._check_storage()
        numbers, legal = row_numbers("reorder: rows", rows, self.lengths, whole=True)
        # All memory is allocated before anything is written.
        moved = [(x, x.index_select(0, numbers)) for x in self.buffers(recurse=False)]
        for x, new in moved:
            x.copy_(new)
        self.lengths.masked_fill_(~legal, LOST)

    def _check_storage(self) -> None:
        for name, x in self.named_buffers(recurse=False):
            stored(x, f"cache: {name.strip('_')}")

    def _chosen(self, rows: Tensor | Sequence[int] | None) -> tuple[Tensor, Tensor]:
        """Batch elements to reset, bool (B,), and whether the indices were legal, shape ()."""
        if rows is None:
            rows = torch.ones_like(self.lengths, dtype=torch.bool)
        if isinstance(rows, Tensor) and rows.dtype == torch.bool:
            self._check_rows("reset: rows", rows, (torch.bool,))
            return rows, torch.ones_like(rows[0])
        numbers, legal = row_numbers("reset: rows", rows, self.lengths)
        hits = numbers[:, None] == torch.arange(len(self.lengths), device=numbers.device)
        once = (hits.sum(0) <= 1).all()
        if arrays_for([once]).concrete(once):
            remedy = "Pass each index once. A mask of batch elements must be bool"
            expect(once, "reset: rows", "different indices", f"{numbers.tolist()}", remedy)
        return hits.any(0), legal.all() & once

    def _least(self) -> tuple[Any, int]:
        """Least length to return to, (B,), and the length up to which every length is always possible."""
        return torch.zeros_like(self.lengths), 0

    def _set_lengths(self, lengths: Tensor) -> None:
        self.lengths.copy_(lengths)

    def _in_layout(self, x: Tensor) -> Tensor:
        # Its own inverse.
        return x.transpose(1, 2) if self.layout == "bshd" and x.dim() == 4 else x

    def _chunk(self, k_new: Any, v_new: Any, counts: Any) -> tuple[Tensor, Tensor]:
        """New tokens as (B, Hkv, n, D), after checks."""
        k_new, v_new = self._tokens("k_new", k_new, self._keys), self._tokens("v_new", v_new, self._values)
        fits, n = k_new.shape[2] == v_new.shape[2], v_new.shape[2]
        expect(fits, "v_new", "as many tokens as k_new", n, "Check k and v", error=ShapeError)
        if counts is not None:
            self._check_rows("counts", counts)
        return k_new, v_new

    def _tokens(self, name: str, new: Any, cache: Tensor) -> Tensor:
        remedy = "Make the cache with the dtype of k and v, under autocast with autocast's"
        check_kind(name, new, (cache.dtype,), "{}, as the cache", remedy, cache.device)
        batch, heads, dim = self.lengths.shape[0], self._kv_heads, cache.shape[-1]
        tokens = self._in_layout(new)
        shape, sizes = tokens.shape, (batch, heads, dim, self.layout)
        fits = len(shape) == 4 and shape[0] == batch and shape[1] == heads and shape[3] == dim
        expected = "batch {}, {} heads and head dim {} in layout {}"
        remedy = "Make the cache for the model's sizes, and pass the layout of k and v"
        expect(fits, name, expected, new.shape, remedy, *sizes, error=ShapeError)
        self._check_count(name, shape[2], "tokens")
        return tokens

    def _check_rows(self, name: str, x: Any, dtypes: tuple[torch.dtype, ...] = INTEGERS) -> None:
        rows, remedy = self.lengths.shape[0], "Pass one for each batch element of the cache"
        kind = "integers" if dtypes is INTEGERS else "bool"
        check_kind(name, x, dtypes, kind, remedy, self.lengths.device)
        fits, expected = x.dim() == 1 and x.shape[0] == rows, "one entry per batch element, shape ({},)"
        expect(fits, name, expected, x.shape, remedy, rows, error=ShapeError)

    def _check_count(self, name: str, n: int, what: str) -> None:
        whole = isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool)
        remedy = "Pass their number"
        expect(whole, name, "an int", type(n).__name__, remedy, error=DtypeError)
        expect(n >= 0, name, f"0 or more {what}", n, remedy, error=ShapeError)
        most = self._max_new
        expect(n <= most, name, f"at most {{}} {what}", n, self._remedy, most, error=ShapeError)


def row_numbers(what: str, rows: Any, of: Tensor, *, whole: bool = False) -> tuple[Tensor, Tensor]:
    """Indices of batch elements as int64 (n,), and whether each is legal. Illegal indices become 0.

    Args:
        what: Name of the argument, for errors.
        rows: A list or a tensor of integers.
        of: A tensor whose first axis is the batch.
        whole: Whether B indices are required.

    Raises:
        ValueError: Shape or device do not fit, or an index is out of range, if values can be read.
        TypeError: The dtype does not fit.
    """
    batch, remedy = of.shape[0], "Pass indices of batch elements"
    if isinstance(rows, int) and not isinstance(rows, bool):
        expect(False, what, "a list or a tensor of indices", f"{rows}", f"Pass [{rows}]", error=DtypeError)
    if isinstance(rows, (list, tuple, range)):
        numbers = [number(what, x, remedy) for x in rows]
        rows = torch.tensor(numbers, dtype=torch.int64, device=of.device)
    check_kind(what, rows, INTEGERS, "integers", remedy, of.device)
    fits = rows.dim() == 1 and (not whole or rows.shape[0] == batch)
    expected = f"shape ({batch},), one for each batch element" if whole else "one axis"
    expect(fits, what, expected, tuple(rows.shape), remedy, error=ShapeError)
    rows = rows.to(torch.int64)
    legal = (rows >= 0) & (rows < batch)
    if arrays_for([legal]).concrete(legal):
        expect(legal.all(), what, "indices from 0 to {}", f"{rows.tolist()}", remedy, batch - 1)
    return torch.where(legal, rows, 0), legal
