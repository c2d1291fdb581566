"""A key-value cache of the newest tokens, and of the first ones where these stay."""

from typing import Unpack

import torch
from torch import Tensor

from attnspan.base.arrays import arrays_for, stored
from attnspan.base.checks import count
from attnspan.masks import Prepared
from attnspan.masks.bounds import Spans

from ._cache_rows import Storage
from ._cache_write import check_not_lost, slots_of
from .caches import SlotCache

__all__ = ["RollingCache"]


class RollingCache(SlotCache):
    """The newest tokens of each batch row, as many as a sliding window needs; token t is in slot t % slots.

    The keys that a query may see are a cyclic interval of slots, at most two spans. Softmax does not depend
    on their order, so nothing is moved or sorted, and rows may be arbitrarily long. The result is that of
    full attention under ``causal() & window(window)``.

    With ``keep``, the first tokens of each row stay, in slots of their own before those of the ring, and all
    later tokens see them (attention sinks as in StreamingLLM, arXiv:2309.17453). The result is that of
    ``causal() & (window(window) | global_keys(keep))``.

    Args:
        batch, kv_heads, head_dim, v_dim, **storage: As of `StaticCache`.
        window: Keys before the query that it sees besides its own, as of the mask ``window(window)``.
        chunk: The most tokens that one `update` brings; the first query of a chunk still sees its whole
            window, so there are ``keep + window + chunk`` slots. Drafts to be taken back count as well.
        keep: How many of the first tokens stay.

    Raises:
        ValueError, TypeError: As `StaticCache`, and for a negative ``window`` or ``keep``.

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
        keep: int = 0,
        **storage: Unpack[Storage],
    ) -> None:
        window, chunk, keep = count("window", window), count("chunk", chunk, least=1), count("keep", keep)
        sizes = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "v_dim": v_dim}
        super().__init__(keep + window + chunk, keep, chunk, **sizes, **storage)
        self.window, self.chunk = window, chunk
        with torch.inference_mode(False):
            # Tokens that were overwritten by some that truncate() took back; slots alone do not tell.
            self.register_buffer("_lost", torch.zeros_like(self.lengths), persistent=False)

    @property
    def k_index(self) -> Tensor:
        """Shape (B, slots), int32: the global index of each slot's token; negative for a slot without one."""
        newest, ring = self.lengths[:, None] - 1, self.slots - self.keep
        slot = torch.arange(self.slots, dtype=torch.int32, device=newest.device)
        index = newest - (newest - slot).remainder(ring)
        if self.keep == 0:
            return index
        first = torch.where(slot <= newest, slot, -1)
        return torch.where(slot < self.keep, first, torch.where(index < self.keep, -1, index)).to(torch.int32)

    def mask(self, q_len: int) -> Prepared:
        """Mask of the newest ``q_len`` tokens of each row, over slots, with the indices of both.

        Position biases and dropout find the tokens' own indices in it. It is lowered: other masks count slots
        as if they were tokens, so do not compose it. The exception is ``| global_keys(n)`` with n of at most
        ``keep``, which is the mask itself: those tokens are seen already. Make it after `update`, anew at
        each step.

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
        oldest = (index - self.window).clamp(min=self.keep)
        # The rows of the last update are never gone; earlier ones are there where a row's chunk was shorter.
        gone = (index < 0) | ((index >= self.keep) & (oldest < self._intact()[:, None]))
        found = Prepared(Spans(self._bounds(oldest, index, gone), self.slots), index, self.k_index)
        object.__setattr__(found, "_kept", self.keep)
        return found

    def _bounds(self, oldest: Tensor, index: Tensor, gone: Tensor) -> Tensor:
        """The slots of the first tokens and of oldest..index.

        They are [0, kept) and [lo, hi), or with the ring's end between them [0, hi) and [lo, slots).
        """
        kept, end = (index + 1).clamp(max=self.keep), slots_of(index, self.keep, self.slots) + 1
        start = slots_of(oldest, self.keep, self.slots)
        wraps, none = start >= end, index < self.keep
        first = torch.stack([torch.zeros_like(kept), torch.where(wraps & ~none, end, kept)], -1)
        lo, hi = torch.where(none, kept, start), torch.where(wraps, self.slots, end)
        second = torch.stack([lo, torch.where(none, kept, hi)], -1)
        spans = torch.where(gone[..., None, None], 0, torch.stack([first, second], -2))
        illegal = torch.tensor([0, -1], dtype=torch.int32, device=spans.device)
        spans = torch.where((self.lengths < 0)[:, None, None, None], illegal, spans)
        return spans.to(torch.int32)[:, None]

    def _intact(self) -> Tensor:
        """Shape (B,): the oldest token of the ring whose slot still holds it."""
        return torch.maximum(stored(self._lost, "cache"), self.lengths - (self.slots - self.keep))

    def _least(self) -> tuple[Tensor, int]:
        # The next query sees `window` tokens before its own; those from its own on are yet to come. Up to
        # `keep` it sees none of the ring.
        intact = self._intact()
        if self.window == 0:
            return super()._least()
        return torch.where(intact > self.keep, intact + self.window, 0), self.keep

    def _set_lengths(self, lengths: Tensor) -> None:
        # Tokens from the new length on will be written anew, into slots of their own.
        self._lost.copy_(torch.minimum(self._intact(), lengths))
        super()._set_lengths(lengths)
