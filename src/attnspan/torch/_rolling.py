"""The cache of a sliding window: a ring of slots."""

import torch
from torch import Tensor

from ..arrays import INT32_MAX
from ..errors import OptionError
from ..masks import Prepared
from ..spans import Spans
from ._cache import Cache, CacheLayout, check_query_rows, check_size, readable
from ._cache_write import lost_error


class RollingCache(Cache):
    """The newest tokens of each batch row, as many as a sliding window needs; token t is in slot t % slots.

    The keys that a query may see are a cyclic interval of slots, at most two spans. Softmax does not care for
    their order, so nothing is moved or sorted, and rows may be arbitrarily long. The result is that of full
    attention under ``causal() & window(window - 1)``.

    Args:
        batch: Rows, B.
        kv_heads: Key and value heads, Hkv.
        window: Keys that each query sees, itself included.
        head_dim: Elements of a key, D.
        v_dim: Elements of a value, Dv; ``head_dim`` by default.
        chunk: The most tokens that one `update` brings; the first query of a chunk still sees its whole
            window, so there are ``window + chunk - 1`` slots. Drafts to be taken back count as well.
        dtype: That of the keys and values; torch's default by default.
        device: Where they are.
        layout: "bhsd" or "bshd": order of the dims of new tokens and of the views that come back.

    Raises:
        ValueError: A size is not positive, or the layout is unknown.
        TypeError: A size is no int, or the dtype is not floating.

    Example:
        >>> from attnspan.torch import attention
        >>> cache = RollingCache(batch=1, kv_heads=1, window=3, head_dim=4)
        >>> for _ in range(5):
        ...     x = torch.randn(1, 1, 1, 4)
        ...     keys, values = cache.update(x, x)
        ...     out = attention(x, keys, values, mask=cache.mask(1))
        >>> cache.k_index.tolist(), cache.mask(1).lowered.bounds[0, 0, 0].tolist()
        ([[3, 4, 2]], [[0, 2], [2, 3]])
    """

    _wrap = True
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
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layout: CacheLayout = "bhsd",
    ) -> None:
        for name, size in (("window", window), ("chunk", chunk)):
            check_size(name, size)
            if not 1 <= size <= INT32_MAX // 2:
                raise OptionError(
                    name, expected=f"1 to {INT32_MAX // 2}", got=str(size), remedy="Pass a number of tokens"
                )
        sizes = (batch, kv_heads, window + chunk - 1, head_dim, head_dim if v_dim is None else v_dim)
        super().__init__(sizes, dtype, device, layout)
        self.window, self.chunk = window, chunk
        self.slots = window + chunk - 1
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

        Args:
            q_len: Query rows, those of the newest tokens; at most ``chunk``.

        Returns:
            A lowered mask with bounds (B, 1, q_len, 2, 2). Rows of padding, which the ring may no longer
            hold, see nothing; those of a row that was truncated to what it did not hold are illegal.

        Raises:
            ShapeError: More rows than ``chunk``.
            OptionError: Such a row, where it can be read (CPU, eager).
        """
        check_query_rows(q_len, *self._most_new())
        if readable(self.lengths) and bool((self.lengths < 0).any()):
            raise lost_error(int(self.lengths.argmin()))
        index = self.q_index(q_len)
        oldest = (index - (self.window - 1)).clamp(min=0)
        # The rows of the last update are never gone; earlier ones are there where a row's chunk was shorter.
        gone = (index < 0) | (oldest < self._intact()[:, None])
        spans = Spans(self._bounds(oldest, index, gone), self.slots)
        return Prepared(spans, index, self.k_index)

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

    def _most_new(self) -> tuple[int, str]:
        return self.chunk, "Split the tokens into chunks, or make the cache with a larger chunk"

    def _holds(self, lengths: Tensor) -> Tensor:
        # The next query sees window - 1 tokens before it; those from its own on are yet to come.
        needed = (lengths - (self.window - 1)).clamp(min=0)
        return needed >= torch.minimum(self._intact(), lengths)

    def _reach(self, b: int) -> str:
        intact, length = int(self._intact()[b]), int(self.lengths[b])
        least = intact + self.window - 1 if intact > 0 else 0
        return f"{least} to {length}, whose window is still in the cache"

    def _truncate(self, lengths: Tensor) -> None:
        # Tokens from the new length on will be written anew, into slots of their own.
        self._lost.copy_(torch.minimum(self._intact(), lengths))
        super()._truncate(lengths)

    def _reset(self, rows: Tensor) -> None:
        super()._reset(rows)
        self._lost.masked_fill_(rows, 0)
