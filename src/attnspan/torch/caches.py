"""Key-value caches of static shape, for decoding and chunked prefill.

Where a token's key is stored is the cache's affair; which stored keys a query may see is said by spans alone.
So nothing is ever moved or sorted, and a compiler sees tensors of one shape at every step.
"""

from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor, nn

from .. import masks
from ..arrays import INT32_MAX, arrays_for, check_plain
from ..checks import count
from ..errors import DeviceError, DtypeError, ShapeError, expect
from ..masks import Mask, Prepared
from ..spans import Spans
from ._cache_write import LOST, cache_write_op, check_not_lost

__all__ = ["Cache", "RollingCache", "StaticCache"]

CacheLayout = Literal["bhsd", "bshd"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class _Storage(TypedDict, total=False):
    dtype: torch.dtype | None
    device: torch.device | str | None
    layout: CacheLayout


class Cache(nn.Module):
    """Buffers of keys and values and a length per batch row; `StaticCache` and `RollingCache` are the kinds.

    The buffers are not part of a state dict; ``.to(...)`` of a model moves and converts them.

    Attributes:
        lengths: Shape (B,), int32: tokens that each row has been given, less those taken back. The buffer
            itself: it changes in place.
    """

    lengths: Tensor
    _keys: Tensor
    _values: Tensor
    _wrap = False
    _remedy = "Pass fewer tokens, or allocate a larger max_len"

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        v_dim: int | None,
        max_new: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layout: CacheLayout = "bhsd",
    ) -> None:
        super().__init__()
        sizes = {"batch": batch, "kv_heads": kv_heads, "slots": slots, "head_dim": head_dim}
        sizes["v_dim"] = head_dim if v_dim is None else v_dim
        batch, kv_heads, slots, *dims = (count(name, size, least=1) for name, size in sizes.items())
        known = layout in ("bhsd", "bshd")
        expect(known, "layout", "bhsd or bshd", repr(layout), "Name the order of k and v")
        self.layout, self.slots, self._max_new = layout, slots, max_new
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        # An inference tensor could not be written outside of inference mode later.
        with torch.inference_mode(False):
            # Stored head by head in either layout: decoding then reads each head's keys in one piece.
            for name, dim in zip(("_keys", "_values"), dims, strict=True):
                self.register_buffer(name, torch.zeros(batch, kv_heads, slots, dim, **like), persistent=False)
            lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self.register_buffer("lengths", lengths, persistent=False)
        floating = self._keys.is_floating_point()
        expect(floating, "dtype", "a floating dtype", str(dtype), "Pass that of k and v", error=DtypeError)

    @property
    def keys(self) -> Tensor:
        """All slots of keys, (B, Hkv, slots, D) in layout "bhsd", (B, slots, Hkv, D) in "bshd": a view."""
        return self._in_layout(self._keys)

    @property
    def values(self) -> Tensor:
        """All slots of values, as `keys`."""
        return self._in_layout(self._values)

    def update(self, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Write each row's new tokens behind those that it has, in place, and advance its length.

        Args:
            k_new: Shape (B, Hkv, n, D), or (B, n, Hkv, D) in layout "bshd"; the cache's dtype and device,
                without gradients.
            v_new: The same with head dim Dv.
            counts: Shape (B,), integer, 0 to n: how many tokens of the chunk are the row's own, where rows
                differ. They stand at its end, with padding before them, so that the last entry is each row's
                newest token. None: all n.

        Returns:
            Views of all slots of keys and values, for `attention` with ``mask(n)``.

        Raises:
            ValueError: Sizes or devices do not fit, or tokens require gradients; on CPU also, when the call
                runs, a row without room or a wrong count, before anything is written. On other devices, such
                a row is left as it is, and its masks are illegal until `reset`: attention gives NaN.
            TypeError: Element types do not fit.
        """
        keys, values = self._keys, self._values
        k_new, v_new = self._tokens("k_new", k_new, keys), self._tokens("v_new", v_new, values)
        fits, n = k_new.shape[2] == v_new.shape[2], v_new.shape[2]
        expect(fits, "v_new", "as many tokens as k_new", n, "Check k and v", error=ShapeError)
        if counts is not None:
            self._check_rows("counts", counts)
        cache_write_op(keys, values, self.lengths, k_new, v_new, counts, self._wrap)
        return self._in_layout(keys), self._in_layout(values)

    def q_index(self, q_len: int) -> Tensor:
        """Shape (B, q_len), int32: the global indices of each row's newest tokens; negative for padding."""
        offset = torch.arange(q_len, dtype=torch.int32, device=self.lengths.device) - q_len
        return self.lengths[:, None] + offset

    def positions(self, n: int, counts: Tensor | None = None) -> Tensor:
        """Shape (B, n), int32: the indices that the n tokens of the next `update` will have, for RoPE.

        ``counts`` as `update` will get them. Entries of padding have indices below the row's length.
        """
        own = n if counts is None else counts[:, None]
        return (self.q_index(n) + own).to(torch.int32)

    def truncate(self, lengths: Tensor | int) -> None:
        """Take tokens back: each row keeps its first ``lengths[b]``, as after rejected drafts.

        Args:
            lengths: Shape (B,), integer, or one number for all rows; at most what each row has.

        Raises:
            ValueError: Sizes or devices do not fit; where values can be read (CPU, eager) also a length that
                the row cannot go back to. Elsewhere its masks are illegal until `reset`.
            TypeError: ``lengths`` is not integer.
        """
        if isinstance(lengths, int):
            lengths = torch.full_like(self.lengths, lengths)
        self._check_rows("lengths", lengths)
        wanted = lengths.clamp(LOST, INT32_MAX).to(torch.int32)
        least = self._least()
        legal = (wanted <= self.lengths) & ((wanted >= least) | (wanted == 0))
        if arrays_for([legal]).concrete(legal) and not legal.all():
            b = int(legal.logical_not().nonzero()[0])
            expected = f"{int(least[b])} to {int(self.lengths[b])}, whose window the row still holds"
            remedy = "A cache only gives back tokens that it still holds; reset() empties a row"
            expect(False, f"truncate: lengths[{b}]", expected, f"{lengths[b]}", remedy)
        self._set_lengths(torch.where(legal, wanted, LOST))

    def reset(self, rows: Tensor | None = None) -> None:
        """Empty the cache, or the batch rows for which ``rows``, bool of shape (B,), is True.

        Raises:
            ValueError, TypeError: ``rows`` has another shape or device, or is not bool.
        """
        if rows is None:
            rows = torch.ones_like(self.lengths, dtype=torch.bool)
        self._check_rows("reset: rows", rows, "bool")
        self._set_lengths(self.lengths.masked_fill(rows, 0))

    def extra_repr(self) -> str:
        # Sizes, for ``print(model)``.
        batch, heads, slots, dim = self._keys.shape
        return f"batch={batch}, kv_heads={heads}, slots={slots}, head_dim={dim}, layout={self.layout!r}"

    def _in_layout(self, x: Tensor) -> Tensor:
        # Its own inverse.
        return x.transpose(1, 2) if self.layout == "bshd" and x.dim() == 4 else x

    def _least(self) -> Any:
        """The shortest length but 0 that each row can go back to, (B,)."""
        return torch.zeros_like(self.lengths)

    def _set_lengths(self, lengths: Tensor) -> None:
        self.lengths.copy_(lengths)

    def _tokens(self, name: str, new: Any, cache: Tensor) -> Tensor:
        """New tokens as (B, Hkv, n, D), checked."""
        remedy = "Make the cache with the dtype of k and v, under autocast with autocast's"
        self._check_kind(name, new, (cache.dtype,), "{}, as the cache", remedy)
        batch, heads, _, dim = cache.shape
        tokens = self._in_layout(new)
        shape, sizes = tokens.shape, (batch, heads, dim, self.layout)
        fits = len(shape) == 4 and shape[0] == batch and shape[1] == heads and shape[3] == dim
        expected = "batch {}, {} heads and head dim {} in layout {}"
        remedy = "Make the cache for the model's sizes, and name the layout of k and v"
        expect(fits, name, expected, new.shape, remedy, *sizes, error=ShapeError)
        self._check_count(name, shape[2], "tokens")
        return tokens

    def _check_rows(self, name: str, x: Any, kind: str = "integers") -> None:
        rows, remedy = self.lengths.shape[0], "Pass one for each row of the cache"
        self._check_kind(name, x, (torch.bool,) if kind == "bool" else _INTEGERS, kind, remedy)
        fits, expected = x.dim() == 1 and x.shape[0] == rows, "one entry per batch row, shape ({},)"
        expect(fits, name, expected, x.shape, remedy, rows, error=ShapeError)

    def _check_count(self, name: str, n: int, what: str) -> None:
        most = self._max_new
        expect(n <= most, name, f"at most {{}} {what}", n, self._remedy, most, error=ShapeError)

    def _check_kind(
        self, name: str, x: Any, dtypes: tuple[torch.dtype, ...], expected: str, remedy: str
    ) -> None:
        kind, device, to_tensor = type(x).__name__, self.lengths.device, "Convert it with torch.as_tensor"
        move = "Move the cache with .to(device), or the tensor"
        expect(isinstance(x, Tensor), name, "a torch.Tensor", kind, to_tensor, error=DtypeError)
        check_plain(name, x)
        expect(x.dtype in dtypes, name, expected, x.dtype, remedy, *dtypes, error=DtypeError)
        expect(x.device == device, name, "device {}, as the cache", x.device, move, device, error=DeviceError)


class StaticCache(Cache):
    """Keys and values of up to ``max_len`` tokens for each batch row; token t is in slot t.

    ``update`` writes at each row's own length, in place. Its shapes never change, so a compiled step is
    compiled once.

    Args:
        batch: Rows, B.
        kv_heads: Key and value heads, Hkv.
        max_len: Tokens that each row has room for.
        head_dim: Elements of a key, D.
        v_dim: Elements of a value, Dv; ``head_dim`` by default.
        **storage: ``dtype`` of keys and values, torch's default by default; their ``device``; ``layout``,
            "bhsd" or "bshd": order of the dims of new tokens and of the views that come back.

    Raises:
        ValueError, TypeError: A size is no positive int, the layout is unknown, or the dtype not floating.

    Example:
        >>> from attnspan.torch import attention
        >>> cache = StaticCache(batch=2, kv_heads=1, max_len=8, head_dim=4)
        >>> new = torch.randn(2, 1, 3, 4)
        >>> keys, values = cache.update(new, new, counts=torch.tensor([3, 1]))
        >>> cache.lengths.tolist()
        [3, 1]
        >>> attention(torch.randn(2, 2, 3, 4), keys, values, mask=cache.mask(3)).shape
        torch.Size([2, 2, 3, 4])
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        v_dim: int | None = None,
        **storage: Unpack[_Storage],
    ) -> None:
        max_len = count("max_len", max_len, least=1)
        super().__init__(batch, kv_heads, max_len, head_dim, v_dim, max_len, **storage)
        self.max_len = max_len

    def mask(self, q_len: int) -> Mask:
        """What the newest ``q_len`` tokens of each row may see: ``causal() & cache(lengths)``.

        An expression, to be composed with others; queries have the indices of those tokens, for position
        biases too. Rows of padding before a row's first token see nothing. The lengths are read when the mask
        is lowered: lower it after `update`, and make it anew at each step.

        Raises:
            ShapeError: More rows than ``max_len``.

        Example:
            >>> cache = StaticCache(1, 1, max_len=8, head_dim=4)
            >>> _ = cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
            >>> cache.mask(2).spans(2, 8).bounds[0, 0, :, 0].tolist()
            [[0, 2], [0, 3]]
        """
        self._check_count("mask", q_len, "query rows")
        return masks.causal() & masks.cache(self.lengths)


class RollingCache(Cache):
    """The newest tokens of each batch row, as many as a sliding window needs; token t is in slot t % slots.

    The keys that a query may see are a cyclic interval of slots, at most two spans. Softmax does not depend
    on their order, so nothing is moved or sorted, and rows may be arbitrarily long. The result is that of
    full attention under ``causal() & window(window)``.

    Args:
        batch, kv_heads, head_dim, v_dim, **storage: As of `StaticCache`.
        window: Keys before the query that it sees besides its own, as of the mask ``window(window)``.
        chunk: The most tokens that one `update` brings; the first query of a chunk still sees its whole
            window, so there are ``window + chunk`` slots. Drafts to be taken back count as well.

    Raises:
        ValueError, TypeError: As `StaticCache`, and for a negative ``window``.

    Example:
        >>> from attnspan.torch import attention
        >>> cache = RollingCache(batch=1, kv_heads=1, window=2, head_dim=4)
        >>> for _ in range(5):
        ...     x = torch.randn(1, 1, 1, 4)
        ...     keys, values = cache.update(x, x)
        ...     out = attention(x, keys, values, mask=cache.mask(1))
        >>> cache.k_index.tolist(), cache.mask(1).lowered.bounds[0, 0, 0].tolist()
        ([[3, 4, 2]], [[0, 2], [2, 3]])
    """

    _wrap = True
    _remedy = "Split the tokens into chunks, or make the cache with a larger chunk"
    _lost: Tensor

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        window: int,
        head_dim: int,
        v_dim: int | None = None,
        *,
        chunk: int = 1,
        **storage: Unpack[_Storage],
    ) -> None:
        window, chunk = count("window", window), count("chunk", chunk, least=1)
        super().__init__(batch, kv_heads, window + chunk, head_dim, v_dim, chunk, **storage)
        self.window, self.chunk = window, chunk
        with torch.inference_mode(False):
            # Tokens that were overwritten by some that truncate() took back; slots alone do not tell.
            self.register_buffer("_lost", torch.zeros_like(self.lengths), persistent=False)

    @property
    def k_index(self) -> Tensor:
        """Shape (B, slots), int32: the global index of each slot's token; negative for a slot without one."""
        newest = self.lengths[:, None] - 1
        slot = torch.arange(self.slots, dtype=torch.int32, device=newest.device)
        return newest - (newest - slot).remainder(self.slots)

    def mask(self, q_len: int) -> Prepared:
        """What the newest ``q_len`` tokens of each row may see, over slots, with the indices of both.

        Position biases and dropout find the tokens' own indices in it. It is lowered: other masks count slots
        as if they were tokens, so do not compose it. Make it after `update`, anew at each step.

        Returns:
            A lowered mask with bounds (B, 1, q_len, 2, 2). Rows of padding, which the ring may no longer
            hold, see nothing; those of a row that was truncated to what it did not hold are illegal.

        Raises:
            ShapeError: More rows than ``chunk``.
            OptionError: Such a row, where it can be read (CPU, eager).
        """
        self._check_count("mask", q_len, "query rows")
        if arrays_for([self.lengths]).concrete(self.lengths):
            check_not_lost(self.lengths.tolist())
        index = self.q_index(q_len)
        oldest = (index - self.window).clamp(min=0)
        # The rows of the last update are never gone; earlier ones are there where a row's chunk was shorter.
        gone = (index < 0) | (oldest < self._intact()[:, None])
        return Prepared(Spans(self._bounds(oldest, index, gone), self.slots), index, self.k_index)

    def _bounds(self, oldest: Tensor, index: Tensor, gone: Tensor) -> Tensor:
        """The slots of tokens oldest..index: [lo, hi), or [0, hi) and [lo, slots) where the ring ends."""
        lo, hi = oldest.remainder(self.slots), index.remainder(self.slots) + 1
        wraps = lo >= hi
        first = torch.stack([torch.where(wraps, 0, lo), hi], -1)
        second = torch.stack([torch.where(wraps, lo, hi), torch.where(wraps, self.slots, hi)], -1)
        spans = torch.where(gone[..., None, None], 0, torch.stack([first, second], -2))
        illegal = torch.tensor([0, -1], dtype=torch.int32, device=spans.device)
        spans = torch.where((self.lengths < 0)[:, None, None, None], illegal, spans)
        return spans.to(torch.int32)[:, None]

    def _intact(self) -> Tensor:
        """Shape (B,): the oldest token whose slot still holds it."""
        return torch.maximum(self._lost, self.lengths - self.slots)

    def _least(self) -> Tensor:
        # The next query sees `window` tokens before its own; those from its own on are yet to come.
        intact = self._intact()
        return torch.where(intact > 0, intact + self.window, 0) if self.window > 0 else super()._least()

    def _set_lengths(self, lengths: Tensor) -> None:
        # Tokens from the new length on will be written anew, into slots of their own.
        self._lost.copy_(torch.minimum(self._intact(), lengths))
        super()._set_lengths(lengths)
