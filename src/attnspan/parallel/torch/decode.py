"""Decoding with a cache whose keys are spread over ranks: keys stay where they are, queries travel.

Shapes: B batch rows, G key heads, H query heads, n new tokens, P ranks, C slots of a rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ShapeError, expect
from ...masks import Mask, causal
from ...torch import attention
from .comm import group_of, raise_broken
from .engine import merged

__all__ = ["ShardedCache"]


class ShardedCache(nn.Module):
    """Keys and values of a growing sequence, each on one rank of a mesh.

    A token's keys never move. New token t goes to rank t % P; after a prefill with a plan, `fill` takes this
    rank's rows as they lie. All batch rows have the same length. Not for training: nothing here is
    differentiable.

    Args:
        mesh: The ranks; see `attnspan.parallel.Plan.on`.
        batch: B.
        kv_heads: G.
        max_len: Most tokens of the sequence.
        head_dim: Elements of a key.
        v_dim: Elements of a value; None for `head_dim`.
        slots: Tokens that this rank has room for; None for an even share and, after `fill`, what it got.
        dtype, device: Of the buffers.

    Attributes:
        length: Tokens so far, on all ranks together.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.testing._internal.distributed.fake_pg import FakeStore
        >>> dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        >>> cache = ShardedCache(init_device_mesh("cpu", (1,)), batch=1, kv_heads=2, max_len=8, head_dim=16)
        >>> q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 1, 16)
        >>> cache.attend(q, k, k).shape, cache.length
        (torch.Size([1, 4, 1, 16]), 1)
        >>> dist.destroy_process_group()
    """

    keys: Tensor
    values: Tensor
    k_index: Tensor

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        batch: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        v_dim: int | None = None,
        slots: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        self._mesh, self.max_len, self.length, self._used = mesh, max_len, 0, 0
        self.ranks, self.rank = group_of(mesh).size(), group_of(mesh).rank()
        slots = -(-max_len // self.ranks) if slots is None else slots
        shape = (batch, kv_heads, slots)
        v_dim = head_dim if v_dim is None else v_dim
        keys, values = (torch.zeros(*shape, dim, dtype=dtype, device=device) for dim in (head_dim, v_dim))
        self.register_buffer("keys", keys, persistent=False)
        self.register_buffer("values", values, persistent=False)
        # Free slots are keys after all tokens, which no query sees.
        self.register_buffer("k_index", max_len + torch.arange(slots, device=device), persistent=False)

    def fill(self, k: Tensor, v: Tensor, q_index: Tensor, length: int) -> None:
        """Take the rows of a prefill as a layout has partitioned them.

        Args:
            k: This rank's keys, shape (B, G, m, D).
            v: Its values, (B, G, m, Dv).
            q_index: Their numbers in the whole sequence, (1, m), -1 for padding: ``rows["q_index"]``.
            length: Tokens of the whole sequence.

        Raises:
            ShapeError: The sequence is longer than `max_len`, or batch rows are partitioned one by one.
        """
        what, wanted = "ShardedCache.fill: q_index", "(1, rows), one order for all batch rows"
        shared = q_index.dim() == 1 or q_index.shape[0] == 1
        remedy = "Prefill with a layout whose mask all batch rows share"
        expect(shared, what, wanted, tuple(q_index.shape), remedy, error=ShapeError)
        self._check_room("fill", length)
        rows = q_index.flatten()
        rows = rows[rows >= 0]
        # Room for what is held now, and for this rank's share of the tokens to come.
        slots = len(rows) + -(-(self.max_len - length) // self.ranks)
        for name, x in (("keys", k), ("values", v)):
            own = getattr(self, name)
            buffer = own.new_zeros((*own.shape[:2], slots, own.shape[3]))
            buffer[:, :, : len(rows)] = x[:, :, : len(rows)]
            setattr(self, name, buffer)
        self.k_index = self.max_len + torch.arange(slots, device=rows.device)
        self.k_index[: len(rows)] = rows
        self.length, self._used = length, len(rows)

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        split_batch: bool = False,
        **options: Any,
    ) -> Tensor:
        """Append n new tokens, and attend with their queries to the keys of all ranks.

        Args:
            q: Queries of the new tokens, (B, H, n, D), the same on all ranks; or with ``split_batch`` this
                rank's B / P batch rows, in the order of the ranks.
            k: Their keys, (B, G, n, D), accordingly.
            v: Their values, (B, G, n, Dv).
            mask: What they may see besides ``causal()``, as ``window(4095)``; its arrays are global.
            split_batch: Whether ranks hold different batch rows.
            **options: ``scale``, ``softcap``, ``bias`` and ``sinks`` of `attnspan.torch.attention`.

        Returns:
            Output for q, as q lies. Parts of the ranks are merged in their order by lse, in float32.

        Raises:
            ShapeError: The sequence becomes longer than `max_len`.
            CommunicationError: A rank did not answer.
        """
        if split_batch:
            q, k, v = (torch.cat(self._gather(x)) for x in (q, k, v))
        new = q.shape[2]
        self._append(k, v)
        tokens = torch.arange(self.length - new, self.length, device=q.device)
        sinks = options.pop("sinks", None)
        seen = causal() if mask is None else causal() & mask
        options |= {"mask": seen, "q_index": tokens, "k_index": self.k_index}
        out, lse = attention(q, self.keys, self.values, return_lse=True, **options)
        outs, lses = self._gather(out.to(torch.promote_types(out.dtype, torch.float32))), self._gather(lse)
        found = merged(outs, lses, sinks).to(out.dtype)
        return found.chunk(self.ranks)[self.rank] if split_batch else found

    def _append(self, k: Tensor, v: Tensor) -> None:
        self._check_room("attend", self.length + k.shape[2])
        tokens = range(self.length, self.length + k.shape[2])
        mine = [i for i, token in enumerate(tokens) if token % self.ranks == self.rank]
        at = slice(self._used, self._used + len(mine))
        self.keys[:, :, at], self.values[:, :, at] = k[:, :, mine], v[:, :, mine]
        self.k_index[at] = torch.tensor(
            [tokens[i] for i in mine], dtype=torch.int64, device=self.k_index.device
        )
        self.length, self._used = self.length + k.shape[2], at.stop

    def _check_room(self, what: str, length: int) -> None:
        remedy = "Make the cache with a larger max_len"
        wanted = f"at most {self.max_len} tokens"
        expect(length <= self.max_len, f"ShardedCache.{what}", wanted, length, remedy, error=ShapeError)

    def _gather(self, x: Tensor) -> list[Tensor]:
        group, x = group_of(self._mesh), x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        try:
            dist.all_gather(parts, x, group=group)
        except RuntimeError as error:
            raise_broken(group, "decoding", error)
        return parts
