"""A KV cache of the newest tokens and, with ``keep``, of the first tokens."""

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


class RollingCache(SlotCache):
    """The newest tokens of each batch element, for a sliding window. Token t is in slot t % slots.

    A query sees a cyclic interval of slots, which is at most two spans. Softmax does not depend on the order
    of keys, so no token is moved or sorted, and sequences may have any length. The result equals full
    attention under ``causal() & window(window)``.

    With ``keep``, the first tokens of each batch element stay in separate slots before the ring, and all
    later tokens see them (attention sinks as in StreamingLLM, arXiv:2309.17453). The result equals full
    attention under ``causal() & (window(window) | global_keys(keep))``.

    Args:
        batch: Batch size, B.
        kv_heads: Number of key and value heads, Hkv.
        window: Number of keys before the query that it sees, besides its own key, as in ``window(window)``.
        head_dim: Elements of a key, D.
        v_dim: Elements of a value, Dv. By default it is ``head_dim``.
        chunk: Largest number of tokens in one `update`, including drafts that you may truncate later. The
            cache has ``keep + window + chunk`` slots, so that the first query of a chunk sees its whole
            window.
        keep: Number of first tokens that stay.
        **storage: ``dtype``, ``device`` and ``layout``, as for `StaticCache`.

    Raises:
        ValueError: As for `StaticCache`, or ``window`` or ``keep`` is negative.
        TypeError: As for `StaticCache`.

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
            # Tokens that were overwritten by tokens that truncate() removed. The slots do not show these.
            self.register_buffer("_lost", torch.zeros_like(self.lengths), persistent=False)

    @property
    def k_index(self) -> Tensor:
        """Global index of each slot's token, or a negative number for an empty slot: int32, (B, slots)."""
        newest, ring = self.lengths[:, None] - 1, self.slots - self.keep
        slot = torch.arange(self.slots, dtype=torch.int32, device=newest.device)
        index = newest - (newest - slot).remainder(ring)
        if self.keep == 0:
            return index
        first = torch.where(slot <= newest, slot, -1)
        return torch.where(slot < self.keep, first, torch.where(index < self.keep, -1, index)).to(torch.int32)

    def mask(self, q_len: int) -> Prepared:
        """Lowered mask of the newest ``q_len`` tokens of each batch element, over slots.

        The mask contains the indices of queries and keys, for position biases and dropout. Do not combine it
        with other masks, because they count slots as if they were tokens. The exception is
        ``| global_keys(n)`` with n of at most ``keep``, which returns the same mask. Make a new mask at each
        step, after `update`.

        Args:
            q_len: Number of queries for each batch element.

        Returns:
            A lowered mask with bounds (B, 1, q_len, 2, 2). Padding queries see no key, because the ring may
            no longer hold their keys. If a batch element was truncated to tokens that it did not hold, its
            spans are illegal.

        Raises:
            ShapeError: ``q_len`` exceeds ``chunk``.
            OptionError: A batch element is illegal, if its length can be read (CPU, eager).
        """
        self._check_count("mask", q_len, "queries")
        if arrays_for([self.lengths]).concrete(self.lengths):
            check_not_lost(self.lengths.tolist())
        index = self.q_index(q_len)
        oldest = (index - self.window).clamp(min=self.keep)
        # Queries of the last update always keep their keys. Earlier queries come from a shorter chunk.
        gone = (index < 0) | ((index >= self.keep) & (oldest < self._intact()[:, None]))
        found = Prepared(Spans(self._bounds(oldest, index, gone), self.slots), index, self.k_index)
        object.__setattr__(found, "_kept", self.keep)
        return found

    def _bounds(self, oldest: Tensor, index: Tensor, gone: Tensor) -> Tensor:
        """Spans of the slots of the first tokens and of the tokens oldest..index.

        They are [0, kept) and [lo, hi). If the tokens wrap around, they are [0, hi) and [lo, slots).
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
        """Oldest token that the ring still holds, shape (B,)."""
        return torch.maximum(stored(self._lost, "cache"), self.lengths - (self.slots - self.keep))

    def _least(self) -> tuple[Tensor, int]:
        # The next query sees `window` tokens before its own token. Later tokens are not written yet. Up to
        # `keep`, it sees no token of the ring.
        intact = self._intact()
        if self.window == 0:
            return super()._least()
        return torch.where(intact > self.keep, intact + self.window, 0), self.keep

    def _set_lengths(self, lengths: Tensor) -> None:
        # Tokens from the new length on will be written again.
        self._lost.copy_(torch.minimum(self._intact(), lengths))
        super()._set_lengths(lengths)
