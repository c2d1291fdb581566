"""Key-value caches of static shape, for decoding and chunked prefill.

Where a token's key is stored is the cache's affair; which stored keys a query may see is said by spans alone.
So nothing is ever moved or sorted, and a compiler sees tensors of one shape at every step.
"""

from typing import Any, Unpack

from torch import Tensor

from attnspan import masks
from attnspan.base.checks import count
from attnspan.masks import Mask

from ._cache_rows import CacheRows, Storage
from ._cache_write import cache_append_op

__all__ = ["SlotCache", "StaticCache"]


class SlotCache(CacheRows):
    """A cache with slots for each batch row; `StaticCache` and `RollingCache` are the kinds.

    Attributes:
        slots: Slots of a row.
        keep: How many of them hold the row's first tokens for good. The others are a ring.
    """

    def __init__(self, slots: int, keep: int, max_new: int, **sizes: Any) -> None:
        # Stored head by head in either layout: decoding then reads each head's keys in one piece.
        super().__init__(("batch", "kv_heads", "slots"), max_new, slots=slots, **sizes)
        self.slots, self.keep = slots, keep

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
        k_new, v_new = self._chunk(k_new, v_new, counts)
        arrays = self._keys, self._values, self.lengths
        self.lengths.copy_(cache_append_op(*arrays, k_new, v_new, counts, self.keep))
        return self.keys, self.values

    def extra_repr(self) -> str:
        # Sizes, for ``print(model)``.
        batch, heads, slots, dim = self._keys.shape
        return f"batch={batch}, kv_heads={heads}, slots={slots}, head_dim={dim}, layout={self.layout!r}"


class StaticCache(SlotCache):
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
        """Mask of the newest ``q_len`` tokens of each row: ``causal() & cache(lengths)``.

        An expression, to be composed with others; queries have the indices of those tokens, for position
        biases too. Rows of padding before a row's first token see nothing. The lengths are read when the mask
        is lowered: lower it after `update`, and make it anew at each step.

        Raises:
            ShapeError: More rows than ``max_len``.

        Example:
            >>> import torch
            >>> cache = StaticCache(1, 1, max_len=8, head_dim=4)
            >>> _ = cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
            >>> cache.mask(2).spans(2, 8).bounds[0, 0, :, 0].tolist()
            [[0, 2], [0, 3]]
        """
        self._check_count("mask", q_len, "query rows")
        return masks.causal() & masks.cache(self.lengths)
