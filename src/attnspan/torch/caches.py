"""KV caches of static shape, for decoding and chunked prefill.

The cache chooses the slot of each token, and spans say which slots a query may see. Keys and values are
therefore never moved or sorted, and a compiler sees tensors of one shape at every step.
"""

from typing import Any, Unpack

from torch import Tensor

from attnspan import masks
from attnspan.base.checks import count
from attnspan.masks import Mask

from ._cache_rows import CacheRows, Storage
from ._cache_write import cache_append_op


class SlotCache(CacheRows):
    """A cache with slots for each batch element, the base of `StaticCache` and `RollingCache`.

    Attributes:
        slots: Number of slots of a batch element.
        keep: Number of slots that hold the first tokens permanently. The other slots are a ring.
    """

    def __init__(self, slots: int, keep: int, max_new: int, **sizes: Any) -> None:
        # Both layouts store head by head, so that decoding reads each head's keys in one piece.
        super().__init__(("batch", "kv_heads", "slots"), max_new, slots=slots, **sizes)
        self.slots, self.keep = slots, keep

    @property
    def keys(self) -> Tensor:
        """View of all slots of keys: (B, Hkv, slots, D) in layout "bhsd", (B, slots, Hkv, D) in "bshd"."""
        return self._in_layout(self._keys)

    @property
    def values(self) -> Tensor:
        """View of all slots of values, in the same layout as `keys`."""
        return self._in_layout(self._values)

    def update(self, k_new: Tensor, v_new: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Append new tokens to each batch element, in place, and advance its length.

        On CPU, a full batch element or a wrong count raises before anything is written. On GPU, a check would
        force a synchronization. There, the batch element is left as it is and is marked as overflowed, and
        attention returns NaN for it until you call `reset`.

        Args:
            k_new: Shape (B, Hkv, n, D), or (B, n, Hkv, D) in layout "bshd". It must have the cache's dtype
                and device, and no gradient.
            v_new: The same, with head dim Dv.
            counts: Integer, shape (B,), from 0 to n: the number of new tokens of each batch element. They are
                at the end of the chunk, after padding, so the last entry is always the newest token. None
                means n for each.

        Returns:
            Views of all slots of keys and values, for `attention` with ``mask(n)``.

        Raises:
            ValueError: Sizes or devices do not fit, or tokens require gradients. On CPU also if a batch
                element is full or a count is wrong.
            TypeError: Dtypes do not fit.
        """
        k_new, v_new = self._chunk(k_new, v_new, counts)
        arrays = self._keys, self._values, self.lengths
        self.lengths.copy_(cache_append_op(*arrays, k_new, v_new, counts, self.keep))
        return self.keys, self.values

    def extra_repr(self) -> str:
        # Sizes, for ``print(model)``.
        batch, heads, slots, dim = self._keys.shape
        return f"batch={batch}, kv_heads={heads}, slots={slots}, head_dim={dim}, layout={self.layout!r}"


class StaticCache(SlotCache):
    """Keys and values of up to ``max_len`` tokens for each batch element. Token t is in slot t.

    ``update`` writes in place, at each batch element's length. The shapes never change, so a compiled step
    compiles once.

    Args:
        batch: Batch size, B.
        kv_heads: Number of key and value heads, Hkv.
        max_len: Capacity of each batch element, in tokens.
        head_dim: Elements of a key, D.
        v_dim: Elements of a value, Dv. By default it is ``head_dim``.
        **storage: ``dtype`` and ``device`` of keys and values, by default torch's. ``layout`` is "bhsd" (the
            default) or "bshd": the order of the dims of new tokens and of the returned views.

    Raises:
        ValueError: A size is not positive, or the layout is unknown.
        TypeError: A size is not an int, or the dtype is not floating.

    Example:
        >>> import torch
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
        **storage: Unpack[Storage],
    ) -> None:
        max_len = count("max_len", max_len, least=1)
        sizes = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "v_dim": v_dim}
        super().__init__(max_len, max_len, max_len, **sizes, **storage)
        self.max_len = max_len

    def mask(self, q_len: int) -> Mask:
        """Mask of the newest ``q_len`` tokens of each batch element: ``causal() & cache(lengths)``.

        You can combine the mask with others. The queries have the indices of the newest tokens, also for
        position biases. Padding queries before the first token see no key. The mask reads the lengths when it
        is lowered, so lower it after `update`, and make a new mask at each step.

        Args:
            q_len: Number of queries for each batch element.

        Raises:
            ShapeError: ``q_len`` exceeds ``max_len``.

        Example:
            >>> import torch
            >>> cache = StaticCache(1, 1, max_len=8, head_dim=4)
            >>> _ = cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
            >>> cache.mask(2).spans(2, 8).bounds[0, 0, :, 0].tolist()
            [[0, 2], [0, 3]]
        """
        self._check_count("mask", q_len, "queries")
        return masks.causal() & masks.cache(self.lengths)
