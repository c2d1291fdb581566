"""Key-value caches of static shape, for decoding and chunked prefill: what they share, and the static one.

Where a token's key is stored is the cache's affair; which stored keys a query may see is said by spans alone.
So nothing is ever moved or sorted, and a compiler sees tensors of one shape at every step.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from .. import masks
from ..arrays import INT32_MAX
from ..errors import DeviceError, DtypeError, OptionError, ShapeError, shown
from ..masks import Mask
from ._cache_write import LOST, cache_write_op

CacheLayout = Literal["bhsd", "bshd"]


class Cache(nn.Module):
    """Buffers of keys and values and a length per batch row; `StaticCache` and `RollingCache` are the kinds.

    The buffers are not part of a state dict; ``.to(...)`` of a model moves and converts them.

    Attributes:
        lengths: Shape (B,), int32: tokens that each row has been given, less those taken back. The buffer
            itself: it changes in place.
    """

    _wrap = False
    lengths: Tensor
    _keys: Tensor
    _values: Tensor

    def __init__(
        self,
        sizes: tuple[int, int, int, int, int],
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        layout: CacheLayout,
    ) -> None:
        super().__init__()
        names = ("batch", "kv_heads", "slots", "head_dim", "v_dim")
        for name, size in zip(names, sizes, strict=True):
            check_size(name, size)
        if layout not in ("bhsd", "bshd"):
            raise OptionError(
                "layout", expected="bhsd or bshd", got=repr(layout), remedy="Name the order of k and v"
            )
        batch, heads, slots, head_dim, v_dim = sizes
        self.layout: CacheLayout = layout
        # An inference tensor could not be written outside of inference mode later.
        with torch.inference_mode(False):
            # Stored head by head in either layout: decoding then reads each head's keys in one piece.
            for name, dim in (("_keys", head_dim), ("_values", v_dim)):
                buffer = torch.zeros(batch, heads, slots, dim, dtype=dtype, device=device)
                self.register_buffer(name, buffer, persistent=False)
            lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self.register_buffer("lengths", lengths, persistent=False)
        if not self._keys.is_floating_point():
            raise DtypeError(
                "dtype", expected="a floating dtype", got=str(dtype), remedy="Pass that of k and v"
            )

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
        for name, x in (("k_new", k_new), ("v_new", v_new)):
            if not isinstance(x, Tensor):
                raise DtypeError(
                    name, expected="a torch.Tensor", got=type(x).__name__, remedy="Pass the new tokens"
                )
        _refuse_vmap(k_new, v_new, counts, self.lengths)
        k_new, v_new = self._in_layout(k_new), self._in_layout(v_new)
        for name, new, cache in (("k_new", k_new, self._keys), ("v_new", v_new, self._values)):
            self._check_tokens(name, new, cache, k_new.shape[2])
        if counts is not None:
            self._check_rows("counts", counts)
        cache_write_op(self._keys, self._values, self.lengths, k_new, v_new, counts, self._wrap)
        return self.keys, self.values

    def q_index(self, q_len: int) -> Tensor:
        """Shape (B, q_len), int32: the global indices of each row's newest tokens; negative for padding.

        Args:
            q_len: Number of tokens.
        """
        offset = torch.arange(q_len, dtype=torch.int32, device=self.lengths.device) - q_len
        return self.lengths[:, None] + offset

    def positions(self, n: int, counts: Tensor | None = None) -> Tensor:
        """Shape (B, n), int32: the indices that the tokens of the next `update` will have, for RoPE.

        Args:
            n: Tokens of the chunk.
            counts: As `update` will get them. Entries of padding have indices below the row's length.
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
        legal = (wanted >= 0) & (wanted <= self.lengths) & self._holds(wanted)
        if readable(legal) and not legal.all():
            b = int(legal.logical_not().nonzero()[0])
            raise OptionError(
                f"truncate: lengths[{b}]",
                expected=f"{self._reach(b)}",
                got=str(int(lengths[b])),
                remedy="A cache only gives back tokens that it still holds; reset() empties a row",
            )
        self._truncate(torch.where(legal, wanted, LOST))

    def reset(self, rows: Tensor | None = None) -> None:
        """Empty the cache, or some of its batch rows.

        Args:
            rows: Shape (B,), bool: which rows; None for all.

        Raises:
            ValueError: ``rows`` has another shape or device.
            TypeError: ``rows`` is not bool.
        """
        if rows is None:
            rows = torch.ones_like(self.lengths, dtype=torch.bool)
        elif isinstance(rows, Tensor) and rows.dtype != torch.bool:
            raise DtypeError(
                "reset: rows", expected="bool", got=str(rows.dtype), remedy="Pass True for each row to empty"
            )
        self._check_rows("reset: rows", rows)
        self._reset(rows)

    def extra_repr(self) -> str:
        """Sizes, for ``print(model)``."""
        batch, heads, slots, dim = self._keys.shape
        return f"batch={batch}, kv_heads={heads}, slots={slots}, head_dim={dim}, layout={self.layout!r}"

    def _in_layout(self, x: Tensor) -> Tensor:
        # Its own inverse.
        return x.transpose(1, 2) if self.layout == "bshd" and x.dim() == 4 else x

    def _most_new(self) -> tuple[int, str]:
        """The largest chunk, and what to do about a larger one."""
        raise NotImplementedError

    def _holds(self, lengths: Tensor) -> Tensor:
        """Bool (B,): could the rows go on from these lengths?"""
        return lengths >= 0

    def _reach(self, b: int) -> str:
        return f"0 to {int(self.lengths[b])}, the tokens of the row"

    def _truncate(self, lengths: Tensor) -> None:
        self.lengths.copy_(lengths)

    def _reset(self, rows: Tensor) -> None:
        self.lengths.masked_fill_(rows, 0)

    def _check_tokens(self, name: str, new: Tensor, cache: Tensor, n: int) -> None:
        most, remedy = self._most_new()
        batch, heads, _, dim = cache.shape
        if new.dim() != 4 or new.shape[0] != batch or new.shape[1] != heads or new.shape[3] != dim:
            raise ShapeError(
                name,
                expected=f"batch {batch}, {heads} heads and head dim {dim} in layout {self.layout!r}",
                got=f"shape {shown(self._in_layout(new).shape)}",
                remedy="Make the cache for the model's sizes, and name the layout of k and v",
            )
        if new.shape[2] != n:
            raise ShapeError(
                name, expected="as many tokens as k_new", got=f"{new.shape[2]}", remedy="Check k and v"
            )
        if n > most:
            raise ShapeError(name, expected=f"at most {most} tokens", got=f"{n}", remedy=remedy)
        if new.dtype != cache.dtype:
            raise DtypeError(
                name,
                expected=f"{cache.dtype}, as the cache",
                got=str(new.dtype),
                remedy="Make the cache with the dtype of k and v, under autocast with autocast's",
            )
        self._check_device(name, new)

    def _check_rows(self, name: str, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise DtypeError(
                name,
                expected="a torch.Tensor",
                got=type(x).__name__,
                remedy="Convert it with torch.as_tensor, on the cache's device",
            )
        if x.is_floating_point() or x.is_complex():
            raise DtypeError(
                name, expected="integers", got=str(x.dtype), remedy="Pass int32 or int64 numbers of tokens"
            )
        if x.dim() != 1 or x.shape[0] != self.lengths.shape[0]:
            raise ShapeError(
                name,
                expected=f"one entry per batch row, shape ({self.lengths.shape[0]},)",
                got=f"shape {shown(x.shape)}",
                remedy="Pass one for each row of the cache",
            )
        self._check_device(name, x)

    def _check_device(self, name: str, x: Tensor) -> None:
        if x.device != self.lengths.device:
            raise DeviceError(
                name,
                expected=f"device {self.lengths.device}, as the cache",
                got=str(x.device),
                remedy="Move the cache with .to(device), or the tensor",
            )


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
        dtype: That of the keys and values; torch's default by default.
        device: Where they are.
        layout: "bhsd" or "bshd": order of the dims of new tokens and of the views that come back.

    Raises:
        ValueError: A size is not positive, or the layout is unknown.
        TypeError: A size is no int, or the dtype is not floating.

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
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layout: CacheLayout = "bhsd",
    ) -> None:
        check_size("max_len", max_len)
        sizes = (batch, kv_heads, max_len, head_dim, head_dim if v_dim is None else v_dim)
        super().__init__(sizes, dtype, device, layout)
        self.max_len = max_len

    def mask(self, q_len: int) -> Mask:
        """What the newest ``q_len`` tokens of each row may see: ``causal() & cache(lengths)``.

        An expression, to be composed with others; queries have the indices of those tokens, for position
        biases too. Rows of padding before a row's first token see nothing. The lengths are read when the mask
        is lowered: lower it after `update`, and make it anew at each step.

        Args:
            q_len: Query rows, those of the newest tokens; at most ``max_len``.

        Raises:
            ShapeError: More rows than the cache has room for.

        Example:
            >>> cache = StaticCache(1, 1, max_len=8, head_dim=4)
            >>> _ = cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
            >>> cache.mask(2).spans(2, 8).bounds[0, 0, :, 0].tolist()
            [[0, 2], [0, 3]]
        """
        check_query_rows(q_len, self.max_len, "Ask for the mask of the newest tokens, as many as update got")
        return masks.causal() & masks.cache(self.lengths)

    def _most_new(self) -> tuple[int, str]:
        return self.max_len, "Allocate a larger max_len"


def check_query_rows(q_len: int, most: int, remedy: str) -> None:
    """Raise unless a mask can have so many rows.

    Example:
        >>> check_query_rows(9, 8, "Ask for fewer")
        Traceback (most recent call last):
        attnspan.errors.ShapeError: mask: expected at most 8 query rows, got 9. Ask for fewer.
    """
    if q_len > most:
        raise ShapeError("mask", expected=f"at most {most} query rows", got=f"{q_len}", remedy=remedy)


def _refuse_vmap(*tensors: Tensor | None) -> None:
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    if any(x is not None and torch._C._functorch.is_batchedtensor(x) for x in tensors):
        raise OptionError(
            "cache: update under vmap",
            expected="tokens of all batch rows at once",
            got="those of one call of several, which would write into one buffer",
            remedy="Make the vmapped axis part of the batch axis",
        )


def readable(x: Tensor) -> bool:
    """Can values be read at no cost: a plain tensor on the host, outside of a trace?

    Example:
        >>> readable(torch.zeros(1))
        True
    """
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.device.type == "cpu"


def check_size(name: str, size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool):
        raise DtypeError(name, expected="an int", got=type(size).__name__, remedy="Pass a size")
    if not 1 <= size <= INT32_MAX:
        raise OptionError(
            name,
            expected=f"1 to {INT32_MAX}",
            got=shown(size),
            remedy="A cache is allocated at its full size",
        )
